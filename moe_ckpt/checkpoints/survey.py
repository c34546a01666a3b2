"""What snapshots there are and who holds which operators, from manifests alone: no record is read."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from megatron.core.dist_checkpointing.moe.errors import UnreadableCheckpoint
from megatron.core.dist_checkpointing.moe.storage.slot_reader import SEALED, WRITING, SlotEntry
from megatron.core.dist_checkpointing.moe.types import STANDBY, OperatorId, Part
from megatron.core.dist_checkpointing.moe.types.layout import Manifest, SnapshotId, Torn
from megatron.core.dist_checkpointing.moe.types.recovery import spans
from moe_ckpt.checkpoints.persist_dir import PersistDir
from moe_ckpt.checkpoints.slots import Slot

from .windows import StoredSnapshot, StoredState, on_timeline, restorable, states, timelines


@dataclass(frozen=True)
class SealedCopy:
    """One sealed snapshot in one place. written_s: when it was sealed, in seconds since 1970; None if not known."""

    stored: StoredSnapshot
    parts: Mapping[OperatorId, Part] = field(repr=False)
    operator_bytes: Mapping[OperatorId, int] = field(repr=False)
    place: str
    written_s: float | None

    @property
    def snapshot(self) -> SnapshotId:
        """Which one it is."""
        return self.stored.snapshot

    @property
    def nbytes(self) -> int:
        """Bytes that it takes."""
        return self.stored.nbytes


@dataclass(frozen=True)
class MemorySurvey:
    """All that was found. writing: what is being written now."""

    holdings: tuple[SealedCopy, ...]
    torn: tuple[Torn, ...]
    writing: tuple[SnapshotId, ...] = ()

    @cached_property
    def places(self) -> Mapping[SnapshotId, tuple[str, ...]]:
        """Where each snapshot lies."""
        found: dict[SnapshotId, list[str]] = {}
        for holding in self.holdings:
            found.setdefault(holding.snapshot, []).append(holding.place)
        return {snapshot: tuple(sorted(places)) for snapshot, places in found.items()}

    @cached_property
    def states(self) -> tuple[tuple[StoredState, bool], ...]:
        """The states that windows make, the newest first, and whether the job went back behind them another way."""
        rest, led, found = self._of_states, timelines(self._of_states), list[tuple[StoredState, bool]]()
        for timeline in led:
            own = on_timeline(timeline, rest)
            found += [(state, timeline is not led[0]) for state in states(own)]
            rest = [stored for stored in rest if stored not in own]
        return tuple(found)

    @cached_property
    def newest_whole(self) -> StoredState | None:
        """The state that a recovery goes to if this is all that there is."""
        found = next(restorable(self._of_states), None)
        return found.state if found else None

    @property
    def _of_states(self) -> list[StoredSnapshot]:
        """One copy of each snapshot, without logs and what was parked."""
        return list(
            {held.snapshot: held.stored for held in self.holdings if held.snapshot.kind not in STANDBY}.values()
        )


def survey_snapshot(persist_dir: PersistDir, snapshot: SnapshotId) -> MemorySurvey:
    """One snapshot of a storage. Raises StoreFailure, UnreadableCheckpoint where it is torn.

    Args:
        persist_dir: The storage.
        snapshot: Iteration, rank and kind of the snapshot.
    """
    return MemorySurvey((_stored(persist_dir, snapshot),), ())


def survey_storage(persist_dir: PersistDir) -> MemorySurvey:
    """All snapshots of a storage. Raises StoreFailure."""
    listed = persist_dir.store.snapshots()
    holdings, torn = [], list(listed.torn)
    for snapshot in listed.sealed:
        try:
            holdings.append(_stored(persist_dir, snapshot))
        except UnreadableCheckpoint as error:  # freed since it was listed, or damaged
            torn.append(Torn(snapshot, str(snapshot), str(error)))
    return MemorySurvey(tuple(holdings), tuple(torn))


def survey_slot(slot: Slot) -> MemorySurvey:
    """All snapshots in one slot; what its owner frees meanwhile is left out. Raises StoreFailure."""
    in_slot, place = slot.reader, f"{slot.node}/{slot.local_rank}"
    listed = in_slot.snapshots()
    holdings = []
    for snapshot in listed.sealed:
        with suppress(UnreadableCheckpoint), in_slot.open(snapshot) as reader:
            entry = SlotEntry(Path(reader.manifest.segment).stem, snapshot, SEALED)
            holdings.append(_holding(reader.manifest, place, _written_s(slot.directory / entry.name)))
    torn = {found.snapshot for found in listed.torn}
    begun = (entry.snapshot for entry in in_slot.entries() if entry.state == WRITING)
    return MemorySurvey(tuple(holdings), listed.torn, tuple(snapshot for snapshot in begun if snapshot not in torn))


def operator_rows(holdings: Sequence[SealedCopy]) -> Iterator[tuple[Any, ...]]:
    """Who has the newest copy of each operator, in the order of operators; logs and parked states do not count.

    Yields:
        Operator; "FULL", or "WEIGHTS" where only compute weights are there; bytes of what all ranks own of it, once;
        iteration; those ranks; the places it is in; in how many of them at least each rank's share is.
    """
    found = [
        (operator, _label(part), holding)
        for holding in holdings
        if holding.snapshot.kind not in STANDBY
        for operator, part in holding.parts.items()
    ]
    newest: dict[tuple[OperatorId, str, int], int] = {}
    for operator, part, holding in found:
        key = operator, part, holding.snapshot.rank
        newest[key] = max(newest.get(key, 0), holding.snapshot.iteration)
    copies: dict[tuple[OperatorId, str, int], dict[int, list[SealedCopy]]] = {}
    for operator, part, holding in found:
        iteration, rank = holding.snapshot.iteration, holding.snapshot.rank
        if newest[operator, part, rank] == iteration:
            copies.setdefault((operator, part, -iteration), {}).setdefault(rank, []).append(holding)
    for (operator, part, negative), held in sorted(copies.items(), key=lambda item: item[0]):
        places = {holding.place for of_rank in held.values() for holding in of_rank}
        nbytes = sum(of_rank[0].operator_bytes.get(operator, 0) for of_rank in held.values())
        least = min(len({holding.place for holding in of_rank}) for of_rank in held.values())
        yield str(operator), part, nbytes, -negative, spans(set(held)), sorted(places), least


def _label(part: Part) -> str:
    return (
        "FULL" if Part.MASTER_AND_MOMENTS in part else "WEIGHTS" if part & (Part.COMPUTE | Part.MASTER) else "MOMENTS"
    )


def _stored(persist_dir: PersistDir, snapshot: SnapshotId) -> SealedCopy:
    with persist_dir.store.open(snapshot) as reader:
        manifest = reader.manifest
    return _holding(manifest, "storage", persist_dir.sealed_s(snapshot))


def _holding(manifest: Manifest, place: str, written_s: float | None) -> SealedCopy:
    parts: dict[OperatorId, Part] = {}
    operator_bytes: dict[OperatorId, int] = {}
    for record in manifest.records:
        if record.operator is not None:
            parts[record.operator] = parts.get(record.operator, Part.NOTHING) | record.field.part
            operator_bytes[record.operator] = operator_bytes.get(record.operator, 0) + record.nbytes
    stored = StoredSnapshot.of(manifest)
    # What was planned says more than the records do: weights can be kept as the master weights that they are cast from.
    return SealedCopy(stored, parts | stored.parts, operator_bytes, place, written_s)


def _written_s(path: Path) -> float | None:
    with suppress(OSError):
        return os.stat(path).st_mtime
    return None
