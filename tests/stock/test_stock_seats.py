"""A launcher with standbys, for jobs in the loop of Megatron-LM."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

from stock_jobs import ALONE, Shape, StockJob
from stock_recording import counting_objects
from world import HANG_TIMEOUT_S, ROOT

NewJob = Callable[..., StockJob]

TWO = Shape(ranks=2, pp=2, ep=1)
SCRIPT = ROOT / "benchmarks" / "standby_job.py"


def losses(folder: Path, memory: Path, *extra: str, standbys: int) -> dict[int, tuple[float, float]]:
    """Loss and norm of each iteration, as they were reported last."""
    (seats := folder / "seats").mkdir(parents=True)
    launcher = [sys.executable, "-m", "megatron.pretrain.seats.run", "--moe-ckpt-standbys", str(standbys)]
    launcher += "--standalone --nproc-per-node 2 --max-restarts 2 --monitor-interval 0.1".split()
    reports = folder / "reports.jsonl"
    protect = ["--moe-ckpt-strategy", "full", "--moe-ckpt-memory-dir", str(memory), "--metrics-jsonl", str(reports)]
    environment = {"LOOP": "stock", "OMP_NUM_THREADS": "1", "SEATS": str(seats), "READY_STANDBYS": "1"}
    ended = subprocess.run(
        [*launcher, str(SCRIPT), *TWO.flags, *protect, *extra],
        cwd=ROOT, env=os.environ | environment, capture_output=True, text=True, timeout=HANG_TIMEOUT_S,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert len(list(seats.glob("seated-*"))) == (2 if standbys else 0)
    lines = map(json.loads, reports.read_text().splitlines())
    return {line["iteration"]: (line["lm_loss"], line["grad_norm"]) for line in lines if "iteration" in line}


def test_standbys_go_on_where_the_ranks_of_a_job_were_lost(tmp_path: Path, new_job: NewJob) -> None:
    straight = losses(tmp_path / "straight", new_job(TWO).memory, standbys=0)
    fault = ["--moe-ckpt-inject-fault", "1@5"]
    assert losses(tmp_path / "killed", new_job(TWO).memory, *fault, standbys=2) == straight
    assert sorted(straight) == list(range(1, 7))


def test_a_standby_has_imported_the_tokenizers_before_it_has_a_rank() -> None:
    code = (
        "import sys, megatron.pretrain.core_import\n"
        "from megatron.pretrain.warm_up import warm_up\n"
        "warm_up(['--device', 'cpu'])\n"
        "before = set(sys.modules)\n"
        "import megatron.core.tokenizers.text.models\n"
        "print(sorted(set(sys.modules) - before))\n"
    )
    environment = os.environ | {"LOOP": "stock"}
    ran = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.splitlines()[-1] == "[]"


def test_after_a_fault_nobody_looks_through_what_was_imported(new_job: NewJob, tmp_path: Path) -> None:
    counted = tmp_path / "counted"
    new_job(ALONE).run(hooks=[partial(counting_objects, str(counted))])
    assert int(counted.read_text()) < 10_000, "modules alone are more than 80,000"
