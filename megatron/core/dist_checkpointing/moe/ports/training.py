"""The ports to the live state of training on one rank: what is copied into snapshots and put back from them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from ..types import Direction, OperatorId, Part, SnapshotPlan, StepJournal
from ..types.layout import Json, Layout
from .storage import MappedWriter
from .transport import Pace

RANDOM = "random/"
"""What the keys of random states begin with."""


class TrainerState(Protocol):
    """The state of training on one rank that belongs to no operator: progress, schedules, scaler, random states."""

    def scalars(self) -> dict[str, Json]:
        """All that is no tensor, as JSON values; every float exactly."""

    def tensors(self) -> Mapping[str, memoryview]:
        """Random states as bytes by name, each of a size that never changes; copies, not views of live state."""

    def restore(self, scalars: Mapping[str, Json], tensors: Mapping[str, memoryview]) -> None:
        """Put back what `scalars` and `tensors` gave.

        Args:
            scalars: JSON values, by their names.
            tensors: Bytes, by their names.

        Raises:
            UnreadableCheckpoint: Something is missing.
        """

    def misfit(self, scalars: Mapping[str, Json]) -> str:
        """Why `restore` would refuse these `scalars` whichever copy they are from, as flags are others; else empty."""

    def difference(self, tensors: Mapping[str, memoryview]) -> str:
        """After an iteration that was run again: what of the live state is not that of these `tensors`, which were
        captured when it ran first, of all that such an iteration makes again; empty if nothing. Random states may be
        others."""

    def restore_common(self, scalars: Mapping[str, Json]) -> None:
        """Put back what is the same on all ranks, from the `scalars` of any rank as they were after the iteration that
        this one has just run again: counts, schedules, loss scales. Random states stay as the iteration left them."""


class Capturer(Protocol):
    """Copies live state of this rank into snapshots: `begin` after the optimizer's step, `end` before the next one.

    states: the tensors of the trainer as `begin` found them, until `end` is called; None where it took none.
    """

    states: Mapping[str, memoryview] | None

    @property
    def operators(self) -> frozenset[OperatorId]:
        """The operators of which this rank owns state."""

    def layout(self, plan: SnapshotPlan, *, trainer: bool = False, among: SnapshotPlan | None = None) -> Layout:
        """The records of a plan on this rank.

        Records of an operator have its id and their part; random states have keys RANDOM + name and no operator.

        Args:
            plan: The parts of operators to store.
            trainer: Also the random states, which come last.
            among: The snapshot that the plan is a piece of: what it selects decides which data-parallel rank stores
                what all of them hold; None: all that this rank may have to store.
        """

    def begin(self, copies: Sequence[tuple[Layout, MappedWriter]], pace: Pace | None = None) -> None:
        """Begin to copy; what the next forward and backward pass changes is copied before the return.

        In steady state nothing is allocated.

        Args:
            copies: Layouts that `layout` gave, each with the writer that was reserved with it; it may be sealed or
                abandoned once `end` has returned.
            pace: When chunks of the rest may begin, until `end` is called; None: as fast as it goes.
        """

    def end(self, timeout_s: float) -> None:
        """Wait until all is copied; nothing refers to the writers' buffers afterwards.

        Raises TimeoutError saying what it waited for, and what a copy raised.
        """

    @property
    def bandwidth_bytes_per_s(self) -> float:
        """How fast the last copy was, where it was not held back; before the first one, a trial copy's."""


class Restorer(Protocol):
    """Puts records back into the live state of this rank.

    At once: `poison`, `restore` all copies, or `keep`; `missing`, `complete`. In a sparse-to-dense conversion
    (MoEvement 3.3): `poison`; before each replayed iteration `restore` the next snapshot, then `refresh`; at last
    `complete`.
    """

    def poison(self) -> None:
        """Fill the state of all operators with NaN, so that nothing that is not restored can be taken for state."""

    def restore(self, read: Callable[[str], memoryview], parts: Mapping[Part, Collection[OperatorId]]) -> int:
        """Copy records into the live state.

        COMPUTE weights are all that a forward pass reads, whichever part stores it (see
        `megatron_state.operators.serves`). Lets through what `read` raises.

        Args:
            read: Fetches the bytes of a record by its key.
            parts: The parts to restore, and of which operators.

        Returns:
            The bytes copied.

        Raises:
            UnreadableCheckpoint: A record has a wrong size.
        """

    def keep(self, frozen: Collection[OperatorId] = ()) -> None:
        """Instead of `poison` and `restore`: live state is what they would make it already, of `frozen` operators the
        compute weights only, of others all but these."""

    def refresh(self) -> None:
        """Make the compute weights whole after a `restore` of some operators' full state and the others' compute
        weights: derived from master weights where only these were restored since the last call; a collective of
        training's own groups. Operators of which nothing was restored since then stay as training left them."""

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
        """The next iteration updates all but these operators, and takes the gradient norm and the verdict on its
        gradients from the journal instead of computing them from a part of the gradients.

        Called again for each iteration, also with no operators.

        Args:
            frozen: The operators, of all ranks and stages.
            step: The journal of the iteration.
            alone: Only some stages of the pipeline run it. Then all that stages compute together comes from the
                journal, also with no frozen operators, and nothing waits for the other stages.

        Raises:
            UsageError: This cannot be done here.
        """

    def thaw(self) -> None:
        """Run as before the first `freeze`, bit for bit."""


@dataclass(frozen=True, slots=True)
class SteppedShard:
    """What an optimizer steps as one tensor; all keys of records of its state begin with `prefix`, and a slash.

    group: of `RecordedStep.groups`, by whose settings it was stepped; None: it was not, and stays as it was. first:
    where its gradient begins in `RecordedStep.gradients`, in bytes. numel: elements of the weights. dtype: of the
    gradient, such as `bfloat16`.
    """

    prefix: str
    operator: OperatorId
    group: int | None
    first: int
    numel: int
    dtype: str


@dataclass(frozen=True, eq=False)
class RecordedStep:
    """All that led from the state after an iteration to that after the next, where weights are stepped by Adam.

    optimizer: the name of its class in torch.optim, or `FusedAdam`. groups: their settings. gradients: bytes, as the
    optimizer read them: reduced, unscaled, clipped. They are there once `copied` has returned, and may be written to
    again once nothing refers to this. clipped_by: gives the factors by one of which they may have been multiplied since
    they were reduced; it waits for the norm.
    """

    optimizer: str
    groups: tuple[Mapping[str, Json], ...]
    shards: tuple[SteppedShard, ...] = field(repr=False)
    gradients: memoryview = field(repr=False)
    copied: Callable[[], None] = field(repr=False)
    clipped_by: Callable[[], Sequence[float]] = field(repr=False, default=tuple)


class StepRecorder(Protocol):
    """Records the steps of this rank's optimizer."""

    def take(self, journal: StepJournal) -> RecordedStep | None:
        """The one step since the last call, which no shard took if it was skipped; None where there were several, or
        older ones have all the memory. journal: its outcome."""


# The ports to the boundaries between pipeline stages: logs of what is sent, and a replay's source of it.


class BoundarySink(Protocol):
    """Takes what this rank sends over a stage boundary; tensors of the framework in use."""

    def sent(self, direction: Direction, tensor: Any) -> None:
        """A tensor is about to be sent over a stage boundary, and does not change now.

        Returns at once: the copy runs beside training. Never raises.

        Args:
            direction: FORWARD to the next stage, BACKWARD to the previous one.
            tensor: The tensor.
        """

    def receiving(self, direction: Direction) -> Callable[[Any], None]:
        """The next tensor is asked for from the previous (FORWARD) or the next (BACKWARD) stage.

        Returns:
            What is to be called with it once it has come, and was not changed yet. Schedules may wait for tensors in
            another order than they asked for them; senders send in the order of asking. Neither raises.
        """


class BoundarySource(Protocol):
    """Gives what a stage outside of a replay sent when the iteration ran first."""

    def received(self, direction: Direction) -> Any | None:
        """The next tensor that came from the previous (FORWARD) or the next (BACKWARD) stage, in the order of arrival.

        None where the stage on that side takes part: then it is received as ever, and what is sent to it is sent.
        Raises UnreadableCheckpoint when there is no further one.
        """

    def serves(self, direction: Direction) -> bool:
        """Whether `received` gives tensors of this direction; what would be sent to that side is `dropped`."""

    def dropped(self, direction: Direction, tensor: Any) -> None:
        """A tensor would have been sent over a stage boundary, to a stage that has it already.

        Args:
            direction: FORWARD to the next stage, BACKWARD to the previous one.
            tensor: The tensor.
        """
