"""What of a job's storage may be freed: superseded snapshots, those of timelines that were left, what was never sealed.

First everything is listed and read. If anything cannot be read for certain, no sealed snapshot goes, for what is not
seen might be what a state needs. Else the state that storage restores is found, its records are read (and those of
older ones until one is intact), and `RetainedState` says what it and the newest states need, as `policy.tracking` does
for a running job. All else on its timeline goes; what might be of another job or of one that is running stays.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from megatron.core.dist_checkpointing.moe.config import MoECheckpointConfig
from megatron.core.dist_checkpointing.moe.errors import NewerFormat, UnreadableCheckpoint, WrongSecret
from megatron.core.dist_checkpointing.moe.policy.lineage import FORGOTTEN, Lineage
from megatron.core.dist_checkpointing.moe.ports import Json, SnapshotId, Store, StoreFailure, Torn
from megatron.core.dist_checkpointing.moe.storage.lease import refuse_writer
from megatron.core.dist_checkpointing.moe.types import OperatorId, Part
from moe_ckpt.checkpoints.windows import (
    RestorableState,
    StoredSnapshot,
    StoredState,
    held_parts,
    needed_pieces,
    on_timeline,
    piece_name,
    pieces_of,
    read_stored,
    restorable,
    timelines,
)
from moe_ckpt.dense.integrity import Advance

from .location import A_LINK, NEVER_COMPLETED, OUTLIVED, GcItem, GcLimits, GcPlan
from .persist_dir import PersistDir, is_unsealed
from .records import verify_records

_KEEP_FLAG = "--moe-ckpt-persist-keep"

_JobKind = tuple[dict[str, Json], str | None]
"""Parallel layout and strategy: what a job can continue from is of the same."""


@dataclass(frozen=True)
class RetainedState:
    """What storage restores: the newest timeline with a state that can be restored, and what of it stays.

    newer: timelines that began later. intact: the newest such state of which every record was read. keep_last: how many
    states stay. kept, complete: by iteration and kind, what stays, and what all ranks have.
    """

    timeline: Lineage
    newer: tuple[Lineage, ...]
    intact: StoredState
    keep_last: int
    kept: frozenset[tuple[int, str]]
    complete: frozenset[tuple[int, str]]

    def continues(self, stored: StoredSnapshot) -> bool:
        """Whether the job that made the retained state came from there, or left from there another way."""
        shared = {name for name, _ in self.timeline} & {name for name, _ in stored.timeline}
        return bool(shared - {FORGOTTEN}) and _job_kind(stored) == _job_kind(self.intact.leading)


def storage_gc_plan(persist_dir: PersistDir, limits: GcLimits, advance: Advance) -> GcPlan:
    """See `CheckpointLocation.gc_plan`. All records of the newest state are read, and of older ones until one is
    intact. Raises StoreFailure.
    """
    store = persist_dir.store
    listed = store.snapshots()
    snapshots, unread = _read(store, listed.sealed)
    torn = [(found, _unjudged(store, found)) for found in listed.torn]
    unknown = [*unread, *(f"{found.snapshot}: {why}" for found, why in torn if why)]
    retained: RetainedState | None = None
    notes: tuple[str, ...]
    if unknown:
        more = f" ({len(unknown) - 1} more are like this)" if len(unknown) > 1 else ""
        notes = (f"{unknown[0]}{more}. What others need of it is not known, so no sealed snapshot is freed.",)
    else:
        retained, notes = _retained(store, snapshots, limits, advance)
    has_strangers = retained is not None and not all(map(retained.continues, snapshots))
    items = [
        *_sealed_items(persist_dir, snapshots, retained, limits),
        *(_torn_item(persist_dir, found, why, retained, has_strangers) for found, why in torn),
        *(GcItem.left_over(path, "it was being deleted when its process ended") for path in persist_dir.half_deleted()),
    ]
    judged = limits.applied(items, persist_dir.last_written_s(), persist_dir.place)
    return GcPlan(judged, str(retained.intact) if retained else "", notes)


def _read(store: Store, sealed: Sequence[SnapshotId]) -> tuple[list[StoredSnapshot], list[str]]:
    """Sealed snapshots, and what became of those that could be read when they were listed and not any more."""
    found, unread = [], []
    for snapshot in sealed:
        try:
            found.append(read_stored(store, snapshot))
        except UnreadableCheckpoint as error:
            unread.append(f"{snapshot}: it could be read just now, and then not: {error}")
    return found, unread


def _retained(
    store: Store, snapshots: Sequence[StoredSnapshot], limits: GcLimits, advance: Advance
) -> tuple[RetainedState | None, tuple[str, ...]]:
    """Only where the whole of a storage could be read: what is not seen might be what a state needs."""
    newest = None
    for found in restorable(snapshots):
        newest = newest or found
        if all(_is_intact(store, member, advance) for member in found.members):
            break
    else:
        if newest is not None:
            return None, (
                "No state here has all its bytes intact, so no sealed snapshot is freed: see moe-ckpt verify.",
            )
        note = "No state here is whole with all the older snapshots that it needs, so no sealed snapshot is freed."
        return None, (note,) if snapshots else ()
    here = on_timeline(found.timeline, snapshots)
    pieces = pieces_of(here)
    known = limits.keep_last or _keep_last_of(newest.state.leading)
    keep_last = known or len(snapshots)
    notes = () if known else ("The job does not say how many states it keeps, so all stay: give --keep-last.",)
    kept = {piece_name(piece) for piece in needed_pieces(pieces, newest.state, keep_last)}
    kept |= {member.name for state in (found, newest) for member in (*state.members, *_newest_of_ranks(here, state))}
    others = timelines(snapshots)
    newer = tuple(others[: others.index(found.timeline)])
    complete = frozenset(map(piece_name, pieces))
    return RetainedState(found.timeline, newer, found.state, keep_last, frozenset(kept), complete), notes


def _newest_of_ranks(here: Sequence[StoredSnapshot], found: RestorableState) -> Iterator[StoredSnapshot]:
    """The newest copies that single ranks have up to a state, though others lost theirs of the same iteration."""
    leading = found.state.leading
    # Of its own layout: a rank of another one is no more, and will never have newer copies.
    past = [stored for stored in here if stored.span[-1] <= leading.span[-1] and stored.layout == leading.layout]
    seen: dict[tuple[int, OperatorId], Part] = {}
    for stored in sorted(past, key=lambda stored: stored.span[-1], reverse=True):
        own = held_parts([stored])
        if any(part not in seen.get(key, Part.NOTHING) for key, part in own.items()):
            yield stored
        seen |= {key: part | seen.get(key, Part.NOTHING) for key, part in own.items()}


def _job_kind(stored: StoredSnapshot) -> _JobKind:
    return dict(stored.facts.topology), stored.said.made_by


def _is_intact(store: Store, stored: StoredSnapshot, advance: Advance) -> bool:
    try:
        with store.open(stored.snapshot) as reader:
            manifest = reader.manifest
        return not verify_records(store, manifest, stored.snapshot.name, advance)
    except UnreadableCheckpoint:
        return False


def _keep_last_of(leading: StoredSnapshot) -> int | None:
    """How many states the job itself kept, by the flags it was started with; None where these are not known."""
    if leading.command is None:
        return None
    flags, given = leading.command.flags, ""
    for flag, following in zip(flags, (*flags[1:], ""), strict=False):  # of several the last one counts
        name, has_value, value = flag.partition("=")
        if name == _KEEP_FLAG:
            given = value if has_value else following
    return int(given) if re.fullmatch("[0-9]{1,18}", given) else MoECheckpointConfig.persist_keep


def _sealed_items(
    persist_dir: PersistDir, snapshots: Sequence[StoredSnapshot], retained: RetainedState | None, limits: GcLimits
) -> list[GcItem]:
    """Snapshots that stay or go for the same reason, those of one window together."""
    groups: dict[tuple[int, int, str, str, bool], list[StoredSnapshot]] = {}
    for stored in snapshots:
        reason, goes = _judged(stored, retained, limits)
        if persist_dir.is_link(stored.snapshot.name):
            reason, goes = A_LINK, False
        groups.setdefault((stored.span[-1], stored.span[0], stored.snapshot.kind, reason, goes), []).append(stored)
    items = []
    for (last, first, kind, reason, goes), members in sorted(groups.items()):
        span = f"iteration {last}" if first == last else f"iterations {first} to {last}"
        count = f"{len(members)} snapshots" if len(members) > 1 else "1 snapshot"
        remove = partial(_free, persist_dir, [stored.snapshot for stored in members]) if goes else None
        nbytes = sum(stored.nbytes for stored in members)
        items.append(GcItem(f"{span}: {count} ({kind})", nbytes, reason, remove))
    return items


def _free(persist_dir: PersistDir, snapshots: Collection[SnapshotId]) -> None:
    """Raises StoreFailure also where a snapshot is free, and its bytes are not, as on NFS while somebody reads it."""
    before = persist_dir.half_deleted()
    for snapshot in snapshots:
        refuse_writer(persist_dir.place)
        persist_dir.store.free(snapshot)
    if left := [path for path in persist_dir.half_deleted() if path not in before]:
        raise StoreFailure(f"{left[0]} could not be deleted, and takes space until it can be")


def _judged(stored: StoredSnapshot, retained: RetainedState | None, limits: GcLimits) -> tuple[str, bool]:
    """Why a snapshot stays or goes, and whether it goes."""
    if retained is None:
        return "what is needed here cannot be told for certain", False
    if not on_timeline(retained.timeline, [stored]):
        return _elsewhere(stored, retained, limits)
    if stored.name in retained.kept:
        return f"it is among the newest {retained.keep_last}, or one of them needs it", False
    if stored.span[-1] > retained.intact.span[-1]:
        return "it is newer than the newest state that is whole and intact", False
    if stored.name not in retained.complete:
        return "its state was never completed by all ranks, or lost a part", True
    return OUTLIVED, True


def _elsewhere(stored: StoredSnapshot, retained: RetainedState, limits: GcLimits) -> tuple[str, bool]:
    """Of what does not lie in the past of the newest state."""
    if not stored.timeline:
        return "its manifest does not say which attempt of a job made it", False
    if stored.timeline in retained.newer:
        return "it is of an attempt that began later and has no whole state yet", False
    job = stored.facts.job
    if retained.continues(stored):
        own = {name for name, _ in stored.timeline}
        later = [after for name, after in retained.timeline if name not in own | {FORGOTTEN}]
        went = f"training went back to iteration {later[0]}" if later else "training went back"
        return f"{went} and came another way", True
    if job in limits.ended:
        return f"job {job} will not be resumed", True
    is_same = job == retained.intact.leading.facts.job
    who = f"an earlier run of job {job}" if is_same else f"job {job}"
    return f"it is of {who}, from which the newest state does not come; --ended {job}", False


def _torn_item(
    persist_dir: PersistDir, torn: Torn, unjudged: str, retained: RetainedState | None, has_strangers: bool
) -> GcItem:
    """What is no sealed snapshot; `unjudged` says why it may be sound all the same, if it may."""
    nbytes = persist_dir.disk_bytes(torn.path)
    if is_unsealed(torn):
        # A folder under a name that no snapshot has; in an object store the name is the snapshot's.
        remove = partial(_free, persist_dir, [torn.snapshot]) if torn.unsealed else partial(shutil.rmtree, torn.path)
        item, stays = GcItem(f"{torn.snapshot}, never sealed", nbytes, NEVER_COMPLETED, remove), ""
    else:
        item = GcItem(f"{torn.snapshot}, damaged", nbytes, torn.why, partial(_free, persist_dir, [torn.snapshot]))
        stays = unjudged or _why_damaged_stays(torn, retained, has_strangers)
    if persist_dir.is_link(Path(torn.path).name):
        stays = A_LINK
    return item.kept(stays) if stays else item


def _unjudged(store: Store, torn: Torn) -> str:
    """Why it may be a sound snapshot all the same; empty for what is certainly damaged, or was never sealed."""
    if is_unsealed(torn):
        return ""
    try:
        store.open(torn.snapshot).close()
    except NewerFormat:
        return "a later version of moe-ckpt wrote it"
    except WrongSecret as error:
        return f"it may be sound: {error}"
    except UnreadableCheckpoint as error:
        if isinstance(error.__cause__, OSError) and not isinstance(error.__cause__, FileNotFoundError):
            return f"it could not be read now: {error}"
        return ""
    return "it could be read on a second try"


def _why_damaged_stays(torn: Torn, retained: RetainedState | None, has_strangers: bool) -> str:
    """Empty for what is older than a state that is intact."""
    if retained is None or torn.snapshot.iteration > retained.intact.span[-1]:
        return f"no intact state is as new: {torn.why}"
    return "it may be of the job of which other snapshots here are" if has_strangers else ""
