"""Snapshots in an object store, or behind any other URL that fsspec knows.

    <url>/iter_0000012-rank_00003-snapshot/segment-00003-5f0c8a1e.bin     the bytes, by rank 3
    <url>/iter_0000012-rank_00003-snapshot/manifest.json                  written last: now it is sealed

An object appears whole or not at all, so the manifest's appearance is the one act that commits. Segments have names
of their own, so that a writer which was given up for dead cannot change what another has sealed.
"""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Any

import fsspec  # type: ignore[import-untyped]

from ..errors import MoECheckpointError, StoreFailure, UnreadableCheckpoint, UsageError, may_pass
from ..types.layout import MANIFEST, Field, Layout, Listing, Manifest, Record, SnapshotId, Torn
from .base import DurableWriter, SnapshotReader, sealed_manifest
from .filesystem import FilesystemStore
from .manifest import MOST_BYTES
from .system import failing_as


@contextmanager
def foreign(failure: str) -> Iterator[None]:
    """Turns whatever a backend of fsspec raises into StoreFailure, OSError apart: each has errors of its own."""
    try:
        yield
    except (MoECheckpointError, OSError):
        raise
    except Exception as error:
        raise StoreFailure(f"{failure}: {type(error).__name__}: {error}") from error


def remote(url: str) -> AbstractContextManager[None]:
    """As `foreign`, for what is read."""
    return foreign(f"{url} cannot be read")


@contextmanager
def acting(what: str) -> Iterator[None]:
    """As `failing_as`, for whatever a backend raises; `what` completes "cannot ..."."""
    with failing_as(what), foreign(f"cannot {what}, but it is safe to try again"):
        yield


def located(url: str) -> tuple[Any, str]:
    """The file system of a URL, and the path there. Raises UsageError for one that fsspec does not know."""
    with remote(url):
        try:
            files, path = fsspec.core.url_to_fs(url)
        except (ValueError, ImportError) as error:
            raise UsageError(f"{url} cannot be used: {error}; install the fsspec package for it") from error
    return files, path


class ObjectStore:
    """Durable snapshots below `url`, such as "s3://bucket/run"; `rank` is the one that writes here.

    What other ranks are writing just now cannot be told from what they left torn, and is listed as torn; `sweep`
    removes only what this rank left. Freeing a snapshot makes its open readers fail with UnreadableCheckpoint, because
    objects cannot be pinned. Raises UsageError for a URL that fsspec does not know.
    """

    def __init__(self, url: str, rank: int) -> None:
        self.files, self.root = located(url)
        self.rank = rank
        self._mutex = threading.Lock()  # `reserve` must look and claim in one act
        self._writing: dict[str, SnapshotId] = {}

    def reserve(self, snapshot: SnapshotId, layout: Layout) -> ObjectWriter:
        """As `ports.Store.reserve`."""
        folder, segment = self._folder(snapshot), f"segment-{self.rank:05d}-{os.urandom(4).hex()}.bin"
        with self._mutex, acting(f"reserve {layout.nbytes} bytes in {folder}"):
            if snapshot in tuple(self._writing.values()):
                raise UsageError(f"the {snapshot} is being written already")
            if MANIFEST in self._names(folder):
                raise UsageError(f"the {snapshot} is in {self.root} already: free it before it is written again")
            self.files.makedirs(folder, exist_ok=True)
            stream = self.files.open(f"{folder}/{segment}", "wb")
            self._writing[segment] = snapshot
        return ObjectWriter(self, snapshot, layout, segment, stream)

    def snapshots(self, rank: int | None = None) -> Listing:
        sealed, torn = [], []
        with failing_as(f"list {self.root}"), remote(self.root):
            for snapshot in filter(None, map(SnapshotId.parse, self._names(self.root))):
                if rank not in (None, snapshot.rank):
                    continue
                try:
                    self._manifest(snapshot)
                    sealed.append(snapshot)
                except UnreadableCheckpoint as error:
                    if snapshot in tuple(self._writing.values()):  # a copy: writers come and continue other threads
                        continue
                    if names := self._names(self._folder(snapshot)):
                        # The manifest is the last to appear and the first to go.
                        is_unsealed = MANIFEST not in names
                        torn.append(
                            Torn(snapshot, self._folder(snapshot), str(error), is_unsealed, may_pass=may_pass(error))
                        )
        return Listing(tuple(sorted(sealed)), tuple(sorted(torn, key=lambda item: item.snapshot)))

    def ranks(self) -> frozenset[int]:
        with failing_as(f"list {self.root}"), remote(self.root):
            return SnapshotId.ranks_in(self._names(self.root))

    def open(self, snapshot: SnapshotId) -> ObjectReader:
        with remote(self._folder(snapshot)):
            manifest = self._manifest(snapshot)
        return ObjectReader(manifest, f"{self._folder(snapshot)}/{manifest.segment}", self.files)

    def sealed_s(self, snapshot: SnapshotId) -> float:
        """When a snapshot was sealed, in seconds since 1970. Raises OSError, StoreFailure."""
        with remote(self.root):
            return float(self.files.modified(f"{self._folder(snapshot)}/{MANIFEST}").timestamp())

    def free(self, snapshot: SnapshotId) -> None:
        """As `ports.Store.free`: the manifest goes first."""
        folder = self._folder(snapshot)
        with acting(f"free {folder}"):
            names = self._names(folder)
            for name in sorted(names, key=lambda name: name != MANIFEST):
                if name not in self._writing:
                    self._remove(f"{folder}/{name}")
            self._remove_empty(folder)

    def sweep(self) -> None:
        with acting(f"remove torn snapshots in {self.root}"):
            for snapshot in filter(None, map(SnapshotId.parse, self._names(self.root))):
                folder = self._folder(snapshot)
                names = self._names(folder)
                # The rank in a segment's name tells mine from those of ranks that may be writing just now.
                mine = f"segment-{self.rank:05d}-"
                left = [name for name in names if name.startswith(mine) and name not in self._writing]
                if MANIFEST not in names and left:
                    for name in left:
                        self._remove(f"{folder}/{name}")
                    self._remove_empty(folder)

    def close(self) -> None:
        """As `ports.Store.close`; there is nothing to release."""

    def publish(self, snapshot: SnapshotId, segment: str, manifest: bytes) -> None:
        """For writers: the one object that commits.

        Args:
            snapshot: The snapshot.
            segment: The name of the object with its bytes.
            manifest: The content of the manifest.

        Raises:
            FileExistsError: Another one is there: this writer was given up for dead, and comes late.
        """
        path = f"{self._folder(snapshot)}/{MANIFEST}"
        self._require_own(path, manifest)  # a put of fsspec's own takes an error of its look for none there
        try:
            self.files.pipe_file(path, manifest, mode="create")
        except Exception:  # it is there, or this backend, or its version, has no such put and says so in its own way
            self._require_own(path, manifest)
            self.files.pipe_file(path, manifest)
        self._writing.pop(segment, None)

    def discard(self, snapshot: SnapshotId, segment: str) -> None:
        """For writers: remove what was written, as far as the store lets it.

        Args:
            snapshot: The snapshot.
            segment: The name of the object with its bytes.
        """
        folder = self._folder(snapshot)
        # Where that fails it stays torn, and is swept another time.
        with suppress(StoreFailure), acting(f"remove {folder}/{segment}"):
            self._remove(f"{folder}/{segment}")
            self._remove_empty(folder)
        self._writing.pop(segment, None)

    def _folder(self, snapshot: SnapshotId) -> str:
        return f"{self.root.rstrip('/')}/{snapshot.name}"

    def _require_own(self, path: str, manifest: bytes) -> None:
        self.files.invalidate_cache()
        with suppress(FileNotFoundError):  # `exists` of fsspec says no for any error
            if self._content(path) != manifest:
                raise FileExistsError(errno.EEXIST, "another process has sealed this snapshot meanwhile", path)

    def _names(self, folder: str) -> list[str]:
        """Names of the objects and folders in a folder, none when it does not exist."""
        self.files.invalidate_cache()
        try:
            found = self.files.ls(folder, detail=False)
        except FileNotFoundError:
            return []
        return sorted(str(path).rstrip("/").rpartition("/")[2] for path in found)

    def _remove(self, path: str) -> None:
        try:
            self.files.rm_file(path)
        except FileNotFoundError:
            return  # it went with another attempt

    def _remove_empty(self, folder: str) -> None:
        """Real folders stay when their last object goes; in object stores there are none."""
        if not self._names(folder) and self.files.exists(folder):
            self.files.rmdir(folder)

    def _manifest(self, snapshot: SnapshotId) -> Manifest:
        return sealed_manifest(snapshot, self._folder(snapshot), self._content, self._length)

    def _content(self, path: str) -> bytes:
        """Of a small object; what is longer than a manifest may be is not read."""
        length = self._length(path)
        if length > MOST_BYTES:
            raise OSError(errno.EFBIG, f"it has {length} bytes, more than {MOST_BYTES}", path)
        return bytes(self.files.cat_file(path))

    def _length(self, path: str) -> int:
        about = self.files.info(path)
        if about["type"] != "file" or about.get("islink"):
            raise OSError(errno.EINVAL, "it is no regular file", path)
        return int(about["size"])


class ObjectWriter(DurableWriter):
    """Streams one segment; records that come before their turn are kept in memory until it comes."""

    def __init__(self, store: ObjectStore, snapshot: SnapshotId, layout: Layout, segment: str, stream: Any) -> None:
        super().__init__(snapshot, layout, segment)
        self._store, self._stream = store, stream
        self._early: dict[str, bytes] = {}
        self._turn = iter(layout.fields)
        self._next = next(self._turn, None)
        self._written_bytes = 0

    def _write(self, field: Field, offset: int, data: memoryview) -> None:
        if field is not self._next:
            self._early[field.key] = bytes(data)
            return
        with acting(f"write record {field.key} to {self._store.root}"):
            self._stream_out(data, offset)
            while self._next and self._next.key in self._early:
                data = memoryview(self._early.pop(self._next.key))
                self._stream_out(data, self._layout.places[self._next.key][1])

    def _stream_out(self, data: memoryview, offset: int) -> None:
        self._stream.write(bytes(offset - self._written_bytes))
        self._stream.write(data)
        self._written_bytes = offset + len(data)
        self._next = next(self._turn, None)

    def _commit(self, manifest: bytes) -> None:
        with acting(f"seal the {self._snapshot} in {self._store.root}"):
            self._stream.write(bytes(self._layout.nbytes - self._written_bytes))
            # Closed first: only then the segment's object is there, and the manifest must not name one that is not.
            self._stream.close()
            self._store.publish(self._snapshot, self._segment, manifest)

    def _discard(self) -> None:
        for end in (getattr(self._stream, "discard", self._stream.close), self._stream.close):
            # An upload that cannot be ended properly is unsealed all the same, whatever its backend raises.
            with suppress(Exception):
                end()
        self._store.discard(self._snapshot, self._segment)


class ObjectReader(SnapshotReader):
    """Reads records by ranges of the segment's object, each into memory of its own."""

    def __init__(self, manifest: Manifest, where: str, files: Any) -> None:
        super().__init__(manifest, where)
        self._files = files

    def _bytes(self, record: Record) -> memoryview:
        if not record.nbytes:
            return memoryview(b"")
        try:
            with remote(self._where):
                found = self._files.cat_file(self._where, record.offset, record.offset + record.nbytes)
        except OSError as error:
            raise UnreadableCheckpoint(f"{self._where}: record {record.key}: {error}; use another copy") from error
        return memoryview(found)

    def _let_go(self) -> None:
        self._files = None


def open_durable(place: str, rank: int) -> FilesystemStore | ObjectStore:
    """The store in a folder, which is created if it is missing, or behind a URL that fsspec knows.

    Args:
        place: A folder, or a URL.
        rank: The rank whose snapshots are stored.

    Raises:
        UsageError: A place that cannot be used.
    """
    return ObjectStore(place, rank) if "://" in place else FilesystemStore(Path(place), rank)
