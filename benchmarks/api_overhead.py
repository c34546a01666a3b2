"""What the calls of `MoECheckpointManager` cost a loop that protects nothing: paired, and by themselves.

The same iterations of Megatron-LM's loop are trained in turns with and without the calls of a manager whose strategy is
`none`. Turns differ by far more than these calls cost, so they are also made many times without any training between
them: that sum over the time of an iteration is the share that is judged.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

from harness import ENDLESS, Benchmark, BenchmarkJob, run_ranks, spread, start

BENCHMARK = Benchmark("api_overhead", 40)
ALLOWED_SHARE = 0.005
CALLS = 20_000
ITERATIONS_PER_TURN = 5


def main() -> int:
    """Exit code 1 if the calls take a larger share of an iteration than allowed."""
    return BENCHMARK.run(
        __doc__,
        lambda turns, quick: run_ranks(__file__, {"pairs": turns}, {}, ENDLESS),
        report,
        lambda result: result["share"] <= ALLOWED_SHARE,
    )


def report(result: dict[str, Any]) -> list[str]:
    """One line."""
    return [
        f"with / without the calls: {spread(result['ratios'], 4)}, {len(result['ratios'])} pairs of"
        f" {ITERATIONS_PER_TURN} iterations; the calls of an iteration take {1e6 * result['calls_s']:.1f} us,"
        f" {result['share']:.4%} of {1e3 * result['iteration_s']:.1f} ms; allowed {ALLOWED_SHARE:.1%}"
    ]


def work(job: BenchmarkJob, settings: dict[str, Any]) -> dict[str, Any]:
    """What each rank does: train in turns, then make the calls alone."""
    trainer, manager = job.trainer, job.trainer.managed()
    nobody = SimpleNamespace(communicator=None, forward_backward=nullcontext, step_done=lambda: None)

    def bare() -> None:
        trainer.manager = nobody
        trainer.iterate()

    def called() -> None:
        trainer.manager = manager
        trainer.iterate()
        manager.after_step()
        manager.reported()

    for iterate in (bare, called):
        timed(iterate)
    pairs = []
    for index in range(settings["pairs"]):
        first, second = (called, bare) if index % 2 else (bare, called)
        times = {first: timed(first), second: timed(second)}
        pairs.append((times[called], times[bare]))
    started_s = time.perf_counter()
    for _ in range(CALLS):
        with manager.forward_backward():
            pass
        manager.step_done()
        manager.after_step()
        manager.reported()
    calls_s = (time.perf_counter() - started_s) / CALLS
    iteration_s = statistics.median(bare_s for _, bare_s in pairs) / ITERATIONS_PER_TURN
    ratios = [called_s / bare_s for called_s, bare_s in pairs]
    return {"iteration_s": iteration_s, "calls_s": calls_s, "share": calls_s / iteration_s, "ratios": ratios}


def timed(iterate: Callable[[], None]) -> float:
    """Seconds that a turn takes the slowest rank."""
    import torch

    torch.distributed.barrier()
    started = time.perf_counter()
    for _ in range(ITERATIONS_PER_TURN):
        iterate()
    torch.distributed.barrier()
    return time.perf_counter() - started


if __name__ == "__main__":
    start(main, work)
