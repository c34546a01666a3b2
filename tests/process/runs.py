"""Small training runs: their flags, and what they leave behind."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

from context_hooks import gathered_context
from world import Hook, Outcome, Running

from moe_ckpt.dense.dense import open_dense
from moe_ckpt.dense.digest import digest_components

Start = Callable[..., Running]
Train = Callable[..., Outcome]
UndisturbedRun = Callable[..., Path]
Launch = Callable[..., CompletedProcess[str]]


@dataclass(frozen=True)
class Layout:
    """How a model is laid out over ranks; without `experts` it is a dense one. first: layers of the first stage, where
    the others share the rest."""

    tp: int = 1
    pp: int = 2
    ep: int = 2
    ranks: int = 4
    vpp: int | None = None
    experts: int | None = 4
    cp: int = 1
    etp: int | None = None
    first: int | None = None

    @property
    def flags(self) -> tuple[str, ...]:
        sizes = {"tensor": self.tp, "pipeline": self.pp, "expert": self.ep}
        flags = [part for name, size in sizes.items() for part in (f"--{name}-model-parallel-size", str(size))]
        if self.tp > 1:
            flags.append("--sequence-parallel")
        if self.cp > 1:
            flags += ["--context-parallel-size", str(self.cp)]
        if self.etp is not None:
            flags += ["--expert-tensor-parallel-size", str(self.etp)]
        if self.vpp is not None:
            flags += ["--num-virtual-stages-per-pipeline-rank", str(self.vpp)]
        if self.first is not None:
            flags += ["--decoder-first-pipeline-num-layers", str(self.first)]
        layers = max(2, self.pp * (self.vpp or 1))
        batch = self.microbatches * self.ranks // (self.tp * self.pp * self.cp)
        if self.experts is not None:
            flags += [*_EXPERTS.split(), "--num-experts", str(self.experts)]
        return (*flags, "--num-layers", str(layers), "--global-batch-size", str(batch))

    @property
    def microbatches(self) -> int:
        """More than the pipeline is deep, so that it is full for a while; what the interleaved schedule allows."""
        return self.pp + 1 if self.vpp is None else 2 * self.pp

    def __str__(self) -> str:
        chunks = "" if self.vpp is None else f"-vpp{self.vpp}"
        more = f"{f'-cp{self.cp}' if self.cp > 1 else ''}{f'-etp{self.etp}' if self.etp else ''}"
        stages = f"-first{self.first}" if self.first is not None else ""
        return f"tp{self.tp}-pp{self.pp}-ep{self.ep}{chunks}{more}{stages}-on-{self.ranks}"

    @property
    def hooks(self) -> tuple[Hook, ...]:
        """What each worker needs for it."""
        return (gathered_context,) if self.cp > 1 else ()


# Every schedule moves at each iteration, clipping bites and dropout draws numbers: nothing can be lost unnoticed.
_MODEL = (
    "--hidden-size 32 --num-attention-heads 4 --normalization RMSNorm --swiglu --disable-bias-linear "
    "--position-embedding-type rope --attention-dropout 0.1 --hidden-dropout 0.0"
)
_NOT_OF_GPT_OSS = ("--swiglu", "--disable-bias-linear")
_EXPERTS = "--moe-ffn-hidden-size 32 --moe-router-topk 2 --moe-aux-loss-coeff 1e-2 --moe-token-dispatcher-type alltoall"
_TRAINING = (
    "--seq-length 32 --micro-batch-size 1 --train-iters 6 --lr 1e-2 --min-lr 1e-3 --lr-decay-style cosine "
    "--lr-warmup-fraction 0.67 --lr-decay-iters 6 --clip-grad 0.5 --start-weight-decay 0.01 --end-weight-decay 0.2 "
    "--weight-decay-incr-style linear --log-interval 1 --split 90,8,2 --num-workers 0"
)
# What Megatron-LM has to be told on the CPU, and of ids that are 256 bytes and the end of a document. A run saves at
# its end, unless `--save-interval` says more.
_STOCK = (
    "--distributed-backend gloo --transformer-impl local --no-persist-layer-norm --no-rope-fusion "
    "--no-masked-softmax-fusion --max-position-embeddings 32 --tokenizer-type NullTokenizer --vocab-size 257 "
    "--eval-iters 0 --eval-interval 1000 --save-interval 1000"
)
_STOCK_EXPERTS = "--moe-router-load-balancing-type aux_loss"


def flags(corpus: str, layout: Layout, *extra: str, distributed: bool = True) -> list[str]:
    """The flags of a small run; `extra` ones win."""
    model = [flag for flag in _MODEL.split() if flag not in _NOT_OF_GPT_OSS or "--quick-geglu" not in extra]
    stock = [*_STOCK.split(), *_STOCK_EXPERTS.split() * (layout.experts is not None)]
    optimizer = ["--use-distributed-optimizer"] if distributed else []
    data = ["--data-path", corpus]
    return [
        *"--device cpu".split(),
        *layout.flags,
        *model,
        *_TRAINING.split(),
        *stock,
        *optimizer,
        *data,
        *extra,
    ]


def metrics(path: Path) -> list[dict[str, Any]]:
    """The reports of a run, one per iteration, without the measured times."""
    return [{key: value for key, value in report.items() if not key.endswith("_s")} for report in reports_in(path)]


def reports_in(path: Path) -> list[dict[str, Any]]:
    """The reports of iterations in a file of --metrics-jsonl, in their order; other lines are left out."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return [line for line in lines if "iteration" in line]


def exact(path: Path, after: int = 0) -> dict[int, str]:
    """What each iteration past `after` computed, to the last bit, by iteration; the last report counts."""
    return {report["iteration"]: repr(report) for report in metrics(path) if report["iteration"] > after}


def digest(folder: Path, iteration: int) -> dict[str, str]:
    """Digest of every component of the checkpoint of `iteration` in a --save directory."""
    components = digest_components(open_dense(folder / f"iter_{iteration:07d}"))
    return {part.component: part.digest for part in components}


def published(folder: Path) -> list[int]:
    """The iterations in a --save directory, oldest first."""
    return sorted(int(path.name[5:]) for path in folder.glob("iter_*"))


def differences(one: dict[Any, str], other: dict[Any, str]) -> list[Any]:
    """Keys whose values are not the same."""
    return [key for key in {**one, **other} if one.get(key) != other.get(key)]
