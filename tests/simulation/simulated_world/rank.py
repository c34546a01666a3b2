"""Capturer, restorer, trainer state and frozen execution of a simulated rank, over its FakeModel."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

from megatron.core.dist_checkpointing.moe.errors import UnreadableCheckpoint, UsageError
from megatron.core.dist_checkpointing.moe.ports import Field, Json, Layout, MappedWriter, Pace
from megatron.core.dist_checkpointing.moe.types import OperatorId, Part, SnapshotPlan, StepJournal

from .model import RANDOM, SAMPLES_PER_ITERATION, FakeModel, FakeTensor
from .world import Thread, World

BANDWIDTH_BYTES_PER_S = 1e6

_NAN = 0xFF  # every float whose bytes are all ones is a NaN


class FakeTrainerState:
    """A `ports.TrainerState`: the iteration, consumed samples, two random states."""

    def __init__(self, model: FakeModel, world: World) -> None:
        self._model, self._world = model, world

    def scalars(self) -> dict[str, Json]:
        """As `ports.TrainerState.scalars`."""
        self._world.event("take trainer scalars")
        return self._model.scalars()

    def tensors(self) -> Mapping[str, memoryview]:
        """As `ports.TrainerState.tensors`."""
        return {key.removeprefix(RANDOM): memoryview(bytes(self._model.live[key])) for key in self._model.random_sizes}

    def restore(self, scalars: Mapping[str, Json], tensors: Mapping[str, memoryview]) -> None:
        """As `ports.TrainerState.restore`; scalars that contradict each other are refused too."""
        self._world.event("restore trainer state")
        iteration = scalars.get("iteration")
        if type(iteration) is not int or scalars.get("consumed_samples") != iteration * SAMPLES_PER_ITERATION:
            raise UnreadableCheckpoint(f"trainer scalars {dict(scalars)} are incomplete or contradict each other")
        for key, nbytes in self._model.random_sizes.items():
            data = tensors.get(key.removeprefix(RANDOM))
            if data is None or data.nbytes != nbytes:
                raise UnreadableCheckpoint(f"the random state {key} is missing or not {nbytes} bytes long")
            self._model.set(key, data)
        self._model.iteration = iteration

    def misfit(self, scalars: Mapping[str, Json]) -> str:
        """There are no flags."""
        return ""

    def difference(self, tensors: Mapping[str, memoryview]) -> str:
        """Nothing is made again but state of operators."""
        return ""

    def restore_common(self, scalars: Mapping[str, Json]) -> None:
        """As `ports.TrainerState.restore_common`."""
        self._world.event("restore trainer scalars")
        if scalars != self._model.scalars():
            raise UnreadableCheckpoint(f"trainer scalars {dict(scalars)} are not those of {self._model.scalars()}")


class FakeCapturer:
    """A `ports.Capturer` that copies one tensor per event on a thread of its own.

    A model that changes a tensor before it was copied makes a snapshot that `version_of` tells to be wrong.
    """

    states: Mapping[str, memoryview] | None = None

    def __init__(self, model: FakeModel, world: World) -> None:
        self._model, self._world = model, world
        self._thread: Thread | None = None
        self._error: Exception | None = None

    @property
    def operators(self) -> frozenset[OperatorId]:
        """As `ports.Capturer.operators`."""
        return self._model.operators

    def layout(self, plan: SnapshotPlan, *, trainer: bool = False, among: SnapshotPlan | None = None) -> Layout:
        """As `ports.Capturer.layout`."""
        fields = [
            tensor.field
            for tensor in self._model.tensors.values()
            if tensor.field.operator and tensor.serves(plan.parts.get(tensor.field.operator, Part.NOTHING))
        ]
        sizes = self._model.random_sizes.items() if trainer else ()
        return Layout.of(fields + [Field(key, "uint8", (nbytes,)) for key, nbytes in sizes])

    def begin(self, copies: Sequence[tuple[Layout, MappedWriter]], pace: Pace | None = None) -> None:
        """As `ports.Capturer.begin`. Raises UsageError when `end` was not called since the last one."""
        self._world.event("begin to capture")
        if self._thread is not None:
            raise UsageError("a capture is under way: end it before the next begins")
        lasting: list[tuple[str, memoryview]] = []
        for layout, writer in copies:
            segment = writer.whole()
            for field, offset in zip(layout.fields, layout.offsets, strict=True):
                place = segment[offset : offset + field.nbytes]
                if field.key in self._model.random_sizes or self._model.tensors[field.key].in_forward:
                    self._copy(field.key, place)
                else:
                    lasting.append((field.key, place))
                del place
            del segment
        self._error = None
        self._thread = self._world.spawn(self._model.rank, "copy", lambda: self._copy_all(lasting))

    def end(self, timeout_s: float) -> None:
        """As `ports.Capturer.end`."""
        self._world.event("end the capture")
        thread = self._thread
        if thread is None:
            return
        if not self._world.wait("waits for the copy", lambda: thread.ended, timeout_s):
            raise TimeoutError(f"copying the state has not ended after {timeout_s:g} s")
        self._thread, error, self._error = None, self._error, None
        if error is not None:
            raise error

    @property
    def bandwidth_bytes_per_s(self) -> float:
        """As `ports.Capturer.bandwidth_bytes_per_s`."""
        return BANDWIDTH_BYTES_PER_S

    def _copy_all(self, copies: list[tuple[str, memoryview]]) -> None:
        try:
            while copies:
                self._copy(*copies.pop(0))
        except Exception as error:
            self._error = error.with_traceback(None)  # its frames would keep buffers
            copies.clear()

    def _copy(self, key: str, place: memoryview) -> None:
        self._world.event(f"copy {key}")
        place[:] = self._model.live[key]


class FakeRestorer:
    """A `ports.Restorer`; one tensor per event."""

    def __init__(self, model: FakeModel, world: World) -> None:
        self._model, self._world = model, world
        self._written: set[str] = set()
        self._fresh: set[str] = set()

    def poison(self) -> None:
        """As `ports.Restorer.poison`."""
        self._world.event("poison")
        self._written.clear()
        self._fresh.clear()
        for tensor in self._model.tensors.values():
            self._model.set(tensor.key, bytes([_NAN]) * tensor.field.nbytes)

    def restore(self, read: Callable[[str], memoryview], parts: Mapping[Part, Collection[OperatorId]]) -> int:
        """As `ports.Restorer.restore`. A part of an operator is what state has any of its components."""
        copied_bytes = 0
        for tensor in self._model.tensors.values():
            field = tensor.field
            if not any(tensor.serves(part) and field.operator in operators for part, operators in parts.items()):
                continue
            data = read(tensor.key)
            self._world.event(f"restore {tensor.key}")
            if data.nbytes != field.nbytes:
                raise UnreadableCheckpoint(f"record {tensor.key} has {data.nbytes} bytes, not {field.nbytes}")
            self._model.set(tensor.key, data)
            self._fresh.add(tensor.key)
            copied_bytes += data.nbytes
        self._written |= self._fresh
        return copied_bytes

    def keep(self, frozen: Collection[OperatorId] = ()) -> None:
        """As `ports.Restorer.keep`."""
        self._world.event("keep")
        self._written = {
            one.key
            for one in self._model.tensors.values()
            if (one.serves(Part.COMPUTE) if one.field.operator in frozen else one.field.part is not Part.COMPUTE)
        }

    def refresh(self) -> None:
        """As `ports.Restorer.refresh`, on this rank alone."""
        self._world.event("refresh compute weights")
        for tensor in self._model.tensors.values():
            stale = tensor.field.part is Part.COMPUTE and tensor.key not in self._fresh
            if stale and f"{tensor.key}/master" in self._fresh:
                self._model.derive(tensor)
        self._fresh.clear()

    def missing(self, frozen: Collection[OperatorId] = ()) -> str:
        """As `ports.Restorer.missing`."""
        required = [tensor.key for tensor in self._not_written() if _is_required(tensor, frozen)]
        return f"{len(required)} tensors were not restored: {', '.join(required[:3])}" if required else ""

    def complete(self) -> None:
        """As `ports.Restorer.complete`, on this rank alone."""
        self._world.event("complete compute weights")
        if why := self.missing():
            raise UnreadableCheckpoint(why)
        for tensor in self._not_written():
            self._model.derive(tensor)

    def _not_written(self) -> list[FakeTensor]:
        return [tensor for tensor in self._model.tensors.values() if tensor.key not in self._written]


def _is_required(tensor: FakeTensor, frozen: Collection[OperatorId]) -> bool:
    is_frozen = tensor.field.operator in frozen
    return tensor.serves(Part.COMPUTE) if is_frozen else tensor.field.part is not Part.COMPUTE


class FakeExecution:
    """A `ports.Execution`: the model's next step changes no frozen operator, and is exact only over exact state."""

    def __init__(self, model: FakeModel, world: World) -> None:
        self._model, self._world = model, world
        self.steps: list[tuple[frozenset[OperatorId], StepJournal]] = []

    def freeze(self, frozen: Collection[OperatorId], step: StepJournal, *, alone: bool = False) -> None:
        """As `ports.Execution.freeze`."""
        self._world.event(f"freeze {len(frozen)} operators")
        self.steps.append((frozenset(frozen), step))
        self._model.frozen = frozenset(frozen)

    def thaw(self) -> None:
        """As `ports.Execution.thaw`."""
        self._world.event("thaw")
        self._model.frozen = None
