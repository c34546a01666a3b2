"""Small jobs in the stock loop: started, killed, started again."""

from __future__ import annotations

import contextlib
import json
import signal
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol
from unittest import mock

from stock_recording import on_the_cpu, recording
from world import ROOT, Hook, Outcome, Running, World

ITERATIONS = 6
KILLED = -signal.SIGKILL
"""Exit code of a rank that an injected fault strikes; others end with 1."""
FULL = ("--moe-ckpt-strategy", "full")
SPARSE = ("--moe-ckpt-strategy", "sparse", "--moe-ckpt-window", "2")
RECOMPUTED = tuple("--recompute-granularity full --recompute-method uniform --recompute-num-layers 1".split())

# Every schedule moves at each iteration, clipping bites and dropout draws numbers: nothing can be lost unnoticed.
FLAGS = (
    "--distributed-backend gloo --transformer-impl local --no-persist-layer-norm "
    "--no-gradient-accumulation-fusion --no-rope-fusion --no-masked-softmax-fusion "
    "--hidden-size 32 --num-attention-heads 4 --normalization RMSNorm --swiglu --disable-bias-linear "
    "--position-embedding-type rope --attention-dropout 0.1 --hidden-dropout 0.0 --max-position-embeddings 32 "
    "--untie-embeddings-and-output-weights "
    "--num-experts 4 --moe-ffn-hidden-size 32 --moe-router-topk 2 --moe-aux-loss-coeff 1e-2 "
    "--moe-router-load-balancing-type aux_loss --moe-token-dispatcher-type alltoall "
    "--seq-length 32 --micro-batch-size 1 --lr 1e-2 --min-lr 1e-3 --lr-decay-style cosine --lr-warmup-fraction 0.67 "
    f"--train-iters {ITERATIONS} --lr-decay-iters {ITERATIONS} --clip-grad 0.5 --weight-decay 0.01 "
    "--use-distributed-optimizer --eval-iters 0 --eval-interval 1000 "
    "--mock-data --tokenizer-type NullTokenizer --vocab-size 127 --split 90,8,2 --num-workers 0"
).split()


@contextlib.contextmanager
def without_state(name: str, field: str = "") -> Iterator[None]:
    """The optimizer's state of keys with this name is not found; with a field, that alone."""
    from megatron.core.dist_checkpointing.moe.megatron_state import megatron

    enumerated = "_optimizer_tensors"
    found = vars(megatron)[enumerated]

    def without(*given: object) -> list[Any]:
        return [one for one in found(*given) if not (name in one.key and field in ("", one.field))]

    with mock.patch.object(megatron, enumerated, without):
        yield


class Kind(Protocol):
    """What a job trains."""

    @property
    def ranks(self) -> int:
        """Processes."""

    @property
    def flags(self) -> list[str]:
        """Of Megatron-LM."""

    @property
    def hooks(self) -> Sequence[Hook]:
        """What each worker needs for it."""

    @property
    def script(self) -> Path | None:
        """What is run in place of the driver."""


@dataclass(frozen=True)
class Shape:
    """How the model of all these tests is laid out over ranks, and what other flags it has."""

    ranks: int
    pp: int
    ep: int
    tp: int = 1
    more: tuple[str, ...] = ()
    hooks: tuple[Hook, ...] = ()
    script: Path | None = None

    @property
    def flags(self) -> list[str]:
        sizes = {"tensor": self.tp, "pipeline": self.pp, "expert": self.ep}
        layout = [part for name, size in sizes.items() for part in (f"--{name}-model-parallel-size", str(size))]
        # More microbatches than the pipeline is deep.
        batch = (self.pp + 1) * self.ranks // (self.pp * self.tp)
        device = ["--device", "cpu"] if self.script is None else []  # a flag of the driver
        return [
            *device,
            *FLAGS,
            *layout,
            "--num-layers",
            str(2 * self.pp),
            "--global-batch-size",
            str(batch),
            *self.more,
        ]


class Tied(Shape):
    """The output reads the embedding, of which the last stage has a copy."""

    @property
    def flags(self) -> list[str]:
        return [flag for flag in super().flags if flag != "--untie-embeddings-and-output-weights"]


ALONE = Shape(ranks=1, pp=1, ep=1)
PAIR = Shape(ranks=2, pp=2, ep=1)
FOUR = Shape(ranks=4, pp=2, ep=2)
TENSOR_PARALLEL = Shape(ranks=4, pp=2, ep=2, tp=2, more=("--sequence-parallel", "--expert-tensor-parallel-size", "1"))
SHARED = Shape(2, 1, 2, more=("--moe-shared-expert-intermediate-size", "16", "--moe-shared-expert-overlap"))
HALF = Shape(ranks=4, pp=2, ep=2, more=("--fp16", "--initial-loss-scale", "4194304", "--hysteresis", "1"))
"""The first iterations are skipped, until the loss scale is small enough."""
OVERFLOWING = Shape(ranks=2, pp=2, ep=1, more=("--fp16", "--initial-loss-scale", str(2.0**40), "--hysteresis", "1"))
"""No iteration makes a step."""
SCRIPT = Shape(ranks=1, pp=1, ep=1, hooks=(on_the_cpu,), script=ROOT / "tests" / "stock" / "users_script.py")
"""Of a user's own, which knows nothing of CPUs."""

Records = dict[tuple[int, Any], Any]


@dataclass(frozen=True)
class StockJob:
    """A job of one name: all its attempts find the memory that the ones before it left.

    memory: a folder on a tmpfs. folder: for what is recorded.
    """

    world: World
    memory: Path
    folder: Path
    shape: Kind = FOUR

    def start(self, *extra: object, hooks: Sequence[Hook] = ()) -> Running:
        """Start an attempt."""
        argv = [*self.shape.flags, *map(str, extra)]
        if "--moe-ckpt-strategy" in argv and argv[argv.index("--moe-ckpt-strategy") + 1] != "none":
            argv += ["--moe-ckpt-memory-dir", str(self.memory)]
        name = {"TORCHELASTIC_RUN_ID": f"stock-{self.memory.name}"}
        all_hooks = [partial(recording, str(self.folder)), *self.shape.hooks, *hooks]
        return self.world.start(argv, self.shape.ranks, all_hooks, [name] * self.shape.ranks, self.shape.script)

    def run(self, *extra: object, hooks: Sequence[Hook] = (), codes: set[int] | None = None) -> Outcome:
        """Run an attempt to its end; `codes` are the exit codes that it must have, and no others."""
        outcome = self.start(*extra, hooks=hooks).wait_or_restart()
        assert set(outcome.codes) == (codes or {0}), outcome.said
        return outcome

    def records(self) -> Records:
        """What each iteration came to on each rank, the last time that it ran, and the digest at the end."""
        found: Records = {}
        for rank in range(self.shape.ranks):
            for line in (self.folder / f"rank-{rank}.jsonl").read_text().splitlines():
                record = json.loads(line)
                found[rank, record.pop("iteration", "end")] = record
        return found

    def ran(self, rank: int) -> list[int]:
        """The iterations that ran on a rank, in their order, of all attempts."""
        lines = (self.folder / f"rank-{rank}.jsonl").read_text().splitlines()
        return [record["iteration"] for record in map(json.loads, lines) if "iteration" in record]

    def began_again(self) -> list[int]:
        """Ranks that ran their first iteration once more: they found nothing, and equal records would not show it."""
        ran = map(self.ran, range(self.shape.ranks))
        return [rank for rank, iterations in enumerate(ran) if iterations.count(iterations[0]) > 1]
