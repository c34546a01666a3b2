"""Copies from memory to storage as values: made in training, carried out there, or by a process that outlives it.

No torch: the process that finishes what a trainer had begun starts with this in a fraction of a second.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ..errors import NewerFormat, OtherSecret, StoreFailure, UnreadableCheckpoint
from ..ports import Facts, Json, Layout, Manifest, Reader, SnapshotId, Store
from ..storage.manifest import decode, encode

_SEGMENT = "segment"
RETRY_PAUSES_S = (1.0, 4.0)
"""How long before each further attempt."""


@dataclass(frozen=True)
class CopyOrder:
    """One snapshot that storage is to have.

    Attributes:
        manifest: What it will say of itself, with the checksums of the records as they were sealed in memory.
        sources: The snapshots in memory that have these records; the first one that has a record gives it.
    """

    manifest: Manifest
    sources: tuple[SnapshotId, ...]

    @classmethod
    def of(cls, target: SnapshotId, facts: Facts, layout: Layout, sources: Sequence[Reader]) -> CopyOrder:
        """The order for records of these readers.

        Args:
            target: The name of the snapshot in storage.
            facts: What its manifest will say.
            layout: Its records.
            sources: Readers of snapshots in memory; the first one that has a record gives it.

        Raises:
            UnreadableCheckpoint: None of them has one of the records.
        """
        # The checksums that memory was sealed with, not those of the bytes read for the copy: so `carry_out` finds what
        # changed in between.
        sums = []
        for field in layout.fields:
            source = _source(sources, field.key)
            if source is None:
                raise UnreadableCheckpoint(f"{target}: record {field.key} is not in memory; it is not persisted")
            sums.append(source.manifest.by_key[field.key].xxh3)
        manifest = Manifest(target, facts, _SEGMENT, layout, tuple(sums))
        return cls(manifest, tuple(reader.manifest.snapshot for reader in sources))

    def to_data(self) -> dict[str, Json]:
        """As JSON."""
        sources: list[Json] = [source.name for source in self.sources]
        return {"manifest": encode(self.manifest).decode("ascii"), "sources": sources}


def orders_from(line: bytes) -> tuple[CopyOrder, ...]:
    """The orders in a line that `line_of` made. Raises UnreadableCheckpoint for anything else."""
    try:
        found = [
            (decode(one["manifest"].encode("ascii"), "an order"), tuple(map(SnapshotId.parse, one["sources"])))
            for one in json.loads(line)
        ]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise UnreadableCheckpoint(f"an order cannot be read: {error!r:.120}") from error
    return tuple(CopyOrder(manifest, tuple(one for one in sources if one)) for manifest, sources in found)


def line_of(orders: Sequence[CopyOrder]) -> bytes:
    """One line of JSON; no orders are a line too."""
    return json.dumps([order.to_data() for order in orders], separators=(",", ":")).encode("ascii") + b"\n"


def carry_out(
    order: CopyOrder, readers: Sequence[Reader], storage: Store, check: Callable[[], None] = lambda: None
) -> int:
    """Write the snapshot, unless storage has it already, and seal it; the bytes that were written.

    Each record is verified as it is read from memory, and all of them are compared with the order before the snapshot
    is published by the one act of its store: what is published is what was sealed.

    Args:
        order: What storage is to have.
        readers: Of the order's sources.
        storage: Gets the snapshot.
        check: Is called before each record, and raises where the copy is to be given up.

    Raises:
        UnreadableCheckpoint: Memory does not have what was ordered any more.
        NewerFormat, OtherSecret: A later version, or a job with a secret where this one has none or the other way
            around, wrote a snapshot of this name, which is left as it is.
        StoreFailure: Storage refuses.
    """
    manifest = order.manifest
    if is_stored(manifest, storage):
        return 0
    # What has this name then is torn, damaged or of another attempt; a store takes no name twice.
    storage.free(manifest.snapshot)
    with storage.reserve(manifest.snapshot, manifest.layout) as writer:
        for field in manifest.layout.fields:
            check()
            source = _source(readers, field.key)
            if source is None:
                raise UnreadableCheckpoint(f"{manifest.snapshot}: record {field.key} is not in memory any more")
            writer.put(field.key, source.read(field.key))
        check()  # a last time: `seal` publishes it
        writer.seal(manifest.facts, expect=manifest.checksums)
    return manifest.layout.nbytes


def retried[Result](
    write: Callable[[], Result], sleep: Callable[[float], None], note: Callable[[Exception], None] = lambda _: None
) -> Result:
    """What `write` returns; it is called again after a pause where storage refuses. Raises what the last call does.

    Args:
        write: Leaves what it has written before.
        sleep: Waits for so many seconds.
        note: Is called with each error after which it is.
    """
    for pause_s in RETRY_PAUSES_S:
        try:
            return write()
        except StoreFailure as error:  # alone may pass by itself: a record that memory lacks is lacking again
            note(error)
        sleep(pause_s)
    return write()


def is_stored(wanted: Manifest, storage: Store) -> bool:
    """Whether storage has this snapshot of this very attempt of the job.

    Args:
        wanted: The manifest that it would have.
        storage: Is looked into.

    Raises:
        NewerFormat, OtherSecret: As `carry_out`.
    """
    try:
        with storage.open(wanted.snapshot) as reader:
            facts = reader.manifest.facts
    except (NewerFormat, OtherSecret):
        raise
    except UnreadableCheckpoint:
        return False
    # The plan alone does not tell attempts apart: an earlier one may have planned the same for this iteration.
    same_timeline = facts.scalars.get("timeline") == wanted.facts.scalars["timeline"]
    return same_timeline and facts.plan_digest == wanted.facts.plan_digest


def _source(readers: Sequence[Reader], key: str) -> Reader | None:
    return next((reader for reader in readers if key in reader.manifest.by_key), None)
