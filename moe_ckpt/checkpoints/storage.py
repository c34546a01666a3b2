"""A job's storage (--moe-ckpt-persist-dir): inspected, verified, and freed of what newer snapshots supersede.

Jobs write there while it is looked at. So a listing is repeated for what was sealed meanwhile, what was freed meanwhile
is no damage, and a state that other ranks may be about to complete is noted and no finding.
"""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import TYPE_CHECKING

from megatron.core.dist_checkpointing.moe.errors import NewerFormat, UnreadableCheckpoint
from megatron.core.dist_checkpointing.moe.ports import Manifest, SnapshotId
from megatron.core.dist_checkpointing.moe.storage.manifest import MOST_BYTES, decode
from megatron.core.dist_checkpointing.moe.storage.small_files import open_regular, read_small
from megatron.core.dist_checkpointing.moe.types import OperatorId, Part
from megatron.core.dist_checkpointing.moe.types.layout import MANIFEST
from moe_ckpt.checkpoints.windows import (
    StoredSnapshot,
    by_operator,
    held_parts,
    lone_pieces,
    on_timeline,
    restorable,
    states,
    timelines,
)
from moe_ckpt.dense.integrity import Advance, unwatched

from .inspect_snapshots import snapshot_report, storage_report
from .location import Checked, CheckpointLocation, Finding, GcLimits, GcPlan, Inspection, LocationKind, Verified
from .persist_dir import PersistDir, is_unsealed, open_persist_dir, snapshot_at
from .records import verify_records
from .storage_gc import storage_gc_plan

if TYPE_CHECKING:
    from moe_ckpt.checkpoints.values import StateView
    from moe_ckpt.report import Report

LISTINGS = 8
"""So often a storage is listed again for what a job has sealed meanwhile; a slow reader may never catch up."""

RECENT_S = 300.0
"""A state of which a snapshot was sealed so short a time ago may still be completed by other ranks."""

_BLOCK_BYTES = 1 << 20

_Result = tuple[StoredSnapshot | None, Checked, tuple[Finding, ...]]
"""Of one snapshot: what it is, unless it could not be opened, how it was looked at, and what is wrong with it."""


class StorageLocation(CheckpointLocation):
    """A --moe-ckpt-persist-dir: a folder, or a URL that fsspec knows."""

    kind = LocationKind.STORAGE

    @cached_property
    def persist_dir(self) -> PersistDir:
        """The storage, opened. Raises UsageError if it cannot be."""
        return open_persist_dir(self.place)

    def size_bytes(self) -> int:
        return self.persist_dir.length_bytes()

    def inspect(self, now_s: float) -> Inspection:
        return Inspection(storage_report(self.persist_dir, now_s))

    def inspect_tensors(self, pattern: str) -> Report:
        """Of the newest iteration that is there."""
        from .inspect_tensors import newest_iteration, snapshot_tensors

        store = self.persist_dir.store
        found = {snapshot: store.open for snapshot in store.snapshots().sealed}
        return snapshot_tensors(self.place, newest_iteration(found), pattern)

    def verify(self, advance: Advance = unwatched) -> Verified:
        """Every record of each snapshot, and whether each state is whole."""
        store = self.persist_dir.store
        now = listed = store.snapshots()
        results: dict[SnapshotId, _Result] = {}
        for _ in range(LISTINGS):
            new = [snapshot for snapshot in now.sealed if snapshot not in results]
            if not new:
                break
            results |= {snapshot: _verified(self.persist_dir, snapshot, self.place, advance) for snapshot in new}
            now = store.snapshots()
        # A job that runs frees what it does not need any more.
        there = {*now.sealed, *(torn.snapshot for torn in now.torn)}
        checked = {snapshot: result for snapshot, result in results.items() if snapshot in there}
        unsealed = [torn for torn in now.torn if is_unsealed(torn)]
        findings = [Finding(torn.path, torn.why) for torn in now.torn if torn not in unsealed]
        findings += [*_misnamed(self.persist_dir), *(finding for _, _, found in checked.values() for finding in found)]
        snapshots = [stored for stored, _, _ in checked.values() if stored is not None]
        intact = [stored for stored, _, found in checked.values() if stored is not None and not found]
        is_in_use = now != listed or _sealed_lately(self.persist_dir, snapshots)
        incomplete, notes = _incomplete(snapshots, self.place, bool(unsealed) or is_in_use, is_in_use)
        newest, lost = next(restorable(intact, snapshots), None), _lost(snapshots, intact)
        if newest is None:
            why = f"no intact copy of {lost[0]} is left" if lost else "no state is whole and intact"
            incomplete.append(Finding(self.place, f"there is nothing to restore from: {why}"))
        left = [f"{torn.path} was never sealed, or is being written: nothing reads it" for torn in unsealed]
        return Verified(
            (*findings, *incomplete),
            tuple(how for _, how, _ in checked.values()),
            (*left, *notes),
            str(newest.state) if newest else "",
        )

    def gc_plan(self, limits: GcLimits, advance: Advance = unwatched) -> GcPlan:
        """As `CheckpointLocation.gc_plan`."""
        return storage_gc_plan(self.persist_dir, limits, advance)

    def state_view(self) -> StateView:
        """The newest state that storage restores."""
        from moe_ckpt.checkpoints.values import storage_view

        return storage_view(self.place, self.persist_dir.store)


class SnapshotLocation(CheckpointLocation):
    """One snapshot in a --moe-ckpt-persist-dir."""

    kind = LocationKind.SNAPSHOT

    @cached_property
    def persist_dir(self) -> PersistDir:
        """The storage that it lies in, opened. Raises UsageError if it cannot be."""
        return open_persist_dir(snapshot_at(self.place)[0])

    @property
    def snapshot(self) -> SnapshotId:
        """Which one it is."""
        return snapshot_at(self.place)[1]

    def size_bytes(self) -> int:
        return open_persist_dir(self.place).length_bytes()

    def inspect(self, now_s: float) -> Inspection:
        return Inspection(snapshot_report(self.place, self.persist_dir, self.snapshot, now_s))

    def inspect_tensors(self, pattern: str) -> Report:
        from .inspect_tensors import snapshot_tensors

        return snapshot_tensors(self.place, {self.snapshot: self.persist_dir.store.open}, pattern)

    def verify(self, advance: Advance = unwatched) -> Verified:
        """Of this snapshot by itself."""
        storage = snapshot_at(self.place)[0]
        stored, checked, findings = _verified(self.persist_dir, self.snapshot, storage, advance)
        note = "whether the other snapshots of its state are there was not asked: give the folder it lies in"
        return Verified(findings, (checked,), (note,) if stored is not None else ())

    def state_view(self) -> StateView:
        from moe_ckpt.checkpoints.values import snapshot_view

        return snapshot_view(self.place, self.persist_dir.store, self.snapshot)


def _sealed_lately(persist_dir: PersistDir, snapshots: Sequence[StoredSnapshot]) -> bool:
    """Whether the newest of these snapshots was sealed just now, as far as the storage says when."""
    newest = max((stored.snapshot for stored in snapshots), default=None)
    when_s = None if newest is None else persist_dir.sealed_s(newest)
    return when_s is not None and abs(time.time() - when_s) < RECENT_S


def _verified(persist_dir: PersistDir, snapshot: SnapshotId, place: str, advance: Advance) -> _Result:
    path, how = f"{place.rstrip('/')}/{snapshot.name}", "every record by its checksum"
    store = persist_dir.store
    try:
        with store.open(snapshot) as reader:
            manifest = reader.manifest
        stored = StoredSnapshot.of(manifest)
        findings = (*verify_records(store, manifest, path, advance), *_padding(persist_dir, manifest))
    except NewerFormat:
        raise
    except (UnreadableCheckpoint, OSError) as error:
        return None, Checked(snapshot.name, how, 0, 0), (Finding(path, str(error)),)
    layout = manifest.layout
    return stored, Checked(snapshot.name, how, len(layout.fields), layout.nbytes), findings


def _incomplete(
    snapshots: Sequence[StoredSnapshot], place: str, is_written: bool, is_in_use: bool
) -> tuple[list[Finding], list[str]]:
    """States that lack snapshots: findings, or notes where a job may be about to write what is missing (is_written), or
    has freed it (is_in_use, which what a killed job left does not show)."""
    findings: list[Finding] = []
    notes: list[str] = []
    reached = next(iter(timelines(snapshots)), ())
    current = on_timeline(reached, snapshots)
    found = states(current)
    last = next((state.span[-1] for state in found if not state.lacking), -1)
    for state in found:
        if not state.lacking:
            continue
        why = f"the state of {state} is not whole: the snapshot of {state.missing} is missing"
        if is_written and state.span[-1] > last:
            notes.append(f"{why}; it is being written, or was when its job died, and an older one is restored")
        elif is_in_use and state.span[-1] < last:
            notes.append(f"{why}; a job that writes here frees it, or it is lost, and a newer one is restored")
        else:
            findings.append(Finding(place, f"{why}; restore it, or free the rest with moe-ckpt gc"))
    for stored, rank in lone_pieces(current):
        why = f"there is the {stored.snapshot}, but not that of rank {rank}"
        if is_written and stored.snapshot.iteration > last:
            notes.append(f"{why}; it is being written, or was when its job died")
        else:
            findings.append(Finding(place, why))
    left = len(snapshots) - len(current)
    if left:
        notes.append(f"{left} snapshots are of attempts that the job left when it went back to an older state")
    return findings, notes


def _lost(snapshots: Sequence[StoredSnapshot], intact: Sequence[StoredSnapshot]) -> list[OperatorId]:
    """Operators of which some rank has no intact copy any more on the newest timeline that leads to a whole state;
    experts may have been stored once, long ago."""
    for timeline in timelines(intact):
        whole = next((state for state in states(on_timeline(timeline, intact)) if not state.lacking), None)
        if whole:
            stored, left = (held_parts(on_timeline(timeline, some)) for some in (snapshots, intact))
            gone = whole.leading.unheld_experts(by_operator(left))
            return sorted(gone | {key[1] for key, part in stored.items() if part & ~left.get(key, Part.NOTHING)})
    return []


def _misnamed(persist_dir: PersistDir) -> Iterator[Finding]:
    """Snapshots in folders that have not the name of one."""
    for path in persist_dir.misnamed():
        try:
            name = decode(read_small(path / MANIFEST, MOST_BYTES), str(path / MANIFEST)).snapshot.name
        except (UnreadableCheckpoint, OSError) as error:
            yield Finding(str(path), f"it looks like a snapshot, but: {error}")
        else:
            yield Finding(
                str(path), "it is a snapshot under a name that nothing looks for", expected=f"the name {name}"
            )


def _padding(persist_dir: PersistDir, manifest: Manifest) -> Iterator[Finding]:
    """Bytes between the records of a segment in a folder, which are zero when it is written and read by nobody."""
    path = persist_dir.segment(manifest.snapshot)
    if path is None:
        return
    ends = [record.offset + record.nbytes for record in manifest.records]
    starts = [*(record.offset for record in manifest.records[1:]), manifest.layout.nbytes]
    with open_regular(path) as file:
        for start, end in zip(ends, starts, strict=False):
            if not _is_zero(file.fileno(), start, end):
                yield Finding(str(path), f"the bytes {start} to {end} between records have changed", expected="zeros")


def _is_zero(descriptor: int, start: int, end: int) -> bool:
    """Whether a file has no other bytes there; holes are skipped, and the rest is read in blocks."""
    while start < end:
        try:
            start = os.lseek(descriptor, start, os.SEEK_DATA)
        except OSError as error:
            if error.errno == errno.ENXIO:  # there is a hole from here to the end of the file
                return True
            raise
        block = os.pread(descriptor, min(_BLOCK_BYTES, max(0, end - start)), start)
        if block.strip(b"\0"):
            return False
        start += _BLOCK_BYTES
    return True
