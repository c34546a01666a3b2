"""What every writer of a snapshot does alike: take each record once, compare, make the manifest, commit."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING

from ..errors import StoreFailure, UnreadableCheckpoint, UsageError
from ..types.layout import Facts, Field, Layout, Manifest, SnapshotId
from .checksums import flat_bytes
from .manifest import encode

if TYPE_CHECKING:
    from typing import Self

    from typing_extensions import Buffer


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
        field, offset = self._claim(key)
        self._keep(field, offset, flat_bytes(data, field))
        self._missing.remove(key)

    def seal(self, facts: Facts, expect: Sequence[str] = ()) -> Manifest:
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
