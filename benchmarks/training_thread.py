"""CPU time of the thread that trains, per iteration, at the scale of the largest models: a GPU may stand still for it.

One rank's real coordinator, strategy `sparse`, capturer and memory, with the operators of DeepSeek-V3 on 1,024 ranks
and popularity that changes; its tensors are tiny, and the messages of all others say what its own do. Time is judged as
a ratio to a fixed loop of Python, since machines differ.
"""

from __future__ import annotations

import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any, ClassVar, cast

import torch
from harness import Benchmark, row, rule, spread, start, where

from megatron.core.dist_checkpointing.moe.boot_clock import SystemClock
from megatron.core.dist_checkpointing.moe.config import MoECheckpointConfig
from megatron.core.dist_checkpointing.moe.megatron_state.operators import GlobalName, Shard, StateTensor
from megatron.core.dist_checkpointing.moe.policy.lineage import Identity
from megatron.core.dist_checkpointing.moe.snapshot.capturer import LiveCapturer
from megatron.core.dist_checkpointing.moe.snapshot.coordinator import Coordinator, Ports
from megatron.core.dist_checkpointing.moe.snapshot.copy_engines import ThreadEngine
from megatron.core.dist_checkpointing.moe.snapshot.memory_limit import segment_sizes
from megatron.core.dist_checkpointing.moe.snapshot.workers import ReplicationWorker, ThreadExecutor
from megatron.core.dist_checkpointing.moe.storage.memory import MemoryStore
from megatron.core.dist_checkpointing.moe.strategies import STRATEGIES, Job
from megatron.core.dist_checkpointing.moe.types import FP16_FP32, Part, SnapshotPlan, StepJournal, Topology
from moe_ckpt.simulator.models import PRESETS
from moe_ckpt.simulator.shards import owned_operators, shard_sizes

BENCHMARK = Benchmark("training_thread", 48)
ALLOWED = {"within": 2.0, "first": 4.5}
"""Times the fixed loop: an iteration within a window, and one that begins a window in another order."""
WINDOW = 4
FIELDS = {"compute": Part.COMPUTE, "master": Part.MASTER, "exp_avg": Part.MOMENTS, "exp_avg_sq": Part.MOMENTS}
PARTS = ("plan", "pieces", "layouts", "digest", "counts", "copies", "other", "total")


def main() -> int:
    """Exit code 1 if an iteration takes longer than is allowed."""
    return BENCHMARK.run(__doc__, lambda turns, quick: measured(turns if not quick else 16), report, keeps)


def keeps(result: dict[str, Any]) -> bool:
    """Whether iterations take no longer than is allowed, within a window and at its begin."""
    return all(median(result[at]["total"]) <= most * median(result["loop"]) for at, most in ALLOWED.items())


def report(result: dict[str, Any]) -> list[str]:
    """By part, in milliseconds, and all of it as a ratio to the loop."""
    loop = median(result["loop"])
    lines = [f"{result['operators']} operators, {where(result)}; the fixed loop takes {1e3 * loop:.2f} ms", ""]
    lines += [row("part", "ms in a window", "ms at its begin"), rule(3)]
    lines += [row(part, *(spread([1e3 * one for one in result[at][part]], 2) for at in ALLOWED)) for part in PARTS]
    return [*lines, row("total / loop", *(f"{median(result[at]['total']) / loop:.2f}" for at in ALLOWED))]


class Others:
    """The transport to ranks that say what this one does."""

    rank, world_size = 0, 1024

    def least(self, values: Sequence[int]) -> tuple[int, ...]:
        return tuple(values)

    def least_and_total(self, values: Sequence[int], added: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        return tuple(values), tuple(added)


class Lane(ThreadExecutor):
    """A thread whose newest work can be waited for: passes of seconds give it the time."""

    newest: ClassVar[dict[Any, Any]] = {}

    def submit(self, work: Callable[[], Any], /) -> Any:
        task = self.newest[self] = super().submit(work)
        return task


def timing(seconds: Counter[str], owner: Any, name: str, part: str) -> None:
    """Add what calls of this method take the thread that trains."""
    inner: Callable[..., Any] = getattr(owner, name)

    def timed(*arguments: Any, **options: Any) -> Any:
        begun_s = time.thread_time()
        try:
            return inner(*arguments, **options)
        finally:
            if threading.current_thread() is threading.main_thread():
                seconds[part] += time.thread_time() - begun_s

    setattr(owner, name, timed)


def measured(iterations: int) -> dict[str, Any]:
    """So many iterations of one rank, and of the fixed loop."""
    shape, topology = PRESETS["DeepSeek-V3-671B"], Topology(1024, pp=16, ep=64)
    sizes, others = shard_sizes(shape, topology, FP16_FP32), cast("Any", Others())
    trainer: Any = SimpleNamespace(scalars=dict, tensors=lambda: {"torch": memoryview(bytes(5056))})
    of_lane = {lane: {one: sizes[one] for one in own} for lane, own in owned_operators(shape, topology).items()}
    places = map(topology.coordinates, range(topology.world_size))
    by_rank = {rank: of_lane[at.pp, at.ep] for rank, at in enumerate(places)}
    config = MoECheckpointConfig(strategy="sparse", window=str(WINDOW), replicas="0")
    job = Job(config, shape.operators, topology, 1 << 24, 10**6, 8, sizes=by_rank)
    tensors = [
        StateTensor(Shard(GlobalName(one, f"{one}.weight"), 0, 16, 16), field, part, torch.zeros(16), (0,))
        for one in by_rank[0] for field, part in FIELDS.items()
    ]  # fmt: skip
    strategy, capturer = STRATEGIES["sparse"](job), LiveCapturer(tensors, trainer, ThreadEngine())
    now, seconds, found, loop = SimpleNamespace(iteration=0), Counter[str](), list[dict[str, float]](), list[float]()
    for owner, name, part in (
        (strategy, "plan", "plan"), (strategy, "pieces", "pieces"), (capturer, "layout", "layouts"),
        (SnapshotPlan, "digest", "digest"), (strategy, "on_token_counts", "counts"), (capturer, "begin", "copies"),
        (capturer, "end", "copies"),
    ):  # fmt: skip
        timing(seconds, owner, name, part)

    def counts() -> Callable[[], dict[int, tuple[int, ...]]]:
        turn = now.iteration // WINDOW  # counts come from the device on the thread that sends them

        def arrived() -> dict[int, tuple[int, ...]]:
            row = tuple(1 + (expert * 7919 + turn * 4051) % 1009 for expert in range(job.num_experts))
            return dict.fromkeys(job.moe_layers, row)

        return arrived

    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        clock, specs = SystemClock(), strategy.buffer_specs()
        store = MemoryStore(Path(folder), "job", 0, segment_sizes(specs, capturer, others, ()))
        ports = Ports(
            memory=store, capturer=capturer, trainer=trainer, control=others, executor=Lane, clock=clock,
            buffer_specs=specs, counts=counts,
        )  # fmt: skip
        identity = Identity("job", {}, capturer.operators, "sparse")
        worker = ReplicationWorker(store, None, others, clock, identity, patience_s=1.0)
        coordinator = Coordinator(job, strategy, ports, worker, None)

        def step() -> None:
            coordinator.step_end(now.iteration, StepJournal(1.0))
            for task in [*Lane.newest.values()]:
                task.result(60.0)  # this thread sleeps: its time stands still
            coordinator.before_optimizer()
            coordinator.report()

        for now.iteration in range(1, iterations + 1):
            seconds.clear()
            begun_s = time.thread_time()
            step()
            total_s = time.thread_time() - begun_s
            found.append(
                {part: seconds[part] for part in PARTS} | {"other": total_s - seconds.total(), "total": total_s}
            )
            begun_s = time.thread_time()
            sum(value * value for value in range(20_000))
            loop.append(time.thread_time() - begun_s)
        coordinator.shutdown()
        store.remove()
    steady = [*enumerate(found)][2 * WINDOW :]
    kinds = {
        "within": [one for at, one in steady if at % WINDOW],
        "first": [one for at, one in steady if at % WINDOW == 0],
    }
    table = {kind: {part: [one[part] for one in some] for part in PARTS} for kind, some in kinds.items()}
    return {"operators": len(job.operators), "order_changes": strategy.order_changes, "loop": loop, **table}


if __name__ == "__main__":
    start(main)
