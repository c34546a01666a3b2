"""What ranks tell each other once all of them stand at the target of a recovery."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec

from ..policy.lineage import Lineage
from ..ports import SnapshotId
from ..types import Tier
from .inventory import CopyLocation, JudgedRow

_NAMED = 32
"""So many unusable snapshots are named in the table of a recovery; more are counted."""


class EndedRecovery(msgspec.Struct, frozen=True, array_like=True):
    """What ranks compared and found, together.

    Attributes:
        compared: By stage, the replayed iterations that each of its ranks compared with what was recorded.
        memory: Iteration and kind of what holds state in any memory.
        windows: By iteration, first and last of those whose snapshots restore a state together with its own.
        unusable: Iteration, owner, kind, finder and tier of sealed snapshots that cannot be used, and why.
        unnamed: How many more there are.
    """

    compared: dict[int, frozenset[int]] = {}
    memory: frozenset[tuple[int, str]] = frozenset()
    windows: dict[int, tuple[int, int]] = {}
    unusable: list[tuple[int, int, str, int, int, str]] = []
    unnamed: int = 0

    @classmethod
    def of(
        cls, rank: int, stage: int, compared: frozenset[int], found: Iterable[JudgedRow], timeline: Lineage
    ) -> EndedRecovery:
        """Of one rank.

        Args:
            rank: The rank.
            stage: Its pipeline stage.
            compared: As the attribute.
            found: What it found in its own stores.
            timeline: Of the state that was recovered.
        """
        found = list(found)
        led = [row for row in found if row.is_state and row.may_be_of(timeline)]
        return cls() | cls(
            {stage: compared},
            frozenset((row.snapshot.iteration, row.snapshot.kind) for row in led if row.tier is not Tier.PERSISTENT),
            {row.snapshot.iteration: (row.span[0], row.span[-1]) for row in led if not row.why},
            [
                (row.snapshot.iteration, row.snapshot.rank, row.snapshot.kind, rank, row.tier.value, row.why)
                for row in found
                if row.why and not (row.torn or row.is_intact)
            ],
        )

    def __or__(self, other: EndedRecovery) -> EndedRecovery:
        compared = dict(self.compared)
        for stage, iterations in other.compared.items():
            compared[stage] = compared[stage] & iterations if stage in compared else iterations
        unusable = sorted([*self.unusable, *other.unusable])
        unnamed = self.unnamed + other.unnamed + max(0, len(unusable) - _NAMED)
        windows = {**self.windows, **other.windows}
        return EndedRecovery(compared, self.memory | other.memory, windows, unusable[:_NAMED], unnamed)

    def lines(self, damaged: Mapping[CopyLocation, str]) -> tuple[str, ...]:
        """What was refused when it was listed, and what when it was read, for people.

        Args:
            damaged: What proved unreadable, and why.
        """
        listed = [
            ((finder, SnapshotId(iteration, owner, kind), Tier(tier)), why)
            for iteration, owner, kind, finder, tier, why in self.unusable
        ]
        refused = sorted([*listed, *damaged.items()])
        named = (f"{snapshot}, held by rank {finder}: {why}" for (finder, snapshot, _), why in refused)
        return (*named, *([f"{self.unnamed} more copies that cannot be used"] if self.unnamed else ()))
