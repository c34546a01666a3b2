"""`moe-ckpt` on what jobs in few bits stored: payloads and scales are read, compared and converted as they are."""

from __future__ import annotations

import io
import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path

import pytest
from attempts import Cluster
from effort import cases
from low_precision_rows import model
from runs import Layout, flags
from sparse_runs import LENGTH
from world import World, node_memory

from moe_ckpt.commands.main import main

STOPPED_AT, WINDOW = 10, 3
LAYOUT = Layout(pp=1, ep=2, ranks=2)
STATE = {
    "row 1": "compute:float16 master:float16 exp_avg:float16 exp_avg_sq:float16",
    "row 2": "compute:uint8 master:float32 exp_avg:float32 exp_avg_sq:float32",
    "row 3": "compute:uint8 master:float16 exp_avg:float32 exp_avg_sq:float32",
    "row 4": "compute:uint8 master:float16 exp_avg:uint8 exp_avg_sq:float16",
    "row 5": "compute:uint8 master:uint8 exp_avg:uint8 exp_avg_sq:float16",
}
"""What the weights of an expert have in storage; of whatever is scaled a scale in fp32 besides."""


@dataclass(frozen=True)
class Source:
    """A job that persisted sparse windows, saved a dense checkpoint after each iteration, and ended early."""

    row: str
    storage: Path
    saved: Path

    @property
    def last(self) -> int:
        """The last iteration of the newest window in storage."""
        return max(int(path.name[5:12]) for path in self.storage.glob("iter_*"))

    def save(self, iteration: int) -> Path:
        return self.saved / f"iter_{iteration:07d}"

    @property
    def expected(self) -> set[tuple[str, str]]:
        """Fields of an expert with their dtypes."""
        fields = {(field, dtype) for field, _, dtype in (one.partition(":") for one in STATE[self.row].split())}
        scaled = {field for field, dtype in fields if dtype == "uint8" or (dtype == "float16" and field != "compute")}
        return fields | {(f"{field}_scale", "float32") for field in scaled}


@pytest.fixture(
    scope="module",
    params=cases(STATE, fast=(), full=STATE.keys() - {"row 5"}),
)
def source(
    request: pytest.FixtureRequest, engine_world: World, corpus: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Source]:
    folder = tmp_path_factory.mktemp("source")
    with node_memory() as memory:
        made = Source(request.param, folder / "storage", folder / "saved")
        Cluster(engine_world, corpus, memory).run(
            LAYOUT, *LENGTH, *model(made.row), "--moe-ckpt-strategy", "sparse", "--moe-ckpt-window", WINDOW,
            "--moe-ckpt-persist-dir", made.storage, "--moe-ckpt-persist-interval", WINDOW,
            "--save", made.saved, "--save-interval", "1", "--exit-interval", STOPPED_AT,
        )  # fmt: skip
        yield made


def moe_ckpt(*arguments: object) -> subprocess.CompletedProcess[str]:
    """Run in this process: a start of Python with torch takes longer than what it is asked for."""
    out, err = io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(err):
        patch.setattr(sys, "argv", ["moe-ckpt", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            main()
    return subprocess.CompletedProcess(arguments, int(ended.value.code or 0), out.getvalue(), err.getvalue())


def test_optimizer_state_of_few_bits_is_refused_by_name_under_another_data_parallel_size(
    source: Source, engine_world: World, corpus: str
) -> None:
    alone = Layout(pp=1, ep=1, ranks=1)
    outcome = engine_world.run(flags(corpus, alone, *model(source.row), "--load", str(source.saved)), alone.ranks)
    assert set(outcome.codes) == {2}, outcome.said
    assert "as it was on each rank, but expert_model_parallel_size was 2 and is 1" in outcome.said


def test_payloads_and_scales_are_compared_each_by_its_name(source: Source) -> None:
    ended = moe_ckpt("diff", "--all", "--json", source.save(STOPPED_AT - 3), source.save(STOPPED_AT))
    assert ended.returncode == 1, ended.stderr
    differing = [row["entry"] for row in json.loads(ended.stdout)["differing"]]
    for field, _ in source.expected - {("compute", "float16")}:
        of_field = [name for name in differing if f".state.{field}.decoder" in name or f"{field}.decoder" in name]
        assert of_field, (field, differing)


@pytest.mark.full
def test_snapshots_are_compared_with_dense_checkpoints_by_converting_them_only(source: Source) -> None:
    ended = moe_ckpt("diff", source.storage, source.save(source.last))
    assert ended.returncode == 2
    assert "convert these first" in ended.stderr


def test_stored_payloads_are_shown_in_the_dtype_they_are_kept_in(source: Source) -> None:
    ended = moe_ckpt("inspect", source.storage, "--tensors", "*experts*", "--json")
    assert ended.returncode == 0, ended.stderr
    statistics = json.loads(ended.stdout)["statistics"]
    shown = {(row["tensor"].rpartition("/")[2], row["dtype"]) for row in statistics}
    # The last snapshot of a window has full states alone, and those of row 2 have no weights.
    of_weights = {("compute", "uint8"), ("compute_scale", "float32")}
    assert shown == source.expected - (of_weights if source.row == "row 2" else set()), statistics


@pytest.mark.parametrize("place", ["storage", pytest.param("dense", marks=pytest.mark.full)])
def test_a_changed_byte_is_found(place: str, source: Source, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(source.storage if place == "storage" else source.saved, copy)
    intact = moe_ckpt("verify", copy)
    assert intact.returncode == 0, intact.stdout
    last = source.last if place == "storage" else STOPPED_AT
    changed = max(copy.glob(f"iter_{last:07d}*/*"), key=lambda path: path.stat().st_size)
    data = bytearray(changed.read_bytes())
    data[len(data) // 2] ^= 1
    changed.write_bytes(data)
    damaged = moe_ckpt("verify", copy)
    assert damaged.returncode in (1, 3)  # 3 where an older state is intact
    assert changed.parent.name in damaged.stdout
