"""Verifies dense checkpoints: one iteration with those that it needs, or all of a --save folder."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from megatron.core.dist_checkpointing.moe.errors import NewerFormat, UnreadableCheckpoint
from moe_ckpt.dense import integrity
from moe_ckpt.dense.chain import read_chain
from moe_ckpt.dense.dense import DenseCheckpoint, open_dense
from moe_ckpt.dense.integrity import Advance
from moe_ckpt.dense.merged import open_merged
from moe_ckpt.dense.names import ITERATION, RELEASE, STAGED, TRACKER, moved_aside, published, read_tracker

from .location import Checked, Finding, Verified
from .saved_iterations import left_names, nothing_tracked

LISTINGS = 8
"""So often a folder is listed again for what a job has published meanwhile; a slow reader may never catch up."""


def verify_iteration(folder: Path, advance: Advance) -> Verified:
    """One iteration, and those that hold experts for it if it was saved with some of the experts.

    Args:
        folder: The folder of the iteration, in a `--save` folder.
        advance: Called with the number of bytes that were read since its last call.
    """
    folder = published(folder)
    checked = {path: _verified(path, advance) for path in _needed(folder)}
    broken = _broken_chain(folder, checked)
    is_whole = not broken and not any(result.findings for result in checked.values())
    return Verified.of_parts(checked.values(), broken, (), _named(folder) if is_whole else "")


def verify_saves(root: Path, advance: Advance) -> Verified:
    """All iterations of a --save folder, what they need of each other, and the tracker.

    Args:
        root: The `--save` folder.
        advance: Called with the number of bytes that were read since its last call.
    """
    root = root.absolute()
    results: dict[Path, Verified] = {}
    for _ in range(LISTINGS):
        new = [path for path in (*_published(root), *moved_aside(root).values()) if path not in results]
        if not new:
            break
        results |= {path: _verified_of_any_version(path, advance) for path in new}
    broken = {path: _broken_chain(path, results) for path in results if path.is_dir()}
    folders = [path for path in sorted(broken) if path.is_dir()]  # a job that runs removes older ones meanwhile
    checked = {path: results[path] for path in folders}
    tracked, problem = _tracked(root)
    findings = [finding for path in folders for finding in broken[path]]
    # What is newer than the tracker says was never announced, or is of a run that was left: nothing loads it by itself.
    unannounced = [path for path in folders if tracked is not None and _number(path.name) > _number(tracked)]
    names = left_names(root, tracked or "")
    behind = [path for path in folders if path.name in names]
    newer = [path for path in unannounced if path not in behind]
    loadable = [path for path in folders if path not in (*newer, *behind) and not broken[path]]
    whole = [path for path in loadable if not _damaged(path, checked)]
    newest = max(whole, key=lambda path: _number(path.name), default=None)
    unnamed = nothing_tracked(root, _named(newest).removeprefix("iteration ") if newest else "")
    findings += [Finding(str(root / TRACKER), unnamed)] if unnamed else problem
    if newest is None:
        findings.append(Finding(str(root), "there is nothing to restore from: no iteration is whole"))
    left = sorted(path for path in root.iterdir() if STAGED.fullmatch(path.name) and path not in folders)
    aside = [path for path in folders if STAGED.fullmatch(path.name)]
    notes = [f"{path} was to be replaced by a save that did not finish: the next start publishes it" for path in aside]
    notes += [f"{path} was left by a save that did not finish, or is being written" for path in left]
    notes += [f"{path} is newer than {TRACKER} says: it is loaded only if it is asked for" for path in newer]
    notes += [f"{path} was left when training went back with --ckpt-step: only that loads it" for path in behind]
    restores = _named(newest) if newest and not unnamed else ""
    return Verified.of_parts(checked.values(), findings, notes, restores)


def _published(root: Path) -> list[Path]:
    named = (path for path in root.iterdir() if path.name == RELEASE or ITERATION.fullmatch(path.name))
    return sorted(path for path in named if path.is_dir())


def _verified_of_any_version(folder: Path, advance: Advance) -> Verified:
    """As `_verified`; one that a later version wrote is a finding, so that the others beside it are still looked at."""
    try:
        return _verified(folder, advance)
    except NewerFormat as error:
        return Verified((Finding(str(folder), str(error)),), (Checked(folder.name, "nothing", 0, 0),))


def _damaged(folder: Path, results: Mapping[Path, Verified]) -> bool:
    """Whether something was found in an iteration, or in one that it is loaded from."""
    return any(results[path].findings for path in _needed(folder) if path in results)


def _number(name: str) -> int:
    """Of an iteration, also of one that was moved aside; a release is before all of them."""
    match = ITERATION.fullmatch(name) or STAGED.fullmatch(name)
    return int(match[1]) if match else -1


def _named(folder: Path) -> str:
    number = _number(folder.name)
    return f"iteration {number}" if number >= 0 else folder.name


def _needed(folder: Path) -> list[Path]:
    """The folders that are there of those from which an iteration is loaded, itself included."""
    try:
        chain = read_chain(folder)
    except UnreadableCheckpoint:
        chain = None  # reported with the folder itself
    others = [] if chain is None else [folder.parent / f"iter_{number:07d}" for number in sorted(chain.iterations)]
    return sorted({folder, *(path for path in others if path.is_dir())})


def _broken_chain(folder: Path, checked: Mapping[Path, Verified]) -> tuple[Finding, ...]:
    """What an iteration lacks of those that hold experts for it, unless damage that was found already explains it."""
    if _damaged(folder, checked):
        return ()
    try:
        open_merged(folder)
    except UnreadableCheckpoint as error:
        return (Finding(str(folder), str(error)),)
    return ()


def _verified(folder: Path, advance: Advance) -> Verified:
    try:
        sizes = [path.stat().st_size for path in folder.iterdir() if path.is_file()]
    except OSError as error:
        finding = Finding(str(folder), f"it cannot be read ({error.strerror})")
        return Verified((finding,), (Checked(folder.name, "nothing", 0, 0),))
    summed = (Checked(folder.name, "every byte by its checksum", len(sizes), sum(sizes)),)
    damage = integrity.check(folder, advance=advance)
    if damage:
        return Verified(tuple(map(Finding.of, damage)), summed)
    try:
        checkpoint = open_dense(folder)
        integrity.expected(folder, checkpoint.common)
    except UnreadableCheckpoint as error:
        finding = Finding(str(folder), str(error))
        return Verified((finding,), (Checked(folder.name, "completeness", len(sizes), 0),))
    misnamed = _misnamed(checkpoint)
    return _read(checkpoint, misnamed, advance) if damage is None else Verified(misnamed, summed)


def _misnamed(checkpoint: DenseCheckpoint) -> tuple[Finding, ...]:
    folder, saved = checkpoint.directory, checkpoint.common.get("iteration")
    if not ITERATION.fullmatch(folder.name) or not isinstance(saved, int) or saved == _number(folder.name):
        return ()
    return (Finding(str(folder), f"it holds iteration {saved}: it was renamed", expected=f"the name iter_{saved:07d}"),)


def _read(checkpoint: DenseCheckpoint, misnamed: tuple[Finding, ...], advance: Advance) -> Verified:
    """Of a checkpoint without checksums: whether each tensor and object can be read as the index describes it."""
    folder, findings, nbytes = checkpoint.directory, list(misnamed), 0
    for name, info in checkpoint.tensors.items():
        for chunk in info.chunks:  # one at a time: a tensor with the experts of all layers is as large as the model
            try:
                checkpoint.read_piece(name, info.dtype, chunk)
            except UnreadableCheckpoint as error:
                findings.append(Finding(str(folder), str(error), name))
            nbytes += chunk.extent.length_bytes
            advance(chunk.extent.length_bytes)
    for name in checkpoint.objects:
        try:
            checkpoint.read_object(name)
        except UnreadableCheckpoint as error:
            findings.append(Finding(str(folder), str(error), name))
    items = len(checkpoint.tensors) + len(checkpoint.objects)
    note = (
        f"{folder} has no {integrity.NAME}, as stock Megatron saves: all of it is there and can be read, but whether"
        " single bytes have changed cannot be said"
    )
    checked = Checked(folder.name, "completeness, and each tensor by reading it", items, nbytes)
    return Verified(tuple(findings), (checked,), () if findings else (note,))


def _tracked(root: Path) -> tuple[str | None, tuple[Finding, ...]]:
    """The folder that the tracker names, None if it names none, and what is wrong with one that is there."""
    path = root / TRACKER
    try:
        name = read_tracker(root)
        if name is not None and not (root / name).is_dir():
            name = read_tracker(root)  # a job that runs may have continued, and removed what was named before
    except UnreadableCheckpoint as error:
        return None, (Finding(str(path), str(error)),)
    if name is not None and not (root / name).is_dir() and name not in moved_aside(root):
        return name, (Finding(str(path), f"it names {name}, which is not there"),)
    return name, ()
