"""What the stores have in common: how a snapshot is written record by record, and read back verified.

Durable stores, on a disk and behind a URL, have one folder for each snapshot:

    <root>/iter_0000012-rank_00003-snapshot/
        segment.bin, or with a name of its own      the bytes of all records
        manifest.json                               which records these are, and their checksums

`filesystem.py` commits by renaming the folder and makes calls to the operating system, `objects.py` commits by writing
the manifest last and makes calls to fsspec.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING

from ..errors import StoreFailure, UnreadableCheckpoint, UsageError
from ..types.layout import MANIFEST, Facts, Field, Layout, Manifest, Record, SnapshotId
from .manifest import checksum, decode, encode, flat_bytes, verified

if TYPE_CHECKING:
    from collections.abc import Buffer
    from typing import Self


class SnapshotWriter(ABC):
    """The sequence of `ports.Writer`; how bytes are kept, committed and discarded is left to the stores."""

    def __init__(self, snapshot: SnapshotId, layout: Layout, segment: str) -> None:
        self._snapshot, self._layout, self._segment = snapshot, layout, segment
        self._missing = set(layout.places)
        self._ended = False

    @abstractmethod
    def _keep(self, field: Field, offset: int, data: memoryview) -> None:
        """Store the bytes of one record. Raises StoreFailure."""

    @abstractmethod
    def _checksums(self) -> tuple[str, ...]:
        """Checksums of all records in the layout's order; no record can be changed from here on."""

    @abstractmethod
    def _commit(self, manifest: bytes) -> None:
        """Make the snapshot exist, in one act at the end. Raises StoreFailure."""

    @abstractmethod
    def _discard(self) -> None:
        """Remove what was kept, as far as the storage lets it. Raises nothing; called once, never after success."""

    def put(self, key: str, data: Buffer) -> None:
        """As `ports.Writer.put`."""
        field, offset = self._claim(key)
        self._keep(field, offset, flat_bytes(data, field))
        self._missing.remove(key)

    def seal(self, facts: Facts, expect: Sequence[str] = ()) -> Manifest:
        """As `ports.Writer.seal`."""
        self._require_open()
        if self._missing:
            raise UsageError(
                f"{self._snapshot}: {len(self._missing)} records were never put, such as {min(self._missing)}"
            )
        manifest = Manifest(self._snapshot, facts, self._segment, self._layout, self._checksums())
        content = encode(manifest)
        try:
            if expect:
                self._compare(manifest, expect)
            self._commit(content)
        except (StoreFailure, UnreadableCheckpoint):
            self.abandon()
            raise
        self._ended = True
        return manifest

    def abandon(self) -> None:
        if not self._ended:
            self._ended = True
            self._discard()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.abandon()

    def _claim(self, key: str) -> tuple[Field, int]:
        self._require_open()
        if key not in self._missing:
            known = "was put already" if key in self._layout.places else "is not in the layout"
            raise UsageError(f"{self._snapshot}: record {key} {known}")
        return self._layout.places[key]

    def _require_open(self) -> None:
        if self._ended:
            raise UsageError(f"{self._snapshot} was sealed or abandoned; reserve it again to write it")

    def _compare(self, manifest: Manifest, expect: Sequence[str]) -> None:
        if len(expect) != len(manifest.checksums):
            raise UsageError(f"{self._snapshot}: {len(expect)} checksums for {len(manifest.checksums)} records")
        wrong = [record.key for record, sum_ in zip(manifest.records, expect, strict=True) if record.xxh3 != sum_]
        if wrong:
            raise UnreadableCheckpoint(
                f"{self._snapshot}: {len(wrong)} of {len(expect)} records arrived with other bytes than were sealed,"
                f" such as {wrong[0]}; send it again"
            )


class SnapshotReader(ABC):
    """The sequence of `ports.Reader`; where bytes come from is left to the stores."""

    def __init__(self, manifest: Manifest, where: str) -> None:
        self.manifest, self._where = manifest, where
        self._closed = False

    @abstractmethod
    def _bytes(self, record: Record) -> memoryview:
        """The record's bytes, read-only, fewer when the storage ends early. Raises UnreadableCheckpoint."""

    @abstractmethod
    def _let_go(self) -> None:
        """End the reader's own hold on the snapshot; called once."""

    def read(self, key: str) -> memoryview:
        self._require_open()
        record = self.manifest.by_key.get(key)
        if record is None:
            raise UsageError(f"{self._where}: there is no record {key}")
        return verified(self._bytes(record), record, self._where)

    def verify(self) -> tuple[Record, ...]:
        self._require_open()
        return tuple(record for record in self.manifest.records if not self._intact(record))

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._let_go()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _intact(self, record: Record) -> bool:
        try:
            verified(self._bytes(record), record, self._where)
        except UnreadableCheckpoint:
            return False
        return True

    def _require_open(self) -> None:
        if self._closed:
            raise UsageError(f"{self._where}: the reader of {self.manifest.snapshot} was closed")


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
        raise UnreadableCheckpoint(f"{error.filename or path}: {error.strerror or error}; use another copy") from error
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


class HostBuffer(SnapshotReader):
    """A snapshot that rank `owner` sends: received into `buffer`, sealed, then read. It ends with the recovery."""

    def __init__(self, owner: int, manifest: Manifest) -> None:
        super().__init__(manifest, f"{manifest.snapshot} as rank {owner} sent it")
        self.buffer = memoryview(bytearray(manifest.layout.nbytes))

    def seal(self) -> None:
        """Verify all bytes. Raises UnreadableCheckpoint."""
        if damaged := self.verify():
            raise UnreadableCheckpoint(f"{self.manifest.snapshot}: {damaged[0].key} arrived damaged")

    def abandon(self) -> None:
        """Give up what arrived."""
        self.close()

    def reader(self) -> HostBuffer:
        """A reader of what arrived."""
        return self

    def _bytes(self, record: Record) -> memoryview:
        return self.buffer[record.offset : record.offset + record.nbytes].toreadonly()

    def _let_go(self) -> None:
        self.buffer = memoryview(b"")
