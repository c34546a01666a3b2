"""Verifies snapshots in storage: every record of each, and whether each state is whole."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from ...errors import NewerFormat, UnreadableCheckpoint
from ...ports import Manifest, SnapshotId, Store
from ...store.filesystem import MANIFEST, SEGMENT, FilesystemStore
from ...store.integrity import Advance
from ...store.manifest import decode
from ...types import OperatorId, Part
from ..windows import Stored, newest_whole, on, states, timelines
from .findings import Checked, Finding, Verified
from .snapshots import lacks, lone_pieces, stored_as, verify_records

UNSEALED = (".writing.", ".freed.")


def verify_storage(store: Store, place: str, advance: Advance) -> Verified:
    """All snapshots of a --moe-ckpt-persist-dir. Raises NewerFormat, StoreFailure."""
    listed = store.snapshots()
    results = {snapshot: _verified(store, snapshot, place, advance) for snapshot in listed.sealed}
    now = store.snapshots()
    # A job that runs frees what it does not need any more.
    there = {*now.sealed, *(one.snapshot for one in now.torn)}
    checked = {snapshot: result for snapshot, result in results.items() if snapshot in there}
    torn = [one for one in listed.torn if _base(one.path).startswith(UNSEALED)]
    findings = [Finding(one.path, one.why) for one in listed.torn if one not in torn]
    findings += [*_misplaced(store), *(one for _, _, found in checked.values() for one in found)]
    snapshots = [one for one, _, _ in checked.values() if one is not None]
    intact = [one for one, _, found in checked.values() if one is not None and not found]
    incomplete, notes = _incomplete(snapshots, place, is_written=bool(torn) or now != listed)
    whole, lost = newest_whole(intact), _lost(snapshots, intact)
    if whole is None:
        incomplete.append(Finding(place, "there is nothing to restore from: no state is whole and intact"))
    elif lost:
        incomplete.append(Finding(place, f"there is nothing to restore from: no intact copy of {lost[0]} is left"))
        whole = None
    unsealed = [f"{one.path} was never sealed, or is being written: nothing reads it" for one in torn]
    return Verified(
        (*findings, *incomplete),
        tuple(one for _, one, _ in checked.values()),
        (*unsealed, *notes),
        str(whole[1][0]) if whole else "",
    )


def verify_snapshot(store: Store, snapshot: SnapshotId, place: str, advance: Advance) -> Verified:
    """One snapshot in the storage `place`, by itself."""
    stored, checked, findings = _verified(store, snapshot, place, advance)
    said = "whether the other snapshots of its state are there was not asked: give the folder it lies in"
    return Verified(findings, (checked,), (said,) if stored is not None else ())


def _verified(
    store: Store, snapshot: SnapshotId, place: str, advance: Advance
) -> tuple[Stored | None, Checked, tuple[Finding, ...]]:
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
        findings.append(Finding(place, f"there is the {one.snapshot}, but not that of rank {rank}"))
    left = len(snapshots) - len(current)
    if left:
        notes.append(f"{left} snapshots are of attempts that the job left when it went back to an older state")
    return findings, notes


def _lost(snapshots: Sequence[Stored], intact: Sequence[Stored]) -> list[OperatorId]:
    """Operators of which some rank has no intact copy any more; experts may have been stored once, long ago."""
    lost, left = _held(snapshots), _held(intact)
    return sorted({key[1] for key, part in lost.items() if part & ~left.get(key, Part.NOTHING)})


def _held(snapshots: Sequence[Stored]) -> dict[tuple[int, OperatorId], Part]:
    """By rank and operator the parts of its state that there are copies of."""
    held: dict[tuple[int, OperatorId], Part] = {}
    for one in snapshots:
        for operator, part in one.parts.items():
            key = one.snapshot.rank, operator
            held[key] = held.get(key, Part.NOTHING) | part
    return held


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


def _base(path: str) -> str:
    return Path(path).name
