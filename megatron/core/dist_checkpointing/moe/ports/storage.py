"""The port to stored snapshots: a `Store` gives `Writer`s and `Reader`s, in memory mapped ones.

Order of calls: `reserve`, put each record, `seal`; later `snapshots`, `open`, `read`; at last `free`.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Protocol

from ..types.layout import Facts, Layout, Listing, Manifest, Record, SnapshotId

if TYPE_CHECKING:
    from collections.abc import Buffer
    from typing import Self


class Writer(Protocol):
    """Stores one snapshot: put every record, then seal, or abandon at any time. Used by one thread at a time.

    Leaving a `with` block abandons what was not sealed. After an error the writer can only be abandoned.
    """

    def put(self, key: str, data: Buffer) -> None:
        """Store the bytes of one record, each record once.

        The records may come in any order, but the layout's is the cheapest. After the return `data` may change.

        Args:
            key: The record's key in the layout.
            data: Contiguous bytes, exactly as many as its field has.

        Raises:
            UsageError: The layout does not know such a key or size.
            StoreFailure: The storage refuses.
        """

    def seal(self, facts: Facts, expect: Sequence[str] = ()) -> Manifest:
        """Commit: from here on the snapshot exists, whole and immutable, for this and every other process.

        After a StoreFailure ask `snapshots`: the snapshot may be there, then it is whole, but might not survive a power
        cut.

        Args:
            facts: What the manifest says besides its records.
            expect: Checksums by which a copy is compared with its original, one per record in the layout's order;
                empty: none.

        Raises:
            UnreadableCheckpoint: The bytes differ from the expected checksums.
            UsageError: A record was not put, or its buffer is still referred to.
            StoreFailure: The storage refuses.
        """

    def abandon(self) -> None:
        """Give up; the snapshot never existed. Does nothing after `seal` or another `abandon`."""

    def __enter__(self) -> Self:
        """The writer itself."""

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """Abandon unless sealed."""


class MappedWriter(Writer, Protocol):
    """A writer into memory that is already there, so that tensors can be copied without a stop on the way."""

    def buffer(self, key: str) -> memoryview:
        """The writable bytes of record `key`, in place of `put`.

        All that refers to it (arrays, tensors) must be gone when `seal` is called: then the bytes are immutable.
        """

    def whole(self) -> memoryview:
        """The writable bytes of the whole segment, gaps between records included, in place of every `put`."""


class Reader(Protocol):
    """One sealed snapshot, pinned: its bytes stay as they are until the reader is closed and the last view of them is
    gone, even if the snapshot is freed meanwhile."""

    @property
    def manifest(self) -> Manifest:
        """The verified manifest."""

    def read(self, key: str) -> memoryview:
        """The bytes of record `key`, read-only, verified by their checksum at each call.

        Raises UnreadableCheckpoint naming the record when they changed or cannot be read, UsageError for an unknown
        key.
        """

    def verify(self) -> tuple[Record, ...]:
        """The records that cannot be read or whose checksum does not match; empty when all is well."""

    def close(self) -> None:
        """Release the snapshot; views that were read stay valid and keep their bytes pinned."""

    def __enter__(self) -> Self:
        """The reader itself."""

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """Close."""


class MappedReader(Reader, Protocol):
    """A reader of memory."""

    def raw(self) -> memoryview:
        """The whole segment, read-only and not verified: for sending it to a receiver that verifies."""


class ReadableStore(Protocol):
    """Snapshots that somebody keeps, for reading."""

    def snapshots(self, rank: int | None = None) -> Listing:
        """What is sealed and what is torn, of one rank or of all. Snapshots that are being written are in neither.

        Each manifest is read, so a rank that wants only its own asks for them. Raises StoreFailure.
        """

    def open(self, snapshot: SnapshotId) -> Reader:
        """A reader of a sealed snapshot. Raises UnreadableCheckpoint when it is missing, torn or damaged."""


class Store(ReadableStore, Protocol):
    """Keeps snapshots: `reserve`, put each record, `seal`; later `snapshots`, `open`, `read`; at last `free`.

    A snapshot is sealed by one rename (in object stores: by one object written last). Before it, a crash at any point
    leaves a torn snapshot that is listed, never read, and whose space is used again. After it, its bytes do not change
    until it is freed. The methods may be called from any thread.
    """

    def reserve(self, snapshot: SnapshotId, layout: Layout) -> Writer:
        """Begin to store a snapshot that the store does not hold.

        Args:
            snapshot: The snapshot, which gives it its name.
            layout: Its records and where they lie.

        Raises:
            UsageError: It is sealed or being written already, or can never fit.
            NoRoom: Space must be freed first.
            StoreFailure: The storage refuses.
        """

    def free(self, snapshot: SnapshotId) -> None:
        """Give up a snapshot, sealed or torn; nothing happens if there is none. Raises StoreFailure.

        Never waits: nobody can open it from here on, and its space is used again when the last reader has ended.
        """

    def ranks(self) -> frozenset[int]:
        """Of which there are snapshots, by their names alone: no manifest is read. Raises StoreFailure."""

    def sweep(self) -> None:
        """Remove what this store's owner left behind unsealed. Raises StoreFailure."""

    def close(self) -> None:
        """End the use of the store; what is sealed stays. Open readers stay valid."""


class MappedStore(Store, Protocol):
    """A store in memory."""

    def reserve(self, snapshot: SnapshotId, layout: Layout) -> MappedWriter:
        """As `Store.reserve`."""

    def open(self, snapshot: SnapshotId) -> MappedReader:
        """As `Store.open`."""

    def resize(self, segment_bytes: Sequence[int]) -> None:
        """Use segments of these sizes from here on: those that are there already stay, the rest is allocated.

        What is sealed or still read in other segments stays until it is freed. Where the segments suffice already,
        nothing happens.

        Args:
            segment_bytes: Bytes of each segment.

        Raises:
            NoRoom: The memory is too small: then all stays as it was.
            StoreFailure: The storage refuses.
        """


class OlderMemory:
    """What other layouts left in the memory of the nodes: nothing here, in `resharding.survivors` what there is."""

    def timelines(self) -> Collection[tuple[tuple[str, int], ...]]:
        """The attempts that led to it, whether it can be had in this layout or not."""
        return ()

    def strays(self) -> Sequence[ReadableStore]:
        """The slots of this node that no process of this start has, in whatever layout."""
        return ()

    def is_spared(self, snapshot: SnapshotId) -> bool:
        """Whether what lies in this rank's slot under this name belongs to it, and is neither used nor freed there."""
        return False

    def is_shown(self, snapshot: SnapshotId) -> bool:
        """Whether a snapshot in storage stands for one of it."""
        return False

    def restored(self, target: int) -> None:
        """All ranks have restored the state after iteration `target`."""
