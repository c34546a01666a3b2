"""Which faults strike when: a schedule from a seed, the same for every job that is compared."""

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
class Fault:
    """at_s: seconds after the job's first iteration. target: a global rank, or the number of a node in the order of
    the nodes that run when it strikes."""

    at_s: float
    kind: Kind
    target: int

    def __str__(self) -> str:
        return f"{self.kind.value} {self.target} at {self.at_s:.1f} s"


@dataclass(frozen=True)
class Odds:
    """mtbf_s: mean time between failures of the whole job. node_share: which share of failures takes a whole node."""

    mtbf_s: float
    node_share: float
    nodes: int
    ranks: int


def schedule(seed: int, odds: Odds, until_s: float) -> tuple[Fault, ...]:
    """The faults of `until_s` seconds: a Poisson process, so times between faults are exponentially distributed.

    Every fault draws the same number of random numbers, so that a longer schedule begins with the shorter one, and
    other shares of node losses leave the times alone. A job on one node loses no nodes.
    """
    draw = random.Random(seed)
    found: list[Fault] = []
    at_s = 0.0
    while True:
        at_s += draw.expovariate(1 / odds.mtbf_s)
        is_node, where = draw.random() < odds.node_share, draw.random()
        if at_s >= until_s:
            return tuple(found)
        if is_node and odds.nodes > 1:
            found.append(Fault(at_s, Kind.NODE, int(where * odds.nodes)))
        else:
            found.append(Fault(at_s, Kind.RANK, int(where * odds.ranks)))
