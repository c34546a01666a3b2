"""What the calls of `MoECheckpointManager` cost a loop that protects nothing: paired, and by themselves.

The same iterations of Megatron-LM's loop are trained in turns with and without the calls of a manager whose strategy is
`none`. Turns differ by far more than these calls cost, so they are also made many times without any training between
them: that sum over the time of an iteration is the share that is judged.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

from harness import ENDLESS, SETTINGS, Benchmark, BenchmarkJob, on_ranks, run_ranks

BENCHMARK = Benchmark("api_overhead")
ALLOWED_SHARE = 0.005
CALLS = 20_000
ITERATIONS_PER_TURN = 5


def main() -> int:
    """Start the ranks; exit code 1 if the calls take a larger share of an iteration than allowed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--pairs", type=int, default=40, help="pairs of turns (default: 40)")
    pairs = parser.parse_args().pairs
    result = run_ranks(__file__, {"pairs": pairs}, {}, ENDLESS)
    BENCHMARK.keep(result)
    low, _, high = result["quartiles"]
    print(
        f"with / without the calls: median {result['median_ratio']:.4f}, quartiles {low:.4f} to {high:.4f}, "
        f"{result['pairs']} pairs of {ITERATIONS_PER_TURN} iterations; the calls of an iteration take "
        f"{1e6 * result['calls_s']:.1f} us, {100 * result['share']:.4f} % of {1e3 * result['iteration_s']:.1f} ms; "
        f"allowed {100 * ALLOWED_SHARE} %"
    )
    return 0 if result["share"] <= ALLOWED_SHARE else 1


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
    ratios = [called_s / bare_s for called_s, bare_s in pairs]
    started_s = time.perf_counter()
    for _ in range(CALLS):
        with manager.forward_backward():
            pass
        manager.step_done()
        manager.after_step()
        manager.reported()
    calls_s = (time.perf_counter() - started_s) / CALLS
    iteration_s = statistics.median(bare_s for _, bare_s in pairs) / ITERATIONS_PER_TURN
    return {
        "pairs": len(pairs),
        "median_ratio": statistics.median(ratios),
        "quartiles": statistics.quantiles(ratios, n=4),
        "iteration_s": iteration_s,
        "calls_s": calls_s,
        "share": calls_s / iteration_s,
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


if __name__ == "__main__":
    if SETTINGS in os.environ:
        on_ranks(sys.argv[1:], work)
    else:
        sys.exit(main())
