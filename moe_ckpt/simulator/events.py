"""A training run as a sequence of events: faults strike, recoveries overlap."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

from megatron.core.dist_checkpointing.moe.errors import UsageError
from megatron.core.dist_checkpointing.moe.policy.checks import positive

from .behaviour import Behaviour, Nodes
from .faults import Fault


@dataclass(frozen=True)
class Moment:
    """How things stand from `at_s` on, until the next moment.

    iterations: done for good. goodput: relative to training without checkpoints and faults; 0 during a recovery.
    k_share: share of experts in a snapshot. lost_tokens: so far.
    """

    at_s: float
    iterations: int
    goodput: float
    k_share: float
    lost_tokens: float


@dataclass(frozen=True)
class SimulatedRun:
    """What came of a run. useful_s + overhead_s + recovery_s = wall_s.

    useful_s: what `iterations` would take without checkpoints and faults. overhead_s: what checkpoints added to them.
    recovery_s: from faults until training was where it was, with iterations that were cut off. faults: that struck.
    from_storage: recoveries from storage, because memory had lost a copy.
    """

    wall_s: float
    useful_s: float
    overhead_s: float
    recovery_s: float
    iterations: float
    faults: int
    from_storage: int
    lost_tokens: float
    timeline: tuple[Moment, ...] = field(repr=False)

    @property
    def ettr(self) -> float:
        """Effective training time ratio."""
        return self.useful_s / self.wall_s


@dataclass(frozen=True)
class Estimate:
    """The mean of several runs, and half the width of its 95 % confidence interval (0 for a single run)."""

    mean: float
    half_width: float
    runs: int

    def __format__(self, spec: str) -> str:
        """For people: the mean, and of more than one run half of the interval, which has no sign."""
        half = f" ± {self.half_width:{spec.replace('+', '')}}" if self.runs > 1 else ""
        return f"{self.mean:{spec}}{half}"

    def is_beyond(self, value: float = 0.0) -> bool:
        """Whether the interval leaves this value out; that of a single run never does."""
        return self.runs > 1 and abs(self.mean - value) > self.half_width


def simulate(behaviour: Behaviour, faults: Sequence[Fault], duration_s: float) -> SimulatedRun:
    """Train from the start with these faults.

    Faults strike training and recoveries alike. One that strikes a recovery restarts it with all nodes that are down,
    or, where the strategy keeps recoveries apart, runs at the same time; the slowest then counts. A failed node is
    replaced at once. Raises UsageError for a duration that is not above 0, and faults that are not in order of time.

    Args:
        behaviour: The system in its job; it is copied and stays as it was.
        faults: The faults in order of time; those after the end do nothing.
        duration_s: Length of the run in wall-clock seconds.
    """
    positive("duration_s", duration_s)
    run = _Running(behaviour.fresh(), duration_s)
    before_s = 0.0
    for fault in faults:
        if fault.at_s < before_s:
            raise UsageError(f"the fault at {fault.at_s} s comes after one at {before_s} s: give them in order of time")
        before_s = fault.at_s
        if fault.at_s >= duration_s:
            break
        run.train_until(fault.at_s)
        run.strike(fault)
    run.train_until(duration_s)
    return run.result()


def estimate(values: Sequence[float]) -> Estimate:
    """The mean of independent values with Student's 95 % interval. Raises UsageError for no values."""
    if not values:
        raise UsageError("seeds names no runs: give at least 1")
    mean = statistics.fmean(values)
    if len(values) == 1:
        return Estimate(mean, 0.0, 1)
    deviation = statistics.stdev(values)
    return Estimate(mean, student(len(values) - 1) * deviation / math.sqrt(len(values)), len(values))


_STUDENT = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)


def student(freedom: int) -> float:
    """The 97.5 % quantile: from a table up to 10 degrees of freedom, then Fisher's expansion about the normal one."""
    if freedom <= len(_STUDENT):
        return _STUDENT[freedom - 1]
    z = statistics.NormalDist().inv_cdf(0.975)
    return z + (z**3 + z) / (4 * freedom) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)


@dataclass(frozen=True)
class _Recovering:
    """A recovery under way: of which nodes, and when it is over."""

    nodes: Nodes
    end_s: float


class _Running:
    """The state of a run between two events."""

    def __init__(self, behaviour: Behaviour, duration_s: float) -> None:
        self._behaviour = behaviour
        self._duration_s = duration_s
        self._now_s = self._resumed_s = 0.0
        self._done = 0.0
        self._stored = 0
        self._useful_s = self._overhead_s = self._recovery_s = 0.0
        self._recoveries: list[_Recovering] = []
        self._filled_s: dict[int, float] = {}
        self._faults = self._from_storage = 0
        self._timeline: list[Moment] = []
        self._note()

    def train_until(self, at_s: float) -> None:
        """Let time pass: finish recoveries, then train."""
        resumed_s = max((recovery.end_s for recovery in self._recoveries), default=self._now_s)
        self._recovery_s += min(resumed_s, at_s) - self._now_s
        self._now_s = min(resumed_s, at_s)
        if resumed_s > at_s:
            return
        if self._recoveries:
            self._recoveries = []
            self._resumed_s = self._now_s
            self._note()
        iterations = (at_s - self._now_s) / self._paced_s
        self._done += iterations
        self._useful_s += iterations * self._behaviour.iteration_s
        self._overhead_s += iterations * self._behaviour.overhead_s
        self._now_s = at_s

    def strike(self, fault: Fault) -> None:
        """Cut off the iteration, and begin a recovery or change those under way."""
        self._faults += 1
        self._slow_down(fault)
        self._cut_off()
        under_way = [ongoing for ongoing in self._recoveries if ongoing.end_s > self._now_s]
        joined = [ongoing for ongoing in under_way if self._behaviour.restarts(ongoing.nodes, fault.nodes)]
        nodes = fault.nodes.union(*(ongoing.nodes for ongoing in joined))
        empty = frozenset(node for node, filled_s in self._filled_s.items() if filled_s > self._now_s)
        recovery = self._behaviour.strike(int(self._done), nodes=nodes, down=fault.nodes | empty)
        self._filled_s.update(dict.fromkeys(fault.nodes, self._now_s + recovery.refill_s))
        if recovery.from_storage:
            # What was read from storage is still there, however long ago it was written.
            self._roll_back(min(recovery.iterations_again, int(self._done) - self._stored))
            self._stored = int(self._done)
        takes_s = recovery.down_s if recovery.from_storage else recovery.total_s
        apart = [ongoing for ongoing in under_way if ongoing not in joined]
        self._recoveries = [*apart, _Recovering(nodes, self._now_s + takes_s)]
        self._note()

    def result(self) -> SimulatedRun:
        """What came of it."""
        return SimulatedRun(
            self._duration_s,
            self._useful_s,
            self._overhead_s,
            self._recovery_s,
            self._done,
            self._faults,
            self._from_storage,
            self._behaviour.lost_tokens,
            tuple(self._timeline),
        )

    @property
    def _paced_s(self) -> float:
        return self._behaviour.iteration_s + self._behaviour.overhead_s

    def _slow_down(self, fault: Fault) -> None:
        """What was not trained while a node was slow, at most since training continued last, is part of the
        recovery."""
        if self._recoveries or not fault.slow_s:
            return
        slow_s = min(fault.slow_s, self._now_s - self._resumed_s)
        lost = slow_s * fault.slowdown / (1 + fault.slowdown) / self._paced_s
        self._undo(min(lost, self._done), self._behaviour.overhead_s)

    def _cut_off(self) -> None:
        self._undo(self._done % 1, self._behaviour.overhead_s)
        self._done = float(round(self._done))

    def _roll_back(self, iterations: int) -> None:
        """Training itself repeats what lies far back: it takes checkpoints again, and faults do not undo it all."""
        self._from_storage += 1
        self._undo(iterations, self._overhead_s / max(self._done, 1.0))

    def _undo(self, iterations: float, overhead_s: float) -> None:
        """What these iterations took, with so much overhead each, is part of the recovery."""
        iteration_s = self._behaviour.iteration_s
        self._done -= iterations
        self._useful_s -= iterations * iteration_s
        self._overhead_s -= iterations * overhead_s
        self._recovery_s += iterations * (iteration_s + overhead_s)

    def _note(self) -> None:
        goodput = 0.0 if self._recoveries else self._behaviour.iteration_s / self._paced_s
        state = self._behaviour
        self._timeline.append(Moment(self._now_s, int(self._done), goodput, state.k_share, state.lost_tokens))
