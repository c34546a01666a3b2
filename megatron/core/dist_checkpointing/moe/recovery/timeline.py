"""The timeline of one recovery, from the first rank that heard of the fault to the last one that trains again.

Each rank keeps `Timestamps`. What ranks leave in memory when a fault ends them, and what they note while they recover,
is gathered and merged; so a timeline spans processes and nodes. What is not known is left out, never guessed:

- A rank that was killed left nothing, and a node that was lost took its times along. The others' times say when it was.
- Where nobody left anything, as when all ranks were killed, the timeline begins with the restart.
- An attempt that failed during its recovery is a part of the same timeline: it counts from the first fault on.
- On a node times are told by `boot_clock`, which does not step. When the marks are gathered they become times of the
  node's wall clock as it is then, and these are compared, all ranks having just left the same collective. One that is
  off by more than a collective could explain is corrected by what it is off; the timeline says so.
"""

from __future__ import annotations

import enum
import json
import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from operator import or_
from pathlib import Path
from typing import Any

import msgspec

from ..boot_clock import boot_id, since_boot_s
from ..policy.lineage import number_of
from ..ports import Json, Transport
from ..replication.agreement import exchanged, merged, of_first
from ..storage.small_files import INFORMING_BYTES, put_aside, read_small
from ..types import RecoveryPlan, Topology
from .exactness import RecoveryTable

log = logging.getLogger(__name__)

FILE = "marks.json"
"""In the folder of the rank's slot, which a restarted process takes over."""

END_OF_TIME_S = 1e11
"""Some 3000 years after 1970."""
TRUSTED_S = 0.5
"""By how much clocks of nodes may seem to differ: a busy rank leaves a collective that late."""


class Milestone(enum.Enum):
    """The points of a recovery, in their order. Those before RESTARTED are passed by the attempt that failed."""

    DETECTED = "detected"
    """This rank heard of the fault: a collective raised, or SIGTERM came."""
    PARKED = "parked"
    """Its live state is sealed in memory, or it will not be; the process is about to end."""
    RESTARTED = "restarted"
    """The new process began."""
    IMPORTED = "imported"
    """Its imports are done and its flags are read; it is about to connect."""
    RENDEZVOUS = "rendezvous"
    """All ranks are connected again."""
    BUILT = "built"
    """Model, optimizer and memory are there."""
    INVENTORY = "inventory"
    """It is known what all ranks hold."""
    PLANNED = "planned"
    FETCHED = "fetched"
    """What this rank restores before training or replaying anything is in its live state."""
    REPLAYED = "replayed"
    """The replay of this rank is over; ranks that only wait do not have it."""
    REJOINED = "rejoined"
    """All ranks stand at the same iteration; the next thing is to train."""


class Timestamps:
    """Times of one process, by the clock of its node, which its next process shares.

    Only wall clocks can be compared over nodes, as far as they agree: see `RecoveryTimeline`.

    Args:
        clock_s: Of the node, never set.
        wall_s: Seconds since 1970.
        stayed: Whether this process trained before the fault, too.
    """

    def __init__(
        self,
        clock_s: Callable[[], float] = since_boot_s,
        wall_s: Callable[[], float] = time.time,
        *,
        stayed: bool = False,
    ) -> None:
        self._clock_s, self._wall_s, self.stayed = clock_s, wall_s, stayed
        self._times: dict[Milestone, float] = {}

    def mark(self, milestone: Milestone, at_s: float | None = None) -> None:
        """Note a point that is passed. Of a point that is passed again the last time counts, but a fault is detected
        once.

        Args:
            milestone: The point.
            at_s: When it was passed, by the clock of these times; None: now.
        """
        if milestone is not Milestone.DETECTED or milestone not in self._times:
            self._times[milestone] = self._clock_s() if at_s is None else at_s

    def wall_s(self) -> tuple[float, float]:
        """What the wall clock says, and by how much it is ahead of the node's."""
        now_s = self._wall_s()
        return now_s, now_s - self._clock_s()

    def times(self) -> dict[str, Json]:
        """The points by name, by the clock of the node; also what a parked copy carries as its scalar `times`."""
        return {milestone.value: at_s for milestone, at_s in self._times.items()}

    def leave(self, folder: Path, attempt: str) -> None:
        """Keep these times for the next process, with those of attempts that failed before.

        Never raises: what cannot be written is missing in the timeline.

        Args:
            folder: Of the rank's slot.
            attempt: A name that its ranks share and that sorts behind earlier ones.
        """
        records = [record for record in left_in(folder) if record["attempt"] != attempt]
        records.append({"attempt": attempt, "boot": boot_id(), "times": self.times()})
        aside = folder / f".{FILE}.{os.getpid()}"
        try:
            # No fsync: the file has to survive the process, not the node.
            aside.write_text(json.dumps(records))
            aside.replace(folder / FILE)
        except OSError as error:
            log.warning("cannot write the timeline of this failure to %s: %s", folder, error.strerror)


def left_in(folder: Path) -> list[dict[str, Any]]:
    """What `leave` kept there since the node was booted, oldest first; nothing where there is no such file.

    One that cannot be believed only costs the times in it: that is said once, and the file is put aside.
    """
    path = folder / FILE
    try:
        records = json.loads(read_small(path, INFORMING_BYTES))
        return [
            {"attempt": str(record["attempt"]), "boot": record["boot"], "times": _times(record["times"])}
            for record in records
            if record["boot"] == boot_id()
        ]
    except FileNotFoundError:
        return []
    except (OSError, ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError) as error:
        put_aside(path, "the times of the last fault", error)
        return []


def forget(folder: Path) -> None:
    """The recovery is over, or training continues from elsewhere: the next fault begins a timeline of its own."""
    try:
        (folder / FILE).unlink(missing_ok=True)
    except OSError as error:
        log.warning("cannot remove the timeline of the last failure in %s: %s", folder, error.strerror)


def _times(data: Mapping[str, Any]) -> dict[str, float]:
    """Raises ValueError for what is no time: all ranks gather these, and JSON has no infinite numbers; nor may
    differences of them be infinite."""
    names = {milestone.value for milestone in Milestone}
    times = {name: float(at_s) for name, at_s in data.items() if name in names}
    if wrong := [f"{name} {at_s}" for name, at_s in times.items() if not 0 <= at_s < END_OF_TIME_S]:
        raise ValueError(f"{wrong[0]} is no time")
    return times


PARTS = {
    Milestone.DETECTED: "detect",
    Milestone.PARKED: "park",
    Milestone.RESTARTED: "restart",
    Milestone.IMPORTED: "import",
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
    stayed: how many kept their processes.
    exactness: how the state compares with the one that was lost, as the recovery's table says it. table: that table,
    line by line. lost_tokens: by layer and expert, routed tokens whose updates are lost. plt, plt_pec, mlt: the share
    of tokens that all faults so far have cost (MoC eq. 7, PEC eq. 4, MOETION eq. 6); None where nothing can be lost.
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
    stayed: int = 0
    exactness: str = "exactly"
    table: Sequence[str] = field(default_factory=list)
    lost_tokens: Mapping[int, Mapping[int, int]] = field(default_factory=dict)
    plt: float | None = None
    plt_pec: float | None = None
    mlt: float | None = None

    @property
    def total_s(self) -> float:
        """Seconds from detection (or the restart, see `is_whole`) to rejoin."""
        return sum(self.parts.values())

    def with_outcome(self, table: RecoveryTable) -> RecoveryTimeline:
        """With what was restored from where, and what was lost."""
        lost: dict[int, dict[int, int]] = {}
        for operator, tokens in sorted(table.plan.lost_tokens.items()):
            lost.setdefault(operator.layer, {})[operator.expert] = tokens
        known = replace(self, exactness=table.came_out, table=list(table.lines()), lost_tokens=lost)
        if (losses := table.losses) is None:
            return known
        return replace(known, plt=float(losses.plt), plt_pec=float(losses.plt_pec), mlt=float(losses.mlt))

    def lines(self) -> Iterator[str]:
        """For the log: one line with all parts, and one for each thing that is unusual."""
        since = "detection" if self.is_whole else "the restart"
        did = f"{self.ranks_back} of {self.ranks} ranks replayed up to {self.replayed} iterations"
        where = f"; in place, {self.stayed} ranks kept their processes" if self.stayed else ""
        parts = ", ".join(f"{name} {length_s:.2f}" for name, length_s in self.parts.items())
        yield (
            f"recovery took {self.total_s:.2f} s from {since} to rejoin"
            f" ({self.scope}; {did if self.replayed else 'no replay'}{where}): {parts}"
        )
        if not self.is_whole:
            yield "recovery: no rank recorded when the failure was detected; the time before the restart is missing"
        if self.attempts > 1:
            yield f"recovery: {self.attempts} attempts; `aborted` is the time of those before the last"
        if self.clocks_s:
            yield f"recovery: node clocks differ by {self.clocks_s:.2f} s (corrected)"

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
    """The timeline of a recovery that all ranks have ended: a collective, the same on all.

    Args:
        transport: To all ranks.
        timestamps: What this process passed.
        earlier: What `left_in` found in the slot of this rank.
        plan: What was carried out.
        topology: Of the job.

    Raises:
        PeerLost: A rank did not answer.
    """
    transport.least([0])  # all leave it at about the same time, so that their clocks can be compared
    clock_s, times, attempts = _by_wall(timestamps, earlier)
    ahead_s = _ahead_s(transport, clock_s, topology)
    own = _Passed.of(transport.rank, times, attempts, ahead_s, stayed=timestamps.stayed)
    return _timeline(merged(transport, own, _Passed, or_), plan, topology)


def _by_wall(
    timestamps: Timestamps, earlier: Sequence[Mapping[str, Any]]
) -> tuple[float, dict[str, float], dict[str, dict[str, float]]]:
    """The wall clock as it is now, and by it what this process passed and what each attempt before did."""
    wall_s, ahead_s = timestamps.wall_s()

    def of_wall(times: Mapping[str, Any]) -> dict[str, float]:
        return {name: at_s + ahead_s for name, at_s in times.items()}

    return wall_s, of_wall(timestamps.times()), {one["attempt"]: of_wall(one["times"]) for one in earlier}


def _ahead_s(transport: Transport, clock_s: float, topology: Topology) -> float:
    """By how much the clock of this node is ahead of that of rank 0: 0 where a busy machine could explain it."""
    if len(topology.ranks_by_node) == 1:
        return 0.0
    # The earliest reading of a node's ranks is the one with the least delay.
    here = topology.ranks_by_node[topology.node(transport.rank)]
    earliest_s = min(at_s for _, at_s in exchanged(transport, dict.fromkeys(here, clock_s), float))
    ahead_s = earliest_s - of_first(transport, earliest_s, float)
    return ahead_s if abs(ahead_s) > TRUSTED_S else 0.0


_Span = tuple[tuple[float, int], tuple[float, int]]
"""When the first and the last of some ranks passed a mark, and which ranks these are."""


class _Passed(msgspec.Struct, array_like=True):
    """What a run of ranks passed, by mark: in these processes, and in each attempt before.

    attempts: also how many ranks left times of it. ahead_s: of their clocks, least and most.
    """

    here: dict[str, _Span]
    attempts: dict[str, tuple[int, dict[str, _Span]]]
    stayed: int
    ahead_s: tuple[float, float]

    @classmethod
    def of(
        cls,
        rank: int,
        times: Mapping[str, float],
        attempts: Mapping[str, Mapping[str, float]],
        ahead_s: float,
        *,
        stayed: bool,
    ) -> _Passed:
        """Of one rank."""

        def spans(times: Mapping[str, float]) -> dict[str, _Span]:
            return {name: ((at_s - ahead_s, rank), (at_s - ahead_s, rank)) for name, at_s in times.items()}

        failed = {name: (1, spans(left)) for name, left in attempts.items()}
        return cls(spans(times), failed, int(stayed), (ahead_s, ahead_s))

    def __or__(self, others: _Passed) -> _Passed:
        attempts = dict(self.attempts)
        for name, (count, spans) in others.attempts.items():
            known, earlier = attempts.get(name, (0, {}))
            attempts[name] = known + count, _together(earlier, spans)
        least, most = zip(self.ahead_s, others.ahead_s, strict=True)
        here, stayed = _together(self.here, others.here), self.stayed + others.stayed
        return _Passed(here, attempts, stayed, (min(least), max(most)))


def _together(first: Mapping[str, _Span], second: Mapping[str, _Span]) -> dict[str, _Span]:
    """The spans of both."""
    both = {name: (first[name], second[name]) for name in first.keys() & second.keys()}
    return {**first, **second} | {
        name: (min(one[0], other[0]), max(one[1], other[1])) for name, (one, other) in both.items()
    }


def _timeline(passed: _Passed, plan: RecoveryPlan, topology: Topology) -> RecoveryTimeline:
    """The timeline of all ranks."""
    failed = [passed.attempts[name] for name in sorted(passed.attempts, key=lambda name: (number_of(name), name))]
    spans = [spans for _, spans in failed]
    parts, slowest, begun_s = _parts(spans, passed.here)
    replayed = [segment for segment in plan.segments if segment.replayed]
    return RecoveryTimeline(
        begun_s,
        any(Milestone.DETECTED.value in attempt for attempt in spans),
        parts,
        slowest,
        attempts=max(1, len(failed)),
        told_by=failed[-1][0] if failed else 0,
        clocks_s=passed.ahead_s[1] - passed.ahead_s[0],
        scope=plan.scope.value,
        target=plan.target,
        replayed=max((len(segment.replayed) for segment in replayed), default=0),
        ranks_back=sum(len(segment.stages) for segment in replayed) * topology.ranks_per_stage,
        ranks=topology.world_size,
        stayed=passed.stayed,
    )


def _parts(
    failed: Sequence[Mapping[str, _Span]], here: Mapping[str, _Span]
) -> tuple[dict[str, float], dict[str, int], float]:
    """Length of each part, the rank that ended it, and when the first one began."""
    parts: dict[str, float] = {}
    slowest: dict[str, int] = {}
    last = failed[-1] if failed else {}
    begun = [spans[Milestone.DETECTED.value][0][0] for spans in failed if Milestone.DETECTED.value in spans]
    starts = begun or [here[mark.value][0][0] for mark in Milestone if mark.value in here] or [0.0]
    begun_s = at_s = starts[0]
    if len(begun) > 1:
        parts["aborted"] = max(0.0, begun[-1] - at_s)
        at_s += parts["aborted"]
    for mark, name in PARTS.items():
        span = (here if mark in AFTER else last).get(mark.value)
        if span is not None:
            end_s, slowest[name] = span[1]
            parts[name] = max(0.0, end_s - at_s)
            at_s = max(at_s, end_s)
    return parts, slowest, begun_s
