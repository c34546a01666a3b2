"""A drill with a real job: ranks and nodes are killed at random, and nothing comes out differently."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from world import ROOT

from megatron.pretrain.processes import processes_with

MOST_S = 800.0
"""A drill of this length waits for something that will not come."""
SMALL = (
    "--num-layers 2 --hidden-size 32 --moe-ffn-hidden-size 32 --num-experts 4 --seq-length 32 --micro-batch-size 1"
    " --global-batch-size 4 --moe-ckpt-window 2"
)


@pytest.mark.full
@pytest.mark.timeout(MOST_S + 60)
@pytest.mark.parametrize("standbys", [0, 1])
def test_a_job_whose_ranks_and_nodes_are_killed_at_random_ends_as_without_faults(
    corpus: str, tmp_path: Path, standbys: int
) -> None:
    flags = ["--minutes", "0.2", "--mtbf", "4", "--seed", "8", "--nodes", "2", "--nproc", "1", "--node-share", "0.4"]
    flags += ["--standbys", str(standbys)]
    command = ["scripts/chaos_cpu.sh", *flags, "--no-baseline", "--folder", str(tmp_path), "--", *SMALL.split()]
    environment = os.environ | {
        "MOE_CKPT_CORPUS": corpus,
        "EP": "1",
        "TMPDIR": str(tmp_path),
        "MOE_CKPT_PYTHON": sys.executable,
    }
    drill = subprocess.Popen(
        command, cwd=ROOT, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    try:
        said = drill.communicate(timeout=MOST_S)[0]
    finally:
        drill.send_signal(signal.SIGTERM)
        drill.wait()
    assert drill.returncode == 0, said
    result = json.loads((tmp_path / "result.json").read_text())["subject"]
    assert {fault["kind"] for fault in result["faults"]} == {"rank", "node"}
    assert sum(result["recoveries"].values()) > 0
    assert "as without faults, to the last bit" in said
    assert not [pid for pid, found in processes_with({}) if found.get("MOE_CKPT_CORPUS") == corpus and "RANK" in found]
