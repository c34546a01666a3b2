"""What happens to a snapshot once it is copied: sealed, replicated, later freed. Runs on a lane beside training."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from ..errors import MoECheckpointError, UnreadableCheckpoint
from ..policy.rounds import Status
from ..policy.timelines import Timeline, past
from ..ports import Clock, Facts, Json, MappedStore, MappedWriter, PeerLost, SnapshotId, Transport
from ..replicate.replicator import Offer, Replicator
from ..store.manifest import encode
from ..strategies import Piece
from ..types import OperatorId, SnapshotPlan
from .inbox import StoreInbox


@dataclass
class Work:
    """One round on this rank, from the copy to the acknowledgements.

    writers: of each piece, in the order of the strategy; None where this rank has no room: then it only helps others.
    renew: connect all ranks anew first, because an earlier round lost a peer.
    """

    plan: SnapshotPlan
    pieces: tuple[Piece, ...]
    writers: tuple[MappedWriter, ...] | None
    scalars: Mapping[str, Json] = field(default_factory=dict)
    renew: bool = False
    status: Status = Status.PENDING
    replicated_bytes: int = 0
    duration_s: float = 0.0
    failures: list[str] = field(default_factory=list)

    def abandon(self) -> None:
        """Give up what was not sealed."""
        for writer in self.writers or ():
            writer.abandon()
        self.writers, self.status = None, Status.FAILED


@dataclass(frozen=True)
class Identity:
    """What the manifests of a rank say in each iteration: the job, its layout, which operators are the rank's, and the
    attempts of the job so far."""

    job: str
    topology: Mapping[str, Json]
    operators: frozenset[OperatorId]
    strategy: str = ""
    timeline: Timeline = ()

    def facts(self, piece: Piece, scalars: Mapping[str, Json]) -> Facts:
        """The facts of one piece, with the parts that it holds of this rank's operators."""
        parts = piece.plan.parts
        held: list[Json] = [
            [one.layer, one.kind.value, one.expert, parts[one].value] for one in sorted(self.operators) if one in parts
        ]
        # What is parked may be of the very iteration that this attempt went on from.
        timeline: list[Json] = [[attempt, after] for attempt, after in past(self.timeline, piece.plan.iteration)]
        window: list[Json] = [piece.span[0], piece.span[-1]]
        own: dict[str, Json] = {
            "operators": held,
            "timeline": timeline,
            "made_by": self.strategy,
            "window": window,
        }
        return Facts(self.job, piece.plan.digest(), self.topology, {**scalars, **own})


class Keeper:
    """Seals, replicates and frees the snapshots in one memory store: this rank's own, and replicas of its owners."""

    def __init__(
        self,
        store: MappedStore,
        replicator: Replicator | None,
        transport: Transport,
        clock: Clock,
        identity: Identity,
        *,
        owners: Sequence[int] = (),
    ) -> None:
        self._store, self._replicator, self._transport = store, replicator, transport
        self._clock, self._identity = clock, identity
        self._owners = tuple(owners)
        self._inbox = StoreInbox(store, clock)
        self._connected = True

    def protect(self, work: Work) -> None:
        """Carry one round out as far as it goes; how far, and why not farther, is left in `work`."""
        begun_s = self._clock.now_s()
        try:
            sealed = self._seal(work)
        except Exception as error:  # whatever it is costs this snapshot, and is told to all ranks
            work.failures.append(_told(error))
            sealed = False
        work.status = Status.SEALED if sealed else Status.FAILED
        pieces = reversed(work.pieces)
        offered = [SnapshotId(work.plan.iteration, self._transport.rank, piece.kind) for piece in pieces]
        self._replicate(work, offered if sealed else None)
        work.duration_s = self._clock.now_s() - begun_s

    def protect_again(self, work: Work, snapshots: Sequence[SnapshotId]) -> None:
        """Replicate sealed snapshots of this rank to peers that lack them, as after a node was replaced."""
        work.status = Status.SEALED
        self._replicate(work, list(snapshots))

    def free(self, names: Collection[tuple[int, str]], *, own: bool = True) -> None:
        """Free these pieces, by iteration and kind: this rank's own unless not `own`, and the replicas of its owners.

        Raises StoreFailure.
        """
        ranks = (self._transport.rank, *self._owners) if own else self._owners
        for iteration, kind in sorted(names):
            for rank in ranks:
                self._store.free(SnapshotId(iteration, rank, kind))

    def _seal(self, work: Work) -> bool:
        if work.writers is None:
            return False
        writers, work.writers = work.writers, None
        try:
            # The first piece last: a recovery goes to the newest iteration that has it, and then wants the others too.
            for index, piece in reversed([*enumerate(work.pieces)]):
                scalars = dict(work.scalars) if index == 0 else {}
                writers[index].seal(self._identity.facts(piece, scalars))
        finally:
            for writer in writers:
                writer.abandon()
        return True

    def _replicate(self, work: Work, offered: Sequence[SnapshotId] | None) -> None:
        if self._replicator is None:
            work.status = Status.PROTECTED if offered is not None else Status.FAILED
            return
        try:
            if work.renew and not self._connected:
                work.failures.append("replication is connected anew")
            if work.renew:
                self._transport.renew()
                self._connected = True
            if not self._connected:
                raise PeerLost("replication waits until all ranks connect anew")
            self._exchange(work, offered)
        except Exception as error:  # an exchange that did not end is void for all its ranks
            self._connected = False
            work.failures.append(_told(error))
        if work.status is Status.SEALED:
            work.status = Status.EXPOSED

    def _exchange(self, work: Work, offered: Sequence[SnapshotId] | None) -> None:
        assert self._replicator is not None
        readers, offers = [], None
        try:
            if offered is not None:
                readers = [self._store.open(snapshot) for snapshot in offered]
                offers = [Offer(one.manifest.snapshot.name, encode(one.manifest), one.raw()) for one in readers]
            done = self._replicator.exchange(work.plan.iteration, offers, self._inbox)
        except UnreadableCheckpoint as error:
            work.failures.append(str(error))
            done = self._replicator.exchange(work.plan.iteration, None, self._inbox)
        finally:
            for reader in readers:
                reader.close()
        work.replicated_bytes += done.sent_bytes
        work.failures += done.failures
        if offers and work.status is Status.SEALED and all(done.acknowledged.values()):
            work.status = Status.PROTECTED


def _told(error: Exception) -> str:
    """Errors for people speak for themselves, others by their type."""
    return str(error) if isinstance(error, MoECheckpointError) else f"{type(error).__name__}: {error}"
