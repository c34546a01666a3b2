"""Gives sealed snapshots of this rank to its peers and keeps those of its owners, verified before acknowledged.

One exchange has four steps, which come in the same order on all ranks:

    announce   owners send their peers a header, and a table of the pieces that they offer
    answer     peers reply about each piece: it is wanted, held already, or refused
    move       what is wanted goes from memory to memory; peers verify, seal and acknowledge it
    move       once more, with what arrived damaged

Bytes that a peer holds anyway are not sent (MOETION 5.1): it compares the checksums in the manifest with those of its
own snapshot of the iteration, copies what is the same, as data-parallel ranks hold it without the distributed
optimizer, and wants the rest. Every replica is whole where it lies.

In place of the bytes of a piece an owner may offer the step that led to it (`recomputation`). A peer that has the state
before it wants that, takes the same step, and verifies what comes of it against the owner's checksums like any bytes
that arrive: what differs counts as damaged, and is sent whole.

Two ranks may be owner and peer of each other. The transport keeps the order of messages between two ranks, so they
need no names: each step receives and sends for all pairs, and ends only when all of it is through.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..errors import UsageError
from ..ports import SendPace, Transport
from .receiver import ReplicaReceiver
from .round import Exchange, ReplicaOffer, ReplicationRound


class Replicator:
    """Exchanges replicas along fixed pairs: `peers` keep those of this rank, `owners` are those whose it keeps.

    If B is a peer of A, A must be an owner of B (policy.placement gives both). Any graph will do.

    Args:
        transport: Carries the bytes.
        peers: Ranks that keep replicas of this one.
        owners: Ranks whose replicas this one keeps.
        sends: The pace of what this rank sends, in chunks then; all ranks have one, or none has. None: as fast as it
            goes.
    """

    def __init__(
        self, transport: Transport, peers: Sequence[int], owners: Sequence[int], sends: SendPace | None = None
    ) -> None:
        self._sends = sends
        for name, ranks in (("peers", peers), ("owners", owners)):
            others = set(ranks) & set(range(transport.world_size)) - {transport.rank}
            if len(others) < len(ranks):
                raise UsageError(
                    f"{name} {list(ranks)} of rank {transport.rank}: must be different other ranks of a world of"
                    f" {transport.world_size}"
                )
        self._transport, self._peers, self._owners = transport, tuple(peers), tuple(owners)

    @property
    def moving_s(self) -> float | None:
        """Seconds that sends have taken so far, without the pauses of their pace; None where they have none."""
        return None if self._sends is None else self._sends.moving_s

    def exchange(self, iteration: int, offers: Sequence[ReplicaOffer] | None, receiver: ReplicaReceiver) -> Exchange:
        """One round: every rank calls it for the same iterations in the same order.

        Blocks until all pairs of this rank are through; raw bytes go straight from and to the given memory. A piece
        that arrives damaged is sent once more. After an exception nothing that was received in this round is kept
        unless it was sealed already, nothing here refers to the memory of offers and replicas, and the transport must
        be renewed.

        Args:
            iteration: Of the snapshots.
            offers: The pieces of this rank, of which peers seal the last one last; None: it has nothing to give.
            receiver: Keeps the pieces of this rank's owners.

        Raises:
            PeerLost: A rank is lost, silent for the transport's timeout (which also limits how long a peer may be busy
                receiving and sealing its replicas), or in another round.
        """
        round_ = ReplicationRound(self._transport, iteration, receiver, offers, self._peers, self._owners, self._sends)
        del offers  # a kept traceback must not pin snapshots
        try:
            round_.announce()
            round_.answer()
            round_.move()
            # Also where nothing was damaged here: this rank's peers and owners may have something to send again.
            round_.move()
            return round_.outcome()
        except BaseException:  # also one that was raised in this thread from outside: no memory may stay referred to
            round_.give_up()
            raise
