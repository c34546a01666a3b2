"""What an earlier version wrote is read by this one, to the last bit.

`written_before/commit-89056c2.tar.xz` was written by that commit: of jobs on two ranks, under each strategy, the memory
tier and the storage they left after iteration 7 of 10; two dense checkpoints, one of them of chained expert saves; and
in `expected.json` the digest and the reports with which the same commit went on from them to iteration 10.
Training on needs a CPU that rounds like the one of the archive; reading and converting need none.
"""

from __future__ import annotations

import ast
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from attempts import Cluster, recovered
from runs import Layout, Train, digest, exact
from world import HANG_TIMEOUT_S, ROOT, World

pytestmark = pytest.mark.own_loop

ARCHIVE = Path(__file__).parent / "written_before" / "commit-89056c2.tar.xz"
RECOVERED, LAST = 6, 10
COMPUTED = ("iteration", "consumed_train_samples", "lm_loss", "grad_norm", "learning_rate", "loss_scale", "skipped")
ARITHMETIC = "0ce3845e938ba5e40faede30d9bdc570d17ee8a9992ed0ca40e0c2bb6c6a5572"
"""What `arithmetic` gives on the CPU that wrote the archive."""
LAYOUT = Layout(tp=1, pp=1, ep=2, ranks=2)
MODEL = (
    "--hidden-size 16 --moe-ffn-hidden-size 16 --num-attention-heads 2 --make-vocab-size-divisible-by 2 --bf16 "
    f"--train-iters {LAST} --lr-decay-iters {LAST}"
).split()
STRATEGIES = {
    "full": ("--moe-ckpt-interval", "2"),
    "pec": ("--moe-ckpt-pec-k-snapshot", "2", "--moe-ckpt-interval", "1"),
    "sparse": ("--moe-ckpt-window", "2"),
}


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("written")
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(folder, filter="data")
    return folder


@pytest.fixture
def memory(tmp_path: Path) -> Iterator[Path]:
    """A folder on the machine's tmpfs, where jobs keep their memory tier."""
    shared = Path("/dev/shm")
    folder = (shared if shared.is_dir() else tmp_path) / f"written-{tmp_path.name}"
    folder.mkdir()
    yield folder
    shutil.rmtree(folder)


def expected(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "expected.json").read_text())


def computed(reports: Path) -> dict[str, str]:
    """What each iteration computed, to the last bit; how well it was protected differs between tiers."""
    return as_computed({str(iteration): report for iteration, report in exact(reports).items()})


def as_computed(reports: dict[str, str]) -> dict[str, str]:
    values = {iteration: ast.literal_eval(report) for iteration, report in reports.items()}
    return {iteration: repr([report[name] for name in COMPUTED]) for iteration, report in values.items()}


def arithmetic() -> str:
    """How this CPU rounds: a digest of what it makes of the kinds of kernels that the jobs use."""
    draw, found = torch.Generator().manual_seed(7), hashlib.sha256()
    for dtype in (torch.float32, torch.bfloat16):
        left, right = (torch.randn(shape, generator=draw).to(dtype) for shape in ((64, 16), (16, 322)))
        product = left @ right
        exponential = product.float().exp().log1p()
        norm, silu = product.float().norm(), torch.nn.functional.silu(product)
        for tensor in (product, torch.softmax(product.float(), -1), silu, norm, exponential):
            found.update(tensor.float().contiguous().numpy().tobytes())
    return found.hexdigest()


trains_alike = pytest.mark.skipif(arithmetic() != ARITHMETIC, reason="this CPU rounds unlike that of the archive")


@pytest.mark.parametrize("strategy", ["full", "pec"])
def test_snapshots_in_storage_become_the_same_dense_checkpoint(strategy: str, written: Path, tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "moe_ckpt",
        "convert",
        "--to",
        "dense",
        written / strategy / "storage",
        tmp_path,
    ]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    subprocess.run(command, env=environment, capture_output=True, timeout=HANG_TIMEOUT_S, check=True)
    assert digest(tmp_path, RECOVERED) == expected(written / strategy)["converted"]


def test_a_dense_checkpoint_has_the_same_digest(written: Path) -> None:
    assert digest(written / "dense" / "save", RECOVERED) == expected(written / "dense")["saved"]


def as_then(reports: dict[int, str], was: dict[str, str]) -> dict[str, str]:
    """Reports without what was added to them since then."""
    found = {str(iteration): ast.literal_eval(report) for iteration, report in reports.items()}
    return {
        iteration: repr({name: report[name] for name in ast.literal_eval(was[iteration])})
        for iteration, report in found.items()
        if iteration in was
    }


@trains_alike
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_job_goes_on_from_storage_as_the_version_that_wrote_it_did(
    strategy: str, written: Path, world: World, corpus: str, memory: Path, tmp_path: Path
) -> None:
    was, end = expected(written / strategy), tmp_path / "end"
    storage = shutil.copytree(written / strategy / "storage", tmp_path / "storage")
    (outcome,) = Cluster(world, corpus, memory).run(
        LAYOUT, *MODEL, "--moe-ckpt-strategy", strategy, *STRATEGIES[strategy], "--moe-ckpt-persist-dir", storage,
        "--moe-ckpt-persist-interval", "2", "--save", end, "--metrics-jsonl", end / "reports",
    )  # fmt: skip
    told = [line for line in recovered(outcome) if "(MLT)" not in line and "PEC eq. 4" not in line]  # newer than that
    assert told == was["recovered"]
    assert computed(end / "reports") == as_computed(was["reports"])
    assert digest(end, LAST) == was["digest"]


@trains_alike
@pytest.mark.parametrize("strategy", ["full", "sparse"])
def test_a_job_goes_on_from_memory_to_the_same_end(
    strategy: str, written: Path, world: World, corpus: str, memory: Path, tmp_path: Path
) -> None:
    end = tmp_path / "end"
    (left,) = (written / strategy / "memory" / "node-0").iterdir()
    job, _, name = left.name.partition("-")
    shutil.copytree(left, memory / name / "node-0" / left.name)
    (outcome,) = Cluster(world, corpus, memory / name).run(
        LAYOUT, *MODEL, "--moe-ckpt-strategy", strategy, *STRATEGIES[strategy], "--save", end, job=job
    )
    table = recovered(outcome)
    assert table[0].startswith("recovered iteration"), outcome.said
    assert table[0].endswith("exactly")
    assert any("own memory" in line for line in table), table
    assert digest(end, LAST) == expected(written / strategy)["digest"]


@trains_alike
def test_training_goes_on_from_a_dense_checkpoint(written: Path, train: Train, tmp_path: Path) -> None:
    was, end = expected(written / "dense"), tmp_path / "end"
    train(LAYOUT, *MODEL, "--load", written / "dense" / "save", "--save", end, "--metrics-jsonl", end / "reports")
    assert as_then(exact(end / "reports"), was["reports"]) == was["reports"]
    assert digest(end, LAST) == was["digest"]


@trains_alike
def test_chained_expert_saves_are_put_together_as_before(written: Path, train: Train, tmp_path: Path) -> None:
    was, end = expected(written / "experts"), tmp_path / "end"
    train(
        LAYOUT, *MODEL, "--load", written / "experts" / "save", "--dist-ckpt-optim-fully-reshardable",
        "--save", end, "--metrics-jsonl", end / "reports",
    )  # fmt: skip
    assert as_then(exact(end / "reports"), was["reports"]) == was["reports"]
    assert digest(end, LAST) == was["digest"]
