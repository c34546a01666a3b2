"""Four ranks of NCCL on one GPU: one dies in a collective, the others abort, keep their processes and train on.

NCCL takes several ranks on a GPU from release 2.30 on, if it is told to; it comes with the bundle. Ranks take turns on
the GPU: times here are no times of four GPUs, but what is aborted, parked and rebuilt is the same.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from gpu_commands import bounded, ending
from gpu_driver import DETERMINISTIC, LOCAL, SMALL, TIMEOUT_S, corpus, unfit_nccl
from gpu_place import REHEARSED, needs_device

pytestmark = needs_device

Record = Callable[..., None]
RANKS = 4
ITERATIONS = 10
LAYOUT = """
--moe-token-dispatcher-type alltoall --num-layers 4 --pipeline-model-parallel-size 2 --expert-model-parallel-size 2
""".split()
PROTECTED = ("--moe-ckpt-strategy", "full", "--moe-ckpt-interval", "1")
SHARED_GPU = {
    "NCCL_MULTI_RANK_GPU_ENABLE": "1",
    "NCCL_NVLS_ENABLE": "0",
    "NCCL_MAX_CTAS": "2",
    "NCCL_P2P_DISABLE": "1",
    "NCCL_ALGO": "Ring",
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0",
}
NOTED = re.compile(r".*(?:communicators|peer failure|parked|parks|kept their processes).*")
"""Log lines that say how survivors got out of it."""


def preloaded() -> dict[str, str]:
    """The environment that has another NCCL than torch brings."""
    library = os.environ.get("MOE_CKPT_GPU_NCCL", "")
    return {"LD_PRELOAD": library} if library and not REHEARSED else {}


@pytest.fixture(scope="module", autouse=True)
def nccl() -> None:
    """Skips these tests, in one line, where NCCL takes one rank for each GPU."""
    if REHEARSED:
        return
    script = "import torch, test_machine; print(test_machine.loaded_nccl())"
    command, here = [sys.executable, "-c", script], Path(__file__).parent
    done = subprocess.run(command, cwd=here, env=os.environ | preloaded(), capture_output=True, text=True)
    if reason := unfit_nccl(done.stdout.strip()):
        pytest.skip(reason)


@dataclass
class Ranks:
    """A job of RANKS ranks on this GPU, or each on its own, with a standby."""

    folder: Path
    memory: Path
    data: str
    share: bool = True

    def run(self, *flags: str, **variables: str) -> subprocess.CompletedProcess[str]:
        """From its begin to its end."""
        self.folder.mkdir()
        launcher = ["-m", "megatron.pretrain.launch", "--nproc-per-node", str(RANKS), "--max-restarts", "2"]
        here = Path(__file__)
        script = str(here.with_name("strike_in_call.py") if self.share else here.parents[2] / "pretrain_gpt_moe.py")
        more = ["--data-path", self.data, "--metrics-jsonl", str(self.reports), "--train-iters", str(ITERATIONS)]
        command = [
            sys.executable,
            *launcher,
            "--moe-ckpt-standbys",
            "1",
            script,
            *SMALL,
            *LOCAL,
            *LAYOUT,
            *DETERMINISTIC,
            *more,
        ]
        environment = os.environ | SHARED_GPU | preloaded() | {"OMP_NUM_THREADS": "1", "STRIKE_IN": ""} | variables
        if not self.share:
            environment |= dict.fromkeys(("NCCL_MULTI_RANK_GPU_ENABLE", "NCCL_P2P_DISABLE"), "0")
        return bounded([*command, *flags], TIMEOUT_S, environment)

    @property
    def reports(self) -> Path:
        """The file of numbers."""
        return self.folder / "reports"

    def lines(self, name: str) -> list[dict[str, Any]]:
        """Those with this entry."""
        found = map(json.loads, self.reports.read_text().splitlines()) if self.reports.exists() else ()
        return [line for line in found if name in line]

    def losses(self) -> dict[int, float]:
        """Of each iteration as it ran last."""
        return {line["iteration"]: line["lm_loss"] for line in self.lines("lm_loss")}


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Ranks:
    """The job that nothing happens to."""
    folder = tmp_path_factory.mktemp("straight")
    job = Ranks(folder / "job", folder, corpus(folder))
    done = job.run()
    assert done.returncode == 0, ending(done)
    return job


@pytest.mark.takes(75)
@pytest.mark.parametrize(
    ("call", "variables"),
    [
        pytest.param("all-to-all", {}, id="all-to-all"),
        pytest.param("p2p", {}, id="p2p"),
        pytest.param("reduce-scatter", {}, id="reduce-scatter"),
        pytest.param("all-to-all", {"NCCL_SHM_DISABLE": "1"}, id="all-to-all over sockets"),
    ],
)
def test_survivors_of_a_rank_that_dies_in_a_collective_keep_their_processes_and_every_bit(
    call: str, variables: dict[str, str], straight: Ranks, tmp_path: Path, shm: Path, record: Record
) -> None:
    if REHEARSED and variables:
        pytest.skip("gloo has one way to send: over sockets by NCCL was not tested")
    struck = tmp_path / "struck"
    job = Ranks(tmp_path / "job", shm, straight.data)
    fault = ("--moe-ckpt-inject-fault", f"1@5:{'start' if call != 'reduce-scatter' else 'forward-backward'}")
    done = job.run(
        *PROTECTED, "--moe-ckpt-memory-dir", str(shm), *fault, STRIKE_IN=call, STRUCK=str(struck), **variables
    )
    recoveries = [line["recovery"] for line in job.lines("recovery")]
    noted = [line for line in (done.stdout + done.stderr).splitlines() if NOTED.match(line)]
    record(f"a rank dies in {call}", variables=variables, struck=struck.exists(), recoveries=recoveries, noted=noted)
    assert done.returncode == 0, ending(done)
    assert struck.exists(), "it never made that call"
    assert [recovery["stayed"] for recovery in recoveries] == [RANKS - 1]
    assert job.losses() == straight.losses()


FLEX = """
--moe-token-dispatcher-type flex --moe-router-dtype fp32 --hidden-size 2048 --num-attention-heads 16
""".split()


@pytest.mark.takes(150)
@pytest.mark.skipif(torch.cuda.device_count() < RANKS, reason=f"fewer than {RANKS} GPUs: flex dispatchers not tested")
@pytest.mark.skipif(find_spec("deep_ep") is None, reason="deep_ep is not installed: flex dispatchers not tested")
@pytest.mark.parametrize("backend", ["deepep", "hybridep"])
def test_survivors_make_the_buffers_of_a_flex_dispatcher_anew_and_keep_every_bit(
    backend: str, tmp_path: Path, shm: Path, record: Record
) -> None:
    flags, data = (*FLEX, "--moe-flex-dispatcher-backend", backend), corpus(tmp_path)
    jobs = [Ranks(tmp_path / name, shm, data, share=False) for name in ("straight", "struck")]
    protected = (*PROTECTED, "--moe-ckpt-memory-dir", str(shm), "--moe-ckpt-inject-fault", "1@5:forward-backward")
    for job, more in zip(jobs, ((), protected), strict=True):
        done = job.run(*flags, *more)
        assert done.returncode == 0, ending(done)
    recoveries = [line["recovery"] for line in jobs[1].lines("recovery")]
    record(f"a rank dies with buffers of {backend}", recoveries=recoveries)
    assert [recovery["stayed"] for recovery in recoveries] == [RANKS - 1]
    assert jobs[1].losses() == jobs[0].losses()
