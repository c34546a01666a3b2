"""The interval of stock checkpoints that is best under a schedule of faults, known beforehand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

LONGEST = 500


@dataclass(frozen=True)
class StockCosts:
    """Seconds: of an iteration, of a checkpoint as training feels it, from a fault until training goes on, and how much
    longer the first checkpoint after a start takes."""

    iteration_s: float
    checkpoint_s: float
    restart_s: float
    first_checkpoint_s: float = 0.0


def best_interval(faults_s: Sequence[float], run_s: float, costs: StockCosts) -> int:
    """Iterations between checkpoints with which a job gets furthest in `run_s` seconds; the smallest of equals.

    Daly's estimate takes a restart to be short against the time between faults; where it is not, only trying helps.
    """
    return max(range(1, LONGEST + 1), key=lambda interval: (reached(faults_s, run_s, costs, interval), -interval))


def reached(faults_s: Sequence[float], run_s: float, costs: StockCosts, interval: int) -> int:
    """The iteration at which a job ends that has a checkpoint every `interval` iterations, starting with none done.

    A fault takes it back to its newest checkpoint, and one that strikes during a restart begins that anew.
    """
    begun_s, saved = 0.0, 0
    for fault_s in sorted(faults_s):
        if begun_s < fault_s < run_s:
            done = saved + _trained(fault_s - begun_s, costs, interval)
            saved = done - done % interval
        begun_s = max(begun_s, fault_s + costs.restart_s)
    return saved + (_trained(run_s - begun_s, costs, interval) if begun_s < run_s else 0)


def _trained(seconds: float, costs: StockCosts, interval: int) -> int:
    """Iterations that fit into so much time; a checkpoint's time passes after the last iteration of an interval."""
    round_s = interval * costs.iteration_s + costs.checkpoint_s
    first_s = round_s + costs.first_checkpoint_s
    rounds = 1 + int((seconds - first_s) / round_s) if seconds >= first_s else 0
    left_s = seconds - (first_s + (rounds - 1) * round_s if rounds else 0.0)
    return rounds * interval + min(interval - 1, int(left_s / costs.iteration_s))
