"""The memory tier of a node (--moe-ckpt-memory-dir): inspected, verified, and freed of what dead jobs left.

All of it works beside a running job: a snapshot is held for no longer than some of its records are read, and what the
job frees meanwhile is no damage. What a job left in memory may be the newest state that it has, and a restart takes
it. So its folder is freed only if neither a snapshot nor the note of a diverged replay is in it, or the user says that
the job will not be resumed.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from megatron.core.dist_checkpointing.moe.errors import NewerFormat, UnreadableCheckpoint, UsageError
from megatron.core.dist_checkpointing.moe.ports import SnapshotId
from megatron.core.dist_checkpointing.moe.storage.manifest import MOST_BYTES, decode
from megatron.core.dist_checkpointing.moe.storage.ownership import OWNER_FILE, kept_free
from megatron.core.dist_checkpointing.moe.storage.slot_reader import SEALED, SlotReader, written_over
from megatron.core.dist_checkpointing.moe.storage.small_files import read_small
from megatron.core.dist_checkpointing.moe.types.recovery import GRADIENTS, LOG, PARKED
from moe_ckpt.checkpoints.windows import StoredSnapshot, on_timeline, restorable, states, timelines
from moe_ckpt.dense.integrity import Advance, unwatched

from .files import disk_bytes, last_written_s
from .inspect_snapshots import memory_report
from .location import (
    A_LINK,
    Checked,
    CheckpointLocation,
    Finding,
    GcItem,
    GcLimits,
    GcPlan,
    Inspection,
    LocationKind,
    Verified,
)
from .records import verify_records
from .slots import Slot, slots

if TYPE_CHECKING:
    from moe_ckpt.report import Report

_DIVERGED = "diverged.json"
"""As `recovery.exactness` has it, which brings torch in."""


class MemoryLocation(CheckpointLocation):
    """A --moe-ckpt-memory-dir, or the folder of one node, job or process in it."""

    kind = LocationKind.MEMORY

    def inspect(self, now_s: float) -> Inspection:
        return Inspection(memory_report(self.path, now_s))

    def inspect_tensors(self, pattern: str) -> Report:
        """Of the newest iteration that is there, one copy of each snapshot."""
        from .inspect_tensors import newest_iteration, snapshot_tensors

        readers = [slot.reader for slot in slots(self.path)]
        found = {snapshot: reader.open for reader in readers for snapshot in reader.snapshots().sealed}
        return snapshot_tensors(self.place, newest_iteration(found), pattern)

    def verify(self, advance: Advance = unwatched) -> Verified:
        """Every record of each sealed snapshot, and what each job could restore."""
        seen = [_verified(slot, advance) for slot in slots(self.path)]
        names = sorted({of_slot.slot.job for of_slot in seen})
        jobs = {job: _judged([of_slot for of_slot in seen if of_slot.slot.job == job]) for job in names}
        problems = (
            Finding(str(self.path), f"job {job}: {judged.problem}") for job, judged in jobs.items() if judged.problem
        )
        notes = [f"job {job}: {note}" for job, judged in jobs.items() for note in judged.notes]
        known = {job: judged.restores for job, judged in jobs.items() if judged.restores is not None}
        restores = "; ".join(f"{state} of job {job}" for job, state in known.items() if state) if known else None
        return Verified.of_parts((of_slot.found for of_slot in seen), problems, notes, restores)

    def gc_plan(self, limits: GcLimits, advance: Advance = unwatched) -> GcPlan:
        """As `CheckpointLocation.gc_plan`: whole jobs, each on its node; one with a living process there stays."""
        own, found = Path(os.path.abspath(self.path)), slots(self.path)
        if any(slot.directory == own for slot in found):
            raise UsageError(
                f"{self.path} is the memory of one process, and jobs are freed as a whole: give the folder of its job,"
                f" {own.parent}, or the --moe-ckpt-memory-dir"
            )
        folders = sorted({slot.directory.parent for slot in found})
        return GcPlan(tuple(_gc_item(folder, slots(folder), limits) for folder in folders))


@dataclass(frozen=True)
class _VerifiedSlot:
    """What came of one slot: `intact` are its snapshots without damage."""

    slot: Slot
    found: Verified
    intact: tuple[StoredSnapshot, ...]


@dataclass(frozen=True)
class _JudgedJob:
    """What the snapshots of one job in memory add up to; restores: as in Verified."""

    restores: str | None = None
    problem: str = ""
    notes: tuple[str, ...] = ()


def _verified(slot: Slot, advance: Advance) -> _VerifiedSlot:
    in_slot, directory = slot.reader, slot.directory
    listed = in_slot.snapshots()
    unsealed = [torn for torn in listed.torn if not torn.path.endswith(SEALED)]
    findings = [Finding(torn.path, torn.why) for torn in listed.torn if torn not in unsealed]
    findings += [Finding(str(directory / OWNER_FILE), slot.problem)] if slot.problem else []
    intact: list[StoredSnapshot] = []
    records = nbytes = 0
    for snapshot in listed.sealed:
        try:
            with in_slot.open(snapshot) as reader:
                manifest = reader.manifest
            stored = StoredSnapshot.of(manifest)
            found = verify_records(in_slot, manifest, str(directory / manifest.segment), advance)
        except UnreadableCheckpoint as error:
            # A running job frees what it does not need any more.
            findings += [Finding(str(directory), str(error))] if _is_sealed(in_slot, snapshot) else []
            continue
        findings += found
        intact += [] if found else [stored]
        records += len(manifest.records)
        nbytes += manifest.layout.nbytes
    checked = Checked(f"{directory.parent.name}/{directory.name}", "every record by its checksum", records, nbytes)
    notes = tuple(f"{torn.path} was left when its process ended: nothing reads it" for torn in unsealed)
    return _VerifiedSlot(slot, Verified(tuple(findings), (checked,), notes), tuple(intact))


def _is_sealed(in_slot: SlotReader, snapshot: SnapshotId) -> bool:
    return any(entry.snapshot == snapshot and entry.state == SEALED for entry in in_slot.entries())


def _judged(seen: Sequence[_VerifiedSlot]) -> _JudgedJob:
    snapshots = [held for of_slot in seen for held in of_slot.intact if held.snapshot.kind not in (LOG, GRADIENTS)]
    is_alive = any(of_slot.slot.alive for of_slot in seen)
    if not snapshots:
        problem = "there is nothing to restore from: no snapshot is sealed and intact"
        return _JudgedJob("", notes=(problem,)) if is_alive else _JudgedJob("", problem)
    world_size = max(held.world_size for held in snapshots)
    ranks = {held.snapshot.rank for held in snapshots}
    if not ranks.issuperset(range(world_size)):
        note = f"{len(ranks)} of {world_size} ranks have snapshots here: whether states are whole takes all nodes"
        return _JudgedJob(notes=(note,))
    parked = sorted({held.snapshot.iteration for held in snapshots if held.snapshot.kind == PARKED})
    notes = [f"ranks parked at iteration {parked[-1]}"] if parked else []
    reached = next(iter(timelines(snapshots)), ())
    # Ranks seal one after the other, and a fault may strike in between: in memory that is no damage.
    notes += [
        f"the state of {state} is not whole: the snapshot of {state.missing} is missing"
        for state in states(on_timeline(reached, snapshots))
        if state.lacking
    ]
    newest = next(restorable(snapshots), None)
    if newest is not None:
        return _JudgedJob(str(newest.state), notes=tuple(notes))
    problem = "there is nothing to restore from: no state is whole and intact"
    if is_alive or parked:
        return _JudgedJob("", notes=(*notes, problem))
    return _JudgedJob("", problem, tuple(notes))


@dataclass(frozen=True)
class _LeftSnapshots:
    """What is sealed by its name. newest: iteration of the newest one that can be read; newer: of a later version.
    noted: a replay diverged, which a restart must not try again."""

    newest: int | None
    unread: int
    newer: bool
    noted: bool

    def __str__(self) -> str:
        if self.unread:
            return "snapshots that this version cannot read are left"
        if self.noted and self.newest is None:
            return "only a note of a diverged replay is left"
        return "no snapshot is left" if self.newest is None else f"snapshots up to iteration {self.newest} are left"


def _gc_item(folder: Path, held: Sequence[Slot], limits: GcLimits) -> GcItem:
    job, left = folder.name, _left(held)
    what, nbytes = f"job {job} on {folder.parent.name}: {left}", disk_bytes(folder)
    item = GcItem(what, nbytes, "its processes are gone", partial(_remove, folder))
    living = [slot.problem or f"{slot.owner or 'a process'} uses it" for slot in held if slot.alive]
    fresh = limits.too_fresh(last_written_s(folder))
    if living:
        return item.kept(living[0])
    if folder.is_symlink():
        return item.kept(A_LINK)
    if left.newer:
        return item.kept("a later version of moe-ckpt wrote in it")
    if job in limits.ended:
        return item
    if fresh:
        return item.kept(fresh)
    if left.newest is not None or left.unread:
        return item.kept(f"a restart of the job can continue from it; --ended {job} if there will be none")
    if left.noted:
        return item.kept(f"a restart of the job needs it; --ended {job} if there will be none")
    return item


def _left(held: Sequence[Slot]) -> _LeftSnapshots:
    """From names first: what cannot be read may be the newest state all the same."""
    newest, unread, newer = None, 0, False
    for slot in held:
        for entry in slot.reader.entries():
            if entry.state == SEALED:
                iteration, is_newer = _read(slot.directory / entry.name)
                newer |= is_newer
                unread += iteration is None
                newest = iteration if newest is None else max(newest, iteration or 0)
    return _LeftSnapshots(newest, unread, newer, any(os.path.lexists(slot.directory / _DIVERGED) for slot in held))


def _read(manifest: Path) -> tuple[int | None, bool]:
    """The iteration in a manifest, None where it cannot be read, and whether a later version wrote it."""
    try:
        return decode(written_over(read_small(manifest, MOST_BYTES)), str(manifest)).snapshot.iteration, False
    except NewerFormat:
        return None, True
    except (UnreadableCheckpoint, OSError):
        return None, False


def _remove(folder: Path) -> None:
    """Raises StoreFailure when a process has taken a slot of the job meanwhile."""
    with kept_free(folder):
        shutil.rmtree(folder)
    with suppress(OSError):
        folder.parent.rmdir()
