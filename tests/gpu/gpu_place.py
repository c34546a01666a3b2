"""Where tests of this folder run: on a GPU, or rehearsed on a CPU, in small, where MOE_CKPT_GPU_REHEARSAL=cpu."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

import pytest
import torch

from megatron.core.dist_checkpointing.moe.snapshot.copy_engines import CopyEngine, ThreadEngine
from megatron.core.dist_checkpointing.moe.snapshot.page_locks import PageLocks
from megatron.core.dist_checkpointing.moe.snapshot.stream_engine import StreamEngine

REHEARSED = os.environ.get("MOE_CKPT_GPU_REHEARSAL") == "cpu"
DEVICE = "cpu" if REHEARSED else "cuda"
BACKEND = "gloo" if REHEARSED else "nccl"

needs_device = pytest.mark.skipif(not (REHEARSED or torch.cuda.is_available()), reason="no CUDA device")


def needs_cuda(what: str) -> pytest.MarkDecorator:
    """Skips a test of something that the CPU has no counterpart of, and says what was not tested."""
    return pytest.mark.skipif(not torch.cuda.is_available(), reason=f"no CUDA device: {what} not tested")


def sized(full: int, rehearsed: int) -> int:
    """A size, and that of a rehearsal."""
    return rehearsed if REHEARSED else full


def copy_engine(locks: PageLocks | None = None) -> CopyEngine:
    """That of the device."""
    return ThreadEngine() if REHEARSED else StreamEngine(locks)


def settle() -> None:
    """Wait until the device has done all it was given."""
    if not REHEARSED:
        torch.cuda.synchronize()


def seconds(run: Callable[[], object]) -> float:
    """How long the device takes for it; the host waits before and after."""
    settle()
    begun_s = time.perf_counter()
    run()
    settle()
    return time.perf_counter() - begun_s


def pinned_bytes_per_s(source: torch.Tensor, target: torch.Tensor) -> float:
    """Of a copy between a device and memory that torch has page-locked, the second one."""
    copies_s = [seconds(lambda: target.copy_(source, non_blocking=True)) for _ in range(3)]
    return float(source.numel() / min(copies_s[1:]))
