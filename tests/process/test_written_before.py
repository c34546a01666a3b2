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
import shutil
import tarfile
from collections.abc import Iterator, Mapping
from dataclasses import astuple
from pathlib import Path
from typing import Any

import pytest
import torch
from attempts import Cluster, recovered
from click.testing import CliRunner
from runs import Layout, Train, digest, exact
from world import OWN, World

from megatron.core.dist_checkpointing.moe.storage.filesystem import FilesystemStore
from megatron.core.dist_checkpointing.moe.storage.slot_reader import SlotReader
from moe_ckpt.commands.main import commands

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


of_own_loop = pytest.mark.own_loop
"""Snapshots have the counts of the driver's own loop in them, which that of Megatron-LM cannot go on from."""
trains_alike = pytest.mark.skipif(arithmetic() != ARITHMETIC, reason="this CPU rounds unlike that of the archive")


def records(store: FilesystemStore | SlotReader) -> str:
    """A digest of all that snapshots hold, read as a recovery reads it, which verifies each record."""
    found = hashlib.sha256()
    for snapshot in sorted(store.snapshots().sealed):
        with store.open(snapshot) as reader:
            for one in reader.manifest.layout.fields:
                found.update(repr((*astuple(snapshot), one.key, one.dtype, one.shape)).encode())
                found.update(reader.read(one.key))
    return found.hexdigest()


STORED = {
    "full": "0b4c89f1075ac15512a1d23f0f219e5331bc1cb3ac98df1a881524b7acdd58a5",
    "pec": "f5bfe7d39dd0be7c68db8c7804e06fa86c58369d7a2b77d3bbfaffab9ff04832",
    "sparse": "91e83b6a89623acf580e000367f29c2c0f0cc2d2b6aaf02ce2c2a1c1c6550ac9",
}
IN_MEMORY = {
    "full": (
        "ad76ee0bd610b61f3becfaaa653631cf4eafd2b571412b6607c2ad67b449b108",
        "bd570efdd5001f50120c50dcc4feef17caf2a16805eb343cc3bc4234168f101e",
    ),
    "sparse": (
        "87ad8d32d72a79331de624c64e803c0de9fa5f1621b2c42684e8b115e93bacf2",
        "4245ce3a65d322023da98a42e0bb6d5b322eaf81810ff7c0b504853fd55bf346",
    ),
}
"""Of both ranks."""


@pytest.mark.parametrize("strategy", STORED)
def test_every_record_in_storage_is_read(strategy: str, written: Path) -> None:
    assert records(FilesystemStore(written / strategy / "storage", 0)) == STORED[strategy]


@pytest.mark.parametrize("strategy", IN_MEMORY)
def test_every_record_in_memory_is_read(strategy: str, written: Path) -> None:
    (job,) = (written / strategy / "memory" / "node-0").iterdir()
    assert tuple(records(SlotReader(slot)) for slot in sorted(job.glob("slot-*"))) == IN_MEMORY[strategy]


@pytest.mark.parametrize("kind", ["dense", "experts"])
def test_every_checksum_of_a_dense_checkpoint_is_compared_and_right(kind: str, written: Path) -> None:
    result = CliRunner().invoke(commands, ["verify", str(written / kind / "save")])
    assert result.exit_code == 0, result.output
    assert "every byte by its checksum" in result.output


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


@of_own_loop
@trains_alike
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_job_goes_on_from_storage_as_the_version_that_wrote_it_did(
    strategy: str, written: Path, worlds: Mapping[str, World], corpus: str, memory: Path, tmp_path: Path
) -> None:
    was, end = expected(written / strategy), tmp_path / "end"
    storage = shutil.copytree(written / strategy / "storage", tmp_path / "storage")
    (outcome,) = Cluster(worlds[OWN], corpus, memory).run(
        LAYOUT, *MODEL, "--moe-ckpt-strategy", strategy, *STRATEGIES[strategy], "--moe-ckpt-persist-dir", storage,
        "--moe-ckpt-persist-interval", "2", "--save", end, "--metrics-jsonl", end / "reports",
    )  # fmt: skip
    told = [line for line in recovered(outcome) if "(MLT)" not in line and "PEC eq. 4" not in line]  # newer than that
    assert told == was["recovered"]
    assert computed(end / "reports") == as_computed(was["reports"])
    assert digest(end, LAST) == was["digest"]


@of_own_loop
@trains_alike
@pytest.mark.parametrize("strategy", ["full", "sparse"])
def test_a_job_goes_on_from_memory_to_the_same_end(
    strategy: str, written: Path, worlds: Mapping[str, World], corpus: str, memory: Path, tmp_path: Path
) -> None:
    end = tmp_path / "end"
    (left,) = (written / strategy / "memory" / "node-0").iterdir()
    job, _, name = left.name.partition("-")
    shutil.copytree(left, memory / name / "node-0" / left.name)
    (outcome,) = Cluster(worlds[OWN], corpus, memory / name).run(
        LAYOUT, *MODEL, "--moe-ckpt-strategy", strategy, *STRATEGIES[strategy], "--save", end, job=job
    )
    table = recovered(outcome)
    assert table[0].startswith("recovered iteration"), outcome.said
    assert table[0].endswith("exactly")
    assert any("own memory" in line for line in table), table
    assert digest(end, LAST) == expected(written / strategy)["digest"]


@of_own_loop
@trains_alike
def test_training_goes_on_from_a_dense_checkpoint(written: Path, train: Train, tmp_path: Path) -> None:
    was, end = expected(written / "dense"), tmp_path / "end"
    train(LAYOUT, *MODEL, "--load", written / "dense" / "save", "--save", end, "--metrics-jsonl", end / "reports")
    assert as_then(exact(end / "reports"), was["reports"]) == was["reports"]
    assert digest(end, LAST) == was["digest"]


@of_own_loop
@trains_alike
def test_chained_expert_saves_are_put_together_as_before(written: Path, train: Train, tmp_path: Path) -> None:
    was, end = expected(written / "experts"), tmp_path / "end"
    train(
        LAYOUT, *MODEL, "--load", written / "experts" / "save", "--dist-ckpt-optim-fully-reshardable",
        "--save", end, "--metrics-jsonl", end / "reports",
    )  # fmt: skip
    assert as_then(exact(end / "reports"), was["reports"]) == was["reports"]
    assert digest(end, LAST) == was["digest"]
