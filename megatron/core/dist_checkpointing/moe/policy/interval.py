"""How often a dense checkpoint pays off: CheckFreq's cap, Young and Daly, and the sweep of Gemini's oracle."""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction

from .checks import not_negative, positive, whole


def checkfreq_interval(
    iteration_time_s: float, stall_s: float, persist_time_s: float, max_overhead: float = 0.03
) -> int:
    """Iterations between checkpoints by CheckFreq's policy, as MoEvement 5.2 uses it: overhead of at most 3 %.

    The smallest interval in which one checkpoint's stall is at most `max_overhead` of the training time (a fraction),
    and in which the checkpoint before has been persisted. All ranks must give the same measurements.
    Raises UsageError for times that are negative or not finite, an iteration that takes no time, and an overhead cap of
    0 or less, which no interval would meet.
    """
    iteration = positive("iteration_time_s", iteration_time_s)
    by_overhead = not_negative("stall_s", stall_s) / (positive("max_overhead", max_overhead) * iteration)
    by_persist = not_negative("persist_time_s", persist_time_s) / iteration
    return max(1, math.ceil(by_overhead), math.ceil(by_persist))


def young(checkpoint_cost_s: float, mtbf_s: float) -> float:
    """Seconds of training between checkpoints by Young's first-order estimate, sqrt(2 C M).

    A cost of 0 gives 0: checkpoint all the time. Raises UsageError for a negative cost, a mean time between failures of
    0 or less, and values that are not finite.
    """
    not_negative("checkpoint_cost_s", checkpoint_cost_s)
    positive("mtbf_s", mtbf_s)
    return math.sqrt(2 * checkpoint_cost_s) * math.sqrt(mtbf_s)


def daly(checkpoint_cost_s: float, mtbf_s: float) -> float:
    """Seconds of training between checkpoints by Daly's higher-order estimate (2006, the source of MoEvement 2.4).

    sqrt(2 C M) (1 + sqrt(C / 2M) / 3 + (C / 2M) / 9) - C where C < 2M, else M. The estimate drops from M to 8/9 M as M
    passes C/2; on either side of that it grows with M. Raises UsageError as `young` does.
    """
    first_order = young(checkpoint_cost_s, mtbf_s)
    if checkpoint_cost_s >= 2 * mtbf_s:
        return float(mtbf_s)
    ratio = checkpoint_cost_s / (2 * mtbf_s)
    return first_order * (1 + math.sqrt(ratio) / 3 + ratio / 9) - checkpoint_cost_s


def in_iterations(interval_s: float, iteration_time_s: float) -> int:
    """An interval in whole iterations: the nearest number (of two, the smaller), and at least 1.

    Raises UsageError for a negative interval, an iteration that takes no time, and values that are not finite.
    """
    iterations = not_negative("interval_s", interval_s) / positive("iteration_time_s", iteration_time_s)
    return max(1, math.ceil(iterations - Fraction(1, 2)))


def expected_recovery_s(iteration_time_s: float, interval: int, restart_s: float = 0.0) -> float:
    """E[R] of dense checkpoints (MoEvement 2.4, 3.6): half an interval is run again, after a constant restart.

    The paper's closed form has no restart; give what detection, spawning and loading take. Raises UsageError for times
    that are negative or not finite, and an interval below 1.
    """
    positive("iteration_time_s", iteration_time_s)
    not_negative("restart_s", restart_s)
    return restart_s + whole("interval", interval, 1) * iteration_time_s / 2


def ettr(
    iteration_time_s: float, checkpoint_overhead_s: float, interval: int, expected_recovery_s: float, mtbf_s: float
) -> float:
    """Effective training time ratio, between 0 and 1 (MoEvement 2.4 and App. C).

    1 / (1 + T_ckpt / (T_iter I)) x 1 / (1 + E[R] / MTBF): `checkpoint_overhead_s` is what one checkpoint adds to the
    training time, paid every `interval` iterations. Raises UsageError for times that are negative or not finite, and an
    iteration time, mean time between failures or interval of 0.
    """
    positive("iteration_time_s", iteration_time_s)
    not_negative("checkpoint_overhead_s", checkpoint_overhead_s)
    whole("interval", interval, 1)
    not_negative("expected_recovery_s", expected_recovery_s)
    positive("mtbf_s", mtbf_s)
    runtime_overhead = checkpoint_overhead_s / iteration_time_s / interval
    return 1 / (1 + runtime_overhead) / (1 + expected_recovery_s / mtbf_s)


def gemini_oracle(
    iteration_time_s: float,
    checkpoint_overhead_s: float,
    mtbf_s: float,
    max_interval: int,
    restart_s: float = 0.0,
) -> int:
    """The interval of 1..`max_interval` iterations with the highest ETTR; of equals the smallest (MoEvement 5.2).

    It needs to know the mean time between failures, which a running job does not: an upper bound for any policy that
    fixes an interval. Raises UsageError as `ettr` does.
    """
    whole("max_interval", max_interval, 1)

    def quality(interval: int) -> float:
        recovery_s = expected_recovery_s(iteration_time_s, interval, restart_s)
        return ettr(iteration_time_s, checkpoint_overhead_s, interval, recovery_s, mtbf_s)

    return max(range(1, max_interval + 1), key=quality)


@dataclass(frozen=True)
class TrainingRun:
    """What MoC eq. 4 takes as given of a whole training run.

    `faults_per_iteration` is the constant rate lambda of eq. 11, `iteration_time_s` over the mean time between
    failures. Raises UsageError for values that are negative or not finite, and an iteration that takes no time.
    """

    iterations: int
    iteration_time_s: float
    faults_per_iteration: float
    restart_s: float

    def __post_init__(self) -> None:
        whole("iterations", self.iterations, 0)
        positive("iteration_time_s", self.iteration_time_s)
        not_negative("faults_per_iteration", self.faults_per_iteration)
        not_negative("restart_s", self.restart_s)

    @property
    def expected_faults(self) -> float:
        """N_fault of MoC eq. 11."""
        return self.faults_per_iteration * self.iterations


def moc_save_overhead_s(snapshot_s: float, forward_backward_s: float) -> float:
    """O_save of MoC eq. 10: the seconds by which a snapshot outlasts the forward and backward passes beside it.

    Raises UsageError for times that are negative or not finite.
    """
    not_negative("snapshot_s", snapshot_s)
    not_negative("forward_backward_s", forward_backward_s)
    return max(0.0, snapshot_s - forward_backward_s)


def moc_overhead_s(save_s: float, interval: int, run: TrainingRun) -> float:
    """O_ckpt of MoC eq. 4 with the expected faults of eq. 11, which is eq. 12 and eq. 13: seconds over the whole run.

    The paper adds I_ckpt / 2 iterations to seconds; here the lost iterations count with the time they take. Two
    strategies compare as eq. 14 to 16 say: by `save_s` and `interval` alone. Raises UsageError for a `save_s` that is
    negative or not finite, and an interval below 1.
    """
    not_negative("save_s", save_s)
    lost_s = whole("interval", interval, 1) / 2 * run.iteration_time_s
    return save_s * run.iterations / interval + run.expected_faults * (run.restart_s + lost_s)
