"""What copies of snapshots reach of the link, and what they cost training; skipped where there is no GPU."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from gpu_driver import LOCAL, Job, corpus

from megatron.core.dist_checkpointing.moe.snapshot.copy_engines import Span, Throttle
from megatron.core.dist_checkpointing.moe.snapshot.page_locks import PageLocks
from megatron.core.dist_checkpointing.moe.snapshot.stopwatch import CudaStopwatch
from megatron.core.dist_checkpointing.moe.snapshot.stream_engine import StreamEngine
from megatron.core.dist_checkpointing.moe.storage.memory import MemoryStore

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")

Record = Callable[..., None]
NBYTES = 2 << 30
WAIT_S = 60.0
LARGE = """
--num-layers 8 --hidden-size 1024 --num-attention-heads 16 --num-experts 16 --moe-ffn-hidden-size 2048
--seq-length 1024 --max-position-embeddings 1024 --global-batch-size 16 --train-iters 16
""".split()
"""About 1.1 billion parameters; 13 GB of state."""


def pinned_bytes_per_s(source: torch.Tensor) -> float:
    """Of one copy to memory that torch has page-locked."""
    target = torch.empty(source.numel(), dtype=torch.uint8, pin_memory=True)
    begun, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for _ in range(2):
        begun.record()
        target.copy_(source, non_blocking=True)
        ended.record()
        ended.synchronize()
    return float(source.numel() / (begun.elapsed_time(ended) / 1000))


def test_segments_are_written_at_the_rate_of_the_link(shm: Path, record: Record) -> None:
    source = torch.randint(0, 255, (NBYTES,), dtype=torch.uint8, device="cuda")
    store, locks = MemoryStore(shm, "job", 0, [NBYTES]), PageLocks()
    engine = StreamEngine(locks)
    engine.prepare(store.views())
    locks.settle(WAIT_S)
    (segment,) = store.views()
    begun, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    rates = []
    for _ in range(3):
        begun.record()
        engine.begin([([Span(source, 0)], segment)])
        engine.wait(WAIT_S)
        ended.record()
        ended.synchronize()
        rates.append(NBYTES / (begun.elapsed_time(ended) / 1000))
    assert bytes(segment[-64:]) == source[-64:].cpu().numpy().tobytes()
    link = pinned_bytes_per_s(source)
    record("device to host", bytes=NBYTES, pinned_bytes_per_s=link, segment_bytes_per_s=rates)
    del segment
    engine.close()
    store.close()
    assert max(rates) >= 0.8 * link


def test_a_copy_that_is_held_back_keeps_to_its_rate_and_hardly_slows_kernels(shm: Path, record: Record) -> None:
    source = torch.zeros(NBYTES, dtype=torch.uint8, device="cuda")
    square = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
    store, engine, watch = MemoryStore(shm, "job", 0, [NBYTES]), StreamEngine(), CudaStopwatch()
    (segment,) = store.views()
    engine.begin([([Span(source, 0)], segment)])  # locks the pages
    engine.wait(WAIT_S)

    def passes_s(bytes_per_s: float | None, *, copied: bool) -> float:
        torch.cuda.synchronize()
        watch.resume()
        if copied:
            engine.begin([([Span(source, 0)], segment)], Throttle(bytes_per_s))
        for _ in range(400):
            torch.mm(square, square)
        watch.pause()
        torch.cuda.synchronize()
        engine.wait(WAIT_S)
        lap_s = watch.lap_s()
        assert lap_s is not None
        return lap_s

    passes_s(None, copied=False)
    pairs = [(passes_s(None, copied=False), passes_s(10e9, copied=True)) for _ in range(5)]
    slowed = statistics.median(beside / alone for alone, beside in pairs)
    record("kernels beside a copy at 10 GB/s", slowed=slowed, pairs_s=pairs)
    engine.close()
    store.close()
    assert slowed < 1.1


def test_a_stopwatch_tells_what_the_device_waited() -> None:
    watch, square = CudaStopwatch(), torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    torch.mm(square, square)
    torch.cuda.synchronize()
    watch.pause()
    torch.cuda.synchronize()
    time.sleep(0.2)
    assert watch.resume() == pytest.approx(0.2, abs=0.05)
    for _ in range(1000):  # about a second
        torch.mm(square, square)
    watch.pause()
    time.sleep(0.2)
    assert watch.resume() == 0.0, "the device had work all the time"


@pytest.mark.timeout(550)
def test_a_checkpoint_in_every_iteration_costs_next_to_nothing(tmp_path: Path, shm: Path, record: Record) -> None:
    """Pairs of jobs, one with and one without; the figures are of the iterations after the first half."""
    data, pairs = corpus(tmp_path), []
    flags = (*LOCAL, *LARGE)
    protected = ("--moe-ckpt-strategy", "full", "--moe-ckpt-interval", "1", "--moe-ckpt-memory-dir", str(shm))
    stalls: list[float] = []
    for at in range(2):
        plain = Job(tmp_path / f"plain-{at}", shm, data, flags)
        beside = Job(tmp_path / f"protected-{at}", shm, data, (*flags, *protected))
        assert plain.run() == 0, plain.said[-1]
        assert beside.run() == 0, beside.said[-1]
        medians = [
            statistics.median(report["iteration_time_s"] for report in job.reports[8:]) for job in (plain, beside)
        ]
        pairs.append(medians)
        stalls += [report["stall_s"] for report in beside.reports[8:]]
    stall = statistics.median(stalls) / statistics.median(one for one, _ in pairs)
    record("a checkpoint in every iteration", pairs_s=pairs, stall_share=stall)
    assert stall < 0.05
