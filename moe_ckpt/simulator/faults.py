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
    """Nodes that fail together, `at_s` seconds after the start. Raises UsageError for a negative time or no nodes."""

    at_s: float
    nodes: Nodes

    def __post_init__(self) -> None:
        not_negative("at_s", self.at_s)
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
    except (OSError, UnicodeDecodeError) as error:
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
