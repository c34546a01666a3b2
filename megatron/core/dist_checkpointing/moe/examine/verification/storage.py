"""Verifies snapshots in storage: every record of each, and whether each state is whole."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from ...errors import NewerFormat, UnreadableCheckpoint
from ...ports import Manifest, SnapshotId, Store, Torn
from ...store.filesystem import SEGMENT, FilesystemStore
from ...store.integrity import Advance
from ...store.manifest import decode
from ...types import OperatorId, Part
from ...types.layout import MANIFEST, UNSEALED
from ..storage import sealed_s
from ..windows import Stored, held, newest_whole, on, restorable, states, timelines
from .findings import Checked, Finding, Verified
from .snapshots import lacks, lone_pieces, stored_as, verify_records

ROUNDS = 8
"""So often a storage is listed again for what a job has sealed meanwhile; a slow reader may never catch up."""

RECENT_S = 300.0
"""A state of which a snapshot was sealed so short a time ago may still be completed by other ranks."""


_Result = tuple[Stored | None, Checked, tuple[Finding, ...]]
"""Of one snapshot: what it is, unless it could not be opened, how it was looked at, and what is wrong with it."""


def verify_storage(store: Store, place: str, advance: Advance) -> Verified:
    """All snapshots of a --moe-ckpt-persist-dir. Raises NewerFormat, StoreFailure."""
    now = listed = store.snapshots()
    results: dict[SnapshotId, _Result] = {}
    for _ in range(ROUNDS):
        new = [snapshot for snapshot in now.sealed if snapshot not in results]
        if not new:
            break
        results |= {snapshot: _verified(store, snapshot, place, advance) for snapshot in new}
        now = store.snapshots()
    # A job that runs frees what it does not need any more.
    there = {*now.sealed, *(one.snapshot for one in now.torn)}
    checked = {snapshot: result for snapshot, result in results.items() if snapshot in there}
    torn = [one for one in now.torn if _is_unsealed(one)]
    findings = [Finding(one.path, one.why) for one in now.torn if one not in torn]
    findings += [*_misplaced(store), *(one for _, _, found in checked.values() for one in found)]
    snapshots = [one for one, _, _ in checked.values() if one is not None]
    intact = [one for one, _, found in checked.values() if one is not None and not found]
    is_written = bool(torn) or now != listed or _sealed_lately(store, snapshots)
    incomplete, notes = _incomplete(snapshots, place, is_written)
    restored, lost = next(restorable(intact, snapshots), None), _lost(snapshots, intact)
    if restored is None:
        why = f"no intact copy of {lost[0]} is left" if lost else "no state is whole and intact"
        incomplete.append(Finding(place, f"there is nothing to restore from: {why}"))
    unsealed = [f"{one.path} was never sealed, or is being written: nothing reads it" for one in torn]
    return Verified(
        (*findings, *incomplete),
        tuple(one for _, one, _ in checked.values()),
        (*unsealed, *notes),
        str(restored.state) if restored else "",
    )


def verify_snapshot(store: Store, snapshot: SnapshotId, place: str, advance: Advance) -> Verified:
    """One snapshot in the storage `place`, by itself."""
    stored, checked, findings = _verified(store, snapshot, place, advance)
    said = "whether the other snapshots of its state are there was not asked: give the folder it lies in"
    return Verified(findings, (checked,), (said,) if stored is not None else ())


def _is_unsealed(torn: Torn) -> bool:
    return torn.unsealed or Path(torn.path).name.startswith(UNSEALED)


def _sealed_lately(store: Store, snapshots: Sequence[Stored]) -> bool:
    """Whether the newest of these snapshots was sealed just now, as far as the store says when."""
    newest = max((one.snapshot for one in snapshots), default=None)
    when_s = None if newest is None else sealed_s(store, newest)
    return when_s is not None and abs(time.time() - when_s) < RECENT_S


def _verified(store: Store, snapshot: SnapshotId, place: str, advance: Advance) -> _Result:
    path, how = f"{place.rstrip('/')}/{snapshot.name}", "every record by its checksum"
    try:
        with store.open(snapshot) as reader:
            manifest = reader.manifest
        findings = (*verify_records(store, manifest, path, advance), *_padding(store, manifest))
    except NewerFormat:
        raise
    except (UnreadableCheckpoint, OSError) as error:
        return None, Checked(snapshot.name, how, 0, 0), (Finding(path, str(error)),)
    layout = manifest.layout
    return stored_as(manifest), Checked(snapshot.name, how, len(layout.fields), layout.nbytes), findings


def _incomplete(snapshots: Sequence[Stored], place: str, is_written: bool) -> tuple[list[Finding], list[str]]:
    """States that lack snapshots: findings, or notes where a job may be about to write or free what is missing."""
    findings: list[Finding] = []
    notes: list[str] = []
    reached = next(iter(timelines(snapshots)), ())
    current = on(reached, snapshots)
    found = states(current)
    last = next((state.span[-1] for state in found if not state.lacking), -1)
    for state in found:
        if not state.lacking:
            continue
        if is_written and state.span[-1] > last:
            notes.append(f"{lacks(state)}; it is being written, or was when its job died, and an older one is restored")
        else:
            findings.append(Finding(place, f"{lacks(state)}; restore it, or free the rest with moe-ckpt gc"))
    for one, rank in lone_pieces(current):
        said = f"there is the {one.snapshot}, but not that of rank {rank}"
        if is_written and one.snapshot.iteration > last:
            notes.append(f"{said}; it is being written, or was when its job died")
        else:
            findings.append(Finding(place, said))
    left = len(snapshots) - len(current)
    if left:
        notes.append(f"{left} snapshots are of attempts that the job left when it went back to an older state")
    return findings, notes


def _lost(snapshots: Sequence[Stored], intact: Sequence[Stored]) -> list[OperatorId]:
    """Operators of which some rank has no intact copy any more on the timeline of the newest whole state; experts may
    have been stored once, long ago."""
    found = newest_whole(intact)
    if found is None:
        return []
    lost, left = (held(on(found[0], some)) for some in (snapshots, intact))
    return sorted({key[1] for key, part in lost.items() if part & ~left.get(key, Part.NOTHING)})


def _misplaced(store: Store) -> Iterator[Finding]:
    """Snapshots in folders that have not the name of one."""
    if not isinstance(store, FilesystemStore):
        return
    for path in sorted(store.directory.iterdir()):
        if SnapshotId.parse(path.name) or path.name.startswith(UNSEALED) or not (path / MANIFEST).is_file():
            continue
        try:
            name = decode((path / MANIFEST).read_bytes(), str(path / MANIFEST)).snapshot.name
        except (UnreadableCheckpoint, OSError) as error:
            yield Finding(str(path), f"it looks like a snapshot, but: {error}")
        else:
            yield Finding(
                str(path), "it is a snapshot under a name that nothing looks for", expected=f"the name {name}"
            )


def _padding(store: Store, manifest: Manifest) -> Iterator[Finding]:
    """Bytes between the records of a segment in a folder, which are zero when it is written and read by nobody."""
    if not isinstance(store, FilesystemStore):
        return
    path = store.directory / manifest.snapshot.name / SEGMENT
    ends = [record.offset + record.nbytes for record in manifest.records]
    starts = [*(record.offset for record in manifest.records[1:]), manifest.layout.nbytes]
    with path.open("rb") as file:
        for start, end in zip(ends, starts, strict=False):
            if any(os.pread(file.fileno(), end - start, start)):
                yield Finding(str(path), f"the bytes {start} to {end} between records have changed", expected="zeros")
