"""What the files of a dense checkpoint are called, and which iteration a --save folder names. No torch."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Final

from megatron.core.dist_checkpointing.moe.errors import UnreadableCheckpoint, UsageError
from megatron.core.dist_checkpointing.moe.storage.small_files import read_small

TRACKER = "latest_checkpointed_iteration.txt"
"""In a --save folder: names the newest complete iteration."""

INDEX = ".metadata"
"""Index of torch.distributed.checkpoint: which entry is where in the shards."""

FORMAT = "metadata.json"
"""Megatron-Core's commit marker, written last: how the iteration was saved."""

COMMON = "common.pt"
"""What is the same on all ranks; since Megatron-Core 0.17 an object in the shards instead."""

DOUBTFUL = ".moe_ckpt_doubtful"
"""Empty, where the result of the next iteration was in doubt, which core runs again from this checkpoint alone."""

RELEASE: Final = "release"
"""Folder of a checkpoint that continues from no iteration, and what the tracker says of it."""

SHARD_SUFFIX = ".distcp"

ITERATION = re.compile(r"iter_(\d{7,})")
"""A published iteration in a --save folder."""

REPLACED = ".replaced"
"""Ends the name of a checkpoint that a save of the same iteration replaces; until that is there it is whole."""

STAGED = re.compile(r"\.iter_(\d{7,})\.(saving|removing|replaced)")
"""An iteration that is being written, removed or replaced, or was when its process died."""

INFORMING_BYTES = 1 << 20
"""The longest tracker, or commit marker."""

INDEX_BYTES = 4 << 30
"""The longest index, or common part: they grow with ranks and entries to some hundreds of MB."""

SUMS_BYTES = 256 << 20
"""The longest list of checksums or of experts: 80 bytes for each file, 10 for each expert."""

_NUMBER = re.compile(r"[0-9]{1,18}")


def read_beside(path: Path, most_bytes: int) -> bytes:
    """The content of a small file of dense checkpoints, where links are followed. Raises OSError as `read_small`.

    Args:
        path: The file, or a link to it.
        most_bytes: Most bytes that it may have.
    """
    return read_small(path, most_bytes, through_links=True)


def read_if_there(path: Path) -> bytes | None:
    """The content of a list of checksums or of experts, None if there is no such file.

    Raises UnreadableCheckpoint where it is there and cannot be read.
    """
    try:
        return read_beside(path, SUMS_BYTES)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise UnreadableCheckpoint(f"{path} cannot be read ({error.strerror}); take another iteration") from error


def iteration_of(text: str) -> int | None:
    """The iteration that a tracker's text names; None for a release, and for more digits than `int` takes."""
    return int(text) if _NUMBER.fullmatch(text) else None


def read_tracker(root: Path) -> str | None:
    """The name of the folder that the tracker of a --save folder names, None without a tracker.

    Raises UnreadableCheckpoint for a tracker that cannot be read, or names no iteration.
    """
    path = root / TRACKER
    try:
        text = read_beside(path, INFORMING_BYTES).decode(errors="replace").strip()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise UnreadableCheckpoint(f"{path} cannot be read ({error.strerror})") from error
    return tracked_name(path, text)


def tracked_name(path: Path, text: str) -> str:
    """The name of the folder that a tracker names.

    Args:
        path: The tracker.
        text: What it holds.

    Raises:
        UnreadableCheckpoint: That is no iteration.
    """
    if text == RELEASE:
        return RELEASE
    iteration = iteration_of(text)
    if iteration is None:
        raise UnreadableCheckpoint(f"{path} holds {text[:40]!r}, not an iteration")
    return f"iter_{iteration:07d}"


def published(folder: Path) -> Path:
    """An iteration's folder under its own name, with the ones that it needs around it: where `.` or a link leads to."""
    return folder.absolute() if ITERATION.fullmatch(folder.name) else folder.resolve()


def moved_aside(root: Path) -> dict[str, Path]:
    """Whole iterations that a save moved out of its way, and has not replaced yet, by the names that they had.

    The next start publishes them again. Raises OSError.
    """
    staged = [path for path in root.iterdir() if STAGED.fullmatch(path.name) and path.suffix == REPLACED]
    named = {path.stem.removeprefix("."): path for path in staged}
    return {name: path for name, path in named.items() if not (root / name).exists()}


def condemned(folder: Path) -> Path:
    """Rename an iteration that is to be removed: a crash in between leaves no half-deleted one that looks whole.

    Returns the hidden folder that it has become. Raises OSError.
    """
    hidden = folder.with_name(f".{folder.name}.removing")
    shutil.rmtree(hidden, ignore_errors=True)
    return folder.rename(hidden)


def new_iteration_folder(root: Path, iteration: int) -> Path:
    """The folder for a new iteration; it is not created.

    Args:
        root: Folder without other checkpoints; it need not exist.
        iteration: Number of the iteration.
    """
    folder = root / f"iter_{iteration:07d}"
    refuse_existing(folder)
    try:
        named = read_tracker(root)
    except UnreadableCheckpoint as error:
        raise UsageError(f"{root} has checkpoints of its own ({error}); give an empty folder") from error
    if named not in (None, folder.name):
        raise UsageError(f"{root} has checkpoints of its own ({TRACKER} names {named}); give an empty folder")
    return folder


def refuse_existing(target: Path) -> None:
    """Raises UsageError where a target is there already."""
    if target.exists():
        raise UsageError(f"{target} exists already; give another target or remove it")
