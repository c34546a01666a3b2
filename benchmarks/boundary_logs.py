"""Boundary logs beside training: what an iteration costs with them, and whether they have the bytes that are predicted.

A GPT-MoE of two pipeline stages trains on two processes in Megatron-LM's loop. In each pair of turns it trains a few
iterations without and as many with logs of all that crosses the stage boundary, one after the other and first one
first, then the other; so whatever else the machine does hits both. Each rank's processor time is measured too, which
other work on the machine hardly changes, and what the thread that trains spends in the logs. With --write the result is
kept as data and as a page.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from typing import Any

from harness import ENDLESS, SETTINGS, Benchmark, BenchmarkJob, machine, on_ranks, run_ranks, spread

BENCHMARK = Benchmark("boundary_logs", "boundary-logs.md")

MOST_COST = 0.02
"""Of an iteration's time: the median of all pairs."""
LOOKBACK = 8
"""Iterations whose logs are kept."""

COMMON = (
    f"{ENDLESS} --bf16 --untie-embeddings-and-output-weights --moe-expert-capacity-factor 1.0"
    " --moe-pad-expert-input-to-capacity"
)
FULL = (
    "--num-layers 4 --hidden-size 512 --num-attention-heads 8 --moe-ffn-hidden-size 512 --num-experts 8"
    " --seq-length 256 --max-position-embeddings 256 --micro-batch-size 2 --global-batch-size 16"
)
QUICK = "--num-layers 4 --seq-length 64 --micro-batch-size 1 --global-batch-size 4"
TWO_STAGES = {"NPROC": "2", "TP": "1", "PP": "2", "EP": "1"}
LAYOUTS = {"1F1B": TWO_STAGES, "interleaved": TWO_STAGES | {"VPP": "2"}}


def main() -> int:
    """Measure; exit code 1 if logs cost more than allowed or have other bytes than predicted."""
    parser = BENCHMARK.parser(__doc__, quick="a tiny model and four pairs")
    parser.add_argument("--pairs", type=int, default=12, help="pairs of turns for each schedule (default: 12)")
    arguments = parser.parse_args()
    pairs, model = (4, QUICK) if arguments.quick else (arguments.pairs, FULL)
    result = BENCHMARK.result(arguments, lambda: measured(pairs, model))
    BENCHMARK.show(arguments, result, report(result))
    return 0 if all(map(is_kept, result["schedules"].values())) else 1


def measured(pairs: int, model: str) -> dict[str, Any]:
    """Both schedules."""
    result: dict[str, Any] = {"machine": machine(), "model": model, "schedules": {}}
    for name, layout in LAYOUTS.items():
        settings = {"pairs": pairs, "iterations": 3}
        result["schedules"][name] = run_ranks(__file__, settings, layout, f"{COMMON} {model}")
    result["machine"]["load_after"] = os.getloadavg()[0]
    return result


def is_kept(found: dict[str, Any]) -> bool:
    """Whether one schedule keeps what is asked for."""
    return cost(found) <= MOST_COST and bytes_as_predicted(found) and not any(found["not_covered"])


def cost(found: dict[str, Any]) -> float:
    """By how much longer an iteration takes with logs, as a share: the median of all pairs."""
    return statistics.median(logged["wall_s"] / plain["wall_s"] - 1 for plain, logged in found["pairs"])


def bytes_as_predicted(found: dict[str, Any]) -> bool:
    """Whether each log of each rank has exactly the bytes that were predicted from shapes."""
    pairs = zip(found["log_bytes"], found["predicted_bytes"], strict=True)
    return all(set(logs) == {predicted} for logs, predicted in pairs)


def report(result: dict[str, Any]) -> list[str]:
    """The page: medians and, in brackets, quartiles."""
    about = result["machine"]
    lines = [
        "# Boundary logs beside training",
        "",
        "Made by `benchmarks/boundary_logs.py --write`; every measurement is in"
        " `benchmarks/results/boundary_logs.json`. Medians of paired turns, and in brackets quartiles.",
        "",
        f"Two processes, each a pipeline stage, on {about['cores']} cores ({about['cpu']}), torch {about['torch']},"
        f" Megatron-Core {about['megatron_core']}; one-minute load {about['load_before']:.1f} before. The threads that"
        " copy and seal logs take their time from training's own cores.",
        "",
        "| schedule | iteration, s | longer with logs, % | more processor time, % | in the training thread, ms |"
        " MB per iteration and rank | predicted |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, found in result["schedules"].items():
        pairs, per_turn = found["pairs"], found["iterations"]
        longer = [100 * (logged["wall_s"] / plain["wall_s"] - 1) for plain, logged in pairs]
        more = [100 * (logged["cpu_s"] / plain["cpu_s"] - 1) for plain, logged in pairs]
        plain_s = [plain["wall_s"] / per_turn for plain, _ in pairs]
        inside_ms = [1000 * logged["inside_s"] / per_turn for _, logged in pairs]
        measured = ", ".join(f"{statistics.mean(logs) / 1e6:.3f}" for logs in found["log_bytes"])
        predicted = ", ".join(f"{nbytes / 1e6:.3f}" for nbytes in found["predicted_bytes"])
        row = (name, spread(plain_s), spread(longer), spread(more), spread(inside_ms), measured, predicted)
        lines.append(f"| {' | '.join(row)} |")
    return [*lines, "", *verdicts(result)]


def verdicts(result: dict[str, Any]) -> list[str]:
    """What was asked for, and whether it is so."""
    lines = []
    for name, found in result["schedules"].items():
        exact = "exactly" if bytes_as_predicted(found) else "NOT"
        gaps = "no iteration without a log" if not any(found["not_covered"]) else f"gaps: {found['not_covered']}"
        kept = "met" if is_kept(found) else "NOT met"
        lines.append(
            f"{name}: at most {MOST_COST:.0%} longer, measured {cost(found):+.2%}; {exact} the predicted bytes; {gaps}:"
            f" {kept}. Memory is bounded by {found['bound_bytes'] / 1e6:.1f} MB per rank for {LOOKBACK} iterations."
        )
    return lines


def work(job: BenchmarkJob, settings: dict[str, Any]) -> dict[str, Any]:
    """What each rank measures."""
    return Logged(job).measured(settings)


class Logged:
    """One training, with real logs that can be left out."""

    def __init__(self, job: BenchmarkJob) -> None:
        from megatron.core import parallel_state
        from megatron.core.dist_checkpointing.moe.local_recovery.boundary_copies import BoundaryRecorder
        from megatron.core.dist_checkpointing.moe.local_recovery.boundary_logs import LogPlan
        from megatron.core.dist_checkpointing.moe.local_recovery.communicator import BoundaryCommunicator
        from megatron.core.dist_checkpointing.moe.megatron_state.megatron import read_topology
        from megatron.core.dist_checkpointing.moe.policy.boundary import sent_bytes, tensor_shape
        from megatron.core.dist_checkpointing.moe.snapshot.background import ThreadExecutor
        from megatron.core.dist_checkpointing.moe.snapshot.copy_engines import ThreadEngine
        from megatron.core.dist_checkpointing.moe.storage.memory import MemoryStore

        self.trainer, self.rank = job.trainer, job.rank
        args, config, topology = self.trainer.args, self.trainer.config, read_topology(job.world_size)
        sizes = (args.seq_length, args.micro_batch_size, config.hidden_size)
        shape = tensor_shape(topology, *sizes, sequence_parallel=config.sequence_parallel)
        self.plan = LogPlan(topology, self.rank, shape, "bfloat16", LOOKBACK)
        self.microbatches = self.trainer.microbatches
        self.predicted_bytes = sent_bytes(topology, topology.stage(self.rank), self.microbatches, shape, 2)
        self.store = MemoryStore(job.folder, "job", self.rank, self.plan.sizes(self.microbatches), area="standby")
        self.recorder, self.lane = BoundaryRecorder(ThreadEngine("boundary-copy")), ThreadExecutor("logs")
        self.communicator = BoundaryCommunicator(parallel_state.get_pipeline_model_parallel_group(), config)
        self.communicator.sink = self
        self.session = self.trainer.communicate(self.communicator)
        self.iteration, self.inside_s = 0, 0.0
        self.begin_logs()

    def begin_logs(self) -> None:
        """Logs of a turn; those of turns before stay until they are superseded."""
        from megatron.core.dist_checkpointing.moe.local_recovery.boundary_logs import BoundaryLogs, LogPorts
        from megatron.core.dist_checkpointing.moe.runtime.clock import SystemClock
        from megatron.core.dist_checkpointing.moe.snapshot.persisting import Identity

        ports = LogPorts(self.store, self.lane, self.recorder, SystemClock())
        self.logs = BoundaryLogs(self.plan, Identity("job", {}, frozenset()), ports, timeout_s=60.0)

    def sent(self, direction: Any, tensor: Any) -> None:
        """As the recorder, timed."""
        started_s = time.perf_counter()
        self.recorder.sent(direction, tensor)
        self.inside_s += time.perf_counter() - started_s

    def received(self, direction: Any, tensor: Any) -> None:
        """As the recorder, timed."""
        started_s = time.perf_counter()
        self.recorder.received(direction, tensor)
        self.inside_s += time.perf_counter() - started_s

    def measured(self, settings: dict[str, Any]) -> dict[str, Any]:
        """Pairs of turns, in turn the one or the other first, and the logs of the last turn."""
        import torch

        turns = {False: self.plain, True: self.logged}
        for turn in turns.values():
            self.timed(turn, settings["iterations"])
        pairs = []
        for at in range(settings["pairs"]):
            found = {on: self.timed(turns[on], settings["iterations"]) for on in ((False, True), (True, False))[at % 2]}
            pairs.append((found[False], found[True]))
            if self.rank == 0:
                print(f"pair {at}: {found[False]['wall_s']:.3f} s, with logs {found[True]['wall_s']:.3f} s", flush=True)
        every: list[Any] = [None] * torch.distributed.get_world_size()
        torch.distributed.all_gather_object(every, (self.log_bytes(), self.predicted_bytes, self.logs.coverage.why))
        log_bytes, predicted, not_covered = zip(*every, strict=True)
        bound_bytes = sum(self.plan.sizes(self.microbatches))
        self.store.remove()
        return {
            "iterations": settings["iterations"],
            "pairs": pairs,
            "log_bytes": log_bytes,
            "predicted_bytes": predicted,
            "not_covered": not_covered,
            "bound_bytes": bound_bytes,
        }

    def timed(self, turn: Any, iterations: int) -> dict[str, float]:
        """A turn after one iteration of its own kind: seconds of all ranks, and processor seconds of all together."""
        import torch

        turn(1)
        torch.distributed.barrier()
        self.inside_s, started_s, started_cpu_s = 0.0, time.perf_counter(), time.process_time()
        turn(iterations)
        torch.distributed.barrier()
        wall_s = time.perf_counter() - started_s
        inside_s = torch.tensor([self.inside_s])
        self.logs.drain(60.0)  # what is sealed of the last iteration costs processor time too
        cpu_s = torch.tensor([time.process_time() - started_cpu_s])
        torch.distributed.all_reduce(cpu_s)
        torch.distributed.all_reduce(inside_s, op=torch.distributed.ReduceOp.MAX)
        return {"wall_s": wall_s, "cpu_s": float(cpu_s), "inside_s": float(inside_s)}

    def plain(self, iterations: int) -> None:
        """Training without logs."""
        self.session.communicator = None
        for _ in range(iterations):
            self.trainer.iterate()

    def logged(self, iterations: int) -> None:
        """Training with logs; only iterations of such turns are counted."""
        from megatron.core.dist_checkpointing.moe.types import StepJournal

        self.session.communicator = self.communicator
        for _ in range(iterations):
            self.iteration += 1
            started_s = time.perf_counter()
            self.logs.begins(self.iteration, self.microbatches)
            self.inside_s += time.perf_counter() - started_s
            self.trainer.iterate()
            started_s = time.perf_counter()
            self.logs.passed()
            base = max(self.iteration - LOOKBACK, 0)
            self.logs.committed(self.iteration, StepJournal(), {"iteration": self.iteration}, base)
            self.inside_s += time.perf_counter() - started_s

    def log_bytes(self) -> list[int]:
        """Of each log that this rank holds."""
        found = []
        for snapshot in self.store.snapshots().sealed:
            with self.store.open(snapshot) as reader:
                sent = (one for one in reader.manifest.records if not one.key.startswith("received/"))
                found.append(sum(record.nbytes for record in sent))
        return found


if __name__ == "__main__":
    if SETTINGS in os.environ:
        on_ranks(sys.argv[1:], work)
    else:
        sys.exit(main())
