"""Which stored states belong together: a job that goes back leaves a future behind, and must not meet it again.

Two snapshots of one iteration can differ although both are intact: one was made before a recovery went back past it,
the other after, with lost tokens or on hardware that does not repeat itself to the bit. A node that was away may bring
the first one back. So each snapshot carries its timeline: the attempts of the job that led to it.

Which of two timelines is newer follows from what led to what, never from a clock: one that continues another is newer,
and an attempt has a number larger than any that it found when it began. Clocks of nodes step, and differ by days.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby

from ..errors import UsageError
from ..types import STANDBY, OperatorId, Piece
from ..types.layout import Facts, Json

type Lineage = tuple[tuple[str, int], ...]
"""Attempts, oldest first: a name, as `attempt_name` gives it, and the iteration after which it continued."""

MAX_ATTEMPTS = 4096
"""Of one timeline: each manifest has it, and what says more is damaged."""

RECENT_ATTEMPTS = 64
"""The newest ones of a timeline, which stay whether anything of them is left or not."""

FORGOTTEN = ""
"""In place of the names of attempts of which nothing is left. What others trained in their iterations is no part of
their timeline, so they leave a gap there."""

MOST_ATTEMPTS = 1 << 62
"""Far above the times of earlier versions, and the next ones still are integers of 64 bits."""


def attempt_name(number: int, token: str) -> str:
    """The name of an attempt.

    Args:
        number: Larger than that of any attempt of which it found something.
        token: What tells it apart from an attempt that did not see it and has the same number.
    """
    return f"{number:020d}-{token}"


def number_of(attempt: str) -> int:
    """The number in a name; 0 for a name that has none, or none that counting leads to.

    In names of earlier versions it is the time of the start in nanoseconds: what follows counts on from there.
    """
    found = re.match(r"[0-9]{1,20}(?=-|$)", attempt)
    number = int(found[0]) if found else 0
    return number if number < MOST_ATTEMPTS else 0


def largest_number(timelines: Iterable[Lineage]) -> int:
    """Of the attempts of these timelines; 0 where there are none."""
    return max((number_of(name) for timeline in timelines for name, _ in timeline), default=0)


def continued(timeline: Lineage, attempt: str, after: int) -> Lineage:
    """The timeline of an attempt that continues from a state of `timeline` as it was after iteration `after`.

    The oldest attempts are lost beyond MAX_ATTEMPTS, and their snapshots with them.

    Args:
        timeline: The timeline that is continued.
        attempt: The name of the new attempt.
        after: The last iteration of `timeline` that the attempt builds on.

    Raises:
        UsageError: The timeline only begins later.
    """
    if timeline and timeline[-1][1] > after:
        raise UsageError(
            f"an attempt cannot continue after iteration {after}: its timeline begins after {timeline[-1][1]}"
        )
    return (*timeline, (attempt, after))[-MAX_ATTEMPTS:]


def shortened(timeline: Lineage, left: Collection[str | None]) -> Lineage:
    """A timeline in which those attempts are forgotten that are not among the newest, and of which nothing is left.

    A copy that is made once, or seldom, may be of any of them: what never changes, and single experts in storage.

    Args:
        timeline: Attempts in their order, each with the iteration after which it began.
        left: The attempts of which anything is left.
    """
    older = ((name if name in left else FORGOTTEN, after) for name, after in timeline[:-RECENT_ATTEMPTS])
    return (*(next(same) for _, same in groupby(older, lambda one: one[0])), *timeline[-RECENT_ATTEMPTS:])


def past(timeline: Lineage, iteration: int) -> Lineage:
    """The part of a timeline that led to the state after `iteration`.

    Args:
        timeline: Attempts in their order, each with the iteration after which it began.
        iteration: The iteration that the state is of.
    """
    return tuple((name, after) for name, after in timeline if after < iteration)


def attempt_of(timeline: Lineage, iteration: int) -> str | None:
    """The attempt in which `iteration` was trained; None if it is not known any more.

    Args:
        timeline: Attempts in their order, each with the iteration after which it began.
        iteration: The iteration that was trained.
    """
    return next((name for name, after in reversed(timeline) if after < iteration), None)


def belongs(snapshot: Lineage, iteration: int, timeline: Lineage) -> bool:
    """Whether a snapshot of `iteration`, made in its last attempt, lies in the past of `timeline`.

    Args:
        snapshot: The timeline that the snapshot was made in.
        iteration: The iteration of the snapshot.
        timeline: The timeline to look in.
    """
    return bool(snapshot) and attempt_of(timeline, iteration) == snapshot[-1][0]


def newest_first(states: Iterable[tuple[Lineage, int]]) -> list[Lineage]:
    """The timelines of what is stored, each once; those without an attempt are left out.

    One that continues another is newer. Where two part, that is newer which has the largest number from there on; if
    neither saw the other, that which came farther.

    Args:
        states: Of each snapshot its timeline and its iteration.
    """
    farthest: dict[Lineage, int] = {}
    for timeline, iteration in states:
        if timeline:
            farthest[timeline] = max(farthest.get(timeline, iteration), iteration)
    numbers: dict[tuple[int, tuple[str, int]], int] = {}

    def ways(timeline: Lineage) -> list[int]:
        # Numbers of its beginnings, each an attempt longer: to hash thousands of attempts for each takes seconds.
        return [*accumulate(timeline, lambda way, one: numbers.setdefault((way, one), len(numbers)), initial=-1)][1:]

    best: dict[int, tuple[int, int]] = {}
    for timeline, iteration in farthest.items():
        largest = 0
        for way, (name, _) in zip(reversed(ways(timeline)), reversed(timeline), strict=True):
            largest = max(largest, number_of(name))
            best[way] = max(best.get(way, (0, iteration)), (largest, iteration))

    def age(timeline: Lineage) -> list[tuple[tuple[int, int], tuple[str, int]]]:
        # Compared from the oldest attempt on; of two that are equal as far as they go, the longer list is larger.
        return [(best[way], attempt) for way, attempt in zip(ways(timeline), timeline, strict=True)]

    return sorted(farthest, key=age, reverse=True)


# What the manifests of a rank say in each iteration.


@dataclass(frozen=True)
class Identity:
    """The job, its parallel layout, which operators are the rank's, and the attempts of the job so far."""

    job: str
    topology: Mapping[str, Json]
    operators: frozenset[OperatorId]
    strategy: str = ""
    timeline: Lineage = ()

    def pieces(self, pieces: Sequence[Piece]) -> list[tuple[int, Piece]]:
        """Those that lie on this rank, with their places: the first one, and all of which it owns a part."""
        return [
            (at, piece) for at, piece in enumerate(pieces) if at == 0 or not self.operators.isdisjoint(piece.plan.parts)
        ]

    def facts(self, piece: Piece, scalars: Mapping[str, Json]) -> Facts:
        """The facts of one piece, with the parts that it holds of this rank's operators; the first one names others.

        Args:
            piece: Of a snapshot.
            scalars: What else its manifest says: for the first piece the trainer's state and the journal.
        """
        parts = piece.plan.parts
        held: list[Json] = [
            [operator.layer, operator.kind.value, operator.expert, parts[operator].value]
            for operator in sorted(self.operators)
            if operator in parts
        ]
        # What is parked may be of the very iteration that this attempt continued from.
        timeline: list[Json] = [[attempt, after] for attempt, after in past(self.timeline, piece.plan.iteration)]
        window: list[Json] = [piece.span[0], piece.span[-1]]
        own: dict[str, Json] = {
            "operators": held,
            "timeline": timeline,
            "made_by": self.strategy,
            "window": window,
        }
        if scalars and piece.kind not in STANDBY and (left_out := sorted(self.operators - parts.keys())):
            # Else whoever looks at storage knows only what a rank has there, and misses nothing that vanished.
            own["left_out"] = [[one.layer, one.kind.value, one.expert] for one in left_out]
        return Facts(self.job, piece.plan.digest(), self.topology, {**scalars, **own})
