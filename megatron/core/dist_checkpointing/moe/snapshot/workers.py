"""What is done beside training with snapshots in memory, once they are copied: sealed, sent to peers, freed.

`ReplicationWorker` and `persister.Persister` run on threads of their own (`BackgroundWork`); the tracker tells them
what to do, and reads how far they have come from their tasks.
"""

from __future__ import annotations

import logging
import queue
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from ..device import device_thread
from ..errors import CheckpointFailure, MoECheckpointError, UnreadableCheckpoint, format_error
from ..extensions import StepSender
from ..policy.lineage import Identity
from ..policy.tracking import Status
from ..ports import (
    Clock,
    Executor,
    Json,
    MappedStore,
    MappedWriter,
    PeerLost,
    RecordedStep,
    SnapshotId,
    StoreFailure,
    Task,
    Transport,
)
from ..replication.receiver import ReplicaReceiver, Room
from ..replication.replicator import ReplicaOffer, Replicator
from ..storage.manifest import encode
from ..strategies import Piece
from ..types import SnapshotPlan

log = logging.getLogger(__name__)

# The threads on which snapshots are worked on, and what is said when that fails.

CLOSING_S = 60.0
"""How long `shutdown` waits; the thread ends with the process at the latest."""


class ThreadExecutor:
    """One daemon thread that runs what is submitted, in order; as `ports.Executor`."""

    def __init__(self, name: str) -> None:
        self._name, self._closed = name, False
        self._waiting: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = queue.SimpleQueue()
        self._thread = device_thread(self._run, f"moe-ckpt-{name}")
        self._thread.start()

    def submit[T](self, work: Callable[[], T], /) -> Future[T]:
        """As `ports.Executor.submit`. Raises MoECheckpointError after `shutdown`."""
        if self._closed:
            raise MoECheckpointError(f"the lane {self._name} was shut down and takes no more work")
        future: Future[T] = Future()
        self._waiting.put((future, work))
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """As `ports.Executor.shutdown`."""
        self._closed = True
        if cancel_futures:
            self._cancel_waiting()
        # Behind all that was submitted before: what was not cancelled still runs, and then the thread ends.
        self._waiting.put(None)
        if wait:
            self._thread.join(CLOSING_S)

    @property
    def has_ended(self) -> bool:
        """As `ports.Executor.has_ended`."""
        return not self._thread.is_alive()

    def _cancel_waiting(self) -> None:
        while True:
            try:
                item = self._waiting.get_nowait()
            except queue.Empty:
                return
            if item is not None:
                item[0].cancel()

    def _run(self) -> None:
        while (item := self._waiting.get()) is not None:
            future, work = item
            # From here on the future cannot be cancelled: whoever waits for it waits for the work.
            if not future.set_running_or_notify_cancel():
                continue
            try:
                value = work()
            except BaseException as error:  # it is raised where the result is asked for
                future.set_exception(error)
            else:
                future.set_result(value)
            del item, future, work  # while it waits for the next, this thread keeps nothing alive


class BackgroundWork:
    """One thread that seals and replicates, one that writes to storage, one that exchanges messages.

    Each does one thing after the other, in the order of submission.

    Args:
        lane: makes a thread of this name.
        timeout_s: how long work that has to end is waited for.
        strict: whether lost protection ends training.
    """

    def __init__(self, lane: Callable[[str], Executor], *, timeout_s: float, strict: bool) -> None:
        # Three threads, so that neither slow storage nor a slow peer holds up the messages on which all ranks agree.
        self._replication, self._persist, self.control = (lane(name) for name in ("replication", "persist", "control"))
        self._timeout_s, self._strict = timeout_s, strict
        self._running: list[Task[None]] = []

    def replicate(self, work: Callable[[], None]) -> Task[None]:
        """Submit work on snapshots in memory."""
        return self._submitted(self._replication, work)

    def persist(self, work: Callable[[], None]) -> Task[None]:
        """Submit work on snapshots in storage."""
        return self._submitted(self._persist, work)

    def check(self) -> None:
        """Let failures of what has ended reach training; what a store refuses only costs protection."""
        running, self._running = self._running, []
        ended: list[Task[None]] = []
        # Sorted before any result is asked for: `_finish` may raise, and what still runs must stay known for `drain`.
        for task in running:
            (ended if task.done() else self._running).append(task)
        self._finish(ended)

    def drain(self) -> None:
        """Wait for all that was submitted."""
        tasks, self._running = self._running, []
        self._finish(tasks)

    def close(self, *, wait: bool) -> None:
        """End the threads; what has not begun is dropped."""
        for lane in (self._replication, self._persist, self.control):
            lane.shutdown(wait, cancel_futures=True)

    @property
    def has_ended(self) -> bool:
        """Whether nothing is worked on any more."""
        return all(lane.has_ended for lane in (self._replication, self._persist, self.control))

    def complain(self, what: str, failures: Sequence[str]) -> None:
        """Say what protection was lost and why.

        Args:
            what: What was lost, as the beginning of a sentence.
            failures: The reasons that this rank knows; empty where only other ranks know one.

        Raises:
            CheckpointFailure: With `--moe-ckpt-strict`, which ends training.
        """
        why = "; ".join(dict.fromkeys(failures)) or "the reason is in the log of another rank"
        then = "training ends because of --moe-ckpt-strict" if self._strict else "training continues"
        # A rank without a reason of its own leaves it to those that have one, and to rank 0, to speak.
        log.log(logging.ERROR if failures else logging.WARNING, "%s: %s; %s", what, why, then)
        if self._strict:
            raise CheckpointFailure(f"{what}: {why}; {then}")

    def _submitted(self, lane: Executor, work: Callable[[], None]) -> Task[None]:
        task = lane.submit(work)
        self._running.append(task)
        return task

    def _finish(self, tasks: Sequence[Task[None]]) -> None:
        for task in tasks:
            # What a store refuses, and work that is late, cost protection. Anything else is a defect, and raised.
            try:
                task.result(self._timeout_s)
            except StoreFailure as error:
                self.complain("a store refused", [str(error)])
            except TimeoutError:
                self.complain("background work does not end", [f"waited {self._timeout_s:g} s for it"])


# The work on one snapshot.


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
        patience_s: float,
        owners: Sequence[int] = (),
        steps: StepSender | None = None,
    ) -> None:
        """patience_s: for how long a replica may wait for room. steps: sends peers that can follow the optimizer its
        steps in place of state."""
        self._store, self._replicator, self._transport = store, replicator, transport
        self._clock, self._identity = clock, identity
        self._owners = tuple(owners)
        self._connected, self._is_stopped = True, False
        self._patience_s, self._steps = patience_s, steps

    def stop(self) -> None:
        """Wait for no more room: training has ended. Called from another thread, and not waited for here."""
        self._is_stopped = True

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
        try:
            sealed = {(one.iteration, one.kind) for one in self._store.snapshots(self._transport.rank).sealed}
        except StoreFailure as error:  # peers wait for this rank in the exchange
            task.failures.append(str(error))
            sealed = set()
        # All ranks have the first piece of a snapshot, with the trainer's state: also one that owns no operator in it.
        own = self._identity.operators
        held = [
            piece
            for piece in task.pieces
            if (piece.plan.iteration, piece.kind) in sealed or not own.isdisjoint(piece.plan.parts)
        ]
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
        readers, offers, rank = [], None, self._transport.rank
        follow = self._steps.follow if self._steps else None
        room = Room(self._clock, self._patience_s, lambda: self._is_stopped)
        receiver = ReplicaReceiver(self._store, room, self._identity.job, rank, follow)
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
            done = replicator.exchange(task.plan.iteration, offers, receiver)
            task.exchange_s = self._clock.now_s() - begun_s
            if moved_s is not None and replicator.moving_s is not None:  # pauses say nothing of the network
                task.exchange_s = replicator.moving_s - moved_s
        except UnreadableCheckpoint as error:
            task.failures.append(str(error))
            # Peers are in this round and wait for a header: one without pieces ends it for them.
            done = replicator.exchange(task.plan.iteration, None, receiver)
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
