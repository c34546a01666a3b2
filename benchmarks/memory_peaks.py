"""Peak resident memory of saving, restoring and converting against the size of the state, and growth over a long run.

Ranks are processes of this machine. A peak is what the kernel calls VmHWM, reset before, less what was resident then.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from harness import ENDLESS, SETTINGS, Benchmark, BenchmarkJob, machine, on_ranks, run_ranks

BENCHMARK = Benchmark("memory_peaks", "memory-peaks.md")
LAYOUT = {"NPROC": "2", "PP": "1", "EP": "2"}
LARGE = (
    f"{ENDLESS} --num-layers 4 --hidden-size 512 --num-attention-heads 8 --ffn-hidden-size 1024"
    " --moe-ffn-hidden-size 1024 --num-experts 8"
)
SMALL = (
    f"{ENDLESS} --num-layers 2 --hidden-size 64 --num-attention-heads 4 --ffn-hidden-size 64 --moe-ffn-hidden-size 64 "
    "--num-experts 4"
)
ITERATIONS, SAMPLES, MB = 600, 12, 1e6
JOBS = {
    "no snapshots": ("none", {}),
    "`full`": ("full", {}),
    "`full`, one heap (`MALLOC_ARENA_MAX=1`)": ("full", {"MALLOC_ARENA_MAX": "1"}),
}
"""The jobs whose memory is followed: their strategy, and what their environment has besides."""
CONFIG = {
    "architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "hidden_act": "silu", "hidden_size": 1024,
    "head_dim": 64, "intermediate_size": 2048, "max_position_embeddings": 4096, "num_attention_heads": 16,
    "num_experts_per_tok": 2, "num_hidden_layers": 4, "num_key_value_heads": 4, "num_local_experts": 8,
    "rms_norm_eps": 1e-5, "rope_theta": 1e6, "vocab_size": 32000,
}  # fmt: skip
SHARD_BYTES = 100 * 10**6


def _status(name: str) -> float:
    """A line of this process's status, in MB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:")) * 1024 / MB


class _Heap(ctypes.Structure):
    """`struct mallinfo2` of glibc."""

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost".split()
    )


def in_use() -> dict[str, float]:
    """MB that this process has resident, by kind, and what of them the heap of C has given out or holds free."""
    heap = ctypes.CDLL(None).mallinfo2
    heap.restype = _Heap
    found = heap()
    return {
        "private_mb": _status("RssAnon"),
        "shared_mb": _status("RssShmem") + _status("RssFile"),
        "allocated_mb": (found.uordblks + found.hblkhd) / MB,
        "free_mb": found.fordblks / MB,
        "python_blocks": sys.getallocatedblocks(),
    }


def peak_of(work: Callable[[], object]) -> float:
    """MB that were resident at most while it worked, beyond those before."""
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")
    before = _status("VmRSS")
    work()
    return _status("VmHWM") - before


def measure(job: BenchmarkJob, settings: dict[str, Any]) -> dict[str, Any]:
    """What each rank does."""
    import torch

    from megatron.core.dist_checkpointing.moe import MoECheckpointConfig
    from megatron.core.dist_checkpointing.moe.megatron_state.megatron import read_topology, state_tensors

    found: dict[str, Any] = {}
    trainer, strategy = job.trainer, settings["strategy"]
    own = {} if strategy == "none" else {"interval": 1, "memory_dir": str(job.folder)}
    manager = trainer.managed(config=MoECheckpointConfig(strategy=strategy, **own))
    manager.resume()
    iterate = job.iterating(manager)
    for _ in range(3):
        iterate()
    tensors = state_tensors(trainer.chunks, trainer.optimizer, read_topology(job.world_size))
    found["state_mb"] = sum(each.tensor.nbytes for each in tensors) / MB
    if settings["iterations"]:
        found["growth"] = []
        for _ in range(SAMPLES):
            for _ in range(settings["iterations"] // SAMPLES):
                iterate()
            gc.collect()
            found["growth"].append(in_use())
    else:
        found |= saved_and_restored(trainer)
    manager.finish(keep_memory=False)
    ranks: list[Any] = [None] * job.world_size
    torch.distributed.all_gather_object(ranks, found)
    return {"ranks": ranks}


def saved_and_restored(trainer: Any) -> dict[str, float]:
    """Peaks of a checkpoint of Megatron-LM's loop: when it is written, and when it is read."""
    import torch

    from megatron.core.dist_checkpointing.moe.megatron_state.optimizer_state import loading_step_counts
    from megatron.training import training

    live = trainer.chunks, trainer.optimizer, trainer.scheduler
    save_mb = peak_of(lambda: training.save_checkpoint(trainer.state.iteration, *live, 0))
    # Core copies into master weights in place, which autograd refuses for those that are the model's own.
    with torch.no_grad(), loading_step_counts(trainer.optimizer):
        return {"save_mb": save_mb, "restore_mb": peak_of(lambda: training.load_checkpoint(*live))}


def in_job(
    flags: str, strategy: str = "none", environment: Mapping[str, str] | None = None, iterations: int = 0
) -> list[dict[str, Any]]:
    """The figures of each rank of a job; with iterations, how its memory grows over so many of them."""
    with tempfile.TemporaryDirectory(prefix="moe-ckpt-peaks-") as saved:
        flags += f" --save {saved} --load {saved} --save-interval 10000 --dist-ckpt-optim-fully-reshardable"
        settings, given = {"strategy": strategy, "iterations": iterations}, LAYOUT | dict(environment or {})
        ranks: list[dict[str, Any]] = run_ranks(__file__, settings, given, flags)["ranks"]
        return ranks


def conversions() -> dict[str, float]:
    """Peaks of the command both ways, for a model of about half a GB, and of the command that does nothing."""
    import torch

    from moe_ckpt.hugging_face.config import Config
    from moe_ckpt.hugging_face.families import read_model
    from moe_ckpt.hugging_face.folder import sharding, write_json, write_shard

    with tempfile.TemporaryDirectory(prefix="moe-ckpt-peaks-") as text:
        folder = Path(text) / "folder"
        folder.mkdir()
        parts = [part for weight in read_model(Config(CONFIG, "it")).weights() for part in weight.parts]
        sizes = [(name, 2 * torch.Size(shape).numel()) for name, shape in parts]
        files, shapes = sharding(sizes, SHARD_BYTES), dict(parts)
        for file in sorted(set(files.values())):
            names = [name for name in files if files[name] == file]
            write_shard(folder / file, {name: torch.ones(shapes[name], dtype=torch.bfloat16) for name in names})
        write_json(folder / "config.json", CONFIG)
        write_json(folder / "model.safetensors.index.json", {"metadata": {}, "weight_map": files})
        idle = _peak_of_command("--from", "hf", folder / "config.json", Path(text) / "no", code=2)
        return {
            "weights_mb": sum(nbytes for _, nbytes in sizes) / MB,
            "largest_tensor_mb": max(nbytes for _, nbytes in sizes) / MB,
            "file_mb": SHARD_BYTES / MB,
            "from_hf_mb": _peak_of_command("--from", "hf", folder, Path(text) / "in") - idle,
            "to_hf_mb": _peak_of_command("--to", "hf", Path(text) / "in", Path(text) / "out") - idle,
        }


def _peak_of_command(*arguments: object, code: int = 0) -> float:
    """MB that `moe-ckpt convert` had resident at most, imports and pages of mapped files included."""
    command = [sys.executable, "-W", "ignore", "-m", "moe_ckpt", "convert", *map(str, arguments)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode != code:
        raise RuntimeError(f"{' '.join(command)} ended with {process.returncode}, not {code}")
    return usage.ru_maxrss * 1024 / MB


def page(result: dict[str, Any]) -> list[str]:
    """The page, as lines."""
    at, convert = result["machine"], result["convert"]
    lines = [
        "# Peak resident memory",
        "",
        "Made by `benchmarks/memory_peaks.py --write`; the data are in `benchmarks/results/memory_peaks.json`.",
        "",
        f"{at['cores']} cores ({at['cpu']}), torch {at['torch']}, Megatron-Core {at['megatron_core']}. MB beyond what"
        " was resident before, by the kernel's high-water mark.",
        "",
        "| rank | state | save | of the state | restore | of the state |",
        "|---|---|---|---|---|---|",
    ]
    for number, rank in enumerate(result["dense"]):
        state, save, restore = rank["state_mb"], rank["save_mb"], rank["restore_mb"]
        shares = f"{save / state:.2f}", f"{restore / state:.2f}"
        lines.append(f"| {number} | {state:.0f} | {save:.0f} | {shares[0]} | {restore:.0f} | {shares[1]} |")
    lines += [
        "",
        "Saved is with `--dist-ckpt-optim-fully-reshardable`, for which Megatron-Core gathers the optimizer's state of"
        " data-parallel ranks.",
        "",
        f"Converting {convert['weights_mb']:.0f} MB of weights in files of {convert['file_mb']:.0f} MB, of which the"
        f" largest tensor has {convert['largest_tensor_mb']:.0f}: `--from hf` takes {convert['from_hf_mb']:.0f} MB"
        f" beyond its imports, `--to hf` {convert['to_hf_mb']:.0f} MB. Pages of mapped files"
        " count, which the kernel can drop.",
        "",
        *growth_lines(result["growth"]),
    ]
    return lines


def growth_lines(growth: Mapping[str, Any]) -> list[str]:
    """How the memory of each job grows."""
    lines = [
        "## Growth",
        "",
        f"The same job over {growth['iterations']} iterations, without snapshots and with one of `full` in memory after"
        f" each iteration, of the rank that grows most; MB after each {growth['iterations'] // SAMPLES} iterations."
        " Given out is what the heap of C has given out (`mallinfo2`: `uordblks` and `hblkhd`), free what it keeps of"
        " what was given back, shared the pages of snapshots and of mapped files.",
        "",
        "| job | MB | " + " | ".join(str((at + 1) * growth["iterations"] // SAMPLES) for at in range(SAMPLES)) + " |",
        "|---|---|" + "---|" * SAMPLES,
    ]
    kinds = {"private": "private_mb", "given out": "allocated_mb", "free": "free_mb", "shared": "shared_mb"}
    for job, ranks in growth["jobs"].items():
        most = max(ranks, key=lambda rank: rank[-1]["private_mb"] - rank[0]["private_mb"])
        for kind, name in kinds.items():
            cells = " | ".join(f"{sample[name]:.1f}" for sample in most)
            lines.append(f"| {job if kind == 'private' else ''} | {kind} | {cells} |")
    lines += ["", "In the second half, of each rank:", ""]
    for job, ranks in growth["jobs"].items():
        halves = [(rank[SAMPLES // 2 - 1], rank[-1]) for rank in ranks]
        private, given = (
            ", ".join(f"{after[name] - before[name]:+.1f}" for before, after in halves)
            for name in ("private_mb", "allocated_mb")
        )
        blocks = ", ".join(f"{after['python_blocks'] - before['python_blocks']:+d}" for before, after in halves)
        lines.append(f"- {job}: private {private} MB; given out {given} MB; objects of Python {blocks}")
    return lines


def measured(iterations: int = ITERATIONS) -> dict[str, Any]:
    """All of it."""
    result: dict[str, Any] = {"machine": machine(), "convert": conversions(), "dense": in_job(LARGE)}
    result["growth"] = growth(iterations)
    return result


def growth(iterations: int) -> dict[str, Any]:
    """How the memory of each of `JOBS` grows."""
    jobs = {}
    for name, (strategy, environment) in JOBS.items():
        jobs[name] = [rank["growth"] for rank in in_job(SMALL, strategy, environment, iterations)]
    return {"iterations": iterations, "jobs": jobs}


def main() -> None:
    """Measure and show."""
    parser = BENCHMARK.parser(__doc__)
    parser.add_argument("--growth", type=int, metavar="ITERATIONS", help="measure anew only growth, over so many")
    arguments = parser.parse_args()

    def measure() -> dict[str, Any]:
        if arguments.growth is None:
            return measured()
        kept: dict[str, Any] = json.loads(BENCHMARK.data.read_text())
        return kept | {"growth": growth(arguments.growth)}

    result = BENCHMARK.result(arguments, measure)
    BENCHMARK.show(arguments, json.loads(json.dumps(result)), page(result))


if __name__ == "__main__":
    if SETTINGS in os.environ:
        on_ranks(sys.argv[1:], measure)
    else:
        main()
