"""What the files below a folder take, and when one was written last; those that vanish meanwhile do not count."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

_OF_FSCK = "lost+found"
"""Of a file system that is mounted there: only root may look into it, and no job writes there."""


def length_bytes(folder: Path) -> int:
    """Lengths of all files; folders that cannot be listed count as nothing."""
    return sum(found.st_size for found in _files(folder, None))


def disk_bytes(folder: Path) -> int:
    """Bytes that the files take on the device. Raises OSError."""
    return sum(found.st_blocks * 512 for found in _files(folder, _unless_gone))


def last_written_s(folder: Path) -> float:
    """Seconds since 1970 of the newest file, 0 without files. Deleting counts as nothing. Raises OSError."""
    return max((found.st_mtime for found in _files(folder, _unless_gone)), default=0.0)


def _files(folder: Path, refused: Callable[[OSError], None] | None) -> Iterator[os.stat_result]:
    for path, folders, names in os.walk(folder, onerror=refused):
        if Path(path) == folder and _OF_FSCK in folders:
            folders.remove(_OF_FSCK)
        for name in names:
            with suppress(FileNotFoundError):
                yield os.stat(os.path.join(path, name))


def _unless_gone(error: OSError) -> None:
    if not isinstance(error, FileNotFoundError):
        raise error
