"""What every reader of a snapshot does alike."""

from __future__ import annotations

from abc import ABC, abstractmethod
from types import TracebackType
from typing import TYPE_CHECKING

from ..errors import UnreadableCheckpoint, UsageError
from ..types.layout import Manifest, Record
from .checksums import verified

if TYPE_CHECKING:
    from typing import Self


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
