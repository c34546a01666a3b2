"""What an answer to "what may be freed?" consists of. Values only."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

A_LINK = "it is a link: remove it by hand"
"""Why a link stays: what it leads to lies in another place, of which nothing was asked."""


NEVER_COMPLETED = "it was never completed or is damaged"
OUTLIVED = "enough newer ones are kept, and none of them lacks what it holds"


@dataclass(frozen=True)
class Item:
    """Something that takes space and is freed as a whole. reason: why it is freed, or why it stays.

    remove: frees it; None for what stays. Raises OSError, StoreFailure.
    """

    what: str
    nbytes: int
    reason: str
    remove: Callable[[], None] | None = field(default=None, repr=False, compare=False)

    def kept(self, reason: str) -> Item:
        """The same, which stays."""
        return replace(self, reason=reason, remove=None)


@dataclass(frozen=True)
class Surplus:
    """What is in a place, oldest first. restores: the newest state that can be loaded from it and stays, for people."""

    items: tuple[Item, ...]
    restores: str = ""
    notes: tuple[str, ...] = ()

    @property
    def freed(self) -> tuple[Item, ...]:
        """What may go."""
        return tuple(item for item in self.items if item.remove is not None)

    @property
    def kept(self) -> tuple[Item, ...]:
        """What stays."""
        return tuple(item for item in self.items if item.remove is None)


@dataclass(frozen=True)
class Limits:
    """What the user says of a place.

    keep_last: newest states to keep; None leaves it to the place. idle_s: where something was written less than this
    ago, a job may be running. ended: ids of jobs that will not be resumed. now_s: seconds since 1970.
    """

    keep_last: int | None
    idle_s: float
    ended: frozenset[str]
    now_s: float

    def too_fresh(self, written_s: float | None) -> str:
        """Why something that was written then must stay, as a whole sentence; empty if it need not."""
        age_s = None if written_s is None else self.now_s - written_s
        if age_s is None:
            return "it cannot be told when something was written here last: a job may be running"
        if age_s < self.idle_s:
            return f"something was written here {max(0.0, age_s):.0f} s ago: a job may be running"
        return ""
