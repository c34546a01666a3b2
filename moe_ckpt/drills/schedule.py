"""What is killed when: a schedule from a seed, the same for every job that is compared."""

from __future__ import annotations

import enum
import random
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
class Odds:
    """mtbf_s: mean time between failures of the whole job. node_share: which share of failures takes a whole node."""

    mtbf_s: float
    node_share: float
    nodes: int
    ranks: int


def schedule(seed: int, odds: Odds, until_s: float) -> tuple[PlannedKill, ...]:
    """The kills of `until_s` seconds: a Poisson process, so times between them are exponentially distributed.

    Every kill draws the same number of random numbers, so that a longer schedule begins with the shorter one, and
    other shares of node losses leave the times alone. A job on one node loses no nodes.
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
