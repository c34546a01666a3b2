"""Writing one snapshot into a preallocated segment of the memory tier."""

from __future__ import annotations

import mmap
import weakref
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ..errors import UsageError
from ..types.layout import Field, Layout, SnapshotId
from .checksums import checksum
from .slot_reader import SEALED, WRITING, SlotEntry
from .system import FileLock, failing_as, sync_directory, write_synced
from .writing import SnapshotWriter

if TYPE_CHECKING:
    from .memory import MemoryStore


@dataclass(eq=False)
class MappedSegment:
    """A preallocated file, mapped once; `lent` are the buffers that a writer has handed out."""

    path: Path
    memory: mmap.mmap
    lent: list[weakref.ref[np.ndarray]] = field(default_factory=list)

    @property
    def nbytes(self) -> int:
        """Bytes of the file."""
        return len(self.memory)

    @property
    def is_lent(self) -> bool:
        """Whether anything still refers to a buffer: an array, a tensor or a view that was made from it."""
        return any(buffer() is not None for buffer in self.lent)


class MemoryWriter(SnapshotWriter):
    """Writes one segment in place; checksums are computed when the snapshot is sealed, from the copied bytes."""

    def __init__(
        self, store: MemoryStore, snapshot: SnapshotId, layout: Layout, segment: MappedSegment, lock: FileLock
    ) -> None:
        super().__init__(snapshot, layout, segment.path.name)
        self._store, self._target, self._lock = store, segment, lock
        self._target.lent.clear()
        self._entry = SlotEntry(segment.path.stem, snapshot, WRITING)

    def buffer(self, key: str) -> memoryview:
        field, offset = self._claim(key)
        self._missing.remove(key)
        return self._lend(offset, field.nbytes)

    def whole(self) -> memoryview:
        self._require_open()
        self._missing.clear()
        return self._lend(0, self._layout.nbytes)

    def _lend(self, offset: int, nbytes: int) -> memoryview:
        if not nbytes:
            return memoryview(bytearray())
        lent = np.frombuffer(self._target.memory, np.uint8, nbytes, offset)
        # An array and not the view of it: every view and tensor made from the view keeps the array, but not the view.
        self._target.lent.append(weakref.ref(lent))
        return memoryview(lent)

    def _keep(self, field: Field, offset: int, data: memoryview) -> None:
        if data:
            self._store.system.copy(memoryview(self._target.memory)[offset : offset + field.nbytes], data)

    def _checksums(self) -> tuple[str, ...]:
        if self._target.is_lent:
            raise UsageError(
                f"{self._snapshot}: a buffer of it is still referred to, so its bytes could change after they are"
                " sealed: delete the tensors and views that were made from it"
            )
        view = memoryview(self._target.memory)
        places = zip(self._layout.fields, self._layout.offsets, strict=True)
        return tuple(checksum(view[offset : offset + field.nbytes]) for field, offset in places)

    def _commit(self, manifest: bytes) -> None:
        system, directory = self._store.system, self._store.directory
        sealed = directory / SlotEntry(self._entry.segment, self._snapshot, SEALED).name
        with failing_as(f"seal the {self._snapshot} in {directory}"):
            # The marker file becomes the manifest: written whole first, then renamed, so that no reader meets a part
            # of it. The lock on the segment is still exclusive: who opens the snapshot now waits for `_end`.
            write_synced(system, directory / self._entry.name, manifest)
            system.rename(directory / self._entry.name, sealed)
            sync_directory(system, directory)
        self._end()

    def _discard(self) -> None:
        # Where the marker stays, it is listed as torn, and its segment is used again all the same.
        with suppress(OSError):
            self._store.system.unlink(self._store.directory / self._entry.name)
        self._end()

    def _end(self) -> None:
        self._lock.release()
        self._store.end_writing(self._target.path)
