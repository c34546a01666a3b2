"""Which stored states belong together: a job that goes back leaves a future behind, and must not meet it again.

Two snapshots of one iteration can differ although both are intact: one was made before a recovery went back past it,
the other after, with lost tokens or on hardware that does not repeat itself to the bit. A node that was away may bring
the first one back. So each snapshot carries its timeline: the attempts of the job that led to it.
"""

from __future__ import annotations

from collections.abc import Iterable

from ..errors import UsageError

type Lineage = tuple[tuple[str, int], ...]
"""Attempts, oldest first: a name, which sorts by the time of its start, and the iteration after which it went on."""

MAX_ATTEMPTS = 64


def continued(timeline: Lineage, attempt: str, after: int) -> Lineage:
    """The timeline of an attempt that goes on from a state of `timeline` as it was after iteration `after`.

    The oldest attempts are forgotten beyond MAX_ATTEMPTS, and their snapshots with them. Raises UsageError when the
    timeline only begins later.
    """
    if timeline and timeline[-1][1] > after:
        raise UsageError(
            f"an attempt cannot go on after iteration {after}: its timeline begins after {timeline[-1][1]}"
        )
    return (*timeline, (attempt, after))[-MAX_ATTEMPTS:]


def past(timeline: Lineage, iteration: int) -> Lineage:
    """The part of a timeline that led to the state after `iteration`."""
    return tuple((name, after) for name, after in timeline if after < iteration)


def attempt_of(timeline: Lineage, iteration: int) -> str | None:
    """The attempt in which `iteration` was trained; None if it is not known any more."""
    return next((name for name, after in reversed(timeline) if after < iteration), None)


def belongs(snapshot: Lineage, iteration: int, timeline: Lineage) -> bool:
    """Whether a snapshot of `iteration`, made in its last attempt, lies in the past of `timeline`."""
    return bool(snapshot) and attempt_of(timeline, iteration) == snapshot[-1][0]


def newest_first(timelines: Iterable[Lineage]) -> list[Lineage]:
    """Different timelines by the start of their last attempt; those without an attempt are left out."""
    return sorted(
        {timeline for timeline in timelines if timeline},
        key=lambda timeline: (timeline[-1], len(timeline)),
        reverse=True,
    )
