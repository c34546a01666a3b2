"""What verifying snapshots in storage and in memory has in common: their records, and whether windows are whole."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol

from ...errors import UnreadableCheckpoint
from ...ports import Manifest, Reader, Record, SnapshotId
from ...store.integrity import Advance
from ..windows import State, Stored
from .findings import Finding

BATCH_BYTES = 1 << 26
"""So many bytes are read before a snapshot is let go of: the job that owns its memory may need that meanwhile."""


class Readable(Protocol):
    """Where snapshots can be opened."""

    def open(self, snapshot: SnapshotId) -> Reader:
        """As `ports.Store.open`."""


def stored_as(manifest: Manifest) -> Stored:
    """A snapshot as `windows` sees it."""
    return Stored(manifest.snapshot, manifest.facts, manifest.layout.nbytes)


def verify_records(store: Readable, manifest: Manifest, path: str, advance: Advance) -> tuple[Finding, ...]:
    """The records of a snapshot that cannot be read or have changed; `path` says where it is.

    Raises UnreadableCheckpoint if it cannot be opened any more.
    """
    found: list[Finding] = []
    for batch in batches(manifest.records, BATCH_BYTES):
        with store.open(manifest.snapshot) as reader:
            for record in batch:
                try:
                    reader.read(record.key)
                except UnreadableCheckpoint as error:
                    found.append(Finding(path, str(error), record.key, f"checksum {record.xxh3}"))
                advance(record.nbytes)
    return tuple(found)


def batches(records: Iterable[Record], least_bytes: int) -> Iterator[list[Record]]:
    """Records in their order, in lists of as many as have `least_bytes`; the last may have fewer."""
    batch: list[Record] = []
    nbytes = 0
    for record in records:
        batch.append(record)
        nbytes += record.nbytes
        if nbytes >= least_bytes:
            yield batch
            batch, nbytes = [], 0
    if batch:
        yield batch


def lacks(state: State) -> str:
    """What misses in a state that is not whole."""
    iteration, rank = state.lacking[0]
    more = f" and {len(state.lacking) - 1} more" if len(state.lacking) > 1 else ""
    return (
        f"the state of {state} is not whole: the snapshot of rank {rank} after iteration {iteration}{more} is missing"
    )


def lone_pieces(snapshots: Sequence[Stored]) -> Iterator[tuple[Stored, int]]:
    """Snapshots without the trainer's state that not all ranks have, each once, with the first rank that lacks it."""
    ranks: dict[tuple[str, int, str, str], dict[int, Stored]] = {}
    for one in snapshots:
        if not one.leads:
            key = one.facts.job, one.snapshot.iteration, one.snapshot.kind, one.facts.plan_digest
            ranks.setdefault(key, {})[one.snapshot.rank] = one
    for there in ranks.values():
        first = next(iter(there.values()))
        lacking = sorted(set(range(first.world_size)) - there.keys())
        if lacking:
            yield first, lacking[0]
