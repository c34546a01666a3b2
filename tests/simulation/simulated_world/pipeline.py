"""Stages of a simulated pipeline: what ranks send each other, what of it is logged, what a replay gets from logs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from hashlib import blake2b

from megatron.core.dist_checkpointing.moe.errors import UnreadableCheckpoint, UsageError
from megatron.core.dist_checkpointing.moe.ports import Field, Layout, MappedWriter, Reader, Transport
from megatron.core.dist_checkpointing.moe.types import Direction, Part, Topology, boundary_key, received_key

from .model import FakeModel, expected_bytes, version_of
from .world import World

TENSOR_BYTES = 32


class FakeRecorder:
    """Copies what is sent into the log that it is armed with, at once."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._keys: list[str] = []
        self._received = dict.fromkeys(Direction, 0)
        self._prints: dict[str, memoryview] = {}
        self._writer: MappedWriter | None = None

    def arm(self, layout: Layout, writer: MappedWriter) -> None:
        """As `local_recovery.boundary_logs.Recorder.arm`."""
        self._writer, keys = writer, [field.key for field in layout.fields]
        self._keys = [key for key in keys if not key.startswith("received/")]
        self._received = dict.fromkeys(Direction, 0)
        # One buffer each, as the recorder writes to the segment as a whole.
        self._prints = {key: writer.buffer(key) for key in keys if key not in self._keys}
        for prints in self._prints.values():
            prints[:] = bytes(len(prints))

    def passed(self) -> None:
        """As `local_recovery.boundary_logs.Recorder.passed`."""

    @property
    def complete(self) -> bool:
        """As `local_recovery.boundary_logs.Recorder.complete`."""
        return self._writer is not None and not self._keys

    def end(self, timeout_s: float) -> None:
        """As `local_recovery.boundary_logs.Recorder.end`."""
        self._world.event("end the log")
        if self._keys:
            raise UsageError(f"{len(self._keys)} tensors were not sent, such as {self._keys[0]}")
        self._writer, self._prints = None, {}

    def disarm(self) -> None:
        """As `local_recovery.boundary_logs.Recorder.disarm`."""
        self._writer, self._prints = None, {}

    def sent(self, key: str, data: bytes) -> None:
        """This goes to another stage now."""
        if self._writer is not None:
            self._world.event(f"log {key}")
            self._keys.remove(key)
            self._writer.buffer(key)[:] = data

    def received(self, way: Direction, data: bytes | bytearray) -> None:
        """This has come from another stage."""
        prints = self._prints.get(received_key(way))
        if prints is not None:
            at, self._received[way] = self._received[way], self._received[way] + 1
            prints[8 * at : 8 * (at + 1)] = print_of(data)


def print_of(data: bytes | bytearray) -> bytes:
    """A fingerprint of what was sent."""
    return blake2b(data, digest_size=8).digest()


class FakeFeed:
    """A `replay.densify.StageFeed`: bytes of the logs in the order of their records."""

    def __init__(self, logs: Mapping[Direction, Reader]) -> None:
        self._logs = logs
        self._left = {
            way: [one.key for one in reader.manifest.layout.fields if one.key.startswith(f"{way.value}/")]
            for way, reader in logs.items()
        }
        self._dropped: dict[Direction, list[bytes]] = {way: [] for way in Direction}

    def serves(self, direction: Direction) -> bool:
        """As `ports.BoundarySource.serves`."""
        return direction in self._logs

    def received(self, direction: Direction) -> bytes | None:
        """As `ports.BoundarySource.received`."""
        if direction not in self._logs:
            return None
        if not self._left[direction]:
            raise UnreadableCheckpoint(f"the log has no further tensor that came {direction.value}")
        return bytes(self._logs[direction].read(self._left[direction].pop(0)))

    def check_all_taken(self) -> None:
        """As `replay.densify.StageFeed.check_all_taken`."""
        if left := [key for keys in self._left.values() for key in keys]:
            raise UnreadableCheckpoint(f"{len(left)} tensors of the log were not received, such as {left[0]}")

    def dropped(self, direction: Direction, data: bytes) -> None:
        """As `ports.BoundarySource.dropped`."""
        self._dropped[direction].append(print_of(data))

    def differences(self) -> list[str] | None:
        """As `replay.densify.StageFeed.differences`."""
        expected = {}
        for way, prints in self._dropped.items():
            if prints:
                (log,) = [log for came, log in self._logs.items() if came is not way]
                expected[way] = bytes(log.read(received_key(way)))
        if any(bytes(8) in (found[at : at + 8] for at in range(0, len(found), 8)) for found in expected.values()):
            return None
        return [f"what goes {way.value}" for way, found in expected.items() if found != b"".join(self._dropped[way])]


class FakeStage:
    """The passes of one rank: microbatches forward through all stages, then back, each with its own tensors.

    A rank whose state, or whose input, is not right sends on garbage. passes: how often it ran an iteration.
    """

    def __init__(self, model: FakeModel, topology: Topology, transport: Transport, recorder: FakeRecorder) -> None:
        self._model, self._topology, self._transport, self._recorder = model, topology, transport, recorder
        self.passes = 0

    def run(self, microbatches: int, source: FakeFeed | None = None) -> None:
        """The next iteration; `source` serves the sides that take no part. Raises PeerLost, UnreadableCheckpoint."""
        self.passes += 1
        self._model.forward_backward()
        for way in Direction:
            for microbatch in range(microbatches):
                key = boundary_key(way, 0, microbatch)
                self._receive(way, key, source)
                self._send(way, key, source)

    def _neighbour(self, step: int) -> int | None:
        stage = self._topology.stage(self._model.rank) + step
        is_there = 0 <= stage < self._topology.pp
        return self._model.rank + step * self._topology.ranks_per_stage if is_there else None

    def _receive(self, way: Direction, key: str, source: FakeFeed | None) -> None:
        sender = self._neighbour(-1 if way is Direction.FORWARD else 1)
        if sender is None:
            return
        data: bytes | bytearray | None = source.received(way) if source is not None else None
        if data is None:
            data = bytearray(TENSOR_BYTES)
            self._transport.receive(sender, memoryview(data)).wait()
        self._recorder.received(way, data)
        if version_of(sender, key, data) != self._model.iteration + 1:
            self._model.spoil()

    def _send(self, way: Direction, key: str, source: FakeFeed | None) -> None:
        to = self._neighbour(1 if way is Direction.FORWARD else -1)
        if to is None:
            return
        model = self._model
        right = expected_bytes(model.rank, key, model.iteration + 1, TENSOR_BYTES)
        data = right if model.is_exact else b"\xff" * TENSOR_BYTES
        self._recorder.sent(key, data)
        back = Direction.BACKWARD if way is Direction.FORWARD else Direction.FORWARD
        if source is None or not source.serves(back):
            self._transport.send(to, data).wait()
        else:
            source.dropped(way, data)


class FakeBuffers:
    """A `local_recovery.park.ChangingBuffers`: what forward passes change of a model's operators."""

    def __init__(self, model: FakeModel) -> None:
        self._model = model
        self._tensors = [tensor for tensor in model.tensors.values() if tensor.in_forward]

    def fields(self) -> Sequence[Field]:
        """As `local_recovery.park.Moving.fields`."""
        return [tensor.field for tensor in self._tensors]

    def copy(self) -> dict[str, bytes]:
        """As `local_recovery.park.Moving.copy`."""
        return {tensor.key: bytes(self._model.live[tensor.key]) for tensor in self._tensors}

    def put_back(self, copy: Mapping[str, bytes]) -> None:
        """As `local_recovery.park.Moving.put_back`."""
        for key, data in copy.items():
            self._model.set(key, data)

    def records(self, copy: Mapping[str, bytes]) -> Mapping[str, memoryview]:
        """As `local_recovery.park.Moving.records`."""
        return {key: memoryview(data) for key, data in copy.items()}


class FakeGradients:
    """A `local_recovery.park.Gradients`: a tensor that says of which iteration it is."""

    KEY = "gradient"

    def __init__(self, model: FakeModel) -> None:
        self._model = model

    def fields(self) -> Sequence[Field]:
        """As `local_recovery.park.Gradients.fields`."""
        return [Field(self.KEY, "uint8", (TENSOR_BYTES,))]

    def copy(self, buffer: Callable[[str], memoryview]) -> None:
        """As `local_recovery.park.Gradients.copy`."""
        model = self._model
        right = expected_bytes(model.rank, self.KEY, model.iteration + 1, TENSOR_BYTES)
        buffer(self.KEY)[:] = right if model.is_exact else b"\xff" * TENSOR_BYTES

    def roll_forward(self, read: Callable[[str], memoryview], moving: Iterable[str]) -> None:
        """Make the step of which these are the gradients; `moving` are the keys that its passes had changed."""
        model = self._model
        # Compute weights are derived when all rejoin; masters and moments are what the step changes.
        stale = [key for key in model.wrong() if key in model.random_sizes or not _is_compute(model, key)]
        if stale or version_of(model.rank, self.KEY, read(self.KEY)) != model.iteration + 1:
            model.spoil()
        for key in moving:
            model.set(key, read(key))
        model.step()


def _is_compute(model: FakeModel, key: str) -> bool:
    return model.tensors[key].field.part is Part.COMPUTE
