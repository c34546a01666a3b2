"""Gives sealed snapshots of this rank to its peers and keeps those of its owners, verified before acknowledged."""

from __future__ import annotations

from collections.abc import Sequence

from ..errors import UsageError
from ..ports import Transport
from .replica_receiver import ReplicaReceiver
from .replicas import Exchange, Offer
from .round import ReplicationRound


class Replicator:
    """Exchanges replicas along fixed pairs: `peers` keep those of this rank, `owners` are those whose it keeps.

    If B is a peer of A, A must be an owner of B (policy.placement gives both). Any graph will do.
    """

    def __init__(self, transport: Transport, peers: Sequence[int], owners: Sequence[int]) -> None:
        for name, ranks in (("peers", peers), ("owners", owners)):
            others = set(ranks) & set(range(transport.world_size)) - {transport.rank}
            if len(others) < len(ranks):
                raise UsageError(
                    f"{name} {list(ranks)} of rank {transport.rank}: must be different other ranks of a world of"
                    f" {transport.world_size}"
                )
        self._transport, self._peers, self._owners = transport, tuple(peers), tuple(owners)

    def exchange(self, iteration: int, offers: Sequence[Offer] | None, receiver: ReplicaReceiver) -> Exchange:
        """One round: every rank calls it for the same iterations in the same order, None for having nothing to give.

        Blocks until all pairs of this rank are through; raw bytes go straight from and to the given memory. A piece
        that arrives damaged is sent once more. Raises PeerLost when a rank is lost, silent for the transport's timeout
        (which also limits how long a peer may be busy receiving and sealing its replicas), or in another round. After
        an exception nothing that was received in this round is kept unless it was sealed already, nothing here refers
        to the memory of offers and replicas, and the transport must be renewed.
        """
        round_ = ReplicationRound(self._transport, iteration, receiver, offers, self._peers, self._owners)
        del offers  # a kept traceback must not pin snapshots
        try:
            round_.announce()
            round_.answer()
            round_.move()
            round_.move()
            return round_.outcome()
        except BaseException:
            round_.give_up()
            raise
