"""Bulk staged on GPUs; over NCCL between two of them beside collectives of training, and when one process is killed."""

from __future__ import annotations

import os
import signal
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.multiprocessing as multiprocessing

from megatron.core.dist_checkpointing.moe.errors import PeerLost
from megatron.core.dist_checkpointing.moe.replication.staged import StagedTransport, Staging

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")

BYTES = 100_000_007
TIMEOUT_S = 60.0


@pytest.mark.parametrize("pinned", [True, False])
def test_bytes_come_back_from_the_buffers_as_they_were(pinned: bool) -> None:
    staging = Staging(torch.device("cuda", 0))
    source = torch.randint(0, 256, (5_000_003,), dtype=torch.uint8, pin_memory=pinned)
    target = torch.zeros_like(source, pin_memory=pinned)
    for at in range(4):
        staging.copied(staging.buffer(at, len(source)), source)
        staging.copied(target, staging.buffer(at, len(source)))
        assert torch.equal(source, target)
        target.zero_()


def content(owner: int, number: int) -> bytes:
    return np.random.default_rng([owner, number]).bytes(BYTES)


def play(rank: int, folder: str) -> None:
    """Exchange replicas both ways while training reduces gradients, then lose rank 1 in the middle of a message."""
    os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "0"
    torch.cuda.set_device(rank)
    store = torch.distributed.FileStore(f"{folder}/store", 2)
    torch.distributed.init_process_group("nccl", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=60))
    transport: Any = StagedTransport(
        store, rank, 2, "test", TIMEOUT_S, backend="nccl", device=torch.device("cuda", rank)
    )
    gradients = torch.ones(50_000_000, device="cuda")
    begun_s = time.monotonic()
    for number in range(5):
        into = bytearray(BYTES)
        under_way = [transport.receive(1 - rank, memoryview(into)), transport.send(1 - rank, content(rank, number))]
        for _ in range(20):
            torch.distributed.all_reduce(gradients)
        for transfer in under_way:
            transfer.wait()
        assert into == content(1 - rank, number)
    torch.cuda.synchronize()
    Path(f"{folder}/exchanged-{rank}").write_text(str(time.monotonic() - begun_s))
    if rank == 1:
        transport.send(0, content(1, 9)[: BYTES // 2]).wait()
        os.kill(os.getpid(), signal.SIGKILL)
    begun_s = time.monotonic()
    transport.receive(1, memoryview(bytearray(BYTES // 2))).wait()
    try:
        transport.receive(1, memoryview(bytearray(BYTES))).wait()
    except PeerLost as error:
        Path(f"{folder}/lost").write_text(f"{time.monotonic() - begun_s} {error}")
    os.kill(os.getpid(), signal.SIGTERM)  # torch's own communicators have lost a peer as well


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="NCCL takes one process for each GPU, and there is one GPU")
def test_bulk_over_nccl_is_exact_beside_collectives_of_training_and_a_killed_peer_is_lost_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    context: Any = multiprocessing.get_context("spawn")
    ranks = [context.Process(target=play, args=(rank, str(tmp_path))) for rank in range(2)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(240)
    assert [process.exitcode for process in ranks] == [-signal.SIGTERM, -signal.SIGKILL]
    assert (tmp_path / "exchanged-0").exists() and (tmp_path / "exchanged-1").exists()
    waited_s, said = (tmp_path / "lost").read_text().split(" ", 1)
    assert float(waited_s) < 10
    assert "rank 1" in said
