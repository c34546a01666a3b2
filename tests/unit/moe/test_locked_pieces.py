"""Segments are page-locked in pieces, and CUDA refuses a copy over the border of two: small ones on the asynchronous
device."""

from __future__ import annotations

import mmap
import queue
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from device_training import WAIT_S, piece, trained

from megatron.core.dist_checkpointing.moe.local_recovery.step_guard import GRADIENT, LiveGradients
from megatron.core.dist_checkpointing.moe.megatron_state import restore
from megatron.core.dist_checkpointing.moe.megatron_state.optimizer_state import SteppedTensor
from megatron.core.dist_checkpointing.moe.megatron_state.restore import LiveRestorer
from megatron.core.dist_checkpointing.moe.ports import Facts, Layout, SnapshotId
from megatron.core.dist_checkpointing.moe.replication import staged
from megatron.core.dist_checkpointing.moe.replication.staged import BulkWay, Staging
from megatron.core.dist_checkpointing.moe.snapshot import page_locks, stream_engine
from megatron.core.dist_checkpointing.moe.snapshot.copy_engines import chunked
from megatron.core.dist_checkpointing.moe.snapshot.page_locks import PageLocks
from megatron.core.dist_checkpointing.moe.storage import system
from megatron.core.dist_checkpointing.moe.storage.memory import MemoryStore
from megatron.core.dist_checkpointing.moe.types import GRADIENTS, Part
from megatron.pretrain.testing.async_device import AsyncDevice, installed

PIECE = mmap.PAGESIZE
NBYTES = 5 * PIECE


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_locks, "LOCK_BYTES", PIECE)
    monkeypatch.setattr(system, "LOCK_BYTES", PIECE)
    monkeypatch.setattr(stream_engine, "chunked", lambda spans, most=PIECE: chunked(spans, most, PIECE))


@pytest.fixture
def device() -> Iterator[AsyncDevice]:
    with installed("lazy", 0) as device:
        yield device


@pytest.fixture
def locks(device: AsyncDevice) -> Iterator[PageLocks]:
    made = PageLocks()
    yield made
    made.release()


@pytest.fixture
def store(locks: PageLocks, tmp_path: Path) -> Iterator[MemoryStore]:
    """Whose segments are locked."""
    made = MemoryStore(tmp_path, "job", 0, [NBYTES] * 2)
    locks.begin(made.views())
    locks.settle(WAIT_S)
    yield made
    made.close()


@pytest.mark.parametrize("schedule", ["random", "eager"])
def test_what_protects_training_copies_over_no_border(schedule: str) -> None:
    assert trained(schedule, 1).all == []


def test_gradients_that_lie_over_borders_are_parked(store: MemoryStore) -> None:
    stepped = []
    for numel, dtype in ((700, torch.bfloat16), (4000, torch.float32), (0, torch.float32)):
        main = torch.zeros(numel, dtype=dtype, device="cuda")
        main.grad = torch.arange(numel, dtype=dtype, device="cuda")
        stepped.append(SteppedTensor(piece("master", Part.MASTER, main).shard, main, dtype))
    nothing: Any = SimpleNamespace(finish=lambda optimizer: None)
    gradients = LiveGradients(nothing, stepped, lambda: nothing)
    name = SnapshotId(5, 0, GRADIENTS)
    with store.reserve(name, Layout.of(gradients.fields())) as writer:
        gradients.copy(writer.buffer)
        writer.seal(Facts("job"))
    with store.open(name) as reader:
        for one in stepped:
            values = torch.arange(one.main.numel(), dtype=one.gradient_dtype)
            assert bytes(reader.read(one.shard.key(GRADIENT))) == values.view(torch.uint8).numpy().tobytes()


class Pipe:
    """The process group of both sides."""

    def __init__(self) -> None:
        self.chunks: queue.Queue[torch.Tensor] = queue.Queue()

    def group(self, store: Any, rank: int, timeout_s: float) -> Pipe:
        return self

    def finish(self, work: Any, check: Any) -> None:
        """It has ended."""

    def send(self, buffers: list[torch.Tensor], other: int, tag: int) -> None:
        self.chunks.put(buffers[0].cpu().clone())

    def recv(self, buffers: list[torch.Tensor], other: int, tag: int) -> None:
        buffers[0].copy_(self.chunks.get(timeout=WAIT_S))


def test_bulk_goes_from_and_to_any_place_of_a_segment(store: MemoryStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staged, "CHUNK_BYTES", 3000)
    source, into = (view[at : at + 4 * PIECE] for view, at in zip(store.views(), (100, 640), strict=True))
    source[:] = np.random.default_rng(0).bytes(len(source))
    pipe, ends = Pipe(), socket.socketpair()
    here, there = (
        BulkWay(pipe, lambda: None, lambda: Staging(torch.device("cuda")), lambda: None, WAIT_S)  # type: ignore[arg-type,return-value]
        for _ in ends
    )
    sending = threading.Thread(target=here.send, args=(ends[0], source, lambda: None))
    sending.start()
    try:
        there.receive(ends[1], into, lambda: None)
    finally:
        for end in ends:
            end.close()
        sending.join(WAIT_S)
    assert into == source


def test_state_is_restored_from_the_locked_pages_of_its_store(
    store: MemoryStore, locks: PageLocks, device: AsyncDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    def buffer(nbytes: int) -> torch.Tensor:
        raise AssertionError(f"a buffer of {nbytes} bytes")

    monkeypatch.setattr(restore, "_page_locked", buffer)
    live = torch.zeros(4000, device="cuda")
    state, values = piece("master", Part.MASTER, live), np.random.default_rng(0).standard_normal(4000, np.float32)
    with store.reserve(SnapshotId(5, 0), Layout.of([state.record])) as writer:
        writer.put(state.key, values)
        writer.seal(Facts("job"))
    restorer = LiveRestorer([state], lambda recast: None)
    restorer.locked_bytes = locks.reach
    with store.open(SnapshotId(5, 0)) as reader:
        restorer.restore(reader.read, {Part.MASTER: [state.operator]})
    assert live.tolist() == values.tolist()
    assert not device.blocking
