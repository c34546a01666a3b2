"""The driver on one CUDA device; skipped where there is none."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from gpu_driver import LOCAL, ROOT, SMALL, Job, alone, corpus

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")

FLAGS = (*LOCAL, "--train-iters", "6", "--save-interval", "3")


def test_training_on_cuda_resumes_where_it_was(tmp_path: Path, shm: Path) -> None:
    data = corpus(tmp_path)
    straight = Job(tmp_path / "straight", shm, data, (*FLAGS, "--save", str(tmp_path / "first")))
    assert straight.run() == 0, straight.last
    from_there = ("--load", str(tmp_path / "first"), "--ckpt-step", "3")
    resumed = Job(tmp_path / "resumed", shm, data, (*FLAGS, "--save", str(tmp_path / "second"), *from_there))
    assert resumed.run() == 0, resumed.last
    before, after = ({at: loss for at, (loss, _) in job.losses().items()} for job in (straight, resumed))
    assert sorted(after) == [4, 5, 6]
    # Scatter kernels on CUDA add in any order, so equality of bits is not asked for here.
    assert after == pytest.approx({iteration: before[iteration] for iteration in after}, rel=1e-3)


def test_a_cuda_run_never_loads_the_cpu_device() -> None:
    flags = [*SMALL, *LOCAL, "--train-iters", "1", "--mock-data"]
    script = (
        f"import sys, pretrain_gpt_moe; assert pretrain_gpt_moe.main({flags!r}) == 0;"
        "assert not [name for name in sys.modules if name.startswith('megatron') and 'cpu_device' in name]"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=300, cwd=ROOT, env=os.environ | alone())
