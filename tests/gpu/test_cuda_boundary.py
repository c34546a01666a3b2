"""What is sent over stage boundaries, copied from a CUDA device beside its kernels; skipped where there is none."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from gpu_place import DEVICE, copy_engine, needs_device, settle, sized

from megatron.core.dist_checkpointing.moe.local_recovery.boundary_copies import (
    BoundaryFailure,
    BoundaryRecorder,
    fingerprint,
)
from megatron.core.dist_checkpointing.moe.ports import Facts, Field, Layout, SnapshotId
from megatron.core.dist_checkpointing.moe.storage.memory import MemoryStore
from megatron.core.dist_checkpointing.moe.types import LOG, Direction, boundary_key, received_key

pytestmark = needs_device

SHAPE = (sized(1024, 16), 2, 1024)
MICROBATCHES = 6
WAIT_S = 60.0
KEYS = [boundary_key(Direction.FORWARD, 0, microbatch) for microbatch in range(MICROBATCHES)]
LAYOUT = Layout.of(Field(key, "bfloat16", SHAPE) for key in KEYS)


@pytest.fixture
def store(shm: Path) -> Iterator[MemoryStore]:
    made = MemoryStore(shm, "job", 0, [LAYOUT.nbytes] * 2, area="standby")
    yield made
    made.close()


@pytest.fixture
def recorder() -> Iterator[BoundaryRecorder]:
    made = BoundaryRecorder(copy_engine())
    yield made
    made.close()


def send(recorder: BoundaryRecorder, seed: int) -> list[bytes]:
    """Tensors that a queue of kernels makes, sent before they are ready, their memory given up and used again."""
    draw = torch.Generator(DEVICE).manual_seed(seed)
    expected = []
    for _ in range(MICROBATCHES):
        tensor = torch.randn(SHAPE, generator=draw, device=DEVICE)
        for _ in range(20):
            tensor = tensor * 1.0001 + 0.001
        tensor = tensor.bfloat16()
        expected.append(tensor.clone())
        recorder.sent(Direction.FORWARD, tensor)
        tensor.data = torch.empty(1, device=DEVICE, dtype=torch.bfloat16)
        torch.full(SHAPE, 7.0, device=DEVICE, dtype=torch.bfloat16)  # would take the memory that was given up
    return [one.view(torch.uint8).cpu().numpy().tobytes() for one in expected]


def test_each_tensor_is_recorded_although_its_memory_is_given_up_at_once(
    store: MemoryStore, recorder: BoundaryRecorder
) -> None:
    for iteration in range(1, 6):
        snapshot = SnapshotId(iteration, 0, LOG)
        writer = store.reserve(snapshot, LAYOUT)
        recorder.arm(LAYOUT, writer)
        expected = send(recorder, iteration)
        recorder.passed()
        recorder.end(WAIT_S)
        writer.seal(Facts("job"))
        with store.open(snapshot) as reader:
            assert [bytes(reader.read(key)) for key in KEYS] == expected
        store.free(snapshot)


def test_what_is_given_up_half_way_leaves_the_next_iteration_whole(
    store: MemoryStore, recorder: BoundaryRecorder
) -> None:
    given_up = store.reserve(SnapshotId(1, 0, LOG), LAYOUT)
    recorder.arm(LAYOUT, given_up)
    recorder.sent(Direction.FORWARD, torch.zeros(SHAPE, device=DEVICE, dtype=torch.bfloat16))
    with pytest.raises(BoundaryFailure, match=f"1 of {MICROBATCHES} forward"):
        recorder.end(WAIT_S)
    given_up.abandon()
    settle()
    writer = store.reserve(SnapshotId(2, 0, LOG), LAYOUT)
    recorder.arm(LAYOUT, writer)
    expected = send(recorder, 9)
    recorder.end(WAIT_S)
    writer.seal(Facts("job"))
    with store.open(SnapshotId(2, 0, LOG)) as reader:
        assert [bytes(reader.read(key)) for key in KEYS] == expected


def test_segments_can_be_given_back_between_iterations(store: MemoryStore, recorder: BoundaryRecorder) -> None:
    writer = store.reserve(SnapshotId(1, 0, LOG), LAYOUT)
    recorder.arm(LAYOUT, writer)
    send(recorder, 1)
    recorder.end(WAIT_S)
    writer.seal(Facts("job"))
    store.free(SnapshotId(1, 0, LOG))
    recorder.settle()
    store.resize([2 * LAYOUT.nbytes] * 2)
    second = store.reserve(SnapshotId(2, 0, LOG), LAYOUT)
    recorder.arm(LAYOUT, second)
    expected = send(recorder, 2)
    recorder.end(WAIT_S)
    second.seal(Facts("job"))
    with store.open(SnapshotId(2, 0, LOG)) as reader:
        assert [bytes(reader.read(key)) for key in KEYS] == expected


def test_what_is_received_has_the_fingerprint_that_the_cpu_computes(
    store: MemoryStore, recorder: BoundaryRecorder
) -> None:
    key = received_key(Direction.BACKWARD)
    layout = Layout.of([*LAYOUT.fields, Field(key, "int64", (MICROBATCHES,))])
    store.resize([layout.nbytes] * 2)
    with store.reserve(SnapshotId(1, 0, LOG), layout) as writer:
        recorder.arm(layout, writer)
        came = []
        for _ in range(MICROBATCHES):
            tensor = torch.randn(SHAPE, device=DEVICE).bfloat16()
            recorder.receiving(Direction.BACKWARD)(tensor)
            came.append(tensor)
        send(recorder, 1)
        recorder.end(WAIT_S)
        writer.seal(Facts("job"))
    with store.open(SnapshotId(1, 0, LOG)) as reader:
        kept = memoryview(bytes(reader.read(key))).cast("q").tolist()
    assert kept == [int(fingerprint(tensor.cpu())) for tensor in came]
