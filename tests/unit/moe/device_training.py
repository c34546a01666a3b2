"""Iterations of training on the asynchronous device, protected by the real code, beside the same on the host.

What a snapshot, a boundary log, token counts or parked buffers must hold is known from the host's shadow of the
training; what differs is a problem, by a sentence.
"""

from __future__ import annotations

import contextlib
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from no_trainer import NoTrainer

from megatron.core.dist_checkpointing.moe.device import Arriving
from megatron.core.dist_checkpointing.moe.errors import MoECheckpointError
from megatron.core.dist_checkpointing.moe.in_place import process_restart
from megatron.core.dist_checkpointing.moe.local_recovery import boundary_copies
from megatron.core.dist_checkpointing.moe.local_recovery.boundary_copies import BoundaryRecorder, fingerprint
from megatron.core.dist_checkpointing.moe.local_recovery.step_guard import LiveBuffers
from megatron.core.dist_checkpointing.moe.megatron_state.operators import GlobalName, Shard, StateTensor
from megatron.core.dist_checkpointing.moe.megatron_state.restore import LiveRestorer
from megatron.core.dist_checkpointing.moe.ports import Facts, Field, Layout, SnapshotId
from megatron.core.dist_checkpointing.moe.snapshot.capturer import LiveCapturer
from megatron.core.dist_checkpointing.moe.snapshot.copy_engines import Throttle
from megatron.core.dist_checkpointing.moe.snapshot.iteration_message import CudaStopwatch
from megatron.core.dist_checkpointing.moe.snapshot.page_locks import PageLocks
from megatron.core.dist_checkpointing.moe.snapshot.stream_engine import StreamEngine
from megatron.core.dist_checkpointing.moe.snapshot.workers import ThreadExecutor
from megatron.core.dist_checkpointing.moe.storage.memory import MemoryStore
from megatron.core.dist_checkpointing.moe.types import (
    LOG,
    Direction,
    OperatorId,
    OperatorKind,
    Part,
    SnapshotPlan,
    boundary_key,
    received_key,
)
from megatron.pretrain.testing.async_device import AsyncDevice, BlockingCopy, installed

ROUTER = OperatorId(0, OperatorKind.ROUTER)
WAIT_S, NUMEL, SEGMENT_BYTES, CHUNK_BYTES = 30.0, 3000, 60_000, 4096
SHAPE, MICROBATCHES = (16, 2, 32), 4
KEYS = [boundary_key(Direction.FORWARD, 0, microbatch) for microbatch in range(MICROBATCHES)]
RECEIVED = received_key(Direction.BACKWARD)
LOGS = Layout.of([*(Field(key, "float32", SHAPE) for key in KEYS), Field(RECEIVED, "int64", (MICROBATCHES,))])
TRAINING = "MainThread"


@dataclass
class Findings:
    """What a run has shown.

    Attributes:
        problems: What was wrong, as sentences.
        blocking: Copies of the iterations after the first that held their thread up.
        waited: How much work of the device training's thread has waited for in these iterations.
        elsewhere: Calls by threads that were not on this rank's device.
    """

    problems: list[str] = field(default_factory=list)
    blocking: list[BlockingCopy] = field(default_factory=list)
    waited: int = 0
    elsewhere: set[tuple[str, str]] = field(default_factory=set)

    @property
    def all(self) -> list[str]:
        """Everything that must not be."""
        blocked = [f"{one.thread} was held up by a copy of {one.nbytes} bytes" for one in self.blocking]
        waited = [f"training's thread has waited for {self.waited} kernels"] * bool(self.waited)
        return [*self.problems, *blocked, *waited, *(f"{call} on device 0 by {name}" for call, name in self.elsewhere)]


def piece(name: str, part: Part, tensor: torch.Tensor) -> StateTensor:
    shard = Shard(GlobalName(ROUTER, "weight"), 0, tensor.numel(), tensor.numel())
    return StateTensor(shard, name, part, tensor, (0,))


class Training:
    """A rank with a router's buffer, master weights and moments, a stage that sends, and what protects them."""

    def __init__(self, device: AsyncDevice, folder: Path, seed: int) -> None:
        self.device, self.found = device, Findings()
        draw = np.random.default_rng(seed)
        self.host = {
            "buffer": torch.from_numpy(draw.integers(0, 9, 64).astype(np.float32)),
            "both": torch.from_numpy(draw.standard_normal(2 * NUMEL).astype(np.float32)),
            "counts": torch.zeros(8, dtype=torch.int64),
        }
        self.live = {name: value.to("cuda") for name, value in self.host.items()}
        self.tensors = [
            piece("buffer", Part.MASTER, self.live["buffer"]),
            piece("master", Part.MASTER, self.live["both"][:NUMEL]),
            piece("exp_avg", Part.MOMENTS, self.live["both"][NUMEL:]),
        ]
        self.store = MemoryStore(folder, "job", 0, [SEGMENT_BYTES] * 3)
        self.logs = MemoryStore(folder, "job", 0, [LOGS.nbytes] * 2, area="standby")
        self.locks = PageLocks()
        self.engine, sends = StreamEngine(self.locks), StreamEngine(self.locks)
        self.capturer = LiveCapturer(self.tensors, NoTrainer(), self.engine)  # type: ignore[arg-type]
        self.recorder = BoundaryRecorder(sends)
        self.moving, self.watch = LiveBuffers(self.tensors), CudaStopwatch()
        self.control = ThreadExecutor("control")
        self.layout = self.capturer.layout(SnapshotPlan(0, {ROUTER: Part.MASTER_AND_MOMENTS}))
        self.begun: tuple[SnapshotId, Any, dict[str, np.ndarray]] | None = None

    def lock_pages(self) -> None:
        """As at the start of training."""
        self.store.lend(self.engine)
        self.logs.lend(self.engine)
        self.locks.settle(WAIT_S)

    def iteration(self, number: int) -> None:
        """Passes, the optimizer's step, the passes that come after it; with a log and a snapshot."""
        name = SnapshotId(number, 0, LOG)
        writer = self.logs.reserve(name, LOGS)
        with self._judged(number):
            self.recorder.arm(LOGS, writer)
            sent, came = self._passes(number)
            self.recorder.passed()
            self.watch.pause()
            self.capturer.end(WAIT_S)
            self.watch.resume()
        self._judge_snapshot()
        with self._judged(number):
            self.live["both"].mul_(0.5).add_(self.live["buffer"][:1])
            taken = Arriving(self.live["counts"])
            self.live["counts"].zero_()
            noted = self.moving.copy()
            self.recorder.end(WAIT_S)
        self.host["both"] = self.host["both"] * 0.5 + self.host["buffer"][:1]
        counted, self.host["counts"] = self.host["counts"], torch.zeros(8, dtype=torch.int64)
        writer.seal(Facts("job"))
        self._judge_log(name, sent, came)
        self._begin_snapshot(number)
        # The next passes begin while the control thread asks for the counts.
        self.live["buffer"].add_(1.0)
        if self.control.submit(taken.wait).result(WAIT_S).tolist() != counted.tolist():
            self.found.problems.append(f"iteration {number}: token counts are wrong")
        self.moving.put_back(noted)
        (parked,) = self.moving.records(noted).values()
        if not np.array_equal(np.frombuffer(parked, np.float32), self.host["buffer"].numpy()):
            self.found.problems.append(f"iteration {number}: parked buffers are wrong")

    def resize_logs(self) -> None:
        """Twice as large, as for a larger window; no snapshot is under way then."""
        self.capturer.end(WAIT_S)
        self._judge_snapshot()
        self.logs.resize([2 * LOGS.nbytes] * 2)
        self.locks.settle(WAIT_S)

    def end(self) -> None:
        """The last snapshot is waited for, and other state is restored."""
        self.capturer.end(WAIT_S)
        self._judge_snapshot()
        self._judge_restore()
        self.engine.close()
        self.recorder.close()
        self.control.shutdown()
        if not process_restart._device_answers():
            self.found.problems.append("the device does not answer")
        self.store.close()
        self.logs.close()
        self.locks.release()  # else what is still mapped is unlocked wherever it is collected, on a later device
        self.device.synchronize()
        self.found.elsewhere = self.device.elsewhere
        self.found.problems += [f"{name} on freed memory" for name in self.device.after_free]

    def give_up(self) -> None:
        """After an error: no thread and no page-lock is left."""
        for thread in threading.enumerate():
            if thread.name == "snapshot-launch":
                thread.join(WAIT_S)
        self.control.shutdown()
        with contextlib.suppress(RuntimeError):
            self.locks.release()

    def _passes(self, number: int) -> tuple[list[torch.Tensor], list[int]]:
        """What is sent, and the fingerprints of what comes."""
        sent, came = [], []
        for microbatch in range(MICROBATCHES):
            value = float(number * 10 + microbatch)
            live, host = torch.full(SHAPE, value, device="cuda"), torch.full(SHAPE, value)
            for _ in range(3):
                live, host = live * 1.01 + self.live["both"][:1], host * 1.01 + self.host["both"][:1]
            gradient = live * 3
            came.append(int(fingerprint(host * 3).item()))
            self.recorder.receiving(Direction.BACKWARD)(gradient)
            del gradient
            self.recorder.sent(Direction.FORWARD, live)
            sent.append(host)
            # As schedules empty what they have sent: its memory is the next kernel's.
            live.data = torch.empty(1, device="cuda")
            torch.full(SHAPE, -7.0, device="cuda")
            for state, change in (("buffer", 1.0), ("counts", microbatch)):
                self.live[state].add_(change)
                self.host[state] = self.host[state] + change
        return sent, came

    def _begin_snapshot(self, number: int) -> None:
        name = SnapshotId(number, 0)
        writer = self.store.reserve(name, self.layout)
        both = self.host["both"]
        expected = {"buffer": self.host["buffer"], "master": both[:NUMEL], "exp_avg": both[NUMEL:]}
        self.begun = name, writer, {key: value.clone().numpy() for key, value in expected.items()}
        pace = Throttle(None)
        pace.chunk_bytes = CHUNK_BYTES
        with self._judged(number):
            self.capturer.begin([(self.layout, writer)], pace)

    def _judge_snapshot(self) -> None:
        if self.begun is None:
            return
        (name, writer, expected), self.begun = self.begun, None
        try:
            writer.seal(Facts("job"))
        except MoECheckpointError as error:  # something still copies to it
            self.found.problems.append(f"iteration {name.iteration}: {error}")
            return
        with self.store.open(name) as reader:
            for state in self.tensors:
                if not np.array_equal(np.frombuffer(bytes(reader.read(state.key)), np.float32), expected[state.field]):
                    self.found.problems.append(f"iteration {name.iteration}: {state.field} of the snapshot is wrong")
        self.store.free(name)

    def _judge_log(self, name: SnapshotId, sent: list[torch.Tensor], came: list[int]) -> None:
        with self.logs.open(name) as reader:
            for key, tensor in zip(KEYS, sent, strict=True):
                if bytes(reader.read(key)) != tensor.numpy().tobytes():
                    self.found.problems.append(f"iteration {name.iteration}: {key} of the log is wrong")
            if memoryview(bytes(reader.read(RECEIVED))).cast("q").tolist() != came:
                self.found.problems.append(f"iteration {name.iteration}: fingerprints of the log are wrong")
        self.logs.free(name)

    def _judge_restore(self) -> None:
        draw = np.random.default_rng(0)
        back = {one.key: draw.standard_normal(one.tensor.numel()).astype(np.float32) for one in self.tensors}
        restorer = LiveRestorer(self.tensors, lambda recast: None)
        restorer.poison()
        read: Callable[[str], memoryview] = lambda key: memoryview(back[key]).cast("B")  # noqa: E731
        restorer.restore(read, {Part.MASTER_AND_MOMENTS: [ROUTER]})
        restorer.complete()
        for one in self.tensors:
            if not np.array_equal(back[one.key], one.tensor.cpu().numpy()):
                self.found.problems.append(f"{one.field} was not restored")

    @contextlib.contextmanager
    def _judged(self, number: int) -> Iterator[None]:
        """What training's thread does; in the first iteration it makes what is kept."""
        waited, blocking = self.device.waited[TRAINING], len(self.device.blocking)
        yield
        if number > 1:
            self.found.waited += self.device.waited[TRAINING] - waited
            self.found.blocking += self.device.blocking[blocking:]


def trained(
    schedule: str,
    seed: int,
    *,
    iterations: int = 4,
    between: Callable[[Training, int], None] = lambda training, number: None,
) -> Findings:
    """Train on a device with this schedule and seed.

    Args:
        schedule: Of `SCHEDULES`.
        seed: Of the schedule and of the state.
        iterations: How many.
        between: Called after each iteration.
    """
    folder = Path(tempfile.mkdtemp(dir="/dev/shm", prefix="async-device-"))
    boundary_copies._numbers.cache_clear()  # they are of the device of a run
    try:
        with installed(schedule, seed) as device:
            training = Training(device, folder, seed)
            try:
                training.lock_pages()
                for number in range(1, iterations + 1):
                    training.iteration(number)
                    between(training, number)
                training.end()
            except Exception as error:
                training.found.problems.append(f"{type(error).__name__}: {error}")
                training.give_up()
            return training.found
    finally:
        boundary_copies._numbers.cache_clear()
        shutil.rmtree(folder)
