"""Models of published examples train with Transformer Engine's own Python, on the CPU."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from world import ROOT, World

pytestmark = pytest.mark.ci

PUBLISHED = ("gpt-125m-8e", "gpt-350m-16e", "gpt-moe", "moe-llava", "qwen-moe", "deepseek-moe")
SMALL = (
    "--device cpu --transformer-impl transformer_engine --pipeline-model-parallel-size 1 --train-iters 2 "
    "--expert-model-parallel-size 1 --num-layers 2 --hidden-size 32 --num-attention-heads 4 --ffn-hidden-size 64 "
    "--num-experts 8 --moe-layer-freq [0,1] --seq-length 32 --micro-batch-size 1 --global-batch-size 2 "
    "--max-position-embeddings 32 --vocab-size 257 --lr-warmup-fraction 0.5 --moe-ckpt-strategy none --split 90,8,2 "
    "--num-workers 0 --log-interval 1 --eval-iters 0"
)
"""Laid over the flags of an example, these make it a job that fits in a test; all else of it stays."""
WITHOUT_GPU = ("--distributed-backend", "gloo", "--no-rope-fusion")


@pytest.mark.parametrize("example", PUBLISHED)
def test_the_model_of_a_published_example_trains_as_it_is_configured_on_gpus(
    example: str, engine_world: World, corpus: str, tmp_path: Path
) -> None:
    given = example_flags(example, corpus, tmp_path)
    assert "--moe-grouped-gemm" in given
    kept = without(given, ("--moe-ckpt-", "--save", "--load", "--async-save", "--moe-ffn", "--moe-shared"))
    outcome = engine_world.run([*kept, *SMALL.split(), *WITHOUT_GPU], 1)
    assert set(outcome.codes) == {0}, outcome.said
    assert "iteration        2/       2" in outcome.said


def example_flags(example: str, corpus: str, folder: Path) -> list[str]:
    """What `train.sh` of an example gives the driver on one node."""
    recorder = folder / "python"
    recorder.write_text('#!/bin/bash\nprintf "%s\\0" "$@"\n')
    recorder.chmod(0o755)
    environment = {"DATA": corpus, "SAVE": str(folder), "HEAD": "here", "MOE_CKPT_PYTHON": str(recorder)}
    called = subprocess.run(
        [str(ROOT / "examples" / example / "train.sh")],
        env=os.environ | environment,
        check=True,
        timeout=60,
        capture_output=True,
        text=True,
    )
    words = called.stdout.split("\0")[:-1]
    return words[next(at for at, word in enumerate(words) if word.endswith("pretrain_gpt_moe.py")) + 1 :]


def without(argv: list[str], prefixes: tuple[str, ...]) -> list[str]:
    """The flags but for those with these prefixes, with their values."""
    kept, dropping = [], False
    for word in argv:
        if word.startswith("--"):
            dropping = word.startswith(prefixes)
        kept += [] if dropping else [word]
    return kept
