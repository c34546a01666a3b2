"""Jobs of the driver on one GPU: their flags, and how they are started, killed and started again.

Rehearsed, they run on the CPU (`gpu_place`).
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import uuid
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from gpu_commands import bounded, ending
from gpu_place import BACKEND, DEVICE, REHEARSED
from world import free_port

from megatron.pretrain.preprocess import PreprocessRequest, preprocess
from megatron.pretrain.testing.te_on_cpu.wheel import place

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 400
SMALL = f"""
--device {DEVICE} --distributed-backend {BACKEND}
--num-layers 2 --hidden-size 64 --num-attention-heads 4 --num-experts 4 --moe-ffn-hidden-size 64
--moe-router-topk 2 --moe-aux-loss-coeff 1e-2 --disable-bias-linear --swiglu --normalization RMSNorm --bf16
--position-embedding-type rope --seq-length 64 --max-position-embeddings 64 --micro-batch-size 2 --global-batch-size 8
--lr 1e-3 --train-iters 12 --use-distributed-optimizer --split 90,5,5 --num-workers 0 --eval-iters 0
--eval-interval 1000 --log-interval 1 --tokenizer-type NullTokenizer --vocab-size 257
""".split()
LOCAL = """
--transformer-impl local --no-persist-layer-norm --no-gradient-accumulation-fusion --no-rope-fusion
--no-masked-softmax-fusion
""".split()
"""Megatron-Core's own layers, without kernels of other packages."""
ENGINE = ("--transformer-impl", "transformer_engine", "--moe-grouped-gemm", *(LOCAL[2:] if REHEARSED else ()))
DETERMINISTIC = ("--deterministic-mode",)
"""Kernels repeat themselves to the bit."""


def needs_engine() -> None:
    """Skip the test where Transformer Engine is missing, and say so; rehearsed, its Python is enough."""
    if not (place().is_dir() if REHEARSED else importlib.util.find_spec("transformer_engine")):
        pytest.skip("Transformer Engine is not installed: its grouped experts and FusedAdam were not tested")


def corpus(folder: Path) -> str:
    """The prefix of a small text corpus; of so many documents that each of the three splits has some."""
    sources = sorted(Path(os.__file__).parent.glob("[a-f]*.py"))
    request = PreprocessRequest(
        inputs=tuple(map(str, sources)),
        json_keys=("text",),
        output_prefix=str(folder / "stdlib"),
        tokenizer_type="ByteTokenizer",
        tokenizer_model=None,
        vocab_size=None,
        append_eod=True,
        workers=1,
    )
    (summary,) = preprocess(request, lambda _done, _total: None)
    return str(summary.prefix)


def alone() -> dict[str, str]:
    """Where the only rank of a job meets itself, which a launcher would say."""
    return {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}


@dataclass
class Job:
    """One process on one GPU, with its memory on a tmpfs; started again it is the same job."""

    folder: Path
    memory: Path
    data: str
    flags: tuple[str, ...] = ()
    job_id: str = field(default_factory=lambda: f"gpu-check-{uuid.uuid4().hex[:12]}")
    """Of its own: a fault strikes once in a job, and jobs of other tests have the same."""
    said: list[str] = field(default_factory=list)
    last: str = ""
    """The end of what the newest start printed, for failure messages."""

    def run(self, *more: str) -> int:
        """Start it; its exit code."""
        self.folder.mkdir(exist_ok=True)
        reports = ("--metrics-jsonl", str(self.folder / "reports"))
        command = [sys.executable, str(ROOT / "pretrain_gpt_moe.py"), *SMALL, "--data-path", self.data, *reports]
        environment = os.environ | {
            **alone(),
            "TORCHELASTIC_RUN_ID": self.job_id,
            "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
            "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0",
            "NCCL_ALGO": "Ring",
        }
        done = bounded([*command, *self.flags, *more], TIMEOUT_S, environment)
        self.said.append(done.stdout + done.stderr)
        self.last = ending(done)
        return done.returncode

    @property
    def reports(self) -> list[dict[str, Any]]:
        """Those of all starts."""
        found = map(json.loads, (self.folder / "reports").read_text().splitlines())
        return [report for report in found if "lm_loss" in report]

    @property
    def recoveries(self) -> list[dict[str, Any]]:
        """The seconds of each, by part, and what came from where."""
        found = map(json.loads, (self.folder / "reports").read_text().splitlines())
        return [line["recovery"] for line in found if "recovery" in line]

    def losses(self) -> dict[int, tuple[float, float]]:
        """Of each iteration, as it ran last, the loss and the norm of the gradients."""
        return {report["iteration"]: (report["lm_loss"], report["grad_norm"]) for report in self.reports}


def unfit_nccl(release: str) -> str:
    """Why this release of NCCL cannot have several ranks on one GPU, in one line; empty where it can."""
    if tuple(int(part) for part in release.split(".")[:2] if part.isdigit()) >= (2, 30):
        return ""
    return f"NCCL {release or 'unknown'} takes one rank for each GPU (expected 2.30 and newer): bring pack nccl"
