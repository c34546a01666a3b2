"""What is killed when: a schedule from a seed, the same for every job that is compared, and the interval of stock
checkpoints that is best under it."""

from __future__ import annotations

import enum
import random
from collections.abc import Sequence
from dataclasses import dataclass


class Kind(enum.Enum):
    """What is lost."""

    RANK = "rank"
    """One process, by SIGKILL."""
    NODE = "node"
    """An agent with its processes and its memory."""


@dataclass(frozen=True)
class PlannedKill:
    """at_s: seconds after the job's first iteration. target: a global rank, or the number of a node in the order of
    the nodes that run when it strikes."""

    at_s: float
    kind: Kind
    target: int


@dataclass(frozen=True)
class FaultRates:
    """mtbf_s: mean time between failures of the whole job. node_share: which share of failures takes a whole node."""

    mtbf_s: float
    node_share: float
    nodes: int
    ranks: int


def schedule(seed: int, odds: FaultRates, until_s: float) -> tuple[PlannedKill, ...]:
    """The kills of a run: a Poisson process, so times between them are exponentially distributed.

    Every kill draws the same number of random numbers, so that a longer schedule begins with the shorter one, and other
    shares of node losses leave the times alone. A job on one node loses no nodes.

    Args:
        seed: Seed of the random numbers.
        odds: Mean time between failures, share of node losses, and numbers of nodes and ranks.
        until_s: Length of the run in seconds; no kill comes later.
    """
    draw = random.Random(seed)
    kills: list[PlannedKill] = []
    at_s = 0.0
    while True:
        at_s += draw.expovariate(1 / odds.mtbf_s)
        is_node, where = draw.random() < odds.node_share, draw.random()
        if at_s >= until_s:
            return tuple(kills)
        kind, count = (Kind.NODE, odds.nodes) if is_node and odds.nodes > 1 else (Kind.RANK, odds.ranks)
        kills.append(PlannedKill(at_s, kind, int(where * count)))


LONGEST = 500


@dataclass(frozen=True)
class StockCosts:
    """Seconds: of an iteration, of a checkpoint as training feels it, from a fault until training continues, and how
    much longer the first checkpoint after a start takes."""

    iteration_s: float
    checkpoint_s: float
    restart_s: float
    first_checkpoint_s: float = 0.0


def best_interval(faults_s: Sequence[float], run_s: float, costs: StockCosts) -> int:
    """Iterations between checkpoints with which a job gets furthest; the smallest of equals.

    Daly's estimate takes a restart to be short against the time between faults; where it is not, only trying helps.

    Args:
        faults_s: Times of the faults, in seconds from the start.
        run_s: Length of the run in seconds.
        costs: Seconds of an iteration, a checkpoint and a restart.
    """
    return max(range(1, LONGEST + 1), key=lambda interval: (reached(faults_s, run_s, costs, interval), -interval))


def reached(faults_s: Sequence[float], run_s: float, costs: StockCosts, interval: int) -> int:
    """The iteration at which a job ends, starting with none done.

    A fault takes it back to its newest checkpoint, and one that strikes during a restart makes that start again.

    Args:
        faults_s: Times of the faults, in seconds from the start, in any order.
        run_s: Length of the run in seconds.
        costs: Seconds of an iteration, a checkpoint and a restart.
        interval: Iterations between two checkpoints.
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
