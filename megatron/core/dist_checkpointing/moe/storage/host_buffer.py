"""A snapshot in ordinary memory of the process: where the memory tier has no room for one that a recovery needs."""

from __future__ import annotations

from ..errors import UnreadableCheckpoint
from ..types.layout import Manifest, Record
from .reading import SnapshotReader


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
