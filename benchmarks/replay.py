"""Iteration time with frozen operators against an iteration of training: how much cheaper a replay is as it thaws.

One GPT-MoE trains on two processes in Megatron-LM's loop. In each pair of turns it trains as usual and with a part of
its operators frozen, one after the other and first one first, then the other; so whatever else the machine does hits
both. Each rank's processor time is measured too, which other work on the machine hardly changes. Parts are taken in two
orders: scattered over the model, as popularity has it, and from the bottom up, as the windows of dense models have it,
where gradients need not flow to the bottom. MoEvement expects about a third less for frozen operators: the weight
gradients and the step of the optimizer.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

from harness import ENDLESS, UNTIED, Benchmark, BenchmarkJob, row, rule, run_ranks, spread, start

BENCHMARK = Benchmark("replay", 20)

LAYOUT = {"NPROC": "2", "TP": "1", "PP": "1", "EP": "2"}
FULL = (
    "--num-layers 4 --hidden-size 256 --num-attention-heads 4 --moe-ffn-hidden-size 512 --num-experts 8"
    f" --seq-length 128 --micro-batch-size 2 --global-batch-size 8 {UNTIED}"
)
QUICK = f"--num-layers 2 --seq-length 32 --micro-batch-size 1 --global-batch-size 4 {UNTIED}"
PERCENTS = (0, 25, 50, 75, 100)
ALL_BUT_ONE = "all but the embedding"


def main() -> int:
    """Measure, show a table, keep the result if asked to."""
    return BENCHMARK.run(__doc__, measured, table)


def measured(turns: int, quick: bool) -> dict[str, Any]:
    """What the ranks measure."""
    model = QUICK if quick else FULL
    return {"model": model} | run_ranks(__file__, {"pairs": turns}, LAYOUT, f"{ENDLESS} {model}")


def table(result: dict[str, Any]) -> list[str]:
    """The medians, for people."""
    lines = [
        f"an iteration of training takes {result['iteration_s']:.3f} s ({result['iteration_cpu_s']:.3f} s of processor"
        " time of the slowest rank)",
        "",
        row("frozen", "iteration time (quartiles)", "processor time"),
        rule(3),
    ]
    for name, part in result["parts"].items():
        lines.append(row(name, spread(part["ratios"]), f"{part['cpu_ratio']:.3f}"))
    return [*lines, "", "Relative to an iteration of training in the same pair of turns; medians."]


def work(job: BenchmarkJob, settings: dict[str, Any]) -> dict[str, Any]:
    """All parts against training."""
    from megatron.core.dist_checkpointing.moe.megatron_state.megatron import operators_of_parameters, read_topology
    from megatron.core.dist_checkpointing.moe.megatron_state.module_tree import model_operators
    from megatron.core.dist_checkpointing.moe.replay.execution import LiveExecution
    from megatron.core.dist_checkpointing.moe.types import StepJournal

    chunks, iterate = job.trainer.chunks, job.iterating()
    operator_of = operators_of_parameters(chunks, read_topology(job.world_size))
    execution = LiveExecution(chunks, job.trainer.optimizer, operator_of)

    def replayed(frozen: Sequence[Any]) -> Callable[[], None]:
        def replay() -> None:
            execution.freeze(frozen, StepJournal(1.0))
            iterate()

        return replay

    parts = {name: replayed(frozen) for name, frozen in parts_of(model_operators(chunks)).items()}
    for turn in (iterate, *parts.values(), iterate):
        timed(turn)
        execution.thaw()
    times: dict[str, list[Any]] = {name: [] for name in parts}
    for index in range(settings["pairs"]):
        for name, replay in parts.items():
            order = (iterate, replay) if index % 2 else (replay, iterate)
            found = {}
            for turn in order:
                found[turn] = timed(turn)
                execution.thaw()
            times[name].append((found[iterate], found[replay]))
    normal = [training for pairs_of_part in times.values() for training, _ in pairs_of_part]
    return {
        "pairs": settings["pairs"],
        "iteration_s": statistics.median(wall_s for wall_s, _ in normal),
        "iteration_cpu_s": statistics.median(cpu_s for _, cpu_s in normal),
        "parts": {name: compared(found) for name, found in times.items()},
    }


def parts_of(operators: Sequence[Any]) -> dict[str, Sequence[Any]]:
    """What is frozen, by name."""
    orders = {"scattered": list(operators), "bottom up": sorted(operators)}
    random.Random(7).shuffle(orders["scattered"])
    parts: dict[str, Sequence[Any]] = {
        f"{percent} % {order}": listed[: round(len(listed) * percent / 100)]
        for order, listed in orders.items()
        for percent in PERCENTS[1:-1]
    }
    ends = {"0 %": (), ALL_BUT_ONE: sorted(operators)[1:], "100 %": operators}
    return {name: parts[name] if name in parts else ends[name] for name in ("0 %", *parts, ALL_BUT_ONE, "100 %")}


def compared(pairs: Sequence[Any]) -> dict[str, Any]:
    """Ratios of both times, per pair."""
    cpu_ratio = statistics.median(frozen[1] / training[1] for training, frozen in pairs)
    return {"cpu_ratio": cpu_ratio, "ratios": [frozen[0] / training[0] for training, frozen in pairs]}


def timed(turn: Callable[[], None]) -> tuple[float, float]:
    """Seconds that a turn takes all ranks, and processor seconds of the rank that needs most."""
    import torch

    torch.distributed.barrier()
    started_s, started_cpu_s = time.perf_counter(), time.process_time()
    turn()
    cpu_s = torch.tensor([time.process_time() - started_cpu_s])
    torch.distributed.all_reduce(cpu_s, op=torch.distributed.ReduceOp.MAX)
    return time.perf_counter() - started_s, float(cpu_s)


if __name__ == "__main__":
    start(main, work)
