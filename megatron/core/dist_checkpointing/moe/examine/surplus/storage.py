"""What of a job's storage may be freed: superseded snapshots, those of timelines that were left, what was never sealed.

Kept are the newest states as `policy.retention` says, everything down to the newest one whose bytes are all intact, and
what might be of another job or of one that is running.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

from ...config import MoECheckpointConfig
from ...errors import NewerFormat, UnreadableCheckpoint
from ...policy.timelines import Timeline
from ...ports import Json, SnapshotId, Store, Torn
from ...store.filesystem import FilesystemStore
from ...store.objects import ObjectStore
from ...types import OperatorId, Part
from ...types.layout import UNSEALED
from ..verification.snapshots import verify_records
from ..windows import (
    Restorable,
    State,
    Stored,
    held,
    needed_pieces,
    on,
    piece_name,
    pieces_of,
    read_stored,
    restorable,
    timelines,
)
from .items import A_LINK, NEVER_COMPLETED, OUTLIVED, Item, Limits, Surplus
from .written import folder_bytes, last_written_s

_KEEP_FLAG = "--moe-ckpt-persist-keep"

_Kind = tuple[dict[str, Json], Json]
"""Parallel layout and strategy: what a job can go on from is of the same."""


@dataclass(frozen=True)
class _Standing:
    """What storage restores: the newest timeline with a state that can be restored, and what of it stays.

    intact: the newest such state of which every record was read. keep_last: how many states stay. kept, complete: by
    iteration and kind, what stays, and what all ranks have.
    """

    timeline: Timeline
    newer: tuple[Timeline, ...]
    intact: State
    keep_last: int
    kept: frozenset[tuple[int, str]]
    complete: frozenset[tuple[int, str]]

    def continues(self, one: Stored) -> bool:
        """Whether the job that made the standing state came from there, or left from there another way."""
        shared = {name for name, _ in self.timeline} & {name for name, _ in one.timeline}
        return bool(shared) and _kind(one) == _kind(self.intact.leading)


def surplus_of_storage(store: Store, place: str, limits: Limits, advance: Callable[[int], None]) -> Surplus:
    """What may be freed in the storage at `place`. All records of the newest state are read, and of older ones until
    one is intact; `advance` is told their bytes. Raises StoreFailure.
    """
    listed = store.snapshots()
    snapshots, unread = _read(store, listed.sealed)
    torn = [(one, _unjudged(store, one)) for one in listed.torn]
    unknown = [*unread, *(f"{one.snapshot}: {why}" for one, why in torn if why)]
    standing: _Standing | None = None
    notes: tuple[str, ...]
    if unknown:
        more = f" ({len(unknown) - 1} more are like this)" if len(unknown) > 1 else ""
        notes = (f"{unknown[0]}{more}. What others need of it is not known, so no sealed snapshot is freed.",)
    else:
        standing, notes = _standing(store, snapshots, limits, advance)
    items = [
        *_sealed(store, snapshots, standing, limits),
        *_torn(store, torn, standing, _has_strangers(snapshots, standing)),
    ]
    if isinstance(store, FilesystemStore):
        items += _being_deleted(store.directory)
    why = limits.too_fresh(last_written_s(place))
    if why:
        items = [item.kept(why) if item.remove else item for item in items]
    return Surplus(tuple(items), str(standing.intact) if standing else "", notes)


def _read(store: Store, sealed: Sequence[SnapshotId]) -> tuple[list[Stored], list[str]]:
    """Sealed snapshots, and what became of those that could be read when they were listed and not any more."""
    found, unread = [], []
    for snapshot in sealed:
        try:
            found.append(read_stored(store, snapshot))
        except UnreadableCheckpoint as error:
            unread.append(f"{snapshot}: it could be read just now, and then not: {error}")
    return found, unread


def _standing(
    store: Store, snapshots: Sequence[Stored], limits: Limits, advance: Callable[[int], None]
) -> tuple[_Standing | None, tuple[str, ...]]:
    """Only where the whole of a storage could be read: what is not seen might be what a state needs."""
    newest = None
    for one in restorable(snapshots):
        newest = newest or one
        if all(_is_intact(store, member, advance) for member in one.members):
            break
    else:
        if newest is not None:
            return None, (
                "No state here has all its bytes intact, so no sealed snapshot is freed: see moe-ckpt verify.",
            )
        said = "No state here is whole with all the older snapshots that it needs, so no sealed snapshot is freed."
        return None, (said,) if snapshots else ()
    here = on(one.timeline, snapshots)
    pieces = pieces_of(here)
    keep_last = limits.keep_last or _keep_last_of(newest.state.leading)
    kept = {piece_name(piece) for piece in needed_pieces(pieces, newest.state, keep_last)}
    kept |= {member.name for state in (one, newest) for member in (*state.members, *_newest_of_ranks(here, state))}
    others = timelines(snapshots)
    standing = _Standing(
        one.timeline,
        tuple(others[: others.index(one.timeline)]),
        one.state,
        keep_last,
        frozenset(kept),
        frozenset(map(piece_name, pieces)),
    )
    return standing, ()


def _newest_of_ranks(here: Sequence[Stored], found: Restorable) -> Iterator[Stored]:
    """The newest copies that single ranks have up to a state, though others lost theirs of the same iteration."""
    past = [one for one in here if one.span[-1] <= found.state.span[-1]]
    seen: dict[tuple[int, OperatorId], Part] = {}
    for one in sorted(past, key=lambda one: one.span[-1], reverse=True):
        own = held([one])
        if any(part not in seen.get(key, Part.NOTHING) for key, part in own.items()):
            yield one
        seen |= {key: part | seen.get(key, Part.NOTHING) for key, part in own.items()}


def _kind(one: Stored) -> _Kind:
    return dict(one.facts.topology), one.facts.scalars.get("made_by")


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
        if _is_link(store, one.snapshot):
            reason, goes = A_LINK, False
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
        return "what is needed here cannot be told for certain", False
    if not on(standing.timeline, [one]):
        return _elsewhere(one, standing, limits)
    if one.name in standing.kept:
        return f"it is among the newest {standing.keep_last}, or one of them needs it", False
    if one.span[-1] > standing.intact.span[-1]:
        return "it is newer than the newest state that is whole and intact", False
    if one.name not in standing.complete:
        return "its state was never completed by all ranks, or lost a part", True
    return OUTLIVED, True


def _elsewhere(one: Stored, standing: _Standing, limits: Limits) -> tuple[str, bool]:
    """Of what does not lie in the past of the newest state."""
    if not one.timeline:
        return "its manifest does not say which attempt of a job made it", False
    if one.timeline in standing.newer:
        return "it is of an attempt that began later and has no whole state yet", False
    if standing.continues(one):
        own = {name for name, _ in one.timeline}
        later = [after for name, after in standing.timeline if name not in own]
        went = f"training went back to iteration {later[0]}" if later else "training went back"
        return f"{went} and came another way", True
    if one.facts.job in limits.ended:
        return f"job {one.facts.job} will not be resumed", True
    who = f"an earlier run of job {one.facts.job}"
    if one.facts.job != standing.intact.leading.facts.job:
        who = f"job {one.facts.job}"
    return f"it is of {who}, from which the newest state does not come; --ended {one.facts.job}", False


def _is_link(store: Store, snapshot: SnapshotId) -> bool:
    return isinstance(store, FilesystemStore) and (store.directory / snapshot.name).is_symlink()


def _has_strangers(snapshots: Sequence[Stored], standing: _Standing | None) -> bool:
    """Whether there are snapshots of which the standing state is no continuation."""
    return standing is not None and not all(map(standing.continues, snapshots))


def _torn(
    store: Store, torn: Sequence[tuple[Torn, str]], standing: _Standing | None, has_strangers: bool
) -> list[Item]:
    """What is no sealed snapshot, each with the reason why it cannot be judged, if it cannot."""
    items = []
    for one, unjudged in torn:
        path = Path(one.path)
        nbytes = store.files.du(one.path) if isinstance(store, ObjectStore) else folder_bytes(path)
        if _is_hidden(one):
            item = Item(f"{one.snapshot}, never sealed", nbytes, NEVER_COMPLETED, partial(shutil.rmtree, one.path))
            stays = ""
        else:
            item = Item(f"{one.snapshot}, damaged", nbytes, one.why, partial(store.free, one.snapshot))
            stays = unjudged or _why_damaged_stays(one, standing, has_strangers)
        if isinstance(store, FilesystemStore) and path.is_symlink():
            stays = A_LINK
        items.append(item.kept(stays) if stays else item)
    return items


def _is_hidden(torn: Torn) -> bool:
    return Path(torn.path).name.startswith(UNSEALED)


def _unjudged(store: Store, torn: Torn) -> str:
    """Why it may be a sound snapshot all the same; empty for what is certainly damaged, or was never sealed."""
    if _is_hidden(torn):
        return ""
    try:
        store.open(torn.snapshot).close()
    except NewerFormat:
        return "a later version of moe-ckpt wrote it"
    except UnreadableCheckpoint as error:
        if isinstance(error.__cause__, OSError) and not isinstance(error.__cause__, FileNotFoundError):
            return f"it could not be read now: {error}"
        return ""
    return "it could be read on a second try"


def _why_damaged_stays(torn: Torn, standing: _Standing | None, has_strangers: bool) -> str:
    """Empty for what is older than a state that is intact."""
    if standing is None or torn.snapshot.iteration > standing.intact.span[-1]:
        return f"no intact state is as new: {torn.why}"
    return "it may be of the job of which other snapshots here are" if has_strangers else ""


def _being_deleted(directory: Path) -> list[Item]:
    said = "it was being deleted when its process ended"
    found = [
        (path, Item(path.name, folder_bytes(path), said, partial(shutil.rmtree, path)))
        for path in sorted(directory.glob(".freed.*"))
    ]
    return [item.kept(A_LINK) if path.is_symlink() else item for path, item in found]
