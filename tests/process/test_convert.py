"""`moe-ckpt convert`: a sparse window in storage becomes a dense checkpoint of the same state, to the last bit."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from attempts import Cluster
from runs import Layout, Train, differences, digest, exact, published
from sparse_runs import BF16, DROPOUT, EXPERT_BIAS, LENGTH, SHARED
from world import HANG_TIMEOUT_S, ROOT, World, node_memory

from moe_ckpt.checkpoints.comparison import differing_values, structure
from moe_ckpt.checkpoints.places import locate

STOPPED_AT, WINDOW = 10, 3
LAYOUT, MODEL = Layout(1, 1, 2, ranks=2), (*BF16, *EXPERT_BIAS, *SHARED, *DROPOUT)


@dataclass(frozen=True)
class Source:
    """A job that persisted sparse windows, saved a dense checkpoint after each iteration, and ended early."""

    storage: Path
    saved: Path

    @property
    def windows(self) -> list[tuple[int, ...]]:
        """The iterations of the windows in storage."""
        names = sorted({int(path.name[5:12]) for path in self.storage.glob("iter_*")})
        return [tuple(names[at : at + WINDOW]) for at in range(0, len(names), WINDOW)]


@pytest.fixture(scope="module")
def source(world: World, corpus: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Source]:
    folder = tmp_path_factory.mktemp("source")
    with node_memory() as memory:
        made = Source(folder / "storage", folder / "saved")
        Cluster(world, corpus, memory).run(
            LAYOUT, *LENGTH, *MODEL, "--moe-ckpt-strategy", "sparse", "--moe-ckpt-window", WINDOW,
            "--moe-ckpt-persist-dir", made.storage, "--moe-ckpt-persist-interval", WINDOW,
            "--save", made.saved, "--save-interval", "1", "--exit-interval", STOPPED_AT,
            "--metrics-jsonl", made.saved / "reports",
        )  # fmt: skip
        yield made


def convert(*arguments: object) -> subprocess.CompletedProcess[str]:
    """What the command makes of these arguments."""
    command = [sys.executable, "-m", "moe_ckpt", "convert", "--to", "dense", *map(str, arguments)]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=HANG_TIMEOUT_S, check=False)


@pytest.mark.ci
def test_a_converted_window_is_the_dense_checkpoint_of_its_last_iteration_and_training_continues_from_it(
    source: Source, train: Train, tmp_path: Path
) -> None:
    before = sorted(source.storage.rglob("*"))
    # With --use-checkpoint-args flags are read there; its newest checkpoint is newer than the window.
    ended = convert(source.storage, tmp_path / "dense", "--", "--load", source.saved)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    last = source.windows[-1][-1]
    assert last < STOPPED_AT
    assert published(tmp_path / "dense") == [last]
    assert f"replay: iteration {last} ({WINDOW - 1} of {WINDOW - 1})" in ended.stdout + ended.stderr
    assert not differences(digest(tmp_path / "dense", last), digest(source.saved, last))
    assert sorted(source.storage.rglob("*")) == before
    reports = {where: tmp_path / f"from-{where}" for where in ("converted", "saved")}
    train(LAYOUT, *LENGTH, *MODEL, "--load", tmp_path / "dense", "--metrics-jsonl", reports["converted"])
    train(LAYOUT, *LENGTH, *MODEL, "--load", source.saved, "--ckpt-step", last, "--metrics-jsonl", reports["saved"])
    assert exact(reports["converted"]) == exact(reports["saved"])
    assert len(exact(reports["saved"])) == int(LENGTH[1]) - last


@pytest.mark.full
def test_partial_snapshots_in_storage_become_a_checkpoint_that_differs_in_nothing_but_stale_experts(
    world: World, corpus: str, tmp_path: Path
) -> None:
    storage, saved = tmp_path / "storage", tmp_path / "saved"
    with tempfile.TemporaryDirectory(prefix="moe-ckpt-") as memory:
        Cluster(world, corpus, Path(memory)).run(
            LAYOUT, *LENGTH, *MODEL, "--moe-ckpt-strategy", "pec", "--moe-ckpt-interval", "1",
            "--moe-ckpt-persist-dir", storage, "--moe-ckpt-persist-interval", "2",
            "--save", saved, "--save-interval", "1", "--exit-interval", STOPPED_AT,
        )  # fmt: skip
    ended = convert(storage, tmp_path / "dense")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    (last,) = published(tmp_path / "dense")
    one, other = (locate(str(root / f"iter_{last:07d}")).state_view().values for root in (tmp_path / "dense", saved))
    assert not structure(one, other)
    stale = [found.name for found in differing_values(one, other, lambda nbytes: None)]
    assert stale
    # The second optimizer is that of experts.
    assert all(".experts." in name or name.startswith("chained_1.") for name in stale)


@pytest.fixture
def storage(source: Source, tmp_path: Path) -> Path:
    """A copy of the storage to change."""
    return Path(shutil.copytree(source.storage, tmp_path / "storage"))


def refused(*arguments: object) -> str:
    """The last line on standard error; nothing was written."""
    ended = convert(*arguments)
    assert ended.returncode in (1, 2), ended.stdout + ended.stderr
    assert "Traceback" not in ended.stderr
    assert not list(Path(str(arguments[1])).glob("iter_*"))
    return ended.stderr.splitlines()[-1]


def test_where_no_window_is_that_is_said(tmp_path: Path) -> None:
    assert "does not exist" in refused(tmp_path / "nowhere", tmp_path / "dense")
    (tmp_path / "empty").mkdir()
    assert "is empty" in refused(tmp_path / "empty", tmp_path / "dense")


@pytest.mark.ci
def test_a_half_written_window_is_refused_and_what_it_lacks_is_named(
    source: Source, storage: Path, tmp_path: Path
) -> None:
    for window in source.windows:
        for path in storage.glob(f"iter_{window[1]:07d}-rank_00001-*"):
            shutil.rmtree(path)
    first, middle, last = source.windows[-1]
    line = refused(storage, tmp_path / "dense")
    assert f"of iterations {first} to {last} the snapshot of rank 1 after iteration {middle} is missing" in line


@pytest.mark.full
def test_a_window_of_another_layout_is_refused(source: Source, tmp_path: Path) -> None:
    other = ("--expert-model-parallel-size", "1", "--pipeline-model-parallel-size", "2")
    line = refused(source.storage, tmp_path / "dense", "--", *other)
    assert "of the layout world_size 2, ep 2 stay, start in their layout" in line


@pytest.mark.full
def test_data_that_is_gone_is_named(source: Source, tmp_path: Path) -> None:
    moved = tmp_path / "moved"
    ended = convert(source.storage, tmp_path / "dense", "--", "--data-path", moved)
    assert ended.returncode != 0
    assert any(str(moved) in line for line in ended.stderr.splitlines()), ended.stderr
    assert not list((tmp_path / "dense").glob("iter_*"))
