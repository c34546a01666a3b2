"""Iteration time of the driver against a bare Megatron-Core loop: same model, layout, data and ranks, paired.

Both loops live in the same processes and train in turns, a few iterations each, so that whatever else the machine does
hits both. The bare loop is what Megatron-Core asks of any user: schedule, optimizer, learning rate; no reports, no
checkpoints, no polling. The result is the ratio of their times per pair of turns; it is kept as data.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULT = Path(__file__).resolve().parent / "results" / "driver_overhead.json"
ALLOWED_RATIO = 1.03
ITERATIONS_PER_TURN = 5


def main() -> int:
    """Start the ranks with the launcher of the demo; exit code 1 if the driver costs more than allowed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--pairs", type=int, default=40, help="pairs of turns (default: 40)")
    pairs = parser.parse_args().pairs
    environment = os.environ | {"PYTHON": sys.executable, "SCRIPT": __file__, "MAX_RESTARTS": "0"}
    iterations = (pairs + 1) * ITERATIONS_PER_TURN
    metrics = RESULT.with_suffix(".jsonl")
    flags = ["--train-iters", str(iterations), "--metrics-jsonl", str(metrics), "--exit-signal-handler"]
    subprocess.run([str(ROOT / "scripts" / "train_cpu.sh"), *flags], env=environment, check=True)
    metrics.unlink()
    result = json.loads(RESULT.read_text())
    low, _, high = result["quartiles"]
    print(
        f"driver / bare Megatron-Core: median {result['median_ratio']:.4f}, quartiles {low:.4f} to {high:.4f}, "
        f"{result['pairs']} pairs of {ITERATIONS_PER_TURN} iterations; a bare iteration takes "
        f"{result['bare_iteration_s']:.4f} s; allowed {ALLOWED_RATIO}"
    )
    return 0 if result["median_ratio"] <= ALLOWED_RATIO else 1


def work(argv: list[str]) -> None:
    """What each rank does: build both loops, train in turns, and let rank 0 write the result."""
    from megatron.pretrain.config import parse_config
    from megatron.pretrain.config.validate import resolve
    from megatron.pretrain.initialize import Launch, initialize, probe_environment, shut_down

    launch = Launch.from_environment()
    config = resolve(parse_config(argv), probe_environment(launch.world_size))
    initialize(config, launch)
    driver, bare = _driver_loop(config, launch), _bare_loop(config)
    for iterate in (driver, bare):
        _timed(iterate)
    pairs = []
    for index in range(int(config.training.train_iters or 0) // ITERATIONS_PER_TURN - 1):
        first, second = (driver, bare) if index % 2 else (bare, driver)
        times = {first: _timed(first), second: _timed(second)}
        pairs.append((times[driver], times[bare]))
    if launch.rank == 0:
        ratios = [driver_s / bare_s for driver_s, bare_s in pairs]
        result = {
            "pairs": len(pairs),
            "median_ratio": statistics.median(ratios),
            "quartiles": statistics.quantiles(ratios, n=4),
            "bare_iteration_s": statistics.median(bare_s for _, bare_s in pairs) / ITERATIONS_PER_TURN,
            "ratios": ratios,
        }
        RESULT.parent.mkdir(exist_ok=True)
        RESULT.write_text(json.dumps(result, indent=1) + "\n")
    shut_down()


def _timed(iterate: Callable[[], None]) -> float:
    """Seconds that a turn takes the slowest rank."""
    import torch

    torch.distributed.barrier()
    started = time.perf_counter()
    for _ in range(ITERATIONS_PER_TURN):
        iterate()
    torch.distributed.barrier()
    return time.perf_counter() - started


def _driver_loop(config: Any, launch: Any) -> Callable[[], None]:
    from megatron.pretrain.assemble import build_faults, build_metrics
    from megatron.pretrain.batches import training_iterators
    from megatron.pretrain.loop import Trainer

    state, transformer, datasets = _built(config)
    trainer = Trainer(state, transformer, datasets, build_metrics(config), build_faults(config, launch))
    batches = training_iterators(config, datasets, state.progress)
    return lambda: trainer.iterate(batches)


def _bare_loop(config: Any) -> Callable[[], None]:
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.pretrain.batches import forward_step, training_iterators

    state, transformer, datasets = _built(config)
    transformer.grad_scale_func = state.optimizer.scale_loss
    batches = training_iterators(config, datasets, state.progress)
    training, schedule = config.training, get_forward_backward_func()
    microbatches = training.global_batch_size // (training.micro_batch_size * config.flat.data_parallel_size)

    def iterate() -> None:
        for chunk in state.chunks:
            chunk.zero_grad_buffer()
        state.optimizer.zero_grad()
        schedule(
            forward_step_func=forward_step,
            data_iterator=batches,
            model=state.chunks,
            num_microbatches=microbatches,
            seq_length=training.seq_length,
            micro_batch_size=training.micro_batch_size,
            forward_only=False,
        )
        state.optimizer.step()
        state.scheduler.step(increment=training.global_batch_size)

    return iterate


def _built(config: Any) -> tuple[Any, Any, Any]:
    from megatron.pretrain.assemble import build_state
    from megatron.pretrain.batches import build_splits
    from megatron.pretrain.tokenizer import build_tokenizer

    tokenizer = build_tokenizer("ByteTokenizer", None, None)
    return *build_state(config, tokenizer), build_splits(config, tokenizer)


if __name__ == "__main__":
    if "RANK" in os.environ:
        work(sys.argv[1:])
    else:
        sys.exit(main())
