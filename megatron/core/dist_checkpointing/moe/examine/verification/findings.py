"""What the verification of checkpoints comes to. Values only."""

from __future__ import annotations

from dataclasses import dataclass, field

from ...store.integrity import Damage


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
