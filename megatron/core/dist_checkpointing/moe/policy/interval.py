"""How often a dense checkpoint pays off: CheckFreq's cap, Young and Daly, and the sweep of Gemini's oracle."""

from __future__ import annotations

import math
from fractions import Fraction

from .checks import not_negative, positive


def checkfreq_interval(
    iteration_time_s: float, stall_s: float, persist_time_s: float, max_overhead: float = 0.03
) -> int:
    """Iterations between checkpoints by CheckFreq's policy, as MoEvement 5.2 uses it: overhead of at most 3 %.

    The smallest interval in which one checkpoint's stall is at most `max_overhead` of the training time, and in which
    the checkpoint before has been persisted. All ranks must give the same measurements.

    Args:
        iteration_time_s: Seconds of an iteration.
        stall_s: Seconds that training waits for one checkpoint.
        persist_time_s: Seconds until a checkpoint has been persisted.
        max_overhead: The share of training time that stalls may take, a fraction.

    Raises:
        UsageError: Times that are negative or not finite, an iteration that takes no time, and an overhead cap of 0 or
            less, which no interval would meet.
    """
    iteration = positive("iteration_time_s", iteration_time_s)
    by_overhead = not_negative("stall_s", stall_s) / (positive("max_overhead", max_overhead) * iteration)
    by_persist = not_negative("persist_time_s", persist_time_s) / iteration
    return max(1, math.ceil(by_overhead), math.ceil(by_persist))


def young(checkpoint_cost_s: float, mtbf_s: float) -> float:
    """Seconds of training between checkpoints by Young's first-order estimate, sqrt(2 C M).

    A cost of 0 gives 0: checkpoint all the time.

    Args:
        checkpoint_cost_s: C, seconds that a checkpoint costs.
        mtbf_s: M, the mean time between failures in seconds.

    Raises:
        UsageError: A negative cost, a mean time between failures of 0 or less, and values that are not finite.
    """
    not_negative("checkpoint_cost_s", checkpoint_cost_s)
    positive("mtbf_s", mtbf_s)
    return math.sqrt(2 * checkpoint_cost_s) * math.sqrt(mtbf_s)


def daly(checkpoint_cost_s: float, mtbf_s: float) -> float:
    """Seconds of training between checkpoints by Daly's higher-order estimate (2006, the source of MoEvement 2.4).

    sqrt(2 C M) (1 + sqrt(C / 2M) / 3 + (C / 2M) / 9) - C where C < 2M, else M. The estimate drops from M to 8/9 M as M
    passes C/2; on either side of that it grows with M.

    Args:
        checkpoint_cost_s: C, seconds that a checkpoint costs.
        mtbf_s: M, the mean time between failures in seconds.

    Raises:
        UsageError: As `young`.
    """
    first_order = young(checkpoint_cost_s, mtbf_s)
    if checkpoint_cost_s >= 2 * mtbf_s:
        return float(mtbf_s)
    ratio = checkpoint_cost_s / (2 * mtbf_s)
    return first_order * (1 + math.sqrt(ratio) / 3 + ratio / 9) - checkpoint_cost_s


def in_iterations(interval_s: float, iteration_time_s: float) -> int:
    """An interval in whole iterations: the nearest number (of two, the smaller), and at least 1.

    Args:
        interval_s: Seconds between checkpoints.
        iteration_time_s: Seconds of an iteration.

    Raises:
        UsageError: A negative interval, an iteration that takes no time, and values that are not finite.
    """
    iterations = not_negative("interval_s", interval_s) / positive("iteration_time_s", iteration_time_s)
    return max(1, math.ceil(iterations - Fraction(1, 2)))
