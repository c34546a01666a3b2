"""What each rank measures of an iteration, and the one message in which it tells all others.

All of it goes through a single collective that gives, element by element, the smallest value of all ranks, and for the
token counts the sum (`Transport.least_and_total`). Minimum is enough for everything else that has to be known:

- a minimum (how far all ranks have come with a round, the time that all of them have for a copy) is sent as it is;
- a maximum (the costs of the slowest rank) is sent negated: max(x) = -min(-x);
- whether all ranks have the same value (a digest of their plans) takes both: they do if and only if minimum = maximum.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from statistics import median
from typing import Any, NamedTuple

import torch

from ..errors import MoECheckpointError
from ..ports import Clock, Executor, Lap, Task, Transport
from ..strategies import Costs, Throughput
from ..types import SnapshotPlan

MICROSECONDS = 1e6
_UNKNOWN = 2**62  # a bandwidth that is not known is no bound: above all that are
_DIGEST_DIGITS = 15  # hexadecimal ones of the plan's digest: as many as 64-bit integers hold with their sign


class _Header(NamedTuple):
    """The fields of a message that are always there; the statuses of open rounds follow. Costs are in microseconds."""

    least_digest: int
    negated_digest: int
    negated_iteration_us: int
    negated_stall_us: int
    negated_round_us: int
    negated_persist_us: int
    negated_slowed_us: int
    least_copy_us: int
    least_bandwidth_bytes_per_s: int
    least_peer_bytes_per_s: int

    @classmethod
    def of(cls, plan: SnapshotPlan | None, costs: Costs, pace: Throughput) -> _Header:
        """As one rank sends it."""
        digest = int(plan.digest()[:_DIGEST_DIGITS], 16) if plan else 0
        return cls(
            least_digest=digest,
            negated_digest=-digest,
            negated_iteration_us=-round(costs.iteration_s * MICROSECONDS),
            negated_stall_us=-round(costs.stall_s * MICROSECONDS),
            negated_round_us=-round(costs.round_s * MICROSECONDS),
            negated_persist_us=-round(costs.persist_s * MICROSECONDS),
            negated_slowed_us=-round(costs.slowed_s * MICROSECONDS),
            least_copy_us=round(pace.iteration_s * MICROSECONDS),
            least_bandwidth_bytes_per_s=int(pace.bandwidth_bytes_per_s),
            least_peer_bytes_per_s=int(min(pace.peer_bytes_per_s, _UNKNOWN)),
        )

    @property
    def same_plan(self) -> bool:
        """Whether all ranks planned the same."""
        return self.least_digest == -self.negated_digest

    @property
    def costs(self) -> Costs:
        """Of the slowest rank."""
        first = self._fields.index("negated_iteration_us")
        return Costs(*(-cost_us / MICROSECONDS for cost_us in self[first : first + len(fields(Costs))]))

    @property
    def pace(self) -> Throughput:
        """What all ranks have time for."""
        peers = math.inf if self.least_peer_bytes_per_s == _UNKNOWN else float(self.least_peer_bytes_per_s)
        return Throughput(self.least_copy_us / MICROSECONDS, float(self.least_bandwidth_bytes_per_s), peers)


_Reduced = tuple[tuple[int, ...], tuple[int, ...]]
"""The least values of all ranks, and the sums."""


@dataclass(frozen=True)
class IterationMessage:
    """What one rank knows after `iteration`.

    Args:
        plan: what it snapshots of that iteration; None for nothing.
        costs: what it measured.
        statuses: gives how far it has come with each open round; called when the message leaves.
        counts: gives whether its step was skipped, and the tokens that its routers sent to the experts of all MoE
            layers; nothing if the strategy does not ask. Called on the thread that sends the message, as they may still
            be on a device.
        pace: the time that a copy has, and how fast the last one was; None if the strategy does not ask.
        numbers: of extensions, which are added up; as many on all ranks.
    """

    iteration: int
    plan: SnapshotPlan | None
    costs: Costs
    statuses: Callable[[], Sequence[int]]
    counts: Callable[[], Sequence[int]]
    pace: Throughput | None = None
    numbers: tuple[int, ...] = ()


@dataclass(frozen=True)
class IterationNews:
    """What the messages of all ranks come to: the least statuses and pace, the highest costs, the sums of counts and
    numbers."""

    iteration: int
    statuses: tuple[int, ...]
    costs: Costs
    counts: tuple[int, ...]
    pace: Throughput
    numbers: tuple[int, ...] = ()


class MessageExchange:
    """Exchanges on a thread of its own, so that training never waits for a slow rank before it must know."""

    def __init__(self, transport: Transport, lane: Executor, clock: Clock) -> None:
        self._transport, self._lane, self._clock = transport, lane, clock
        self._sent: tuple[int, int, Task[_Reduced]] | None = None

    def send(self, message: IterationMessage, awaiting: Sequence[Task[None]], until_s: float) -> None:
        """Begin to exchange. Work that is almost done is waited for: what misses this message takes that of the next
        iteration.

        Args:
            message: What this rank knows.
            awaiting: Work whose outcome its statuses tell.
            until_s: For how long that work is waited for, as a time of the clock.
        """

        def exchange() -> _Reduced:
            # Not on training's thread: the digest of a plan with 15,000 operators takes 10 ms.
            header = _Header.of(message.plan, message.costs, message.pace or Throughput(0.0, 0.0))
            for task in awaiting:
                # How it ended is looked at by training's thread.
                with suppress(Exception):
                    task.result(max(0.0, until_s - self._clock.now_s()))
            counts = message.counts()  # may wait for the device; statuses are as late as can be
            return self._transport.least_and_total([*header, *message.statuses()], [*message.numbers, *counts])

        # One thread exchanges, in the order of submission: the collectives of all ranks come in one order.
        self._sent = message.iteration, len(message.numbers), self._lane.submit(exchange)

    def receive(self, timeout_s: float) -> IterationNews | None:
        """What came of the message that was sent last; None when there was none.

        Raises:
            PeerLost, TimeoutError: when it did not come about.
            MoECheckpointError: when ranks planned differently.
        """
        sent, self._sent = self._sent, None
        if sent is None:
            return None
        iteration, numbers, task = sent
        least, sums = task.result(timeout_s)
        length = len(_Header._fields)
        header = _Header(*least[:length])
        # Before anything else is read: what ranks say of different plans does not belong together.
        if not header.same_plan:
            raise MoECheckpointError(
                f"the ranks planned different snapshots of iteration {iteration}: this is a defect, as plans depend"
                " only on what all ranks know; training cannot be protected"
            )
        # Numbers of extensions come first in the sums, as many on all ranks; all that follows are counts.
        return IterationNews(iteration, least[length:], header.costs, sums[numbers:], header.pace, sums[:numbers])


# How long training's device stood still for checkpoints, and how long its passes took.
#
# The host runs ahead of a GPU: while it waits for copies, the device may still have passes to compute, and what the
# host waited says nothing of what training lost. So points of an iteration are marked with events on training's
# stream. Two of them with nothing launched in between are as far apart as the device had nothing to do.

_REMEMBERED = 16
_COLD, _ENOUGH = 1, 3


class HostStopwatch:
    """As `ports.Stopwatch`, where the host computes what it trains."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._resumed_s, self._paused_s = clock.now_s(), clock.now_s()

    def pause(self) -> Lap:
        """As `ports.Stopwatch.pause`."""
        self._paused_s = self._clock.now_s()
        lap_s = self._paused_s - self._resumed_s
        return lambda: lap_s

    def resume(self) -> float:
        """As `ports.Stopwatch.resume`."""
        self._resumed_s = self._clock.now_s()
        return self._resumed_s - self._paused_s


class CudaStopwatch:
    """As `ports.Stopwatch`, by events on the stream that is current when it is called; no call waits for passes."""

    def __init__(self) -> None:
        self._resumed, self._paused = _recorded(), _recorded()

    def pause(self) -> Lap:
        """As `ports.Stopwatch.pause`."""
        self._paused = _recorded()
        first, last = self._resumed, self._paused
        return lambda: float(first.elapsed_time(last)) / 1000 if last.query() else None

    def resume(self) -> float:
        """As `ports.Stopwatch.resume`."""
        # Asked before the next event is recorded: where the device has not come to the pause yet, it had work to do
        # all the time, whatever the host waited for.
        stood_still = self._paused.query()
        self._resumed = _recorded()
        if not stood_still:
            return 0.0
        self._resumed.synchronize()  # at once: there is nothing before it on the stream
        return float(self._paused.elapsed_time(self._resumed)) / 1000


def _recorded() -> Any:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


class PassTimes:
    """What the newest passes took, and what copies cost them: the time by which those with copies take longer.

    newest_s: of the last passes that have come to an end; 0 where none has.
    """

    def __init__(self) -> None:
        self._laps: deque[tuple[Lap, bool]] = deque()
        self.newest_s = 0.0
        self._newest: deque[float] = deque(maxlen=_REMEMBERED)
        self._alone: deque[float] = deque(maxlen=_REMEMBERED)
        self._cold = _COLD + 1
        self.slowed_s: float | None = None

    @property
    def shortest_s(self) -> float | None:
        """Of the newest passes: the first ones of a start take long. None where none are known."""
        return min(self._newest, default=None)

    def launched(self, lap: Lap, *, copied: bool) -> None:
        """Passes are launched; how long they take is asked for from now on.

        Args:
            lap: Tells it.
            copied: As in `noted`.
        """
        self._laps.append((lap, copied))

    def look(self) -> None:
        """Take in the passes that have come to an end: of a loop that never waits for its device, those of earlier
        iterations."""
        while self._laps and (passes_s := self._laps[0][0]()) is not None:
            self.newest_s = passes_s
            self.noted(passes_s, copied=self._laps.popleft()[1])

    def noted(self, passes_s: float, *, copied: bool) -> None:
        """Take in the passes of an iteration.

        `slowed_s` is then how much longer those with copies take than the median without, None until `_ENOUGH` warm
        ones without are known. The first passes of a process build kernels and caches, and do not count.

        Args:
            passes_s: How long they took.
            copied: Whether a snapshot was copied meanwhile.
        """
        self._newest.append(passes_s)
        self._cold = max(0, self._cold - 1)
        if not copied:
            if not self._cold:
                self._alone.append(passes_s)
            return
        self.slowed_s = passes_s - median(self._alone) if len(self._alone) >= _ENOUGH else None
