"""Snapshots of tensors on one CUDA device, copied beside its kernels; skipped where there is none."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from gpu_place import DEVICE, copy_engine, needs_cuda, needs_device, sized
from no_trainer import NoTrainer

from megatron.core.dist_checkpointing.moe.device import own_stream
from megatron.core.dist_checkpointing.moe.megatron_state.operators import GlobalName, Shard, StateTensor
from megatron.core.dist_checkpointing.moe.megatron_state.restore import LiveRestorer
from megatron.core.dist_checkpointing.moe.ports import Facts, SnapshotId
from megatron.core.dist_checkpointing.moe.snapshot.capturer import LiveCapturer
from megatron.core.dist_checkpointing.moe.snapshot.copy_engines import CopyEngine
from megatron.core.dist_checkpointing.moe.storage.memory import MemoryStore
from megatron.core.dist_checkpointing.moe.types import OperatorId, OperatorKind, Part, SnapshotPlan

pytestmark = needs_device

ROUTER = OperatorId(0, OperatorKind.ROUTER)
NUMEL = sized(4_000_001, 400_001)
WAIT_S = 60.0
SIDE = sized(4096, 64)


TRAINER: Any = NoTrainer()


def piece(field: str, part: Part, tensor: torch.Tensor) -> StateTensor:
    shard = Shard(GlobalName(ROUTER, "weight"), 0, tensor.numel(), tensor.numel())
    return StateTensor(shard, field, part, tensor, (0,))


@pytest.fixture
def tensors() -> list[StateTensor]:
    draw = torch.Generator(DEVICE).manual_seed(1)
    both = torch.randn(2 * NUMEL, generator=draw, device=DEVICE)
    return [
        piece("buffer", Part.MASTER, torch.randn(64, generator=draw, device=DEVICE)),
        piece("master", Part.MASTER, both[:NUMEL]),
        piece("exp_avg", Part.MOMENTS, both[NUMEL:]),
        piece("step", Part.MOMENTS, torch.ones(1)),
    ]


@pytest.fixture
def store(shm: Path) -> Iterator[MemoryStore]:
    made = MemoryStore(shm, "job", 0, [40_000_000] * 2)
    yield made
    made.close()


@pytest.fixture
def engine() -> Iterator[CopyEngine]:
    made = copy_engine()
    yield made
    made.close()


def hold_the_device() -> None:
    """Work that keeps training's stream busy for a while."""
    square = torch.randn(SIDE, SIDE, device=DEVICE)
    for _ in range(20):
        square = square @ square.T / SIDE


def host_copies(tensors: list[StateTensor]) -> list[torch.Tensor]:
    return [one.tensor.cpu().clone() for one in tensors]


def test_snapshots_have_the_state_when_begun_and_restore_it(
    store: MemoryStore, engine: CopyEngine, tensors: list[StateTensor], caplog: pytest.LogCaptureFixture
) -> None:
    capturer = LiveCapturer(tensors, TRAINER, engine)
    layout = capturer.layout(SnapshotPlan(0, {ROUTER: Part.MASTER_AND_MOMENTS}))
    with caplog.at_level(logging.WARNING):
        for iteration in range(1, 6):
            for one in tensors:
                one.tensor.add_(1.0)
            expected = host_copies(tensors)
            hold_the_device()
            writer = store.reserve(SnapshotId(iteration, 0), layout)
            capturer.begin([(layout, writer)])
            tensors[0].tensor.fill_(-1.0)  # as the next forward pass does with buffers
            capturer.end(WAIT_S)
            tensors[1].tensor.fill_(-1.0)  # as the next step of the optimizer does
            writer.seal(Facts("job"))
            restorer = LiveRestorer(tensors, lambda recast: None)
            restorer.poison()
            with store.open(SnapshotId(iteration, 0)) as reader:
                restorer.restore(reader.read, {Part.MASTER_AND_MOMENTS: [ROUTER]})
            restorer.complete()
            for one, value in zip(tensors, expected, strict=True):
                assert torch.equal(one.tensor.cpu(), value), one.field
            store.free(SnapshotId(iteration, 0))
    assert not [record for record in caplog.records if "page-lock" in record.message]


@needs_cuda("streams were")
def test_streams_of_copies_are_none_of_those_that_torch_hands_out() -> None:
    own = {name: own_stream(name).cuda_stream for name in ("test-copy", "test-send")}
    assert own["test-copy"] != own["test-send"]
    assert own_stream("test-copy").cuda_stream == own["test-copy"]
    assert {torch.cuda.Stream().cuda_stream for _ in range(64)}.isdisjoint(own.values())


@needs_cuda("a host that goes ahead of the device was")
def test_begin_does_not_wait_for_the_device(store: MemoryStore, engine: CopyEngine, tensors: list[StateTensor]) -> None:
    capturer = LiveCapturer(tensors, TRAINER, engine)
    layout = capturer.layout(SnapshotPlan(0, {ROUTER: Part.MASTER_AND_MOMENTS}))
    for iteration in (1, 2, 3):  # both segments are page-locked by the second
        writer = store.reserve(SnapshotId(iteration, 0), layout)
        hold_the_device()
        held = torch.cuda.Event()
        held.record()
        capturer.begin([(layout, writer)])
        was_busy = not held.query()
        capturer.end(WAIT_S)
        writer.seal(Facts("job"))
        if iteration < 3:
            store.free(SnapshotId(iteration, 0))
    assert was_busy


@needs_cuda("a driver that refuses page-locks was")
def test_what_cannot_be_page_locked_is_copied_all_the_same_and_said_once(
    store: MemoryStore,
    engine: CopyEngine,
    tensors: list[StateTensor],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    cudart = torch.cuda.cudart()

    class Refusing:
        cudaHostUnregister = staticmethod(cudart.cudaHostUnregister)

        @staticmethod
        def cudaHostRegister(address: int, nbytes: int, flags: int) -> object:
            return cudart.cudaHostRegister(0, nbytes, flags)

    monkeypatch.setattr(torch.cuda, "cudart", Refusing)
    capturer = LiveCapturer(tensors, TRAINER, engine)
    layout = capturer.layout(SnapshotPlan(0, {ROUTER: Part.MASTER_AND_MOMENTS}))
    for iteration in (1, 2):
        with store.reserve(SnapshotId(iteration, 0), layout) as writer:
            capturer.begin([(layout, writer)])
            capturer.end(WAIT_S)
            writer.seal(Facts("job"))
        with store.open(SnapshotId(iteration, 0)) as reader:
            found = torch.frombuffer(bytearray(reader.read(tensors[1].key)), dtype=torch.float32)
        assert torch.equal(found, tensors[1].tensor.cpu())
    assert len([record for record in caplog.records if "page-lock" in record.message]) == 1


def test_the_bandwidth_is_that_of_the_device_and_a_trial_comes_before_the_first_copy(
    store: MemoryStore, tensors: list[StateTensor]
) -> None:
    capturer = LiveCapturer(tensors, TRAINER, copy_engine())
    tried = capturer.bandwidth_bytes_per_s
    layout = capturer.layout(SnapshotPlan(1, {ROUTER: Part.MASTER_AND_MOMENTS}))
    with store.reserve(SnapshotId(1, 0), layout) as writer:
        capturer.begin([(layout, writer)])
        capturer.end(WAIT_S)
    for found in (tried, capturer.bandwidth_bytes_per_s):
        assert 1e8 < found < 1e12


def test_segments_are_page_locked_over_resizes(
    store: MemoryStore, tensors: list[StateTensor], caplog: pytest.LogCaptureFixture
) -> None:
    engine = copy_engine()
    capturer = LiveCapturer(tensors, TRAINER, engine)
    layout = capturer.layout(SnapshotPlan(1, {ROUTER: Part.MASTER_AND_MOMENTS}))
    for iteration in range(1, 5):
        with store.reserve(SnapshotId(iteration, 0), layout) as writer:
            capturer.begin([(layout, writer)])
            capturer.end(WAIT_S)
            writer.seal(Facts("job"))
        store.free(SnapshotId(iteration, 0))
        engine.release(store.views())
    store.lend(engine)
    store.resize([80_000_000] * 2)
    with store.reserve(SnapshotId(9, 0), layout) as writer:
        capturer.begin([(layout, writer)])
        capturer.end(WAIT_S)
    assert not [record for record in caplog.records if "page-lock" in record.message]
