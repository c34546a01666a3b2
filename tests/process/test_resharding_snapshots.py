"""Snapshots in storage come back under another parallel layout: every bit of weights, master weights and moments."""

from __future__ import annotations

from pathlib import Path

import pytest
from runs import Layout, Start, Train, digest, differences, metrics

SAME = (
    "--global-batch-size 24 --num-layers 4 --attention-dropout 0 --make-vocab-size-divisible-by 192 --train-iters 3 "
    "--dist-ckpt-optim-fully-reshardable --save-interval 3"
).split()
FULL = "--moe-ckpt-strategy full --moe-ckpt-interval 1 --moe-ckpt-persist-interval 1".split()

def test_try(train: Train, tmp_path: Path) -> None:
    storage = ["--moe-ckpt-persist-dir", tmp_path / "storage"]
    one, other = Layout(tp=2, pp=2, ep=1), Layout(tp=1, pp=1, ep=4)
    a = train(one, "--bf16", *FULL, *SAME, *storage, "--save", tmp_path / "one")
    print(a.said)
    b = train(other, "--bf16", *FULL, *SAME, *storage, "--save", tmp_path / "other")
    print(b.said)
    x, y = digest(tmp_path / "one", 3), digest(tmp_path / "other", 3)
    print(list(x), differences(x, y))
    assert 0
