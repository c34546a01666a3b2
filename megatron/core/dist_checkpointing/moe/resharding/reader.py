"""One snapshot of this rank, read from the records of another layout."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING

import numpy as np
from numpy.lib.stride_tricks import as_strided

from ..errors import UnreadableCheckpoint, UsageError
from ..policy.resharding import ElementRun, ReadPlan
from ..ports import Manifest, Reader, SnapshotId
from ..types.layout import DTYPE_BYTES, Field, Record
from .generation import Assembly

if TYPE_CHECKING:
    from typing import Self

    from numpy.typing import NDArray

_UNITS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64, 16: np.complex128}


class ReshardedReader:
    """The `ports.Reader` of a snapshot that is put together as it is read.

    Every record that is read is verified by its checksum before a byte of it is taken. Of memory that takes one record
    of the other layout beside the one that is made up; no record is read twice.

    Args:
        assembly: What is read, from where.
        open_: Opens a snapshot of the other layout.
        begun: Called before the first record is read.
    """

    def __init__(
        self, assembly: Assembly, open_: Callable[[SnapshotId], Reader], begun: Callable[[], None] = lambda: None
    ) -> None:
        self._assembly, self._open, self._begun = assembly, open_, begun
        self._readers: dict[int, Reader] = {}
        self._is_closed = False

    @property
    def manifest(self) -> Manifest:
        """What the snapshot looks like in this job's layout; its records have no checksums of their own."""
        return self._assembly.manifest

    def read(self, key: str) -> memoryview:
        """As `ports.Reader.read`."""
        if self._is_closed:
            raise UsageError(f"the reader of the {self.manifest.snapshot} was closed")
        record = self.manifest.by_key.get(key)
        if record is None:
            raise UsageError(f"the {self.manifest.snapshot}: there is no record {key}")
        self._begun()
        plans = self._assembly.reads[key]
        if len(plans) == 1 and _is_all(plans[0].runs, record.field):
            data = self._source(plans[0])
            if data.nbytes == record.nbytes:
                return data
        unit = _UNITS[DTYPE_BYTES[record.field.dtype]]
        made: NDArray[np.generic] = np.empty(record.nbytes // np.dtype(unit).itemsize, unit)
        for plan in plans:
            _copy(np.frombuffer(self._source(plan), unit), made, plan.runs)
        whole: memoryview = made.view(np.uint8).data
        return whole.toreadonly()

    def verify(self) -> tuple[Record, ...]:
        """As `ports.Reader.verify`: of the records as this job has them."""
        return tuple(record for record in self.manifest.records if not self._intact(record.key))

    def close(self) -> None:
        """As `ports.Reader.close`."""
        self._is_closed = True
        for reader in self._readers.values():
            reader.close()
        self._readers = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _source(self, plan: ReadPlan) -> memoryview:
        """The verified bytes of a record of the other layout. Raises UnreadableCheckpoint."""
        rank, snapshot = plan.record.rank, self.manifest.snapshot
        if rank not in self._readers:
            self._readers[rank] = self._open(SnapshotId(snapshot.iteration, rank, snapshot.kind))
        reader = self._readers[rank]
        found = reader.manifest.by_key.get(plan.record.key)
        if found is None or found.xxh3 != plan.record.xxh3:
            raise UnreadableCheckpoint(f"the {reader.manifest.snapshot} was replaced while it was read; start again")
        return reader.read(plan.record.key)

    def _intact(self, key: str) -> bool:
        try:
            self.read(key)
        except UnreadableCheckpoint:
            return False
        return True


def _is_all(runs: tuple[ElementRun, ...], field: Field) -> bool:
    return runs == (ElementRun(0, 0, field.nbytes // DTYPE_BYTES[field.dtype]),)


def _copy(source: NDArray[np.generic], target: NDArray[np.generic], runs: tuple[ElementRun, ...]) -> None:
    for run in runs:
        pairs = ((source, run.source, run.source_step), (target, run.target, run.target_step))
        last = max(at + (run.count - 1) * step + run.length - array.size for array, at, step in pairs)
        if last > 0:  # a view would reach beyond the memory
            raise UnreadableCheckpoint(f"a record has {last} elements fewer than its key says")
        one, other = (
            as_strided(array[at:], (run.count, run.length), (step * array.itemsize, array.itemsize))
            for array, at, step in pairs
        )
        other[:] = one
