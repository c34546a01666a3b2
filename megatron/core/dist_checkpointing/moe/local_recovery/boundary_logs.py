"""Boundary logs of one rank: made in each iteration, sealed beside training, kept as long as a replay needs them.

A log is a snapshot of kind "log" in the survivor's store. While an iteration runs, a recorder copies what this rank
sends into its segment (`begins` to `passed`); after the step the log is handed to a lane that computes checksums and
seals it while the next iterations train (`on_commit`). It goes when no replay can begin early enough to need it any
more, or when there is no segment left: the bound is `lookback` iterations.

`LogCoverage` says whether a neighbour that lost its state could replay with these logs. Where it could not, training
continues all the same, and a fault rolls back all stages instead: so every failure here costs coverage and nothing
else.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from ..errors import MoECheckpointError, UnreadableCheckpoint, format_error
from ..policy.lineage import Identity
from ..policy.rollback import covered_since, covers, kept
from ..ports import (
    Clock,
    Executor,
    Facts,
    Field,
    Json,
    Layout,
    MappedStore,
    MappedWriter,
    NoRoom,
    Reader,
    SnapshotId,
    StoreFailure,
    Task,
)
from ..strategies import Piece
from ..types import LOG, Direction, SnapshotPlan, StepJournal, received_key
from .boundary_copies import UNKNOWN, LogPlan, fingerprint

__all__ = ["BoundaryLogs", "LogCoverage", "LogPlan", "LogPorts", "Recorder"]

log = logging.getLogger(__name__)

_SHORTEST_WAIT_S = 0.001


class Recorder(Protocol):
    """Copies what is sent in an iteration; see `local_recovery.boundary_copies.BoundaryRecorder`."""

    def arm(self, layout: Layout, writer: MappedWriter) -> None:
        """Record what is sent from here on.

        Args:
            layout: Of a boundary log.
            writer: Of its memory, reserved with this layout.

        Raises:
            TimeoutError: What was given up before is still being copied.
            MoECheckpointError: It cannot be recorded.
        """

    def passed(self) -> None:
        """What is sent from here on is none of the iteration."""

    @property
    def complete(self) -> bool:
        """Whether it is armed and all that was planned has been sent."""

    def end(self, timeout_s: float) -> None:
        """Wait until all is copied. Raises TimeoutError, and errors for people."""

    def disarm(self) -> None:
        """Give up what was recorded since `arm`."""


@dataclass(frozen=True, kw_only=True)
class LogPorts:
    """What the logs of a rank need: the store beside its snapshots, a lane of its own, what records, and time."""

    store: MappedStore
    lane: Executor
    recorder: Recorder
    clock: Clock


@dataclass(frozen=True, slots=True)
class LogCoverage:
    """Whether the next replay of a neighbouring stage finds all logs of this rank that it needs.

    Logs that are being sealed count; if that fails, the next coverage says so.

    Attributes:
        newest: The iteration that was committed last.
        since: The first iteration of the unbroken row of logs up to that; None where that has none.
        why: What is missing, and the reason, for people; empty where nothing is.
    """

    newest: int
    since: int | None
    why: str = ""


class BoundaryLogs:
    """In each iteration: `begins` before its first forward pass, `passed` after its last backward pass, `on_commit`
    after the optimizer's step; when a peer was lost, `drain`. All from the thread that trains.

    What goes wrong costs the log of an iteration and is logged as coverage, once for each change; nothing is raised
    for it. The store keeps what an earlier process had: it counts as this rank's where the rank is the same.
    """

    def __init__(self, plan: LogPlan, identity: Identity, ports: LogPorts, *, timeout_s: float) -> None:
        self._plan, self._identity, self._timeout_s = plan, identity, timeout_s
        self._store, self._lane, self._recorder, self._clock = ports.store, ports.lane, ports.recorder, ports.clock
        self._sealed: set[SnapshotId] = set()  # also those of other ranks that used this slot before
        self._sealing: dict[int, Task[None]] = {}
        self._recording: tuple[int, MappedWriter] | None = None
        self._lost: dict[int, str] = {}
        self._coverage, self._is_judged = LogCoverage(0, None), False
        try:
            self._sealed = {snapshot for snapshot in self._store.snapshots().sealed if snapshot.kind == LOG}
        except StoreFailure as error:
            log.warning("boundary logs of earlier attempts cannot be listed: %s", error)

    @property
    def coverage(self) -> LogCoverage:
        """As `on_commit` found it last."""
        return self._coverage

    def fit(self, plan: LogPlan) -> None:
        """Keep as many logs as this plan says from here on."""
        self._plan = plan

    def begins(self, iteration: int, microbatches: int) -> None:
        """Record what this rank sends from here on as the log of `iteration`, in place of one that is there.

        Args:
            iteration: Whose passes begin.
            microbatches: How many it has.
        """
        self.abandon()
        self._harvest()
        try:
            if iteration in self._sealing:
                self._await(iteration, self._timeout_s)
            if self._mine(iteration) in self._sealed:
                self._free(self._mine(iteration))
            writer = self._reserved(iteration, self._plan.layout(microbatches))
        except (MoECheckpointError, TimeoutError) as error:
            self._lost[iteration] = format_error(error)
            return
        try:
            self._recorder.arm(self._plan.layout(microbatches), writer)
        except (MoECheckpointError, TimeoutError) as error:
            writer.abandon()
            self._lost[iteration] = format_error(error)
        else:
            self._recording = iteration, writer

    def passed(self) -> None:
        """The forward and backward passes have ended: what is sent from here on, as in an evaluation, is not logged."""
        self._recorder.passed()

    def on_commit(
        self, iteration: int, journal: StepJournal, trainer: Mapping[str, Json], oldest_base: int | None
    ) -> LogCoverage:
        """The iteration is part of training: seal its log beside training, and free those that no replay needs.

        Args:
            iteration: Whose step has ended.
            journal: How it came out.
            trainer: The trainer's scalars after it.
            oldest_base: The iteration from whose state the earliest replay may start; None while there is none, and
                then nothing can be missing.

        Returns:
            Whether a neighbour's replay finds all logs of this rank.
        """
        self._harvest()
        if self._recording is not None and self._recording[0] == iteration:
            scalars = dict(trainer)
            self._hand_over(lambda: {"journal": journal.to_data(), "trainer": scalars}, self._timeout_s)
        self._trim(iteration, oldest_base)
        self._judge(iteration, oldest_base)
        return self._coverage

    def drain(self, timeout_s: float) -> str:
        """Seal what is complete, within this time, as before this process ends; what is not sealed then, in words.

        A log of the iteration under way is complete once all its passes have sent what they send; it is sealed without
        a journal, which this rank does not know yet.
        """
        deadline_s = self._clock.now_s() + timeout_s
        if self._recording is not None:
            iteration = self._recording[0]
            if self._recorder.complete:
                self._hand_over(dict, timeout_s)
            else:
                self.abandon()
                self._lost[iteration] = "not all of its tensors were sent"
        for iteration in list(self._sealing):
            self._await(iteration, max(deadline_s - self._clock.now_s(), _SHORTEST_WAIT_S))
        missing = [f"iteration {iteration} ({why})" for iteration, why in sorted(self._lost.items())]
        return f"no boundary logs of {', '.join(missing)}" if missing else ""

    def abandon(self) -> None:
        """Give up the log that is being recorded, if any."""
        if self._recording is not None:
            writer = self._recording[1]
            self._recording = None
            self._recorder.disarm()
            writer.abandon()

    def _mine(self, iteration: int) -> SnapshotId:
        return SnapshotId(iteration, self._plan.rank, LOG)

    def _reserved(self, iteration: int, layout: Layout) -> MappedWriter:
        """Memory for a log; the oldest one gives way where there is none. Raises StoreFailure, UsageError.

        Logs never take more segments than are theirs: those of other kinds must be free when a peer is lost.
        """
        if len(self._sealing) >= self._plan.segments:
            raise NoRoom(
                f"{len(self._sealing)} logs are still being sealed: the machine's memory or cores are overloaded"
            )
        while self._sealed and len(self._sealed) + len(self._sealing) >= self._plan.segments:
            self._free(min(self._sealed))
        try:
            return self._store.reserve(self._mine(iteration), layout)
        except NoRoom:
            if not self._sealed:
                raise
            self._free(min(self._sealed))
            return self._store.reserve(self._mine(iteration), layout)

    def _hand_over(self, scalars: Callable[[], Mapping[str, Json]], timeout_s: float) -> None:
        """What was recorded goes to the lane once all is copied; `scalars` is called there, as it may wait."""
        assert self._recording is not None
        iteration, writer = self._recording
        self._recording = None
        try:
            self._recorder.end(timeout_s)
        except (MoECheckpointError, TimeoutError) as error:
            self._recorder.disarm()
            writer.abandon()
            self._lost[iteration] = format_error(error)
            return
        identity, piece = self._identity, Piece(LOG, SnapshotPlan(iteration, {}))
        self._lost.pop(iteration, None)
        self._sealing[iteration] = self._lane.submit(lambda: _seal(writer, lambda: identity.facts(piece, scalars())))

    def _harvest(self) -> None:
        for iteration in [iteration for iteration, task in self._sealing.items() if task.done()]:
            self._await(iteration, _SHORTEST_WAIT_S)

    def _await(self, iteration: int, timeout_s: float) -> None:
        """Take in how the sealing of a log ended; one that takes longer stays under way."""
        task = self._sealing[iteration]
        try:
            task.result(timeout_s)
        except Exception as error:  # whatever it is costs this log, and shows in the coverage
            if not task.done():
                self._lost[iteration] = f"it was not sealed within {timeout_s:g} s"
                return
            self._lost[iteration] = format_error(error)
        else:
            self._lost.pop(iteration, None)
            self._sealed.add(self._mine(iteration))
        del self._sealing[iteration]

    def _trim(self, newest: int, oldest_base: int | None) -> None:
        iterations = {snapshot.iteration for snapshot in self._sealed}
        staying = kept(iterations, oldest_base, newest, self._plan.lookback)
        for snapshot in [snapshot for snapshot in sorted(self._sealed) if snapshot.iteration not in staying]:
            try:
                self._free(snapshot)
            except StoreFailure as error:
                log.warning("cannot free the %s, its memory stays in use: %s", snapshot, error)
        relevant = kept(self._lost, oldest_base, newest, self._plan.lookback)
        self._lost = {iteration: why for iteration, why in self._lost.items() if iteration in relevant}

    def _free(self, snapshot: SnapshotId) -> None:
        """Raises StoreFailure."""
        self._store.free(snapshot)
        self._sealed.discard(snapshot)

    def _judge(self, newest: int, oldest_base: int | None) -> None:
        sealed = {snapshot.iteration for snapshot in self._sealed if snapshot.rank == self._plan.rank}
        own = sealed | self._sealing.keys()
        why = ""
        if oldest_base is not None and (missing := covers(own, oldest_base, newest)):
            why = "; ".join([missing, *self._reasons(own, newest - oldest_base)])
        before, self._coverage = self._coverage, LogCoverage(newest, covered_since(own, newest), why)
        if why and (not before.why or not self._is_judged):
            log.warning("localized recovery unavailable: %s; a failure now rolls back all stages", why)
        elif before.why and not why:
            log.info("localized recovery available: boundary logs cover replays from iteration %s", oldest_base)
        self._is_judged = True

    def _reasons(self, own: Collection[int], iterations: int) -> list[str]:
        """Why logs are missing that a replay of so many iterations needs, each reason once."""
        reasons = [why for iteration, why in sorted(self._lost.items()) if iteration not in own]
        if iterations > self._plan.lookback:
            reasons.append(f"only those of the last {self._plan.lookback} iterations are kept")
        return list(dict.fromkeys(reasons))


def _seal(writer: MappedWriter, facts: Callable[[], Facts]) -> None:
    try:
        writer.seal(facts())
    finally:
        writer.abandon()


# What a pipeline stage gets from its neighbours in an iteration that it runs again without them (MoEvement 3.4).

_OTHER = {Direction.FORWARD: Direction.BACKWARD, Direction.BACKWARD: Direction.FORWARD}


class StageSource:
    """The `ports.BoundarySource` of one iteration, from the logs of the ranks that sent to this one.

    Between two ranks tensors of one direction arrive in the order in which they were sent, which is that of the records
    in the sender's log. Each record is read, and so verified, when it is asked for.

    logs: by direction, the open log of the sender on that side, where that does not take part in the replay: of the
        rank one stage before for FORWARD, one stage after for BACKWARD. With virtual stages the first stage is after
        the last one. A log may stand for both directions; only records of the right one are taken.
    device: where the tensors go.
    sends: keys of what this rank sends in an iteration, in its order; with `name` they say what came out otherwise.

    What this rank would send to these stages they have had when the iteration ran first: their logs have fingerprints
    of it, with which `differences` compares.
    """

    def __init__(
        self,
        logs: Mapping[Direction, Reader],
        device: torch.device | str | int,
        sends: Sequence[str] = (),
        name: str = "this rank",
    ) -> None:
        self._name = name
        self._logs, self._device = dict(logs), device
        self._left = {direction: deque(_sent(direction, log)) for direction, log in self._logs.items()}
        self._sends = {way: [key for key in sends if key.startswith(f"{way.value}/")] for way in Direction}
        self._dropped: dict[Direction, list[torch.Tensor]] = {direction: [] for direction in Direction}

    def serves(self, direction: Direction) -> bool:
        """As `ports.BoundarySource.serves`."""
        return direction in self._logs

    def received(self, direction: Direction) -> torch.Tensor | None:
        """As `ports.BoundarySource.received`; also raises UnreadableCheckpoint for a record that is damaged."""
        if direction not in self._logs:
            return None
        log, left = self._logs[direction], self._left[direction]
        if not left:
            raise UnreadableCheckpoint(
                f"the {log.manifest.snapshot} has no more tensors that were sent {direction.value}, but the replay"
                " needs more: it was written with other flags"
            )
        field = left.popleft()
        return _tensor(field, log.read(field.key), self._device)

    def check_all_taken(self) -> None:
        """To be called after the iteration. Raises UnreadableCheckpoint if a log had more than the iteration took."""
        for direction, left in self._left.items():
            if left:
                raise UnreadableCheckpoint(
                    f"the {self._logs[direction].manifest.snapshot} has {len(left)} tensors, {left[0].key} the first,"
                    " that the replay did not take: it was written with other flags"
                )

    def dropped(self, direction: Direction, tensor: torch.Tensor) -> None:
        """As `ports.BoundarySource.dropped`: take its fingerprint, without waiting for the device."""
        if _has_fingerprints(self._receiver(direction), direction):
            self._dropped[direction].append(fingerprint(tensor))

    def differences(self) -> list[str] | None:
        """After the iteration: a sentence for each tensor that is not what the other stages received when it ran first.

        None where some of them were compared with nothing, because the logs have no fingerprints of them, and what was
        compared is alike. Raises UnreadableCheckpoint for fingerprints that are damaged.
        """
        found, all_known = [], True
        for way, tensors in self._dropped.items():
            log = self._receiver(way)
            if log is None:
                continue
            if not _has_fingerprints(log, way):
                all_known = False
                continue
            received: list[int] = np.frombuffer(log.read(received_key(way)), np.int64).tolist()
            sent = torch.cat(tensors).tolist() if tensors else []
            all_known = all_known and len(received) == len(sent) and UNKNOWN not in received
            for at, (ours, theirs) in enumerate(zip(sent, received, strict=False)):
                if theirs not in (ours, UNKNOWN):
                    found.append(self._difference(way, at, ours, theirs, log))
        return found if found or all_known else None

    def _receiver(self, direction: Direction) -> Reader | None:
        """The log of the rank that received what this one sent in a direction: what it sent came the other way."""
        return self._logs.get(_OTHER[direction])

    def _difference(self, way: Direction, at: int, ours: int, theirs: int, log: Reader) -> str:
        key = self._sends[way][at] if at < len(self._sends[way]) else f"{way.value}, tensor {at}"
        what = "activations" if way is Direction.FORWARD else "gradients"
        snapshot = log.manifest.snapshot
        return (
            f"the {what} {key} that {self._name} sends in iteration {snapshot.iteration} have the fingerprint"
            f" {ours & _MASK:016x}, but those that rank {snapshot.rank} received had {theirs & _MASK:016x}"
        )


_MASK = (1 << 64) - 1


def _has_fingerprints(log: Reader | None, direction: Direction) -> bool:
    return log is not None and received_key(direction) in log.manifest.layout.places


def _sent(direction: Direction, log: Reader) -> list[Field]:
    return [field for field in log.manifest.layout.fields if field.key.startswith(f"{direction.value}/")]


def _tensor(field: Field, data: memoryview, device: torch.device | str | int) -> torch.Tensor:
    """A tensor of its own: kernels may sum up otherwise where memory is aligned otherwise than torch does it."""
    tensor = torch.empty(field.shape, dtype=getattr(torch, field.dtype), device="cpu")
    np.copyto(tensor.view(-1).view(torch.uint8).numpy(), np.frombuffer(data, np.uint8))
    return tensor.to(device)
