"""Verifies the memory tier of a node: every record of each sealed snapshot, also while its job runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ...errors import UnreadableCheckpoint
from ...storage.slot_reader import SEALED, SlotEntry, SlotReader
from ...store.integrity import Advance
from ...types.layout import SnapshotId
from ...types.standby import GRADIENTS, LOG, PARKED
from ..areas import Slot, slots
from ..windows import Stored, newest_whole, on, states, timelines
from .findings import Checked, Finding, Verified
from .snapshots import lacks, stored_as, verify_records


@dataclass(frozen=True)
class _Seen:
    """What came of one slot: `intact` are its snapshots without damage."""

    slot: Slot
    findings: tuple[Finding, ...]
    checked: Checked
    unchecked: tuple[str, ...]
    intact: tuple[Stored, ...]


@dataclass(frozen=True)
class _Judged:
    """What the snapshots of one job in memory add up to; restores: as in Verified."""

    restores: str | None = None
    problem: str = ""
    notes: tuple[str, ...] = ()


def verify_memory(memory_dir: Path, advance: Advance) -> Verified:
    """All slots below a --moe-ckpt-memory-dir. Raises UnreadableCheckpoint if there is none, StoreFailure."""
    seen = [_verified(slot, advance) for slot in slots(memory_dir)]
    jobs = {
        job: _judged([one for one in seen if one.slot.job == job]) for job in sorted({one.slot.job for one in seen})
    }
    problems = (Finding(str(memory_dir), f"job {job}: {said.problem}") for job, said in jobs.items() if said.problem)
    notes = [f"job {job}: {note}" for job, said in jobs.items() for note in said.notes]
    known = {job: said.restores for job, said in jobs.items() if said.restores is not None}
    return Verified(
        (*(finding for one in seen for finding in one.findings), *problems),
        tuple(one.checked for one in seen),
        (*(note for one in seen for note in one.unchecked), *notes),
        "; ".join(f"{state} of job {job}" for job, state in known.items() if state) if known else None,
    )


def _verified(slot: Slot, advance: Advance) -> _Seen:
    shelf, directory = slot.shelf, slot.directory
    listed = shelf.snapshots()
    unsealed = [one for one in listed.torn if not one.path.endswith(SEALED)]
    findings = [Finding(one.path, one.why) for one in listed.torn if one not in unsealed]
    intact: list[Stored] = []
    records = nbytes = 0
    for snapshot in listed.sealed:
        try:
            with shelf.open(snapshot) as reader:
                manifest = reader.manifest
            found = verify_records(shelf, manifest, str(directory / manifest.segment), advance)
        except UnreadableCheckpoint as error:
            # A running job frees what it does not need any more.
            findings += [Finding(str(directory), str(error))] if _is_sealed(shelf, snapshot) else []
            continue
        findings += found
        intact += [] if found else [stored_as(manifest)]
        records += len(manifest.records)
        nbytes += manifest.layout.nbytes
    checked = Checked(f"{directory.parent.name}/{directory.name}", "every record by its checksum", records, nbytes)
    notes = tuple(f"{one.path} was left when its process ended: nothing reads it" for one in unsealed)
    return _Seen(slot, tuple(findings), checked, notes, tuple(intact))


def _is_sealed(shelf: SlotReader, snapshot: SnapshotId) -> bool:
    def is_it(entry: SlotEntry) -> bool:
        return entry.snapshot == snapshot and entry.state == SEALED

    return any(map(is_it, shelf.entries()))


def _judged(seen: Sequence[_Seen]) -> _Judged:
    snapshots = [one for slot in seen for one in slot.intact if one.snapshot.kind not in (LOG, GRADIENTS)]
    is_alive = any(one.slot.alive for one in seen)
    if not snapshots:
        said = "there is nothing to restore from: no snapshot is sealed and intact"
        return _Judged("", notes=(said,)) if is_alive else _Judged("", said)
    world_size = max(one.world_size for one in snapshots)
    ranks = {one.snapshot.rank for one in snapshots}
    if not ranks.issuperset(range(world_size)):
        said = f"{len(ranks)} of {world_size} ranks have snapshots here: whether states are whole takes all nodes"
        return _Judged(notes=(said,))
    whole = newest_whole(snapshots)
    parked = sorted({one.snapshot.iteration for one in snapshots if one.snapshot.kind == PARKED})
    notes = [f"ranks parked at iteration {parked[-1]}"] if parked else []
    reached = next(iter(timelines(snapshots)), ())
    # Ranks seal one after the other, and a fault may strike in between: in memory that is no damage.
    notes += [lacks(state) for state in states(on(reached, snapshots)) if state.lacking]
    if whole is not None:
        return _Judged(str(whole[1][0]), notes=tuple(notes))
    said = "there is nothing to restore from: no state is whole and intact"
    if is_alive or parked:
        return _Judged("", notes=(*notes, said))
    return _Judged("", said, tuple(notes))
