"""What is done with a snapshot beside training, once it is copied: seal, replicate, write to storage, free.

`ReplicationWorker` and `Persister` run on threads of their own (`background.BackgroundWork`); the tracker tells them
what to do, and reads how far they have come from their tasks.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

from ..errors import UnreadableCheckpoint, format_error
from ..extensions import StepSender
from ..policy.lineage import Identity
from ..policy.tracking import Status
from ..ports import (
    Clock,
    Json,
    Layout,
    MappedStore,
    MappedWriter,
    PeerLost,
    Reader,
    RecordedStep,
    SnapshotId,
    Store,
    StoreFailure,
    Task,
    Transport,
)
from ..replication.receiver import ReplicaReceiver
from ..replication.replicator import ReplicaOffer, Replicator
from ..storage.manifest import encode
from ..strategies import Piece
from ..types import SnapshotPlan
from ..types.operators import scaled
from .persisting import CopyOrder, carry_out

ATTEMPTS = 3
FIRST_PAUSE_S = 1.0


@dataclass
class SnapshotTask:
    """One snapshot on this rank, from its copy to the acknowledgements of peers.

    The worker's thread writes `status` and the thread that sends messages reads it; the rest changes hands with
    `running`, which training's thread sets when it submits the task.

    Args:
        writers: of each piece that lies on this rank, in the order of the strategy; None where it has no room: then it
            only helps others.
        scalars: the trainer's state, for the first piece.
        remembered: gives the journal of the step and the strategy's memory, for the same; called by the worker.
        reconnect: connect all ranks again first, because an earlier round lost a peer.
        step: what led to it from the state of the iteration before, where that is known and peers can follow it.
    """

    plan: SnapshotPlan
    pieces: tuple[Piece, ...]
    writers: tuple[MappedWriter, ...] | None
    scalars: Mapping[str, Json] = field(default_factory=dict)
    remembered: Callable[[], Mapping[str, Json]] = dict
    reconnect: bool = False
    status: Status = Status.PENDING
    step: RecordedStep | None = None
    replicated_bytes: int = 0
    carried_bytes: int = 0
    exchange_s: float = 0.0
    duration_s: float = 0.0
    failures: list[str] = field(default_factory=list)
    running: Task[None] | None = None

    def abandon(self) -> None:
        """Give up what was not sealed."""
        for writer in self.writers or ():
            writer.abandon()
        self.writers, self.step, self.status = None, None, Status.FAILED


class ReplicationWorker:
    """Works on the snapshots in one memory store: this rank's own, and replicas of the ranks that it keeps them for."""

    def __init__(
        self,
        store: MappedStore,
        replicator: Replicator | None,
        transport: Transport,
        clock: Clock,
        identity: Identity,
        *,
        owners: Sequence[int] = (),
        steps: StepSender | None = None,
    ) -> None:
        """steps: sends peers that can follow the optimizer its steps in place of state."""
        self._store, self._replicator, self._transport = store, replicator, transport
        self._clock, self._identity = clock, identity
        self._owners = tuple(owners)
        self._receiver = ReplicaReceiver(store, clock, identity.job, transport.rank, steps.follow if steps else None)
        self._connected = True
        self._steps = steps

    def protect(self, task: SnapshotTask) -> None:
        """Carry one round out as far as it goes; how far, and why not farther, is left in `task`."""
        begun_s = self._clock.now_s()
        try:
            sealed = self._seal(task)
        except Exception as error:  # whatever it is costs this snapshot, and all ranks hear of it
            task.failures.append(format_error(error))
            sealed = False
        task.status = Status.SEALED if sealed else Status.FAILED
        # In the order of sealing, so that peers, too, seal the first piece last.
        offered = [piece for _, piece in reversed(self._identity.pieces(task.pieces)) if piece.replicated]
        self._replicate(task, offered if sealed else None)
        task.duration_s = self._clock.now_s() - begun_s

    def protect_again(self, task: SnapshotTask) -> None:
        """Replicate sealed pieces of this rank to peers that lack them, as after a node was replaced."""
        task.status = Status.SEALED
        held = [piece for piece in task.pieces if not self._identity.operators.isdisjoint(piece.plan.parts)]
        self._replicate(task, held)

    def free(self, names: Collection[tuple[int, str]], *, own: bool = True) -> None:
        """Free pieces in memory.

        Args:
            names: Iteration and kind of each.
            own: Whether this rank's own go too, and not only the replicas of its owners.

        Raises:
            StoreFailure: Memory refuses.
        """
        ranks = (self._transport.rank, *self._owners) if own else self._owners
        for iteration, kind in sorted(names):
            for rank in ranks:
                self._store.free(SnapshotId(iteration, rank, kind))

    def _seal(self, task: SnapshotTask) -> bool:
        if task.writers is None:
            return False
        writers, task.writers = task.writers, None
        # Taken out of the task: what it gives is freed here, and not by training's thread with the task.
        remembered, task.remembered = task.remembered, dict
        try:
            # The first piece last: a recovery goes to the newest iteration that has it, and then wants the others too.
            held = self._identity.pieces(task.pieces)
            for (index, piece), writer in reversed([*zip(held, writers, strict=True)]):
                scalars = {**task.scalars, **remembered()} if index == 0 else {}
                writer.seal(self._identity.facts(piece, scalars))
        finally:
            for writer in writers:
                writer.abandon()
        return True

    def _replicate(self, task: SnapshotTask, offered: Sequence[Piece] | None) -> None:
        """Exchange with peers; every rank comes here for every round, though it may have nothing to offer itself."""
        if self._replicator is None:
            task.status = Status.PROTECTED if offered is not None else Status.FAILED
            return
        try:
            if task.reconnect and not self._connected:
                task.failures.append("replication is connected again")
            # All ranks set this in the same round, also those whose connections are whole: `renew` waits for all.
            if task.reconnect:
                self._transport.renew()
                self._connected = True
            if not self._connected:
                raise PeerLost("replication waits until all ranks connect again")
            self._exchange(self._replicator, task, offered)
        except Exception as error:  # an exchange that did not end is void for all its ranks
            self._connected = False
            task.failures.append(format_error(error))
        task.step = None  # its memory is wanted for the next one
        if task.status is Status.SEALED:
            task.status = Status.UNDER_REPLICATED

    def _exchange(self, replicator: Replicator, task: SnapshotTask, offered: Sequence[Piece] | None) -> None:
        readers, offers = [], None
        rank = self._transport.rank
        try:
            if offered is not None:
                readers = [self._store.open(SnapshotId(one.plan.iteration, rank, one.kind)) for one in offered]
                steps = [memoryview(b"")] * len(readers)
                if self._steps is not None:
                    steps = self._steps.steps(task.plan.iteration, offered, readers, task.step)
                offers = [
                    ReplicaOffer(reader.manifest.snapshot.name, encode(reader.manifest), reader.raw(), step)
                    for reader, step in zip(readers, steps, strict=True)
                ]
            begun_s, moved_s = self._clock.now_s(), replicator.moving_s
            done = replicator.exchange(task.plan.iteration, offers, self._receiver)
            task.exchange_s = self._clock.now_s() - begun_s
            if moved_s is not None and replicator.moving_s is not None:  # pauses say nothing of the network
                task.exchange_s = replicator.moving_s - moved_s
        except UnreadableCheckpoint as error:
            task.failures.append(str(error))
            # Peers are in this round and wait for a header: one without pieces ends it for them.
            done = replicator.exchange(task.plan.iteration, None, self._receiver)
        finally:
            # Readers pin their segments, which the next snapshots need.
            for reader in readers:
                reader.close()
        if self._steps is not None:
            self._steps.exchanged(offered or (), done, offered=any(offer.step.nbytes for offer in offers or ()))
        task.replicated_bytes += done.sent_bytes
        task.carried_bytes += done.carried_bytes
        task.failures += done.failures
        if offers and task.status is Status.SEALED and all(done.acknowledged.values()):
            task.status = Status.PROTECTED


@dataclass
class PersistTask:
    """What becomes persistent together, and how far this rank has come.

    Args:
        plans: of one snapshot, or of all of a window, oldest first.
        pieces: of each plan.
        held: the pieces in memory that have the records of each plan, the one with the trainer state first.
    """

    plans: tuple[SnapshotPlan, ...]
    pieces: tuple[tuple[Piece, ...], ...]
    held: tuple[tuple[Piece, ...], ...]
    status: Status = Status.PENDING
    failures: list[str] = field(default_factory=list)
    running: Task[None] | None = None
    written_bytes: int = 0
    begun_s: float = 0.0
    duration_s: float = 0.0


class Persister:
    """Writes what one rank owns.

    Args:
        layout: gives the records of a piece on this rank, from the piece and its place among those of its plan.
        varying: keys that are not in memory where a peer stored them in place of this rank.
        announce: is told what is about to be written, and with nothing when that has come to an end: who outlives this
            process can then finish it.
    """

    def __init__(
        self,
        memory: Store,
        storage: Store,
        rank: int,
        identity: Identity,
        layout: Callable[[Piece, int], Layout],
        *,
        clock: Clock,
        varying: frozenset[str] = frozenset(),
        announce: Callable[[Sequence[CopyOrder]], None] = lambda orders: None,
    ) -> None:
        self._varying, self._announce = varying, announce
        self._memory, self._storage, self._rank = memory, storage, rank
        self._identity, self._layout, self._clock = identity, layout, clock
        self._is_stopped = False

    def stop(self) -> None:
        """Give up what is being written, and write no more; called from another thread, and not waited for here."""
        # One thread sets it, another reads it before each record: a lock would add nothing.
        self._is_stopped = True

    def _check_stopped(self) -> None:
        if self._is_stopped:
            raise UnreadableCheckpoint("training begins again in this process: what was being persisted is given up")

    def persist(self, task: PersistTask) -> None:
        """Write the pieces, each sealed on its own; tried again after a pause where storage refuses."""
        pause_s, task.begun_s = FIRST_PAUSE_S, self._clock.now_s()
        for attempt in range(1, ATTEMPTS + 1):
            try:
                self._check_stopped()
                self._write(task)
                task.duration_s = self._clock.now_s() - task.begun_s
                task.status = Status.PROTECTED
                break
            except Exception as error:  # whatever it is costs this copy, and all ranks hear of it
                task.failures.append(format_error(error))
                # Only what storage refuses may pass by itself: a record that memory lacks is lacking again.
                if attempt < ATTEMPTS and isinstance(error, StoreFailure):
                    self._clock.sleep(pause_s)
                    pause_s *= 4
                else:
                    task.status = Status.FAILED
                    break
        if not self._is_stopped:
            self._announce(())

    def free(self, iterations: Collection[int]) -> None:
        """Remove this rank's snapshots of these iterations. Raises StoreFailure."""
        for snapshot in self._storage.snapshots(self._rank).sealed:
            if snapshot.iteration in iterations:
                self._storage.free(snapshot)

    def _write(self, task: PersistTask) -> None:
        with ExitStack() as stack:
            found = [
                (order, sources)
                for plan, pieces, held in zip(task.plans, task.pieces, task.held, strict=True)
                for order, sources in self._orders(plan.iteration, pieces, held, stack)
            ]
            # Before the first record is written: a trainer that is killed in between leaves an order to be finished.
            self._announce([order for order, _ in found])
            for order, sources in found:
                task.written_bytes += carry_out(order, sources, self._storage, self._check_stopped)

    def behind(self, task: PersistTask) -> str:
        """Who still writes this, and since when; any rank may be the one, and only that rank knows."""
        if task.running is None or task.running.done():
            return "by another rank"
        since_s = self._clock.now_s() - task.begun_s if task.begun_s else 0.0
        return f"by rank {self._rank}: for {since_s:.0f} s, {scaled(task.written_bytes)} are whole"

    def _orders(
        self, iteration: int, pieces: Sequence[Piece], held: Sequence[Piece], stack: ExitStack
    ) -> Iterator[tuple[CopyOrder, list[Reader]]]:
        """What is to be written of one snapshot, and the readers of its sources, which `stack` closes."""
        sources = [
            stack.enter_context(self._memory.open(SnapshotId(iteration, self._rank, piece.kind)))
            for _, piece in self._identity.pieces(held)
        ]
        keys = {key for reader in sources for key in reader.manifest.by_key}
        # The first piece last, as in memory.
        for index, piece in reversed(self._identity.pieces(pieces)):
            layout = self._layout(piece, index)
            if not self._varying <= keys:
                layout = Layout.of([one for one in layout.fields if one.key not in self._varying or one.key in keys])
            scalars = dict(sources[0].manifest.facts.scalars) if index == 0 else {}
            target = SnapshotId(iteration, self._rank, piece.kind)
            yield CopyOrder.of(target, self._identity.facts(piece, scalars), layout, sources), sources
