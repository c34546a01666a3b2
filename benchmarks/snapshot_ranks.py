"""What each rank of `snapshot.py` does: copies alone, memory over many snapshots, checkpoints in turns."""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from harness import SETTINGS, BenchmarkJob, on_ranks
from peers import OURS, import_nvrx
from snapshot_session import Ours, live_tensors, sum_and_max
from snapshot_turns import PEERS, checkpoints_in_turns, every_iteration


def measured(job: BenchmarkJob, settings: dict[str, Any]) -> dict[str, Any]:
    """What was asked for."""
    if settings["part"] == "memory":
        return {"memory": _memory(job, settings["warm"], settings["iterations"])}
    if settings["part"] == "every iteration":
        return {"state": _state_facts(job)} | every_iteration(job, settings)
    names = [*OURS, *(name for name in PEERS if HAS_NVRX or not name.startswith("NVRx"))]
    return {
        "state": _state_facts(job),
        "bandwidth": _bandwidth(job, settings["copies"]),
        "checkpoints": checkpoints_in_turns(job, names, settings),
    }


def _state_facts(job: BenchmarkJob) -> dict[str, Any]:
    """Bytes of the training state, by part: each value once, on the first of the ranks that have it."""
    sizes: dict[str, int] = {}
    for live in live_tensors(job):
        own = live.holders[0] == job.rank if live.holders else True
        name = live.part.name.lower()
        sizes[name] = sizes.get(name, 0) + own * live.tensor.nbytes
    parts = ("master", "moments", "compute")
    total, _ = sum_and_max([sizes.get(name, 0) for name in parts])
    parameters = sum(parameter.numel() for chunk in job.trainer.chunks for parameter in chunk.parameters())
    return {f"{name}_bytes": int(size) for name, size in zip(parts, total, strict=True)} | {
        "total_bytes": int(sum(total)),
        "parameters_of_rank_0": parameters,
        "ranks": job.world_size,
    }


def _bandwidth(job: BenchmarkJob, copies: int) -> dict[str, Any]:
    """Capture of all of a rank's state into the memory tier against one memcpy of as many bytes, in pairs."""
    import torch

    from megatron.core.dist_checkpointing.moe.megatron_state.trainer_state import LiveTrainerState, NoLoopState
    from megatron.core.dist_checkpointing.moe.snapshot.capturer import LiveCapturer
    from megatron.core.dist_checkpointing.moe.snapshot.copy_engines import ThreadEngine
    from megatron.core.dist_checkpointing.moe.storage.memory import MemoryStore
    from megatron.core.dist_checkpointing.moe.types.snapshots import full_plan

    trainer = job.trainer
    capturer = LiveCapturer(
        live_tensors(job), LiveTrainerState(trainer.optimizer, trainer.scheduler, NoLoopState()), ThreadEngine()
    )
    layout = capturer.layout(full_plan(1, sorted(capturer.operators)), trainer=True)
    folder = job.folder / "bandwidth"
    folder.mkdir(exist_ok=True)
    store = MemoryStore(folder, "bandwidth", job.rank, [layout.nbytes] * 2)
    source, target = np.ones(layout.nbytes, np.uint8), np.zeros(layout.nbytes, np.uint8)
    result: dict[str, Any] = {"bytes": layout.nbytes, "tensors": len(layout.fields)}
    result["glibc_tunables"] = os.environ.get("GLIBC_TUNABLES", "")
    for name, ranks in (("alone", 1), ("all ranks at once", job.world_size)):
        torch.distributed.barrier()
        rows = []
        if job.rank < ranks:
            rows = [_copied(capturer, store, layout, (target, source), 1 + at) for at in range(copies)][2:]
        torch.distributed.barrier()
        memcpy, capture = ([layout.nbytes / row[at] / 1e9 for row in rows] for at in (0, 1))
        result[name] = {"memcpy_gb_per_s": memcpy, "capture_gb_per_s": capture}
    torch.distributed.barrier()
    store.remove()
    return result


def _copied(capturer: Any, store: Any, layout: Any, arrays: tuple[Any, Any], iteration: int) -> tuple[float, float]:
    """Seconds of a memcpy and of a capture, in turn the one or the other first."""
    from megatron.core.dist_checkpointing.moe.ports import SnapshotId

    def memcpy() -> None:
        np.copyto(*arrays)

    def capture() -> None:
        capturer.begin([(layout, writer)])
        capturer.end(60.0)

    times = {}
    with store.reserve(SnapshotId(iteration, 0), layout) as writer:
        for work in (memcpy, capture) if iteration % 2 else (capture, memcpy):
            started_s = time.perf_counter()
            work()
            times[work] = time.perf_counter() - started_s
    return times[memcpy], times[capture]


def _memory(job: BenchmarkJob, warm: int, iterations: int) -> dict[str, Any]:
    """Resident bytes of each rank without shared ones, after each iteration, with a snapshot at each."""
    found = {}
    _iterated(job.iterating(), warm)
    for name in (*OURS, "none"):  # what training itself still grows, the last of them sees least of
        session = None if name == "none" else Ours(job, name, interval=1)
        iterate = job.iterating(job.trainer.managed(session))
        _iterated(iterate, warm)
        samples = []
        for _ in range(iterations):
            iterate()
            samples.append(_private_bytes())
        if session is not None:
            session.close()
        slope = float(np.polyfit(np.arange(iterations), np.array(samples, dtype=float), 1)[0])
        growth = statistics.median(samples[-20:]) - statistics.median(samples[:20])
        _, (slope, growth, most) = sum_and_max([slope, growth, float(max(samples))])
        found[name] = {
            "iterations": iterations,
            "slope_bytes_per_iteration": slope,
            "growth_bytes": growth,
            "largest_bytes": most,
            "samples_of_rank_0": samples,
        }
    return found


def _iterated(iterate: Callable[[], None], times: int) -> None:
    for _ in range(times):
        iterate()


def _private_bytes() -> int:
    """Anonymous memory: what is resident without shared segments, and without pages of files, such as the corpus."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon")) * 1024


if __name__ == "__main__":
    # Before Megatron-Core is imported, which looks for it once.
    HAS_NVRX = import_nvrx(Path(json.loads(os.environ[SETTINGS])["nvrx"]))
    on_ranks(sys.argv[1:], measured)
