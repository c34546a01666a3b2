"""Peak resident memory of saving, restoring and converting against the size of the state.

Ranks are processes of this machine. A peak is what the kernel calls VmHWM, reset before, less what was resident then.
"""

from __future__ import annotations

import gc
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from harness import ENDLESS, Benchmark, BenchmarkJob, row, rule, run_ranks, spread, start, where

BENCHMARK = Benchmark("memory_peaks", 3, "memory-peaks.md")
LAYOUT = {"NPROC": "2", "PP": "1", "EP": "2"}
LARGE = (
    f"{ENDLESS} --num-layers 4 --hidden-size 512 --num-attention-heads 8 --ffn-hidden-size 1024"
    " --moe-ffn-hidden-size 1024 --num-experts 8"
)
SMALL = f"{ENDLESS} --num-layers 2"
MB = 1e6
CONFIG = {
    "architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "hidden_act": "silu", "hidden_size": 1024,
    "head_dim": 64, "intermediate_size": 2048, "max_position_embeddings": 4096, "num_attention_heads": 16,
    "num_experts_per_tok": 2, "num_hidden_layers": 4, "num_key_value_heads": 4, "num_local_experts": 8,
    "rms_norm_eps": 1e-5, "rope_theta": 1e6, "vocab_size": 32000,
}  # fmt: skip
SHARD_BYTES = 100 * 10**6
COMMAND = """
import atexit, runpy, sys
from pathlib import Path
lines = Path("/proc/self/status").read_text
atexit.register(lambda: sys.stderr.write(next(line for line in lines().splitlines() if line.startswith("VmHWM:"))))
runpy.run_module("moe_ckpt", run_name="__main__", alter_sys=True)
"""
"""It tells its peak itself: what `wait4` says of a process begins with the peak of the one that started it."""


def _status(name: str) -> float:
    """A line of this process's status, in MB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:")) * 1024 / MB


def peak_of(work: Callable[[], object]) -> float:
    """MB that were resident at most while it worked, beyond those before."""
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")
    before = _status("VmRSS")
    work()
    return _status("VmHWM") - before


def measure(job: BenchmarkJob, settings: dict[str, Any]) -> dict[str, Any]:
    """Of each rank: MB of its state, and peaks of a checkpoint of Megatron-LM's loop, when it is written and read."""
    import torch

    from megatron.core.dist_checkpointing.moe.megatron_state.megatron import read_topology, state_tensors
    from megatron.core.dist_checkpointing.moe.megatron_state.optimizer_state import loading_step_counts
    from megatron.training import training

    trainer, iterate = job.trainer, job.iterating()
    for _ in range(3):
        iterate()
    live = trainer.chunks, trainer.optimizer, trainer.scheduler
    tensors = state_tensors(trainer.chunks, trainer.optimizer, read_topology(job.world_size))
    found = {"state_mb": sum(each.tensor.nbytes for each in tensors) / MB}
    found["save_mb"] = peak_of(lambda: training.save_checkpoint(trainer.state.iteration, *live, 0))
    # Core copies into master weights in place, which autograd refuses for those that are the model's own.
    with torch.no_grad(), loading_step_counts(trainer.optimizer):
        found["restore_mb"] = peak_of(lambda: training.load_checkpoint(*live))
    ranks: list[Any] = [None] * job.world_size
    torch.distributed.all_gather_object(ranks, found)
    return {"ranks": ranks}


def in_job(flags: str) -> list[dict[str, Any]]:
    """The figures of each rank of a job."""
    with tempfile.TemporaryDirectory(prefix="moe-ckpt-peaks-") as saved:
        flags += f" --save {saved} --load {saved} --save-interval 10000 --dist-ckpt-optim-fully-reshardable"
        ranks: list[dict[str, Any]] = run_ranks(__file__, {}, LAYOUT, flags)["ranks"]
        return ranks


def conversions(quick: bool) -> dict[str, float]:
    """Peaks of the command both ways, for a model of about half a GB or a small one, and of one that does nothing."""
    import torch

    from moe_ckpt.hugging_face.config import Config
    from moe_ckpt.hugging_face.families import read_model
    from moe_ckpt.hugging_face.folder import sharding, write_json, write_shard

    with tempfile.TemporaryDirectory(prefix="moe-ckpt-peaks-") as text:
        folder = Path(text) / "folder"
        folder.mkdir()
        config = CONFIG | ({"hidden_size": 128, "intermediate_size": 256} if quick else {})
        parts = [part for weight in read_model(Config(config, "it")).weights() for part in weight.parts]
        sizes = [(name, 2 * torch.Size(shape).numel()) for name, shape in parts]
        files, shapes = sharding(sizes, SHARD_BYTES), dict(parts)
        for file in sorted(set(files.values())):
            names = [name for name in files if files[name] == file]
            write_shard(folder / file, {name: torch.ones(shapes[name], dtype=torch.bfloat16) for name in names})
        write_json(folder / "config.json", config)
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
    command = [sys.executable, "-W", "ignore", "-c", COMMAND, "convert", *map(str, arguments)]
    ended = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    if ended.returncode != code:
        raise RuntimeError(f"{' '.join(command)} ended with {ended.returncode}, not {code}: {ended.stderr}")
    return int(ended.stderr.split()[-2]) * 1024 / MB


def page(result: dict[str, Any]) -> list[str]:
    """The page, as lines."""
    converted, jobs = result["convert"], result["dense"]
    convert = converted[0]
    lines = [
        *BENCHMARK.head("Peak resident memory"),
        f"Measured {where(result)}; n = {len(jobs)}. MB beyond what was resident before, by the"
        " kernel's high-water mark.",
        "",
        row("rank", "state", "save", "of the state", "restore", "of the state"),
        rule(6),
    ]
    for number, runs in enumerate(zip(*jobs, strict=True)):
        cells = [f"{runs[0]['state_mb']:.0f}"]
        for what in ("save_mb", "restore_mb"):
            cells += [spread([run[what] for run in runs], 0), spread([run[what] / run["state_mb"] for run in runs], 2)]
        lines.append(row(number, *cells))
    return [
        *lines,
        "",
        "Saved is with `--dist-ckpt-optim-fully-reshardable`, for which Megatron-Core gathers the optimizer's state of"
        " data-parallel ranks.",
        "",
        f"Converting {convert['weights_mb']:.0f} MB of weights in files of {convert['file_mb']:.0f} MB, of which the"
        f" largest tensor has {convert['largest_tensor_mb']:.0f}: `--from hf` takes"
        f" {spread([one['from_hf_mb'] for one in converted], 0)} MB beyond its imports, `--to hf`"
        f" {spread([one['to_hf_mb'] for one in converted], 0)} MB. Pages of mapped files count, which the kernel"
        " can drop.",
    ]


def measured(turns: int, quick: bool) -> dict[str, Any]:
    """All of it, so many times."""
    return {
        "convert": [conversions(quick) for _ in range(turns)],
        "dense": [in_job(SMALL if quick else LARGE) for _ in range(turns)],
    }


def main() -> int:
    """Measure and show."""
    return BENCHMARK.run(__doc__, measured, page)


if __name__ == "__main__":
    start(main, measure)
