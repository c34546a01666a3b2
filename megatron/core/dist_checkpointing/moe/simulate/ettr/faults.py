"""When nodes fail: by chance, or as a trace says."""

from __future__ import annotations

import csv
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from ...errors import UsageError
from ...policy.checks import not_negative, positive, whole
from .behaviour import Nodes

SIX_HOURS = Path(__file__).parent / "traces" / "six_hours.csv"
"""A stand-in for the 6-hour trace with 24 faults of MoEvement Fig. 10, whose times are not published.

Made by `poisson` with a seed, as the first trace with 24 faults of single nodes among 12: a mean of 15 minutes between
faults, as 24 in 6 hours are, where the paper says about 19.
"""


@dataclass(frozen=True)
class Fault:
    """Nodes that fail together, `at_s` seconds after the start. Raises UsageError for a negative time or no nodes."""

    at_s: float
    nodes: Nodes

    def __post_init__(self) -> None:
        not_negative("at_s", self.at_s)
        if not self.nodes:
            raise UsageError(f"the fault at {self.at_s} s takes no nodes: name at least 1")


@dataclass(frozen=True)
class Bursts:
    """Faults of several nodes at once: `share` of all faults take `nodes` adjacent ones, as a rack or a switch does."""

    share: float
    nodes: int

    def __post_init__(self) -> None:
        whole("nodes of a burst", self.nodes, 1)
        if not 0 <= self.share <= 1:
            raise UsageError(f"share of bursts is {self.share}, but must be from 0 to 1")


SINGLE = Bursts(0.0, 1)
"""Every fault takes one node."""


def poisson(mtbf_s: float, duration_s: float, nodes: int, seed: int, bursts: Bursts = SINGLE) -> tuple[Fault, ...]:
    """Faults of a Poisson process with this mean time between them, on nodes 0..`nodes` - 1, all as likely.

    The same seed gives the same faults, and at another `mtbf_s` the same ones closer together or further apart.
    Raises UsageError for times that are not above 0 and finite, no nodes, or bursts of more nodes than there are.
    """
    positive("mtbf_s", mtbf_s)
    positive("duration_s", duration_s)
    whole("nodes", nodes, bursts.nodes)
    chance = random.Random(seed)
    faults: list[Fault] = []
    at_s = 0.0
    while True:
        at_s += mtbf_s * chance.expovariate(1.0)
        first, is_burst = chance.randrange(nodes), chance.random() < bursts.share
        if at_s >= duration_s:
            return tuple(faults)
        struck = bursts.nodes if is_burst else 1
        faults.append(Fault(at_s, frozenset((first + step) % nodes for step in range(struck))))


def sweep(mtbfs_s: Iterable[float], duration_s: float, nodes: int, seed: int) -> dict[float, tuple[Fault, ...]]:
    """Poisson faults for each mean time between failures, of the same seed: what differs is only how often they come.

    Raises UsageError as `poisson` does.
    """
    return {mtbf_s: poisson(mtbf_s, duration_s, nodes, seed) for mtbf_s in mtbfs_s}


def load_trace(path: Path = SIX_HOURS) -> tuple[Fault, ...]:
    """Faults from a CSV file with the columns `at_s` and `nodes` (numbers, with blanks between), in order of time.

    Raises UsageError, with the line, for what is no number, and for a file that cannot be read.
    """
    try:
        with path.open(newline="", encoding="utf-8") as file:
            reader = csv.DictReader(file)
            missing = {"at_s", "nodes"} - set(reader.fieldnames or ())
            if missing:
                raise UsageError(
                    f"{path}: the first line must name the columns at_s and nodes; {min(missing)} is missing"
                )
            faults = [_fault(path, number, row) for number, row in enumerate(reader, start=2)]
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path}: cannot be read as a trace of faults: {error}") from error
    return tuple(sorted(faults, key=lambda fault: fault.at_s))


def save_trace(path: Path, faults: Sequence[Fault]) -> None:
    """Write what `load_trace` reads, times to the millisecond."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(("at_s", "nodes"))
        writer.writerows((f"{fault.at_s:.3f}", " ".join(map(str, sorted(fault.nodes)))) for fault in faults)


def _fault(path: Path, line: int, row: dict[str, str | None]) -> Fault:
    try:
        return Fault(float(row["at_s"] or ""), frozenset(int(node) for node in (row["nodes"] or "").split()))
    except (ValueError, UsageError) as error:
        raise UsageError(f"{path}, line {line}: {error}") from error
