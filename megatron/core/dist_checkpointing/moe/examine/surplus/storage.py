"""What of a job's storage may be freed: superseded snapshots, those of timelines that were left, what was never sealed.

Kept are the newest states as `policy.keeping` says, everything down to the newest one whose bytes are all intact, and
what might be of another job or of one that is running.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

from ...config import MoECheckpointConfig
from ...errors import NewerFormat, UnreadableCheckpoint
from ...policy.keeping import keep_persistent
from ...policy.retention import Reason
from ...policy.strategies import Piece
from ...policy.timelines import Timeline
from ...ports import SnapshotId, Store, Torn
from ...store.filesystem import FilesystemStore
from ...store.objects import ObjectStore
from ...types import OperatorId, Part, SnapshotPlan
from ..verification.snapshots import verify_records
from ..windows import State, Stored, newest_whole, on, stored, timelines
from .items import Item, Limits, Surplus
from .written import folder_bytes, last_written_s

_UNSEALED = (".writing.", ".freed.")
_KEEP_FLAG = "--moe-ckpt-persist-keep"

_Name = tuple[int, str]
"""Iteration and kind, which all ranks' snapshots of one piece have in common."""


@dataclass(frozen=True)
class _Standing:
    """What storage restores: the newest timeline with a whole state, and what of it stays.

    intact: the newest whole state of which every record was read. keep_last: how many states stay.
    """

    timeline: Timeline
    newer: tuple[Timeline, ...]
    intact: State
    keep_last: int
    kept: frozenset[_Name]
    complete: frozenset[_Name]
    attempts: frozenset[str]
    jobs: frozenset[str]


def surplus_of_storage(store: Store, place: str, limits: Limits, advance: Callable[[int], None]) -> Surplus:
    """What may be freed in the storage at `place`. All records of the newest state are read, and of older ones until
    one is intact; `advance` is told their bytes. Raises StoreFailure.
    """
    snapshots = stored(store)
    torn = store.snapshots().torn
    standing, notes = _standing(store, snapshots, limits, advance)
    items = [*_sealed(store, snapshots, standing, limits), *_torn(store, torn, standing)]
    if isinstance(store, FilesystemStore):
        items += _being_deleted(store.directory)
    why = limits.too_fresh(last_written_s(place))
    if why:
        items = [item.kept(why) if item.remove else item for item in items]
    return Surplus(tuple(items), str(standing.intact) if standing else "", notes)


def _standing(
    store: Store, snapshots: Sequence[Stored], limits: Limits, advance: Callable[[int], None]
) -> tuple[_Standing | None, tuple[str, ...]]:
    found = newest_whole(snapshots)
    if found is None:
        return None, ("No state here is whole, so no sealed snapshot is freed.",) if snapshots else ()
    timeline, whole = found
    here = on(timeline, snapshots)
    pieces = _pieces(here)
    for state in whole:
        needed = {_name(piece) for piece in keep_persistent(_until(pieces, state), 1)}
        members = [one for one in here if (one.snapshot.iteration, one.snapshot.kind) in needed]
        if all(_is_intact(store, one, advance) for one in members):
            break
    else:
        return None, ("No state here has all its bytes intact, so no sealed snapshot is freed: see moe-ckpt verify.",)
    keep_last = limits.keep_last or _keep_last_of(whole[0].leading)
    kept = frozenset(map(_name, keep_persistent(pieces, keep_last))) | needed
    others = timelines(snapshots)
    standing = _Standing(
        timeline,
        tuple(others[: others.index(timeline)]),
        state,
        keep_last,
        kept,
        frozenset(map(_name, pieces)),
        frozenset(name for name, _ in timeline),
        frozenset(one.facts.job for one in here),
    )
    return standing, ()


def _pieces(snapshots: Sequence[Stored]) -> list[Piece]:
    """What all ranks have of one timeline, as retention judges it."""
    ranks: dict[_Name, dict[int, Stored]] = {}
    for one in snapshots:
        ranks.setdefault((one.snapshot.iteration, one.snapshot.kind), {})[one.snapshot.rank] = one
    pieces = []
    for (iteration, kind), held in sorted(ranks.items()):
        first = next(iter(held.values()))
        if held.keys() >= set(range(first.world_size)):
            parts: dict[OperatorId, Part] = {}
            for one in held.values():
                parts |= one.parts
            pieces.append(Piece(kind, SnapshotPlan(iteration, parts), first.span))
    return pieces


def _name(piece: Piece) -> _Name:
    return piece.plan.iteration, piece.kind


def _until(pieces: Sequence[Piece], state: State) -> list[Piece]:
    return [piece for piece in pieces if piece.span[-1] <= state.span[-1]]


def _is_intact(store: Store, one: Stored, advance: Callable[[int], None]) -> bool:
    try:
        with store.open(one.snapshot) as reader:
            manifest = reader.manifest
        return not verify_records(store, manifest, one.snapshot.name, advance)
    except UnreadableCheckpoint:
        return False


def _keep_last_of(leading: Stored) -> int:
    """As the job was told."""
    trainer = cast("Mapping[str, Any]", leading.facts.scalars["trainer"])
    flags = [str(flag) for flag in (trainer.get("command") or {}).get("flags", ())]
    said = [flag.partition("=")[2] for flag in flags if flag.startswith(f"{_KEEP_FLAG}=")]
    said += [value for flag, value in pairwise(flags) if flag == _KEEP_FLAG]
    return int(said[-1]) if said and said[-1].isdecimal() else MoECheckpointConfig.persist_keep


def _sealed(store: Store, snapshots: Sequence[Stored], standing: _Standing | None, limits: Limits) -> list[Item]:
    """Snapshots that stay or go for the same reason, those of one window together."""
    groups: dict[tuple[int, int, str, str, bool], list[Stored]] = {}
    for one in snapshots:
        reason, goes = _judged(one, standing, limits)
        groups.setdefault((one.span[-1], one.span[0], one.snapshot.kind, reason, goes), []).append(one)
    items = []
    for (last, first, kind, reason, goes), members in sorted(groups.items()):
        span = f"iteration {last}" if first == last else f"iterations {first} to {last}"
        count = f"{len(members)} snapshots" if len(members) > 1 else "1 snapshot"
        remove = partial(_free, store, [one.snapshot for one in members]) if goes else None
        items.append(Item(f"{span}: {count} ({kind})", sum(one.nbytes for one in members), reason, remove))
    return items


def _free(store: Store, snapshots: Collection[SnapshotId]) -> None:
    for snapshot in snapshots:
        store.free(snapshot)


def _judged(one: Stored, standing: _Standing | None, limits: Limits) -> tuple[str, bool]:
    """Why a snapshot stays or goes, and whether it goes."""
    if standing is None:
        return "nothing here can be restored for certain", False
    if not on(standing.timeline, [one]):
        return _elsewhere(one, standing, limits)
    name = one.snapshot.iteration, one.snapshot.kind
    if name in standing.kept:
        return f"it is among the newest {standing.keep_last}, or one of them needs it", False
    if one.span[-1] > standing.intact.span[-1]:
        return "it is newer than the newest state that is whole and intact", False
    if name not in standing.complete:
        return "its state was never completed by all ranks, or lost a part", True
    return Reason.OLDER.value, True


def _elsewhere(one: Stored, standing: _Standing, limits: Limits) -> tuple[str, bool]:
    """Of what does not lie in the past of the newest state."""
    if not one.timeline:
        return "its manifest does not say which attempt of a job made it", False
    if one.timeline in standing.newer:
        return "it is of an attempt that began later and has no whole state yet", False
    if one.timeline[-1][0] in standing.attempts or one.facts.job in standing.jobs:
        own = {name for name, _ in one.timeline}
        later = [after for name, after in standing.timeline if name not in own]
        went = f"training went back to iteration {later[0]}" if later else "training went back"
        return f"{went} and came another way", True
    if one.facts.job in limits.ended:
        return f"job {one.facts.job} will not be resumed", True
    return f"it is of job {one.facts.job}, from which the newest state does not come; --ended {one.facts.job}", False


def _torn(store: Store, torn: Sequence[Torn], standing: _Standing | None) -> list[Item]:
    items = []
    for one in torn:
        hidden = Path(one.path).name.startswith(_UNSEALED)
        nbytes = store.files.du(one.path) if isinstance(store, ObjectStore) else folder_bytes(Path(one.path))
        if hidden:
            items.append(
                Item(f"{one.snapshot}, never sealed", nbytes, Reason.TORN.value, partial(shutil.rmtree, one.path))
            )
            continue
        item = Item(f"{one.snapshot}, damaged", nbytes, one.why, partial(store.free, one.snapshot))
        stays = _why_damaged_stays(store, one, standing)
        items.append(item.kept(stays) if stays else item)
    return items


def _why_damaged_stays(store: Store, torn: Torn, standing: _Standing | None) -> str:
    """Empty for what is certainly damaged and older than a state that is intact."""
    try:
        store.open(torn.snapshot).close()
    except NewerFormat:
        return "a later version of moe-ckpt wrote it"
    except UnreadableCheckpoint as error:
        if isinstance(error.__cause__, OSError) and not isinstance(error.__cause__, FileNotFoundError):
            return f"it could not be read now: {error}"
    else:
        return "it could be read on a second try"
    if standing is None or torn.snapshot.iteration > standing.intact.span[-1]:
        return f"no intact state is as new: {torn.why}"
    return ""


def _being_deleted(directory: Path) -> list[Item]:
    found = sorted(directory.glob(".freed.*"))
    return [
        Item(path.name, folder_bytes(path), "it was being deleted when its process ended", partial(shutil.rmtree, path))
        for path in found
    ]
