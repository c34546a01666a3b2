"""A snapshot in ordinary memory of the process: where the memory tier has no room for one that a recovery needs."""

from __future__ import annotations

from ..store.reading import SnapshotReader
from ..types.layout import Manifest, Record


class HostBuffer(SnapshotReader):
    """Reads a snapshot from `data`, its whole segment."""

    def __init__(self, manifest: Manifest, where: str, data: memoryview) -> None:
        super().__init__(manifest, where)
        self._data = data.toreadonly()

    def _bytes(self, record: Record) -> memoryview:
        return self._data[record.offset : record.offset + record.nbytes]

    def _let_go(self) -> None:
        self._data = memoryview(b"")
