"""Reading the records of snapshots in storage and in memory, without holding on to memory that a job needs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from megatron.core.dist_checkpointing.moe.errors import UnreadableCheckpoint
from megatron.core.dist_checkpointing.moe.ports import Manifest, Record, Store
from megatron.core.dist_checkpointing.moe.storage.slot_reader import SlotReader
from moe_ckpt.dense.integrity import Advance

from .location import Finding

BATCH_BYTES = 1 << 26
"""So many bytes are read before a snapshot is release: the job that owns its memory may need that meanwhile."""


def verify_records(store: Store | SlotReader, manifest: Manifest, path: str, advance: Advance) -> tuple[Finding, ...]:
    """The records of a snapshot that cannot be read or have changed.

    Raises UnreadableCheckpoint if it cannot be opened any more.

    Args:
        store: Opens the snapshot.
        manifest: The snapshot's manifest, with the checksum of each record.
        path: Name of the snapshot in findings.
        advance: Called with the bytes of each record.
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
    """Records in their order, in lists; the last list may have fewer bytes than the others.

    Args:
        records: The records.
        least_bytes: Bytes at which a list is complete.
    """
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
