"""When nodes fail: by chance, or as a trace says."""

from __future__ import annotations

import csv
import random
from dataclasses import dataclass
from pathlib import Path

from megatron.core.dist_checkpointing.moe.errors import UsageError
from megatron.core.dist_checkpointing.moe.policy.checks import not_negative, positive, whole

from .behaviour import Nodes


@dataclass(frozen=True)
class Fault:
    """Nodes that fail together, `at_s` seconds after the start.

    slow_s: for how long before that one of them was slow, and all waited for it; slowdown: by which share an iteration
    took longer meanwhile. Raises UsageError for negative values and no nodes.
    """

    at_s: float
    nodes: Nodes
    slow_s: float = 0.0
    slowdown: float = 0.0

    def __post_init__(self) -> None:
        for name in ("at_s", "slow_s", "slowdown"):
            not_negative(name, getattr(self, name))
        if not self.nodes:
            raise UsageError(f"the fault at {self.at_s} s takes no nodes: name at least 1")


def poisson(mtbf_s: float, duration_s: float, nodes: int, seed: int) -> tuple[Fault, ...]:
    """Faults of a Poisson process, each on one node, all nodes equally likely.

    The same seed gives the same faults, and at another `mtbf_s` the same ones closer together or further apart. Raises
    UsageError for times that are not above 0 and finite, and no nodes.

    Args:
        mtbf_s: Mean time between faults of the whole job, in seconds.
        duration_s: Length of the run in seconds; no fault comes later.
        nodes: Number of nodes; faults strike 0 to `nodes` - 1.
        seed: Seed of the random numbers.
    """
    positive("mtbf_s", mtbf_s)
    positive("duration_s", duration_s)
    whole("nodes", nodes, 1)
    chance = random.Random(seed)
    faults: list[Fault] = []
    at_s = 0.0
    while True:
        at_s += mtbf_s * chance.expovariate(1.0)
        node = chance.randrange(nodes)
        chance.random()  # keeps each seed's faults as they were when they could also take several nodes
        if at_s >= duration_s:
            return tuple(faults)
        faults.append(Fault(at_s, frozenset((node,))))


@dataclass(frozen=True)
class FailureMix:
    """How failures hang together. Shares are of all failures; seconds are means.

    rack_share: that take all nodes of a rack, of `rack_nodes` neighbours. repeat_share: of a node that failed before,
    `repeat_s` after it came back into use. slow_share: that begin with a node which makes iterations longer, by the
    share `slowdown`, for `slow_s` until it is found. Raises UsageError for shares outside of 0 to below 1,
    and of more than 1 together.
    """

    rack_share: float = 35 / 419
    rack_nodes: int = 4
    repeat_share: float = 0.2
    repeat_s: float = 1800.0
    slow_share: float = 0.1
    slow_s: float = 600.0
    slowdown: float = 0.3

    def __post_init__(self) -> None:
        whole("rack_nodes", self.rack_nodes, 1)
        for name in ("repeat_s", "slow_s", "slowdown"):
            not_negative(name, getattr(self, name))
        for name in ("rack_share", "repeat_share", "slow_share"):
            if not 0 <= getattr(self, name) < 1:
                raise UsageError(f"{name} is {getattr(self, name)}, but is a share below 1")
        if self.rack_share + self.repeat_share + self.slow_share > 1:
            raise UsageError("rack_share, repeat_share and slow_share are more than 1 together: no failure is of two")


def correlated(
    mtbf_s: float, duration_s: float, nodes: int, seed: int, mix: FailureMix = FailureMix()
) -> tuple[Fault, ...]:
    """As many faults as `poisson` has on average, but of racks, repeated nodes and slow nodes too.

    Args:
        mtbf_s: Mean time between faults of the whole job, in seconds.
        duration_s: Length of the run in seconds; no fault comes later.
        nodes: Number of nodes; faults strike 0 to `nodes` - 1.
        seed: Seed of the random numbers.
        mix: How they hang together.

    Raises:
        UsageError: Times are not above 0 and finite, or there are no nodes.
    """
    positive("mtbf_s", mtbf_s)
    positive("duration_s", duration_s)
    whole("nodes", nodes, 1)
    chance, faults, at_s = random.Random(seed), [], 0.0
    while True:
        # Each has on average repeat_share / (1 - repeat_share) repetitions.
        at_s += mtbf_s / (1 - mix.repeat_share) * chance.expovariate(1.0)
        if at_s >= duration_s:
            break
        # Kinds are those of first failures, their shares of all.
        node, kind = chance.randrange(nodes), (1 - mix.repeat_share) * chance.random()
        hit, slow_s = {node}, 0.0
        if kind < mix.rack_share:
            first = node // mix.rack_nodes * mix.rack_nodes
            hit = set(range(first, min(first + mix.rack_nodes, nodes)))
        elif kind < mix.rack_share + mix.slow_share:
            slow_s = mix.slow_s * chance.expovariate(1.0)
        faults.append(Fault(at_s, frozenset(hit), slow_s, mix.slowdown if slow_s else 0.0))
        again_s = at_s
        while chance.random() < mix.repeat_share:
            again_s += mix.repeat_s * chance.expovariate(1.0)
            faults.append(Fault(again_s, frozenset((node,))))
    return tuple(sorted((one for one in faults if one.at_s < duration_s), key=lambda fault: fault.at_s))


def load_trace(path: Path, nodes: int | None = None) -> tuple[Fault, ...]:
    """Faults from a CSV file with the columns `at_s` and `nodes` (numbers, with blanks between), in order of time.

    Raises UsageError, with the line, for a value that is no number and for nodes that the job has not, and for a file
    that cannot be read.

    Args:
        path: The CSV file, UTF-8.
        nodes: Number of nodes of the job; None: any node may be named.
    """
    try:
        with path.open(newline="", encoding="utf-8") as file:
            reader = csv.DictReader(file)
            missing = {"at_s", "nodes"} - set(reader.fieldnames or ())
            if missing:
                raise UsageError(
                    f"{path}: the first line must name the columns at_s and nodes; {min(missing)} is missing"
                )
            faults = [_fault(path, number, row, nodes) for number, row in enumerate(reader, start=2)]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise UsageError(f"{path}: cannot be read as a trace of faults: {error}") from error
    return tuple(sorted(faults, key=lambda fault: fault.at_s))


def _fault(path: Path, line: int, row: dict[str, str | None], nodes: int | None) -> Fault:
    try:
        named = frozenset(int(node) for node in (row["nodes"] or "").split())
        unknown = sorted(node for node in named if node < 0 or (nodes is not None and node >= nodes))
        if unknown:
            raise UsageError(f"the job has no node {unknown[0]}: its nodes are 0 to {(nodes or 1) - 1}")
        return Fault(float(row["at_s"] or ""), named)
    except (ValueError, UsageError) as error:
        raise UsageError(f"{path}, line {line}: {error}") from error
