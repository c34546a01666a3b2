"""Iteration time of the driver against a bare Megatron-Core loop: same model, layout, data and ranks, paired.

Both loops live in the same processes and train in turns, a few iterations each, so that whatever else the machine does
hits both. The bare loop is what Megatron-Core asks of any user: schedule, optimizer, learning rate; no reports, no
checkpoints, no polling. The result is the ratio of their times per pair of turns; it is kept as data.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from harness import SETTINGS, Benchmark, build_job, on_ranks, run_ranks

BENCHMARK = Benchmark("driver_overhead")
ALLOWED_RATIO = 1.03
ITERATIONS_PER_TURN = 5


def main() -> int:
    """Start the ranks with the launcher of the demo; exit code 1 if the driver costs more than allowed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--pairs", type=int, default=40, help="pairs of turns (default: 40)")
    pairs = parser.parse_args().pairs
    flags = f"--train-iters {(pairs + 1) * ITERATIONS_PER_TURN} --exit-signal-handler"
    metrics = BENCHMARK.data.with_suffix(".jsonl")  # written, as a job would
    result = run_ranks(__file__, {"pairs": pairs}, {}, f"{flags} --metrics-jsonl {metrics}")
    metrics.unlink()
    BENCHMARK.keep(result)
    low, _, high = result["quartiles"]
    print(
        f"driver / bare Megatron-Core: median {result['median_ratio']:.4f}, quartiles {low:.4f} to {high:.4f}, "
        f"{result['pairs']} pairs of {ITERATIONS_PER_TURN} iterations; a bare iteration takes "
        f"{result['bare_iteration_s']:.4f} s; allowed {ALLOWED_RATIO}"
    )
    return 0 if result["median_ratio"] <= ALLOWED_RATIO else 1


def work(config: Any, launch: Any, settings: dict[str, Any]) -> dict[str, Any]:
    """What each rank does: build both loops, and train in turns."""
    folder = Path(settings["folder"])
    driver = build_job(config, launch, folder).iterating()
    bare = bare_loop(build_job(config, launch, folder))
    for iterate in (driver, bare):
        timed(iterate)
    pairs = []
    for index in range(settings["pairs"]):
        first, second = (driver, bare) if index % 2 else (bare, driver)
        times = {first: timed(first), second: timed(second)}
        pairs.append((times[driver], times[bare]))
    ratios = [driver_s / bare_s for driver_s, bare_s in pairs]
    return {
        "pairs": len(pairs),
        "median_ratio": statistics.median(ratios),
        "quartiles": statistics.quantiles(ratios, n=4),
        "bare_iteration_s": statistics.median(bare_s for _, bare_s in pairs) / ITERATIONS_PER_TURN,
        "ratios": ratios,
    }


def timed(iterate: Callable[[], None]) -> float:
    """Seconds that a turn takes the slowest rank."""
    import torch

    torch.distributed.barrier()
    started = time.perf_counter()
    for _ in range(ITERATIONS_PER_TURN):
        iterate()
    torch.distributed.barrier()
    return time.perf_counter() - started


def bare_loop(job: Any, manager: Any = None) -> Callable[[], None]:
    """A loop of nothing but what Megatron-Core asks for; with a manager, also of the calls that protect it."""
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.pretrain.batches import forward_step

    state, config = job.state, job.config
    job.transformer.grad_scale_func = state.optimizer.scale_loss
    training, schedule = config.training, get_forward_backward_func()
    microbatches = training.global_batch_size // (training.micro_batch_size * config.flat.data_parallel_size)

    def iterate() -> None:
        for chunk in state.chunks:
            chunk.zero_grad_buffer()
        state.optimizer.zero_grad()
        passes()
        state.optimizer.step()
        state.scheduler.step(increment=training.global_batch_size)

    def passes() -> None:
        schedule(
            forward_step_func=forward_step,
            data_iterator=job.batches,
            model=state.chunks,
            num_microbatches=microbatches,
            seq_length=training.seq_length,
            micro_batch_size=training.micro_batch_size,
            forward_only=False,
        )

    def protected() -> None:
        for chunk in state.chunks:
            chunk.zero_grad_buffer()
        state.optimizer.zero_grad()
        with manager.forward_backward():
            passes()
        state.optimizer.step()
        state.scheduler.step(increment=training.global_batch_size)
        manager.step_done()
        manager.after_step()
        manager.reported()

    return iterate if manager is None else protected


if __name__ == "__main__":
    if SETTINGS in os.environ:
        on_ranks(sys.argv[1:], work)
    else:
        sys.exit(main())
