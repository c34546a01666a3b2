"""What the subsystem needs from its surroundings, where there is more than one implementation.

Rooms that do not import each other meet here: the values that cross a port are re-exported beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from .errors import MoECheckpointError
from .store.layout import (
    DTYPE_BYTES,
    Facts,
    Field,
    Json,
    Layout,
    Listing,
    Manifest,
    Record,
    SnapshotId,
    Torn,
)
from .types import Direction, OperatorId, Part, SnapshotPlan, StepJournal

if TYPE_CHECKING:
    from typing import Self

    from typing_extensions import Buffer

Value = TypeVar("Value", covariant=True)

__all__ = [
    "DTYPE_BYTES",
    "RANDOM",
    "BoundarySink",
    "BoundarySource",
    "Capturer",
    "Clock",
    "Execution",
    "Facts",
    "Field",
    "Json",
    "Lane",
    "Layout",
    "Listing",
    "Manifest",
    "MappedReader",
    "MappedStore",
    "MappedWriter",
    "NoRoom",
    "PeerLost",
    "Reader",
    "Record",
    "Restorer",
    "SnapshotId",
    "Store",
    "StoreFailure",
    "Task",
    "Torn",
    "TrainerState",
    "Transfer",
    "Transport",
    "Writer",
]


class StoreFailure(MoECheckpointError):
    """A store could not take, show or give up a snapshot now; what it had sealed before is untouched."""


class NoRoom(StoreFailure):
    """No space for another snapshot until one is freed, or until the last reader of a freed one has ended."""


class Writer(Protocol):
    """Stores one snapshot: put every record, then seal, or abandon at any time. Used by one thread at a time.

    Leaving a `with` block abandons what was not sealed. After an error the writer can only be abandoned.
    """

    def put(self, key: str, data: Buffer) -> None:
        """Store the bytes of record `key`: contiguous, exactly as many as its field has, each record once.

        The records may come in any order, but the layout's is the cheapest. After the return `data` may change.
        Raises UsageError for a key or a size that the layout does not know, StoreFailure when the storage refuses.
        """

    def seal(self, facts: Facts, expect: Sequence[str] = ()) -> Manifest:
        """Commit: from here on the snapshot exists, whole and immutable, for this and every other process.

        `expect` are checksums by which a copy is compared with its original, one per record in the layout's order.
        Raises UnreadableCheckpoint when the bytes differ from them, UsageError when a record was not put or its
        buffer is still referred to, StoreFailure when the storage refuses. After a StoreFailure ask `snapshots`: the
        snapshot may be there, then it is whole, but might not survive a power cut.
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
        """Let go of the snapshot; views that were read stay valid and keep their bytes pinned."""

    def __enter__(self) -> Self:
        """The reader itself."""

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """Close."""


class MappedReader(Reader, Protocol):
    """A reader of memory."""

    def raw(self) -> memoryview:
        """The whole segment, read-only and not verified: for sending it to a receiver that verifies."""


class Store(Protocol):
    """Keeps snapshots: `reserve`, put each record, `seal`; later `snapshots`, `open`, `read`; at last `free`.

    A snapshot is sealed by one rename (in object stores: by one object written last). Before it, a crash at any point
    leaves a torn snapshot that is listed, never read, and whose space is used again. After it, its bytes do not change
    until it is freed. The methods may be called from any thread.
    """

    def reserve(self, snapshot: SnapshotId, layout: Layout) -> Writer:
        """Begin to store a snapshot that the store does not hold.

        Raises UsageError when it is sealed or being written already, or can never fit; NoRoom when space must be
        freed first; StoreFailure when the storage refuses.
        """

    def snapshots(self) -> Listing:
        """What is sealed and what is torn. Snapshots that are being written are in neither. Raises StoreFailure."""

    def open(self, snapshot: SnapshotId) -> Reader:
        """A reader of a sealed snapshot. Raises UnreadableCheckpoint when it is missing, torn or damaged."""

    def free(self, snapshot: SnapshotId) -> None:
        """Give up a snapshot, sealed or torn; nothing happens if there is none. Raises StoreFailure.

        Never waits: nobody can open it from here on, and its space is used again when the last reader has ended.
        """

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

    def resize(self, segment_bytes: Sequence[int], before: Callable[[], None] = lambda: None) -> None:
        """Use segments of these sizes from here on: those that are there already stay, the rest is allocated.

        before: called first where segments may go. What is sealed or still read in other segments stays until it is
        freed. Where the segments suffice already, nothing happens. Raises NoRoom when the memory is too small: then all
        stays as it was; StoreFailure.
        """


class PeerLost(MoECheckpointError):
    """Another rank did not answer in time, or its connection broke; the sentence names it and what was waited for."""


class Transfer(Protocol):
    """Bytes on their way to or from another rank; the buffer must stay as it is until `wait` has returned."""

    def wait(self) -> None:
        """Return when all bytes were sent or received. Raises PeerLost, at the latest after the transport's timeout."""


class Transport(Protocol):
    """Bytes and small numbers between the ranks of a job, beside the collectives of training.

    Between two ranks messages arrive whole and in the order of their sending; the receiver knows their sizes. Used by
    one thread at a time. After a PeerLost all messages under way are void, and `renew` must be called before the next.
    """

    @property
    def rank(self) -> int:
        """This rank."""

    @property
    def world_size(self) -> int:
        """Number of ranks."""

    def send(self, to: int, data: Buffer) -> Transfer:
        """Begin to send contiguous bytes; nothing is copied."""

    def receive(self, source: int, into: memoryview) -> Transfer:
        """Begin to receive as many bytes as `into` has; nothing is copied."""

    def least(self, values: Sequence[int]) -> tuple[int, ...]:
        """Element by element the smallest value of all ranks; 64-bit integers. Raises PeerLost."""

    def total(self, values: Sequence[int]) -> tuple[int, ...]:
        """Element by element the sum over all ranks; 64-bit integers. Raises PeerLost."""

    def gather(self, value: Json) -> list[Json]:
        """The values of all ranks, by rank. Raises PeerLost."""

    def renew(self) -> None:
        """Connect all ranks anew after a failure; every rank must come. Raises PeerLost when one does not."""

    def close(self) -> None:
        """End all connections."""


class Clock(Protocol):
    """Time as the coordinator sees it."""

    def now_s(self) -> float:
        """Seconds from an arbitrary start, never going back."""

    def sleep(self, seconds: float) -> None:
        """Let this much time pass."""


class Task(Protocol[Value]):
    """Work that was submitted to a lane."""

    def done(self) -> bool:
        """Whether it has ended, in whatever way."""

    def result(self, timeout: float | None = None) -> Value:
        """What it returned, or raises what it raised; TimeoutError after `timeout` seconds."""


class Lane(Protocol):
    """Runs work beside training, one piece after the other in the order of submission; as `concurrent.futures`."""

    def submit(self, work: Callable[[], Value], /) -> Task[Value]:
        """Run `work` after all that was submitted before."""

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Take nothing more; wait for the rest, or drop what has not begun."""


RANDOM = "random/"
"""What the keys of random states begin with."""


class TrainerState(Protocol):
    """The state of training on one rank that belongs to no operator: progress, schedules, scaler, random states."""

    def scalars(self) -> dict[str, Json]:
        """All that is no tensor, as JSON values; every float exactly."""

    def tensors(self) -> Mapping[str, memoryview]:
        """Random states as bytes by name, each of a size that never changes; copies, not views of live state."""

    def restore(self, scalars: Mapping[str, Json], tensors: Mapping[str, memoryview]) -> None:
        """Put back what `scalars` and `tensors` gave. Raises UnreadableCheckpoint when something is missing."""

    def restore_common(self, scalars: Mapping[str, Json]) -> None:
        """Put back what is the same on all ranks, from the `scalars` of any rank as they were after the iteration that
        this one has just run again: counts, schedules, loss scales. Random states stay as the iteration left them."""


class Capturer(Protocol):
    """Copies live state of this rank into snapshots: `begin` after the optimizer's step, `end` before the next one."""

    @property
    def operators(self) -> frozenset[OperatorId]:
        """The operators of which this rank owns state."""

    def layout(self, plan: SnapshotPlan, *, trainer: bool = False) -> Layout:
        """The records of the parts in `plan` on this rank, with `trainer` also the random states, which come last.

        Records of an operator have its id and their part; random states have keys RANDOM + name and no operator.
        """

    def begin(self, copies: Sequence[tuple[Layout, MappedWriter]]) -> None:
        """Begin to copy; what the next forward and backward pass changes is copied before the return.

        Each writer was reserved with its layout, one that `layout` gave; it may be sealed or abandoned once `end` has
        returned. In steady state nothing is allocated.
        """

    def end(self, timeout_s: float) -> None:
        """Wait until all is copied; nothing refers to the writers' buffers afterwards.

        Raises TimeoutError saying what it waited for, and what a copy raised.
        """

    @property
    def bandwidth_bytes_per_s(self) -> float:
        """How fast the last copy was, from its `begin` to its last byte; before the first one, a trial copy's."""


class Restorer(Protocol):
    """Puts records back into the live state of this rank.

    At once: `poison`, `restore` all copies, `missing`, `complete`. In a sparse-to-dense conversion (MoEvement 3.3):
    `poison`; before each replayed iteration `restore` the next snapshot, then `refresh`; at last `complete`.
    """

    def poison(self) -> None:
        """Fill the state of all operators with NaN, so that nothing that is not restored can be taken for state."""

    def restore(self, read: Callable[[str], memoryview], parts: Mapping[Part, Collection[OperatorId]]) -> int:
        """Copy the records of these parts of these operators, fetched by key with `read`, into the live state.

        WEIGHTS are all that a forward pass reads, whichever part stores it (see `capture.operators.serves`).
        Returns the bytes copied. Lets through what `read` raises, UnreadableCheckpoint for a record of a wrong size.
        """

    def refresh(self) -> None:
        """Make the compute weights whole after a `restore` of some operators' FULL state and the others' WEIGHTS:
        derived from master weights where only these were restored since the last call; a collective of training's own
        groups. Operators of which nothing was restored since then stay as training left them."""

    def missing(self, frozen: Collection[OperatorId] = ()) -> str:
        """Which state still has to be restored, for people; empty when all is there that `complete` needs.

        Of `frozen` operators, which are not trained yet, only the compute weights are needed.
        """

    def complete(self) -> None:
        """Derive compute weights where only master weights were restored; a collective of training's own groups.

        Raises UnreadableCheckpoint, before anything is derived, that names what was not restored.
        """


class Execution(Protocol):
    """Runs iterations in which some operators are frozen (MoEvement 3.3): forward and input gradients only."""

    def freeze(self, frozen: Collection[OperatorId], step: StepJournal, *, alone: bool = False) -> None:
        """The next iteration updates all but these operators, of all ranks and stages, and takes the gradient norm and
        the verdict on its gradients from the journal instead of computing them from a part of the gradients.

        alone: only some stages of the pipeline run it. Then all that stages compute together comes from the journal,
        also with no frozen operators, and nothing waits for the other stages.
        Called again for each iteration, also with no operators. Raises UsageError where this cannot be done.
        """

    def thaw(self) -> None:
        """Run as before the first `freeze`, bit for bit."""


class BoundarySink(Protocol):
    """Takes what this rank sends over a stage boundary; tensors of the framework in use."""

    def sent(self, direction: Direction, tensor: Any) -> None:
        """This tensor is about to be sent to the next (FORWARD) or previous (BACKWARD) stage, and does not change now.

        Returns at once: the copy runs beside training. Never raises.
        """


class BoundarySource(Protocol):
    """Gives what a stage outside of a replay sent when the iteration ran first."""

    def received(self, direction: Direction) -> Any | None:
        """The next tensor that came from the previous (FORWARD) or the next (BACKWARD) stage, in the order of arrival.

        None where the stage on that side takes part: then it is received as ever, and what is sent to it is sent.
        Raises UnreadableCheckpoint when there is no further one.
        """

    def serves(self, direction: Direction) -> bool:
        """Whether `received` gives tensors of this direction; what would be sent to that side is dropped."""
