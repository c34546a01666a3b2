"""What one device reaches, by torch alone: a matrix product, and a step of Adam."""

from __future__ import annotations

import time
from collections.abc import Callable

REPEATS = 4


def matrix_flops(size: int, element_bytes: int) -> float:
    """Operations per second of one square matrix product: what this device can reach at most."""
    import torch

    kind = {2: torch.bfloat16, 4: torch.float32}[element_bytes]
    left, right = (torch.randn(size, size, device=device(), dtype=kind) for _ in range(2))
    return float(2.0 * size**3 / timed_s(lambda: torch.mm(left, right)))


def optimizer_bytes_per_s(parameters: int) -> float:
    """Bytes of gradients, parameters and moments that a step of Adam reads and writes in a second."""
    import torch

    weights = torch.nn.Parameter(torch.zeros(parameters, device=device()))
    weights.grad = torch.ones_like(weights)
    optimizer = torch.optim.Adam([weights], fused=True)
    return 28.0 * parameters / timed_s(optimizer.step)


def device() -> str:
    """Where torch computes here."""
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def element_bytes() -> int:
    """Of what a layer computes with here: bf16 on GPUs, fp32 on CPUs, which emulate anything narrower."""
    return 2 if device() == "cuda" else 4


def timed_s(work: Callable[[], object]) -> float:
    """Shortest seconds of REPEATS runs, after one that is not counted."""
    return min([_once_s(work) for _ in range(REPEATS + 1)][1:])


def _once_s(work: Callable[[], object]) -> float:
    """Seconds by the clock; without a GPU those that this thread computed, so that others on the machine do not count.

    OpenMP lets the calling thread work as long as any of its threads.
    """
    import torch

    on_gpu = device() == "cuda"
    clock = time.perf_counter if on_gpu else time.thread_time
    started = clock()
    work()
    if on_gpu:
        torch.cuda.synchronize()
    return clock() - started
