"""Bandwidths of the machine at hand: GPU to host, storage, and collectives of processes that are started for it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron.core.dist_checkpointing.moe.errors import MoECheckpointError, UsageError

from .layer import device, timed_s

_HERE = Path(__file__).parent


@dataclass(frozen=True)
class Law:
    """Seconds of an all-gather by the bytes that it gathers: steps x latency_s + what travels / bytes_per_s."""

    latency_s: float
    bytes_per_s: float


def host_copy_bytes_per_s(size: int) -> float:
    """Bytes per second from the GPU to pinned host memory; without a GPU, from host memory to host memory."""
    import torch

    on_gpu = device() == "cuda"
    source = torch.ones(size, dtype=torch.uint8, device=device())
    target = torch.empty(size, dtype=torch.uint8, pin_memory=on_gpu)
    return size / timed_s(lambda: target.copy_(source, non_blocking=on_gpu))


def storage_bytes_per_s(folder: Path, size: int, timeout_s: float) -> float:
    """Bytes per second that one process writes into a new file, fsync included; the file is removed.

    Raises UsageError for a folder that cannot be written, MoECheckpointError where it takes longer than timeout_s.
    """
    worker = [sys.executable, "-P", str(_HERE / "storage_worker.py"), str(folder), str(size)]
    result = _finished([_started(worker, {})], timeout_s, f"writing {size} bytes to {folder}")[0]
    seconds = json.loads(result)
    if "error" in seconds:
        raise UsageError(f"{folder} cannot be written: {seconds['error']}")
    return float(size / seconds["seconds"])


def collective_seconds(ranks: int, sizes: Sequence[int], timeout_s: float) -> dict[int, float]:
    """Shortest seconds of an all-gather of each number of bytes, over `ranks` processes.

    With NCCL where there are as many GPUs, else with gloo on CPUs, over loopback.
    Raises MoECheckpointError where they fail or take longer than timeout_s.
    """
    with tempfile.TemporaryDirectory(prefix="moe-ckpt-profile-") as folder:
        environment = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        command = [sys.executable, "-P", str(_HERE / "collective_worker.py"), f"file://{folder}/meeting"]
        counts = ",".join(map(str, sizes))
        workers = [
            _started([*command, str(rank), str(ranks), counts, str(timeout_s)], environment) for rank in range(ranks)
        ]
        results = _finished(workers, timeout_s, f"collectives of {ranks} processes")
    seconds = json.loads(results[0])
    return {int(size): float(value) for size, value in seconds.items()}


def affine_law(seconds: dict[int, float], ranks: int) -> Law:
    """The straight line nearest to what was measured (least squares of relative errors).

    An all-gather over p ranks takes p - 1 steps, in which (p - 1) / p of its bytes reach each rank. A latency below 0
    is noise and counts as 0. Raises UsageError where fewer than two sizes were measured, or larger ones are not slower.
    """
    if len(seconds) < 2:
        raise UsageError(f"an affine law needs at least 2 sizes, but {len(seconds)} was measured")
    points = [(float(size), value, 1 / value**2) for size, value in seconds.items()]
    total = sum(weight for _, _, weight in points)
    mean_size = sum(size * weight for size, _, weight in points) / total
    mean_s = sum(value * weight for _, value, weight in points) / total
    above = sum(weight * (size - mean_size) * (value - mean_s) for size, value, weight in points)
    slope = above / sum(weight * (size - mean_size) ** 2 for size, _, weight in points)
    if slope <= 0:
        raise UsageError("larger collectives did not take longer: measure again with larger sizes or an idle machine")
    return Law(max(0.0, mean_s - slope * mean_size) / (ranks - 1), (ranks - 1) / ranks / slope)


def _started(command: list[str], environment: dict[str, str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        command, env=os.environ | environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def _finished(workers: list[subprocess.Popen[str]], timeout_s: float, what: str) -> list[str]:
    """What the workers wrote; none of them outlives this."""
    deadline = time.monotonic() + timeout_s
    try:
        written = [worker.communicate(timeout=max(0.1, deadline - time.monotonic())) for worker in workers]
    except subprocess.TimeoutExpired:
        raise MoECheckpointError(
            f"{what} took longer than {timeout_s:g} s: raise --timeout, or measure less with --megabytes"
        ) from None
    finally:
        for worker in workers:
            if worker.poll() is None:
                worker.kill()
                worker.wait(timeout=10)
    for worker, (_, errors) in zip(workers, written, strict=True):
        if worker.returncode:
            last = errors.strip().splitlines()[-1:] or [f"exit code {worker.returncode}"]
            raise MoECheckpointError(f"{what} failed: {last[0][:300]}")
    return [output for output, _ in written]
