"""Verifies whatever is recognized, offline: every checksum, and whether all is there that belongs together."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from ...store.integrity import Advance, unwatched
from ..recognition import Content, Recognized
from ..storage import open_storage, snapshot_at
from .findings import Verified
from .memory import verify_memory
from .storage import verify_snapshot, verify_storage


def verify(place: Recognized, advance: Advance = unwatched) -> Verified:
    """Read all of a place and say what is damaged, missing or cannot be checked; nothing is changed.

    `advance` is told the bytes that were read. Raises UsageError for a place that cannot be opened, NewerFormat,
    StoreFailure.
    """
    if place.content is Content.MEMORY:
        return verify_memory(place.path, advance)
    if place.content is Content.STORAGE:
        return verify_storage(open_storage(place.place), place.place, advance)
    if place.content is Content.SNAPSHOT:
        storage, snapshot = snapshot_at(place.place)
        return verify_snapshot(open_storage(storage), snapshot, storage, advance)
    # Reading dense checkpoints takes torch.
    from .dense import verify_iteration, verify_saves

    verify_dense = verify_iteration if place.content is Content.ITERATION else verify_saves
    return verify_dense(place.path, advance)


def size_bytes(place: Recognized) -> int:
    """About how many bytes `verify` will read, from the lengths of files."""
    if "://" in place.place:
        import fsspec  # type: ignore[import-untyped]

        from ...store.objects import remote

        with remote(place.place):
            files, root = fsspec.core.url_to_fs(place.place)
            return int(files.du(root))
    return sum(map(_length_bytes, place.path.rglob("*")))


def _length_bytes(path: Path) -> int:
    with suppress(FileNotFoundError):  # of a job that goes on
        return path.stat().st_size if path.is_file() else 0
    return 0
