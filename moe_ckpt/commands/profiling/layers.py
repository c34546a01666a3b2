"""Megatron-Core's own layers, timed in small jobs of Megatron-LM of the layout that is asked for."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.core.dist_checkpointing.moe.errors import MoECheckpointError, UsageError
from megatron.core.dist_checkpointing.moe.types import ModelShape

from ...simulator.layer_times import LayerTimes, fitted, layer_shape

REPEATS = 5
POLL_S = 0.1
PATIENCE_S = 30
LAUNCHER, WORKER = "megatron.pretrain.launch", "megatron.pretrain.layer_timing"
COPIED_BYTES = 128 * 2**20
"""More than caches hold, as the state of a rank is."""


_UNFUSED = ("--no-persist-layer-norm", "--no-rope-fusion", "--no-masked-softmax-fusion")
"""Megatron-LM's fusions that need kernels of Transformer Engine or Apex."""


@dataclass(frozen=True)
class LayerSettings:
    """Jobs to time: ranks that compute at once, their layout, samples of a microbatch in ascending order, tokens of a
    sample; device: cpu or cuda; timeout_s: for all of it."""

    ranks: int
    tp: int
    pp: int
    ep: int
    micro_batch_sizes: tuple[int, ...]
    seq_length: int
    device: str
    timeout_s: float

    def __post_init__(self) -> None:
        if self.ranks % (self.tp * self.pp) or self.ranks % (self.ep * self.pp):
            raise UsageError(
                f"--ranks {self.ranks} is not a multiple of --tp {self.tp} x --pp {self.pp} and --ep {self.ep} x --pp"
                f" {self.pp}: give a layout that the ranks make up"
            )


def most_ranks(asked: int) -> int:
    """As many as are asked for, but on GPUs no more than there are of them here."""
    import torch

    return min(asked, torch.cuda.device_count() or asked)


def patterns_of(shape: ModelShape) -> list[list[int]]:
    """Layers of a stage in the jobs that are timed: one of the commoner kind, two, and one of each kind."""
    has = [bool(shape.moe_layers), len(shape.moe_layers) < shape.num_layers]
    common = int(has[0] and 2 * len(shape.moe_layers) >= shape.num_layers)
    return [[common], [common] * 2, *([[common, 1 - common]] if all(has) else [])]


def count_of(shape: ModelShape, settings: LayerSettings) -> int:
    """How often `timed` calls `done`."""
    return len(patterns_of(shape)) * (len(settings.micro_batch_sizes) + 1)


def timed(shape: ModelShape, settings: LayerSettings, done: Callable[[], None]) -> dict[str, Any]:
    """What the jobs found: see `megatron.pretrain.layer_timing`.

    Raises UsageError for a layout that Megatron-LM refuses, MoECheckpointError where a job fails or takes too long.
    """
    with tempfile.TemporaryDirectory(prefix="moe-ckpt-profile-") as name:
        folder = Path(name)
        given = {
            "patterns": patterns_of(shape),
            "micro_batch_sizes": settings.micro_batch_sizes,
            "repeats": REPEATS,
            "copied_bytes": COPIED_BYTES,
            **{name: str(folder / name) for name in ("result", "progress", "killed", "back")},
        }
        (folder / "settings").write_text(json.dumps(given))
        (folder / "progress").touch()
        job = _started(folder, settings, [*model_flags(shape), *_job_flags(shape, settings)])
        try:
            _wait(job, folder, settings, done)
        finally:
            _end(job)
        # A job that failed while it was timed was started again as well, and then had nothing to do.
        if job.returncode or not all((folder / name).exists() for name in ("result", "killed", "back")):
            raise _failure(job, folder)
        found: dict[str, Any] = json.loads((folder / "result").read_text())
        times = {name: json.loads((folder / name).read_text()) for name in ("killed", "back")}
        return found | {"restart_s": times["back"]["ready_at_s"] - times["killed"]["at_s"]}


def layer_times(shape: ModelShape, settings: LayerSettings, found: dict[str, Any], host_rate: float) -> LayerTimes:
    """The lines through what was found. host_rate: bytes per second of a copy with nothing beside it."""
    copies = found["copies"]
    copied_s = copies["copied_bytes"] / host_rate
    lines = fitted(found["rows"], settings.pp)
    assert lines["ends"] and lines["reduce"] and lines["step"]
    return LayerTimes(
        layer_shape(shape),
        settings.ranks,
        settings.tp,
        settings.pp,
        settings.ep,
        settings.seq_length,
        lines["moe"],
        lines["dense"],
        lines["ends"],
        lines["reduce"],
        lines["step"],
        found["restart_s"],
        max(0.0, copies["beside_s"] - copies["alone_s"]) / copied_s if copied_s else 0.0,
    )


def frozen_saves(found: dict[str, Any]) -> float:
    """Share of a layer's passes that is saved where it has no weight gradients; 0 where noise hides it."""
    rows = [row for row in found["rows"] if "frozen_s" in row][:2]
    active, frozen = (rows[1][name] - rows[0][name] for name in ("microbatch_s", "frozen_s"))
    return min(0.9, max(0.0, 1 - frozen / active)) if active > 0 else 0.0


def model_flags(shape: ModelShape) -> list[str]:
    """Megatron-LM's flags for layers of this shape; how many there are is said beside them."""
    sizes = {
        "hidden-size": shape.hidden_size,
        "num-attention-heads": shape.num_attention_heads,
        "ffn-hidden-size": shape.ffn_hidden_size,
        "kv-channels": shape.kv_channels,
        "normalization": shape.normalization,
        "vocab-size": shape.vocab_size,
    }
    if shape.num_query_groups is not None:
        sizes["num-query-groups"] = shape.num_query_groups
    if shape.multi_latent_attention:
        for name in ("q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim"):
            sizes[name.replace("_", "-")] = getattr(shape, name)
    if shape.num_experts:
        sizes |= {
            "num-experts": shape.num_experts,
            "moe-router-topk": shape.moe_router_topk,
            "moe-ffn-hidden-size": shape.moe_ffn_hidden_size,
            "moe-shared-expert-intermediate-size": shape.moe_shared_expert_intermediate_size or None,
            "moe-token-dispatcher-type": "alltoall",
        }
    switches = {
        "group-query-attention": shape.num_query_groups is not None,
        "swiglu": shape.gated_linear_unit,
        "disable-bias-linear": not shape.add_bias_linear,
        "add-qkv-bias": shape.add_qkv_bias,
        "qk-layernorm": shape.qk_layernorm,
        "untie-embeddings-and-output-weights": shape.untie_embeddings_and_output_weights,
        "multi-latent-attention": shape.multi_latent_attention,
        # A softmax over the one expert that was chosen has no gradient, which Megatron-Core refuses.
        "moe-router-pre-softmax": bool(shape.num_experts) and shape.moe_router_topk == 1,
    }
    given = [part for name, value in sizes.items() if value is not None for part in (f"--{name}", str(value))]
    positions = "learned_absolute" if shape.max_position_embeddings else "rope"
    return [
        *given,
        *(f"--{name}" for name, wanted in switches.items() if wanted),
        *("--position-embedding-type", positions, "--make-vocab-size-divisible-by", "1"),
    ]


def _job_flags(shape: ModelShape, settings: LayerSettings) -> list[str]:
    layout = {"tensor-model": settings.tp, "pipeline-model": settings.pp, "expert-model": settings.ep}
    flags = [part for name, degree in layout.items() for part in (f"--{name}-parallel-size", str(degree))]
    flags += ["--num-layers", str(settings.pp)]  # of each pattern, the job says it again
    size, length = settings.micro_batch_sizes[-1], settings.seq_length
    flags += ["--micro-batch-size", str(size), "--seq-length", str(length), "--train-iters", "1", "--lr", "1e-4"]
    flags += ["--max-position-embeddings", str(max(length, shape.max_position_embeddings))]
    flags += ["--attention-dropout", "0", "--hidden-dropout", "0"]
    flags += ["--tokenizer-type", "NullTokenizer", "--mock-data", "--use-distributed-optimizer"]
    flags += ["--sequence-parallel"] if settings.tp > 1 else []
    flags += ["--device", settings.device, "--eval-iters", "0", "--no-gradient-accumulation-fusion"]
    flags.append("--no-check-for-nan-in-loss-and-grad")  # which is done inside of the loop only
    if settings.device == "cuda":
        flags.append("--bf16")
    else:
        flags += ["--distributed-backend", "gloo"]
    if settings.device == "cuda" and importlib.util.find_spec("transformer_engine") is not None:
        return flags
    return [*flags, "--transformer-impl", "local", *_UNFUSED]


def _started(folder: Path, settings: LayerSettings, flags: Sequence[str]) -> subprocess.Popen[bytes]:
    environment = os.environ | {"LAYER_TIMING": str(folder / "settings")}
    if settings.device == "cpu":
        environment |= {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"), "GLOO_SOCKET_IFNAME": "lo"}
    launcher = [sys.executable, "-m", LAUNCHER, "--nproc-per-node", str(settings.ranks), "--max-restarts", "1"]
    with (folder / "log").open("wb") as log:
        return subprocess.Popen([*launcher, worker_script(), *flags], env=environment, stdout=log, stderr=log)


def worker_script() -> str:
    """What each rank runs."""
    found = importlib.util.find_spec(WORKER)
    assert found is not None
    assert found.origin is not None
    return found.origin


def _wait(job: subprocess.Popen[bytes], folder: Path, settings: LayerSettings, done: Callable[[], None]) -> None:
    """Until it has ended."""
    deadline, seen = time.monotonic() + settings.timeout_s, 0
    while job.poll() is None:
        if time.monotonic() > deadline:
            raise MoECheckpointError(
                f"timing Megatron-Core's layers took longer than {settings.timeout_s:g} s: raise --timeout, or measure"
                " a smaller --model, fewer --micro-batch-size or a shorter --seq-length"
            )
        now = (folder / "progress").stat().st_size
        for _ in range(now - seen):
            done()
        seen = now
        time.sleep(POLL_S)


def _end(job: subprocess.Popen[bytes]) -> None:
    """The launcher ends its ranks when it is asked to end."""
    if job.poll() is not None:
        return
    job.terminate()
    try:
        job.wait(timeout=PATIENCE_S)
    except subprocess.TimeoutExpired:
        job.kill()
        job.wait(timeout=PATIENCE_S)


def _failure(job: subprocess.Popen[bytes], folder: Path) -> MoECheckpointError:
    said = (folder / "log").read_text(errors="replace").strip().splitlines()
    errors = [line for line in said if "Error" in line] or said
    last = errors[-1][:300] if errors else f"exit code {job.returncode}"
    kind = UsageError if job.returncode == 2 else MoECheckpointError
    return kind(f"timing Megatron-Core's layers failed: {last}")
