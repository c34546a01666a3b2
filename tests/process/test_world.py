"""The worlds that all process tests share must not carry anything from one job to the next."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from runs import Layout, Train, exact, flags
from world import ROOT

pytestmark = pytest.mark.ci


def test_a_used_world_computes_what_fresh_processes_compute(train: Train, corpus: str, tmp_path: Path) -> None:
    fresh, before, after = tmp_path / "fresh.jsonl", tmp_path / "before.jsonl", tmp_path / "after.jsonl"
    layout = Layout(tp=1, pp=1, ep=1, ranks=1)
    train(layout, "--metrics-jsonl", before)
    descriptors = len(os.listdir("/proc/self/fd"))
    train(Layout(ep=1, ranks=2, vpp=2), "--fp16", "--train-iters", 2)
    train(Layout(tp=2, pp=1, ep=1, ranks=2), "--bf16", "--train-iters", 2, "--num-experts", 8, distributed=False)
    train(layout, "--metrics-jsonl", after)
    kept = len(os.listdir("/proc/self/fd")) - descriptors
    assert kept < 16, "of five ranks, of which some may not have ended: a session of tests has hundreds of jobs"
    command = [sys.executable, "pretrain_gpt_moe.py", *flags(corpus, layout, "--metrics-jsonl", str(fresh))]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    subprocess.run(command, cwd=ROOT, env=environment, check=True, timeout=180, capture_output=True)
    assert exact(before) == exact(after) == exact(fresh)
    assert len(exact(fresh)) == 6
