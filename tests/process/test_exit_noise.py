"""A real job whose output somebody stops to read, and that is then stopped with Ctrl-C."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest
from attempts import Cluster
from runs import Layout, flags, metrics
from world import HANG_TIMEOUT_S

pytestmark = pytest.mark.ci

ROOT = Path(__file__).parents[2]
HEARD = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
"""In a child: a shell that runs the tests in the background lets it ignore Ctrl-C."""
LAYOUT = Layout(pp=2, ep=1, ranks=2)


@pytest.mark.full
def test_a_job_outlives_who_reads_it_and_ends_at_ctrl_c_without_a_traceback(cluster: Cluster, tmp_path: Path) -> None:
    reports = tmp_path / "reports"
    protect = ("--moe-ckpt-strategy", "full", "--moe-ckpt-memory-dir", str(cluster.memory))
    argv = flags(cluster.corpus, LAYOUT, *protect, "--train-iters", "100000", "--metrics-jsonl", str(reports))
    own = {
        "MOE_CKPT_PYTHON": sys.executable,
        "MOE_CKPT_CORPUS": cluster.corpus,
        "TMPDIR": str(tmp_path),
        "NPROC": "2",
        "STANDBYS": "1",
    }
    job = subprocess.Popen(
        ["scripts/train_cpu.sh", *argv], cwd=ROOT, env=os.environ | own, text=True, start_new_session=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, preexec_fn=HEARD,
    )  # fmt: skip
    try:
        assert job.stdout is not None
        for _ in range(3):  # as `| head -3` does
            job.stdout.readline()
        job.stdout.close()
        until = time.monotonic() + HANG_TIMEOUT_S
        while (not reports.exists() or len(metrics(reports)) < 5) and time.monotonic() < until:
            time.sleep(0.1)
        os.killpg(job.pid, signal.SIGINT)
        assert job.stderr is not None
        said = job.stderr.read()
        assert job.wait(HANG_TIMEOUT_S) == 128 + signal.SIGINT, said
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(job.pid, signal.SIGKILL)
    assert len(metrics(reports)) >= 5, said
    assert "Traceback" not in said
    assert "Logging error" not in said
    assert "KeyboardInterrupt" not in said
    # Of each rank that prints: the first and the last.
    assert 1 <= said.count("nobody reads standard output any more") <= LAYOUT.ranks, said
    assert said.count("stopped by signal SIGINT") == 1, said
