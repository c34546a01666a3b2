"""When something was written in a place last, and how much is there."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ...store.objects import remote

_TIMES = ("mtime", "LastModified", "last_modified", "updated", "created")
"""What file systems of fsspec call the time of an object's last change."""


def last_written_s(place: str) -> float | None:
    """Seconds since 1970 of the newest file below a folder or a URL; 0 if there are no files, None if it is not known.

    Deleting counts as nothing. Raises OSError, and StoreFailure for a URL.
    """
    times = _of_url(place) if "://" in place else _of_folder(Path(place))
    newest: float | None = 0.0
    for written_s in times:
        newest = None if newest is None or written_s is None else max(newest, written_s)
    return newest


def folder_bytes(folder: Path) -> int:
    """Bytes that the files below a folder take; those that vanish meanwhile do not count. Raises OSError."""
    return sum(found.st_blocks * 512 for found in _files(folder))


def _of_folder(folder: Path) -> Iterator[float]:
    return (found.st_mtime for found in _files(folder))


def _files(folder: Path) -> Iterator[os.stat_result]:
    for path, _, names in os.walk(folder, onerror=_unless_gone):
        for name in names:
            with suppress(FileNotFoundError):
                yield os.stat(os.path.join(path, name))


def _unless_gone(error: OSError) -> None:
    if not isinstance(error, FileNotFoundError):
        raise error


def _of_url(url: str) -> Iterator[float | None]:
    import fsspec  # type: ignore[import-untyped]

    with remote(url):
        files, root = fsspec.core.url_to_fs(url)
        files.invalidate_cache()  # what was listed before may be older than what a job has written since
        found = files.find(root, detail=True)
    return map(_time_s, found.values())


def _time_s(about: Mapping[str, Any]) -> float | None:
    for name in _TIMES:
        told = about.get(name)
        if isinstance(told, datetime):
            return (told if told.tzinfo else told.replace(tzinfo=UTC)).timestamp()
        if isinstance(told, int | float):
            return float(told)
    return None
