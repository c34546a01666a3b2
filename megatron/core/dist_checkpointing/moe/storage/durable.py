"""What the stores of durable snapshots share, on a disk and behind a URL: a folder of one root for each snapshot.

    <root>/iter_0000012-rank_00003-snapshot/
        segment.bin, or with a name of its own      the bytes of all records
        manifest.json                               which records these are, and their checksums

`filesystem.py` commits by renaming the folder and makes calls to the operating system, `objects.py` commits by writing
the manifest last and makes calls to fsspec.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import UnreadableCheckpoint
from ..types.layout import MANIFEST, Field, Layout, Manifest, SnapshotId
from .checksums import checksum
from .manifest import decode
from .writing import SnapshotWriter

if TYPE_CHECKING:
    from .filesystem import FilesystemStore
    from .objects import ObjectStore


def open_durable(place: str, rank: int) -> FilesystemStore | ObjectStore:
    """The store in a folder, which is created if it is missing, or behind a URL that fsspec knows.

    Raises UsageError for a place that cannot be used.
    """
    from .filesystem import FilesystemStore  # here, because both use what is below
    from .objects import ObjectStore

    return ObjectStore(place, rank) if "://" in place else FilesystemStore(Path(place), rank)


def sealed_manifest(
    snapshot: SnapshotId, folder: str, read: Callable[[str], bytes], size: Callable[[str], int]
) -> Manifest:
    """The verified manifest of a sealed snapshot whose segment is there and as long as it should be.

    Args:
        snapshot: What the manifest must say that it is.
        folder: The snapshot's folder.
        read: Gives the content of a small file, or raises OSError.
        size: Gives the bytes of a file, or raises OSError.

    Raises:
        UnreadableCheckpoint: It is missing, torn or damaged; from the OSError where there was one.
    """
    path = f"{folder}/{MANIFEST}"
    try:
        manifest = decode(read(path), path)
        if manifest.snapshot != snapshot:  # first of all: its segment would be sought in the wrong folder
            raise UnreadableCheckpoint(f"{path}: belongs to the {manifest.snapshot}; it was moved")
        found_bytes = size(f"{folder}/{manifest.segment}")
    except FileNotFoundError as error:
        missing = error.filename or error
        raise UnreadableCheckpoint(
            f"{folder}: {missing} is missing: it was never sealed, or was freed; use another copy"
        ) from error
    except OSError as error:
        raise UnreadableCheckpoint(f"{path}: {error.strerror or error}; use another copy") from error
    if found_bytes != manifest.layout.nbytes:
        raise UnreadableCheckpoint(
            f"{folder}/{manifest.segment}: has {found_bytes} of {manifest.layout.nbytes} bytes: it was truncated or"
            " extended; use another copy"
        )
    return manifest


class DurableWriter(SnapshotWriter):
    """Writes one segment; checksums are those of the bytes as they were given, not as the device shows them later."""

    def __init__(self, snapshot: SnapshotId, layout: Layout, segment: str) -> None:
        super().__init__(snapshot, layout, segment)
        self._sums: dict[str, str] = {}

    @abstractmethod
    def _write(self, field: Field, offset: int, data: memoryview) -> None:
        """Store the bytes of one record. Raises StoreFailure."""

    def _keep(self, field: Field, offset: int, data: memoryview) -> None:
        self._sums[field.key] = checksum(data)
        self._write(field, offset, data)

    def _checksums(self) -> tuple[str, ...]:
        return tuple(self._sums[field.key] for field in self._layout.fields)
