"""What can be asked of a place that holds checkpoints, and the answers. Values only.

There are three kinds of places, and single pieces of two of them, each in a file of its own:

    memory   MemoryLocation                        a --moe-ckpt-memory-dir, or a folder in it
    storage  StorageLocation, SnapshotLocation     a --moe-ckpt-persist-dir (folder or URL), one snapshot of it
    saves    SavesLocation, IterationLocation      a --save folder, one iteration of it

`places.locate` says which one a path or URL is. All of them answer the same questions, so commands ask no further.
"""

from __future__ import annotations

import math
import shutil
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from datetime import datetime
from enum import Enum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from megatron.core.dist_checkpointing.moe.errors import UsageError
from megatron.core.dist_checkpointing.moe.storage.lease import refuse_writer, writer_of
from moe_ckpt.dense.integrity import Advance, Damage, unwatched

from .files import disk_bytes, length_bytes

if TYPE_CHECKING:
    from moe_ckpt.checkpoints.values import StateView
    from moe_ckpt.report import Report

A_LINK = "it is a link: remove it by hand"
"""Why a link stays: what it leads to lies in another place, of which nothing was asked."""


class LocationKind(Enum):
    """Kinds of places that can be looked into; the values say what they are."""

    ITERATION = "iteration of a torch_dist checkpoint"
    SAVES = "checkpoints of a --save directory"
    STORAGE = "snapshots in a --moe-ckpt-persist-dir"
    SNAPSHOT = "one snapshot of a --moe-ckpt-persist-dir"
    MEMORY = "memory tier of a --moe-ckpt-memory-dir"


class CheckpointLocation(ABC):
    """A place that holds checkpoints. `place` is a folder, of storage also a URL, as it was given.

    Nothing is read before a method asks for it, and only what `gc_plan` returns changes anything.
    """

    kind: ClassVar[LocationKind]

    def __init__(self, place: str) -> None:
        self.place = place

    @property
    def path(self) -> Path:
        """The place as a folder; for places that are no URLs."""
        return Path(self.place)

    def size_bytes(self) -> int:
        """About how many bytes `verify` reads, from the lengths of files."""
        return length_bytes(self.path)

    @abstractmethod
    def inspect(self, now_s: float) -> Inspection:
        """What is there, from names, indices and manifests alone. Raises UnreadableCheckpoint, StoreFailure."""

    @abstractmethod
    def inspect_tensors(self, pattern: str) -> Report:
        """Statistics of the tensors whose names match a glob, each read whole.

        Raises UnreadableCheckpoint for bytes that are not what was saved, UsageError where no tensor matches.
        """

    @abstractmethod
    def verify(self, advance: Advance = unwatched) -> Verified:
        """Read everything and say what is damaged, missing or cannot be checked; nothing is changed.

        Raises NewerFormat; UnreadableCheckpoint, StoreFailure where the place as a whole cannot be read.
        """

    def gc_plan(self, limits: GcLimits, advance: Advance = unwatched) -> GcPlan:
        """What may be freed, why the rest stays, and how to free it. What stays for its content was read first.

        Raises UsageError for a piece of something that is freed as a whole; OSError, StoreFailure, UnreadableCheckpoint
        where the place cannot be read.

        Args:
            limits: What to keep, and how long ago the last write must be.
            advance: Called with the number of bytes that were read since its last call.
        """
        raise UsageError(f"{self.place} is one {self.kind.value}: give the folder it lies in")

    def signable(self) -> tuple[Path, ...]:
        """The iterations here that `sign` can sign. Raises UsageError for a place without any."""
        raise UsageError(
            f"{self.place} is {self.kind.value}: snapshots are signed by the job that makes them, or not at all"
        )

    def state_view(self) -> StateView:
        """The one state at this place, as named values that `diff` compares. Raises UnreadableCheckpoint, StoreFailure.

        Raises UsageError for a place that holds no single state.
        """
        raise UsageError(
            f"{self.place} is the {self.kind.value}, which holds no single state: give a checkpoint, or a"
            " --moe-ckpt-persist-dir"
        )


@dataclass(frozen=True)
class Inspection:
    """What is at a place. problem: a sentence on what is wrong with it; empty if nothing is."""

    report: Report
    problem: str = ""


@dataclass(frozen=True, slots=True)
class Finding:
    """Something that is not as it should be.

    path: of the file or folder. found: what is there, or a whole sentence. item: the record or tensor, if it is one.
    expected: what should be there, if that can be said.
    """

    path: str
    found: str
    item: str = ""
    expected: str = ""

    @classmethod
    def of(cls, damage: Damage) -> Finding:
        """A file that does not match the integrity file."""
        return cls(str(damage.path), damage.found, expected=damage.expected)

    def __str__(self) -> str:
        where = "" if self.path in self.found else f"{self.path}: "
        item = f"{self.item}: " if self.item and self.item not in self.found else ""
        return f"{where}{item}{self.found}{f'; expected {self.expected}' if self.expected else ''}"


@dataclass(frozen=True, slots=True)
class Checked:
    """A part of a place that was looked at: `items` files, tensors or records of `nbytes` bytes together, and how."""

    part: str
    how: str
    items: int
    nbytes: int


@dataclass(frozen=True)
class Verified:
    """What a place was found to be.

    unchecked: what could not be looked at, or does not count as damage, as sentences. restores: the newest state that
    can be loaded from it, empty if there is none; None where that was not asked.
    """

    findings: tuple[Finding, ...]
    checked: tuple[Checked, ...] = field(repr=False)
    unchecked: tuple[str, ...] = ()
    restores: str | None = None

    @classmethod
    def of_parts(
        cls, parts: Iterable[Verified], findings: Iterable[Finding], notes: Iterable[str], restores: str | None
    ) -> Verified:
        """The results of several parts as one, followed by findings and notes on the whole.

        Args:
            parts: The results of the parts, in order.
            findings: Damage that shows only in the parts together.
            notes: Sentences on the whole: checks that were not possible, and facts that do not count as damage.
            restores: Name of the newest state that can be restored; empty: none; None: it was not looked for.
        """
        parts = tuple(parts)
        return cls(
            (*(finding for part in parts for finding in part.findings), *findings),
            tuple(checked for part in parts for checked in part.checked),
            (*(note for part in parts for note in part.unchecked), *notes),
            restores,
        )


NEVER_COMPLETED = "it was never completed or is damaged"
OUTLIVED = "enough newer ones are kept, and none of them lacks what it holds"


@dataclass(frozen=True)
class GcItem:
    """Something that takes space and is freed as a whole. reason: why it is freed, or why it stays.

    remove: frees it; None for what stays. Raises OSError, StoreFailure.
    """

    what: str
    nbytes: int
    reason: str
    remove: Callable[[], None] | None = field(default=None, repr=False, compare=False)

    def kept(self, reason: str) -> GcItem:
        """The same, which stays."""
        return replace(self, reason=reason, remove=None)

    @classmethod
    def left_over(cls, folder: Path, reason: str) -> GcItem:
        """A folder that nothing reads, which goes unless it is a link. Raises OSError.

        Args:
            folder: The folder.
            reason: Why nothing reads it, for the user.
        """
        item = cls(folder.name, disk_bytes(folder), reason, partial(shutil.rmtree, folder))
        return item.kept(A_LINK) if folder.is_symlink() else item


@dataclass(frozen=True)
class GcPlan:
    """What is in a place, oldest first. restores: the newest state that can be loaded from it and stays, for people."""

    items: tuple[GcItem, ...]
    restores: str = ""
    notes: tuple[str, ...] = ()

    @property
    def freed(self) -> tuple[GcItem, ...]:
        """What may go."""
        return tuple(item for item in self.items if item.remove is not None)


AHEAD_S = 5.0
"""By how much clocks that are kept by NTP, or by a file server, may differ."""


def age_of(written_s: float | None, now_s: float) -> float | None:
    """Seconds since something was written; None where that is not known.

    Args:
        written_s: Time of the write, in seconds since 1970; None, NaN, or a time that is still to come: not known.
        now_s: Current time, in seconds since 1970.
    """
    if written_s is None or math.isnan(written_s) or written_s > now_s + AHEAD_S:
        return None
    return max(0.0, now_s - written_s)


@dataclass(frozen=True)
class GcLimits:
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
        if written_s is None:
            return "it cannot be told when something was written here last: a job may be running"
        age_s = age_of(written_s, self.now_s)
        if age_s is None:
            when = datetime.fromtimestamp(written_s).astimezone().isoformat(" ", "seconds")
            return (
                f"something here is dated {when}, which is still to come: a clock is off, and a job may be running"
                " (touch it if none is)"
            )
        if age_s < self.idle_s:
            return f"something was written here {age_s:.0f} s ago: a job may be running"
        return ""

    def applied(self, items: list[GcItem], written_s: float | None, place: str) -> tuple[GcItem, ...]:
        """The items, all of which are kept while a job has a lease, or where the last write was too short a time ago.

        Whether a job has one is asked again by each before it goes: to make the plan may have taken an hour.

        Args:
            items: What could be freed, and what stays in any case.
            written_s: Time of the last write to the place, in seconds since 1970; None: not known.
            place: The folder or URL.
        """
        fresh = writer_of(place) or self.too_fresh(written_s)
        going = (item.remove and partial(_remove_unless_written, place, item.remove) for item in items)
        return tuple(
            item.kept(fresh) if fresh and remove else replace(item, remove=remove)
            for item, remove in zip(items, going, strict=True)
        )


def _remove_unless_written(place: str, remove: Callable[[], None]) -> None:
    refuse_writer(place)
    remove()
