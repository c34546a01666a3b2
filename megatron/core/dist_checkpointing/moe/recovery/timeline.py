"""The timeline of one recovery, from the first rank that heard of the fault to the last one that trains again.

Each rank keeps `Timestamps`. What ranks leave in memory when a fault ends them, and what they note while they recover,
is gathered and merged; so a timeline spans processes and nodes. What is not known is left out, never guessed:

- A rank that was killed left nothing, and a node that was lost took its times along. The others' times say when it was.
- Where nobody left anything, as when all ranks were killed, the timeline begins with the restart.
- An attempt that failed during its recovery is a part of the same timeline: it counts from the first fault on.
- Clocks of nodes are compared when the marks are gathered, all ranks having just left the same collective. One that
  is off by more than a collective could explain is corrected by what it is off; the timeline says so.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, cast

from ..ports import Json, Transport
from ..types import RecoveryPlan, Topology
from .timestamps import Milestone, Timestamps

TRUSTED_S = 0.5
"""By how much clocks of nodes may seem to differ: a busy rank leaves a collective that late."""

PARTS = {
    Milestone.DETECTED: "detect",
    Milestone.PARKED: "park",
    Milestone.RESTARTED: "restart",
    Milestone.RENDEZVOUS: "rendezvous",
    Milestone.BUILT: "build",
    Milestone.INVENTORY: "inventory",
    Milestone.PLANNED: "plan",
    Milestone.FETCHED: "fetch",
    Milestone.REPLAYED: "replay",
    Milestone.REJOINED: "rejoin",
}
"""The part that lasts until the slowest rank has passed the mark; the first one begins when the fastest has."""

AFTER = frozenset(PARTS) - {Milestone.DETECTED, Milestone.PARKED}
"""Points that the processes after the restart pass."""


@dataclass(frozen=True)
class RecoveryTimeline:
    """One recovery. parts: seconds by name, in the order of events; their sum is `total_s`.

    begun_s: when it began, in seconds since 1970. is_whole: whether that is when the fault was detected; else nobody
    left a mark, and it is the restart. slowest: for each part the rank that ended it. attempts: how many it took.
    told_by: how many ranks left times before the restart. clocks_s: how far the clocks of nodes were apart, 0 if
    no more than can be measured. replayed: iterations of the longest replay. ranks_back: those that replay, of `ranks`.
    """

    begun_s: float
    is_whole: bool
    parts: Mapping[str, float]
    slowest: Mapping[str, int] = field(default_factory=dict)
    attempts: int = 1
    told_by: int = 0
    clocks_s: float = 0.0
    scope: str = "none"
    target: int = 0
    replayed: int = 0
    ranks_back: int = 0
    ranks: int = 1

    @property
    def total_s(self) -> float:
        """Seconds from detection (or the restart, see `is_whole`) to rejoin."""
        return sum(self.parts.values())

    def lines(self) -> Iterator[str]:
        """For the log: one line with all parts, and one for each thing that is unusual."""
        since = "detection" if self.is_whole else "the restart"
        did = f"{self.ranks_back} of {self.ranks} ranks replayed up to {self.replayed} iterations"
        parts = ", ".join(f"{name} {length_s:.2f}" for name, length_s in self.parts.items())
        yield (
            f"timeline: {self.total_s:.2f} s from {since} to rejoin"
            f" ({self.scope}; {did if self.replayed else 'no replay'}): {parts}"
        )
        if not self.is_whole:
            yield "timeline: no rank left word of when the fault was detected; what came before the restart is missing"
        if self.attempts > 1:
            yield f"timeline: it took {self.attempts} attempts; those before the last one are the part `aborted`"
        if self.clocks_s:
            yield f"timeline: clocks of nodes differ by {self.clocks_s:.2f} s, which was taken into account"

    def to_data(self) -> dict[str, Any]:
        """As JSON values, with `total_s` for readers."""
        return asdict(self) | {"total_s": self.total_s}


def gather_timeline(
    transport: Transport,
    timestamps: Timestamps,
    earlier: Sequence[Mapping[str, Any]],
    plan: RecoveryPlan,
    topology: Topology,
) -> RecoveryTimeline:
    """The timeline of a recovery that all ranks have ended: a collective, the same on all. Raises PeerLost.

    earlier: what `left_in` found in the slot of this rank.
    """
    transport.least([0])  # all leave it at about the same time, so that their clocks can be compared
    rows = transport.gather(rank_timestamps(timestamps, earlier))
    return merged(cast("list[Mapping[str, Any]]", rows), plan, topology)


def rank_timestamps(timestamps: Timestamps, earlier: Sequence[Mapping[str, Any]]) -> dict[str, Json]:
    """What one rank gives for the timeline, as JSON values."""
    return {
        "clock_s": timestamps.now_s(),
        "times": timestamps.times(),
        "earlier": [dict(attempt) for attempt in earlier],
    }


def merged(rows: Sequence[Mapping[str, Any]], plan: RecoveryPlan, topology: Topology) -> RecoveryTimeline:
    """The timeline from the `rank_timestamps` of all ranks."""
    offsets = _offsets(rows, topology)
    here = [_shifted(row["times"], offset) for row, offset in zip(rows, offsets, strict=True)]
    attempts: dict[str, dict[int, dict[Milestone, float]]] = {}
    for rank, (row, offset) in enumerate(zip(rows, offsets, strict=True)):
        for attempt in row["earlier"]:
            attempts.setdefault(attempt["attempt"], {})[rank] = _shifted(attempt["times"], offset)
    failed = [attempts[name] for name in sorted(attempts)]
    parts, slowest, begun_s = _parts(failed, here)
    replayed = [segment for segment in plan.segments if segment.replayed]
    return RecoveryTimeline(
        begun_s,
        any(Milestone.DETECTED in times for attempt in failed for times in attempt.values()),
        parts,
        slowest,
        attempts=max(1, len(failed)),
        told_by=len(failed[-1]) if failed else 0,
        clocks_s=max(offsets) - min(offsets),
        scope=plan.scope.value,
        target=plan.target,
        replayed=max((len(segment.replayed) for segment in replayed), default=0),
        ranks_back=sum(len(segment.stages) for segment in replayed) * topology.ranks_per_stage,
        ranks=topology.world_size,
    )


def _parts(
    failed: Sequence[Mapping[int, Mapping[Milestone, float]]], here: Sequence[Mapping[Milestone, float]]
) -> tuple[dict[str, float], dict[str, int], float]:
    """Length of each part, the rank that ended it, and when the first one began."""
    parts: dict[str, float] = {}
    slowest: dict[str, int] = {}
    last, now = dict(failed[-1]) if failed else {}, dict(enumerate(here))
    begun = [min(times) for attempt in failed if (times := _passed(Milestone.DETECTED, attempt))]
    starts = begun or [min(times) for mark in Milestone if (times := _passed(mark, now))] or [(0.0, 0)]
    begun_s = at_s = starts[0][0]
    if len(begun) > 1:
        parts["aborted"] = max(0.0, begun[-1][0] - at_s)
        at_s += parts["aborted"]
    for mark, name in PARTS.items():
        passed = _passed(mark, now if mark in AFTER else last)
        if passed:
            end_s, slowest[name] = max(passed)
            parts[name] = max(0.0, end_s - at_s)
            at_s = max(at_s, end_s)
    return parts, slowest, begun_s


def _passed(mark: Milestone, by_rank: Mapping[int, Mapping[Milestone, float]]) -> list[tuple[float, int]]:
    """When each rank passed the mark, of those that did."""
    return [(times[mark], rank) for rank, times in by_rank.items() if mark in times]


def _offsets(rows: Sequence[Mapping[str, Any]], topology: Topology) -> list[float]:
    """By how much each rank's clock is ahead of rank 0's, where it is more than a busy machine could explain.

    The earliest reading of a node's ranks is the one with the least delay.
    """
    nodes = [topology.node(rank) for rank in range(len(rows))]
    first: dict[int, float] = {}
    for node, row in zip(nodes, rows, strict=True):
        first[node] = min(first.get(node, float("inf")), row["clock_s"])
    ahead = [first[node] - first[nodes[0]] for node in nodes]
    return [seconds if abs(seconds) > TRUSTED_S else 0.0 for seconds in ahead]


def _shifted(times: Mapping[str, float], offset_s: float) -> dict[Milestone, float]:
    return {Milestone(name): at_s - offset_s for name, at_s in times.items()}
