"""`moe-ckpt inspect` and `moe-ckpt completion` as a person meets them."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from megatron.core.dist_checkpointing.moe.extensions.lossy.ledger import TokenLedger
from megatron.core.dist_checkpointing.moe.ports import Facts, Field, Layout, Manifest, SnapshotId
from megatron.core.dist_checkpointing.moe.storage.filesystem import FilesystemStore
from megatron.core.dist_checkpointing.moe.storage.manifest import checksum
from megatron.core.dist_checkpointing.moe.storage.manifest import encode as encode_manifest
from megatron.core.dist_checkpointing.moe.storage.memory import MemoryStore
from megatron.core.dist_checkpointing.moe.storage.objects import ObjectStore
from megatron.core.dist_checkpointing.moe.types import Level, OperatorId, OperatorKind, Part, expert
from moe_ckpt.commands.main import main
from moe_ckpt.dense.chain import Chain, encode
from moe_ckpt.dense.went_back import RECORD, gone_back

if TYPE_CHECKING:
    from conftest import Content, Save

ROUTER = OperatorId(0, OperatorKind.ROUTER)
ATTEMPTS = [["0001-a", 0], ["0002-b", 3]]
VALUES = np.array([1.0, -2.0, 4.0, np.inf], np.float32)
LAYOUT = Layout.of(
    [
        Field("layer0.expert0/master", "float32", (4,), Part.MASTER, expert(0, 0)),
        Field("layer0.expert0/exp_avg", "float32", (4,), Part.MOMENTS, expert(0, 0)),
        Field("layer0.router/master", "float32", (2, 2), Part.MASTER, ROUTER),
        Field("random/torch", "uint8", (16,)),
    ]
)
Call = Callable[..., tuple[int, str, str]]


@pytest.fixture
def output(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Call:
    def call(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["moe-ckpt", *map(str, arguments)])
        with pytest.raises(SystemExit) as exit_info:
            main()
        return exit_info.value.code, *capsys.readouterr()  # type: ignore[return-value]

    return call


@pytest.fixture
def data(output: Call) -> Callable[..., dict[str, Any]]:
    """What `inspect --json` says of a place that it can read."""

    def call(*arguments: object) -> dict[str, Any]:
        code, out, err = output("inspect", *arguments, "--json")
        assert (code, err) == (0, "")
        found: dict[str, Any] = json.loads(out, parse_constant=pytest.fail)
        return found

    return call


def said(iteration: int, window: tuple[int, int], timeline: list[list[Any]] = ATTEMPTS, ranks: int = 2) -> Facts:
    parts = {expert(0, 0): Part.MASTER_AND_MOMENTS, ROUTER: Part.COMPUTE}
    held = [[one.layer, one.kind.value, one.expert, part.value] for one, part in parts.items()]
    scalars = {
        "trainer": {"iteration": iteration, "command": {"flags": ["--num-experts", "8", "--bf16"], "folder": "/x"}},
        "operators": held,
        "timeline": timeline,
        "window": list(window),
        "made_by": "sparse",
    }
    return Facts("job-7", "", {"world_size": ranks, "tp": 1, "pp": ranks}, scalars)  # type: ignore[arg-type]


def put(store: Any, snapshot: SnapshotId, facts: Facts) -> None:
    with store.reserve(snapshot, LAYOUT) as writer:
        for field in LAYOUT.fields:
            if field.dtype == "float32":
                writer.put(field.key, VALUES + snapshot.iteration)
            else:
                writer.put(field.key, bytes(field.nbytes))
        writer.seal(facts)


def window(store: Any, first: int, last: int, timeline: list[list[Any]] = ATTEMPTS) -> None:
    for iteration in range(first, last + 1):
        for rank in range(2):
            put(store, SnapshotId(iteration, rank, "window"), said(iteration, (first, last), timeline))


# Dense checkpoints


@pytest.fixture
def saves(content: Content, save: Save, tmp_path: Path) -> Path:
    """A --save folder in a path with a space, with iterations 6 and 12, of which the tracker names the newer."""
    vars(content.common["args"]).update(world_size=4, pipeline_model_parallel_size=2, num_experts=8)
    root = tmp_path / "my run"
    for iteration in (6, 12):
        content.common["iteration"] = iteration
        save(content, root / f"iter_{iteration:07d}")
    (root / "latest_checkpointed_iteration.txt").write_text("12")
    return root


def test_a_save_folder_shows_its_newest_iteration_and_all_others(data, saves: Path) -> None:
    found = data(saves)
    assert (found["newest_iteration"], found["tracker_names"], found["whole_iterations"]) == (12, "iter_0000012", 2)
    assert (found["iteration"], found["world_size"], found["layout"]) == (12, 4, "PP 2")
    assert [(row["iteration"], row["state"], row["tracked"]) for row in found["iterations"]] == [
        ("iter_0000012", "complete", "yes"),
        ("iter_0000006", "complete", ""),
    ]
    assert {"argument": "num_experts", "value": "8"} in found["arguments"]


def test_the_components_of_a_checkpoint_have_their_bytes(data, content: Content, saves: Path) -> None:
    sizes = {row["component"]: row["size_bytes"] for row in data(saves / "iter_0000006")["components"]}
    masters = [name for name in content.tensors if ".fp32_param." in name]
    assert sizes["master weights"] == sum(content.tensors[name].nbytes for name in masters)
    assert sizes["router buffers"] == content.tensors["decoder.layers.mlp.router.expert_bias"].nbytes


def test_a_stock_checkpoint_without_common_pt_is_understood(data, content: Content, save: Save, tmp_path: Path) -> None:
    folder = save(content, tmp_path / "iter_0000012")
    if (folder / "common.pt").exists():  # Megatron-Core before 0.17
        content.objects["common_state"] = content.common
        folder = save(content, tmp_path / "without" / "iter_0000012")
        (folder / "common.pt").unlink()
    found = data(folder)
    assert (found["iteration"], found["format"]) == (12, "torch_dist 1, common part among the shards")
    assert found["integrity_file"] == "no: bytes cannot be checked"


def test_what_the_tracker_names_is_passed_over_when_it_is_torn(data, saves: Path) -> None:
    (saves / "iter_0000012" / "metadata.json").unlink()
    (saves / ".iter_0000018.saving").mkdir()
    found = data(saves)
    assert (found["newest_iteration"], found["whole_iterations"]) == (6, 1)
    states = {row["iteration"]: row["state"] for row in found["iterations"]}
    assert states["iter_0000012"] == "not whole: no metadata.json"
    assert states[".iter_0000018.saving"] == "half-written"


def test_an_iteration_is_called_half_removed_only_where_the_save_that_replaces_it_is_there(data, saves: Path) -> None:
    (saves / ".iter_0000012.replaced").mkdir()
    (saves / "iter_0000006").rename(saves / ".iter_0000006.replaced")
    states = {row["iteration"]: row["state"] for row in data(saves)["iterations"]}
    assert states[".iter_0000012.replaced"] == "half-removed"
    assert states[".iter_0000006.replaced"] == "moved aside by a save that did not finish: the next start publishes it"


def test_an_iteration_with_fewer_digits_than_the_one_that_the_tracker_names_is_older(data, saves: Path) -> None:
    (saves / "iter_0000006").rename(saves / "iter_9999999")
    (saves / "iter_0000012").rename(saves / "iter_10000000")
    (saves / "iter_10000000" / "metadata.json").unlink()
    (saves / "latest_checkpointed_iteration.txt").write_text("10000000")
    assert data(saves)["newest_iteration"] == 9999999


def test_without_a_tracker_a_line_says_that_a_job_loads_nothing_and_what_to_do(output: Call, saves: Path) -> None:
    tracker = saves / "latest_checkpointed_iteration.txt"
    tracker.unlink()
    code, out, err = output("inspect", saves)
    assert (code, "iter_0000012" in out) == (1, True)
    why = "is missing, so a job finds nothing to load; write 12 into latest_checkpointed_iteration.txt"
    assert err == f"moe-ckpt: {tracker} {why}\n"


def test_an_iteration_that_training_left_is_not_the_newest(data, saves: Path) -> None:
    (saves / RECORD).write_bytes(gone_back(saves, 6, "job", [6, 12]).encoded())
    (saves / "iter_0000018").mkdir()
    (saves / "latest_checkpointed_iteration.txt").write_text("18")
    assert data(saves)["newest_iteration"] == 6


def test_a_damaged_newest_iteration_is_shown_and_named_with_exit_code_1(output: Call, saves: Path) -> None:
    (saves / "iter_0000012" / ".metadata").write_bytes(b"nothing")
    code, out, err = output("inspect", saves)
    assert code == 1
    assert "iter_0000006" in out
    assert err.startswith("moe-ckpt: the index (.metadata) is damaged")
    assert err.count("\n") == 1


def test_a_save_folder_without_a_whole_iteration_has_nothing_to_restore_from(output: Call, tmp_path: Path) -> None:
    (tmp_path / "iter_0000006").mkdir()
    code, _, err = output("inspect", tmp_path)
    assert (code, err.count("\n")) == (1, 1)
    assert "none of its 1 iterations is whole: there is nothing to restore from" in err


def test_a_tracker_alone_is_nothing_to_restore_from(output: Call, tmp_path: Path) -> None:
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("6")
    code, out, err = output("inspect", tmp_path)
    assert (code, out) == (1, "")
    assert "no iteration: there is nothing to restore from" in err


def test_a_chain_says_which_iteration_has_which_expert(data, saves: Path) -> None:
    marks = {iteration: f"{iteration:016x}" for iteration in (6, 12)}
    older = Chain(6, {1: (6, 6, 6)}, {6: marks[6]}, 0, None, "")
    for chain in (older, Chain(12, {1: (12, 6, 12)}, marks, 0, None, "")):
        (saves / f"iter_{chain.iteration:07d}" / "moe_ckpt_chain.json").write_bytes(encode(chain))
    found = data(saves)
    assert found["iterations"][0]["needs"] == [6]
    assert [(row["operator"], row["iteration"], row["behind"]) for row in found["operators"]] == [
        ("layer1.expert1", 6, 6),
        ("layer1.expert0", 12, 0),
        ("layer1.expert2", 12, 0),
    ]


def test_a_missing_folder_of_a_chain_is_named(output: Call, saves: Path) -> None:
    chain = Chain(12, {1: (12, 3)}, {3: "0" * 16, 12: "1" * 16}, 0, None, "")
    (saves / "iter_0000012" / "moe_ckpt_chain.json").write_bytes(encode(chain))
    code, _, err = output("inspect", saves / "iter_0000012")
    why = "is not whole: needs iteration 3, which is missing; take another iteration"
    assert (code, err) == (1, f"moe-ckpt: {saves / 'iter_0000012'} {why}\n")


def test_statistics_of_dense_tensors_are_those_of_torch(data, content: Content, saves: Path) -> None:
    found = data(saves, "--tensors")
    rows = {row["tensor"]: row for row in found["statistics"]}
    assert set(rows) == set(content.tensors)
    for name, tensor in content.tensors.items():
        row, exact = rows[name], tensor.double()
        assert (row["dtype"], row["shape"]) == (str(tensor.dtype)[6:], "x".join(map(str, tensor.shape)))
        assert (row["min"], row["max"], row["non_finite"]) == (exact.min().item(), exact.max().item(), 0)
        assert row["mean"] == pytest.approx(exact.mean().item(), abs=1e-12)
        assert row["std"] == pytest.approx(exact.std(correction=0).item(), rel=1e-12)


@pytest.mark.parametrize(
    "strange",
    [
        {"args": {"world_size": 4, "mask": torch.ones(2)}}, {"args": 5}, {"content_metadata": "x"},
        {"content_metadata": {"distrib_optim_sharding_type": torch.ones(2)}}, {"iteration": "x"},
        {"iteration": torch.ones(2)}, {"iteration": math.nan}, {"args": Namespace(world_size=torch.ones(2))},
        {"args": Namespace(name="\x1b]0;owned\x07\ud800")},
    ],
)  # fmt: skip
def test_whatever_the_common_part_says_is_shown_or_left_out(
    strange: dict[str, Any], data, output: Call, content: Content, saves: Path
) -> None:
    folder = saves / "iter_0000012"
    torch.save(content.common | strange, folder / "common.pt")
    found = data(folder)
    assert found["iteration"] in (12, None) and found["world_size"] in (4, None)
    code, out, _ = output("inspect", folder, "--rows", 0)
    assert code == 0 and not {"\x1b", "\x07", "\ud800"} & set(out)


def test_statistics_that_are_too_large_are_none_in_json(
    data, save: Save, new_content: type[Content], tmp_path: Path
) -> None:
    weights = torch.tensor([1e308, 1e308, -1e308, 1.0], dtype=torch.float64)
    (row,) = data(save(new_content({"w": weights}), tmp_path / "iter_0000012"), "--tensors")["statistics"]
    assert (row["max"], row["std"]) == (1e308, None)


def test_a_pattern_chooses_tensors_and_one_that_fits_none_is_wrong_usage(data, output: Call, saves: Path) -> None:
    rows = data(saves, "--tensors", "*exp_avg_sq*")["statistics"]
    assert len(rows) == 2
    assert all("exp_avg_sq" in row["tensor"] for row in rows)
    code, out, err = output("inspect", saves, "--tensors", "*nothing*")
    assert (code, out) == (2, "")
    assert "no tensor that matches '*nothing*'" in err


# Snapshots in storage


def test_a_whole_window_is_shown_with_its_operators_and_flags(data, tmp_path: Path) -> None:
    window(FilesystemStore(tmp_path / "win dows", 0), 4, 6)
    found = data(tmp_path / "win dows")
    assert (found["newest_iteration"], found["newest_whole_state"], found["whole_windows"]) == (6, 6, "1 of 1")
    assert (found["world_size"], found["layout"], found["strategy"]) == (2, "TP 1, PP 2", "sparse")
    assert found["timeline"] == "attempt 2, 0002-b, which continued after iteration 3"
    assert [(row["iterations"], row["snapshots"], row["of"], row["state"]) for row in found["windows"]] == [
        ("4-6", 6, 6, "whole")
    ]
    assert [
        (row["operator"], row["part"], row["iteration"], row["ranks"], row["size_bytes"]) for row in found["operators"]
    ] == [
        ("layer0.router", "WEIGHTS", 6, "0-1", 32),
        ("layer0.expert0", "FULL", 6, "0-1", 64),
    ]
    assert found["flags"] == [{"flag": "--num-experts", "value": "8"}, {"flag": "--bf16", "value": ""}]
    assert 0 <= found["age_s"] < 3600


def test_a_half_written_window_says_which_snapshot_it_lacks(data, tmp_path: Path) -> None:
    store = FilesystemStore(tmp_path, 0)
    window(store, 4, 6)
    store.free(SnapshotId(5, 1, "window"))
    found = data(tmp_path)
    assert (found["newest_whole_state"], found["protection"]) == (None, "none: no state is whole here")
    assert found["windows"][0]["state"] == "lacks rank 1 after iteration 5"
    assert "No state is whole here" in found["notes"][0]


STRANGE: tuple[dict[str, Any], ...] = (
    {"timeline": 5}, {"timeline": [[1, 2, 3]]}, {"timeline": [[5, "x"]]}, {"timeline": [["a", 0]] * 4097},
    {"window": "ab"}, {"window": [0, 10**12]}, {"window": [3, 2]}, {"operators": [[0, 9, 0, 6]]},
    {"operators": [[0, 3, 0, 99]]}, {"made_by": 5}, {"trainer": "x"}, {"trainer": {"command": 5}},
    {"trainer": {"command": {"flags": 5}}}, {"strategy": "x"}, {"strategy": {"ledger": 5}},
    {"strategy": {"ledger": {"losses": [[2, 1, [5]], [3, 1, []]]}}}, {"strategy": {"ledger": {}, "planned": 5}},
    {"world_size": "8"}, {"world_size": 10**12}, {"world_size": -1},
)  # fmt: skip


@pytest.mark.parametrize("strange", STRANGE)
def test_what_no_job_writes_into_a_manifest_costs_that_snapshot_and_not_the_command(
    strange: dict[str, Any], output: Call, tmp_path: Path
) -> None:
    store, facts = FilesystemStore(tmp_path, 0), said(5, (5, 5))
    window(store, 4, 4)
    of_topology = {name: value for name, value in strange.items() if name == "world_size"}
    said_beside = {**facts.scalars, **strange} if not of_topology else facts.scalars
    put(store, SnapshotId(5, 0, "window"), Facts("job-7", "", {**facts.topology, **of_topology}, said_beside))
    code, out, err = output("inspect", tmp_path)
    assert (code, err) == (0, "") and "no job writes such a manifest" in out
    code, out, err = output("verify", tmp_path)
    assert code == 3 and "no job writes such a manifest" in out
    assert output("gc", tmp_path)[0] == 0
    assert output("diff", tmp_path, tmp_path)[0] == 0


def test_a_segment_that_is_longer_than_memory_is_a_finding(output: Call, tmp_path: Path) -> None:
    terabytes, snapshot = 4 << 40, SnapshotId(4, 0)
    for name, fields, align in (
        ("record", [Field("w", "uint8", (terabytes,))], 64),
        ("padding", [Field("v", "uint8", (4,)), Field("w", "uint8", (4,))], terabytes),
    ):
        layout, folder = Layout.of(fields, align), tmp_path / name / snapshot.name
        folder.mkdir(parents=True)
        checksums = tuple(checksum(bytes(4)) for _ in fields)
        made = Manifest(snapshot, said(4, (4, 4), ranks=1), "segment.bin", layout, checksums)
        (folder / "manifest.json").write_bytes(encode_manifest(made))
        (folder / "segment.bin").touch()
        os.truncate(folder / "segment.bin", layout.nbytes)
    assert output("verify", tmp_path / "padding")[0] == 0
    code, out, _ = output("verify", tmp_path / "record")
    assert code == 1 and "more than there is memory for" in out
    code, _, err = output("inspect", tmp_path / "record", "--tensors", "*")
    assert code == 1 and "more than there is memory for" in err
    with (tmp_path / "padding" / snapshot.name / "segment.bin").open("r+b") as file:
        file.seek(terabytes // 2)
        file.write(b"x")
    code, out, _ = output("verify", tmp_path / "padding")
    assert code == 1 and "between records have changed" in out


def test_a_window_that_the_job_went_back_behind_is_left(data, tmp_path: Path) -> None:
    store = FilesystemStore(tmp_path, 0)
    window(store, 4, 5, [["0001-a", 0]])
    window(store, 1, 2, [["0001-a", 0]])
    window(store, 6, 7, [["0001-a", 0], ["0002-b", 3]])
    states = {row["iterations"]: row["state"] for row in data(tmp_path)["windows"]}
    assert states == {"6-7": "whole", "1-2": "whole", "4-5": "whole, left behind"}


def test_torn_snapshots_are_listed_with_the_reason(data, tmp_path: Path) -> None:
    store = FilesystemStore(tmp_path, 0)
    window(store, 4, 4)
    window(store, 5, 5)
    with (tmp_path / SnapshotId(5, 0, "window").name / "segment.bin").open("ab") as file:
        file.write(b"more")
    found = data(tmp_path)
    assert (found["torn"], found["newest_whole_state"]) == (1, 4)
    assert "truncated or extended" in found["torn_snapshots"][0]["why"]


def test_storage_in_which_all_is_torn_has_nothing_to_restore_from(output: Call, tmp_path: Path) -> None:
    window(FilesystemStore(tmp_path, 0), 4, 4)
    for path in tmp_path.glob("*/manifest.json"):
        path.write_bytes(path.read_bytes().replace(b'"iteration":4', b'"iteration":5'))
    code, out, err = output("inspect", tmp_path)
    assert (code, out, err.count("\n")) == (1, "", 1)
    assert "does not match its own checksum" in err


def test_storage_behind_a_url_is_looked_at_like_a_folder(data) -> None:
    window(ObjectStore("memory://inspect/windows", 0), 4, 5)
    found = data("memory://inspect/windows")
    assert (found["newest_whole_state"], found["snapshots"]) == (5, 4)
    assert 0 <= found["age_s"] < 3600


@pytest.mark.parametrize("tail", ["", "/"])
def test_one_snapshot_is_looked_at_alone(tail: str, data, tmp_path: Path) -> None:
    window(FilesystemStore(tmp_path, 0), 4, 5)
    found = data(f"{tmp_path / SnapshotId(4, 1, 'window').name}{tail}")
    assert (found["newest_iteration"], found["snapshots"]) == (4, 1)
    assert "newest_whole_state" not in found


def test_statistics_of_snapshots_are_of_the_newest_iteration_and_count_what_is_no_number(data, tmp_path: Path) -> None:
    window(FilesystemStore(tmp_path, 0), 4, 5)
    found = data(tmp_path, "--tensors", "*/master")
    assert [row["tensor"] for row in found["statistics"]] == [
        f"rank {rank}: {key}" for rank in (0, 1) for key in ("layer0.expert0/master", "layer0.router/master")
    ]
    router = found["statistics"][1]
    assert (router["shape"], router["min"], router["max"], router["mean"]) == ("2x2", 3.0, 9.0, 6.0)
    assert (router["non_finite"], found["tensors_with_non_finite_numbers"]) == (1, 4)


def test_statistics_refuse_bytes_that_are_not_as_sealed(output: Call, tmp_path: Path) -> None:
    window(FilesystemStore(tmp_path, 0), 4, 4)
    path = tmp_path / SnapshotId(4, 1, "window").name / "segment.bin"
    path.write_bytes(b"\1" + path.read_bytes()[1:])
    code, _, err = output("inspect", tmp_path, "--tensors")
    assert (code, err.count("\n")) == (1, 1)
    assert "layer0.expert0/master at offset 0 does not match its checksum" in err


# The memory tier


@pytest.fixture
def nodes(tmp_path: Path) -> tuple[Path, list[MemoryStore]]:
    """Two nodes with one process each, which holds its own snapshots and the other's."""
    base = tmp_path / "memory"
    stores = []
    for node in range(2):
        (base / f"node-{node}").mkdir(parents=True)
        stores.append(MemoryStore(base / f"node-{node}", "job-7", 0, [LAYOUT.nbytes] * 6))
    return base, stores


def test_memory_shows_slots_copies_and_who_holds_what(data, nodes: tuple[Path, list[MemoryStore]]) -> None:
    base, stores = nodes
    for store in stores:
        window(store, 4, 5)
    stores[1].close()
    found = data(base)
    assert [(row["node"], row["local_rank"], row["area"], row["sealed"]) for row in found["slots"]] == [
        ("node-0", 0, "slot", 4),
        ("node-1", 0, "slot", 4),
    ]
    assert [row["owner"].rpartition(", ")[2] for row in found["slots"]] == ["alive", "gone"]
    assert (found["protection"], found["living_owners"]) == ("iteration 5, 2 copies of each snapshot", 1)
    assert found["operators"][0]["held_by"] == ["node-0/0", "node-1/0"]
    assert found["operators"][0]["copies"] == 2


def test_memory_shows_what_is_being_written_and_what_is_torn(data, nodes: tuple[Path, list[MemoryStore]]) -> None:
    base, stores = nodes
    put(stores[0], SnapshotId(4, 0), said(4, (4, 4), ranks=1))
    (stores[1].directory / f"segment-000.{SnapshotId(4, 1).name}.writing").touch()
    with stores[0].reserve(SnapshotId(5, 0), LAYOUT):
        found = data(base)
    assert [(row["sealed"], row["torn"], row["being_written"]) for row in found["slots"]] == [(1, 0, 1), (0, 1, 0)]
    assert "it was never sealed" in found["torn_snapshots"][0]["why"]


def test_logs_and_parked_states_are_no_windows(data, tmp_path: Path) -> None:
    store = MemoryStore(tmp_path, "job-7", 0, [LAYOUT.nbytes] * 4, area="standby")
    put(store, SnapshotId(6, 0, "parked"), said(6, (6, 6)))
    for iteration in (6, 7):
        put(store, SnapshotId(iteration, 0, "log"), said(iteration, (iteration, iteration)))
    found = data(tmp_path)
    assert found["windows"] == []
    assert [(row["kind"], row["iterations"], row["rank"]) for row in found["logs_and_parked_states"]] == [
        ("log", "6-7", 0),
        ("parked", "6", 0),
    ]


def test_a_slot_without_snapshots_is_shown(data, nodes: tuple[Path, list[MemoryStore]]) -> None:
    found = data(nodes[0] / "node-0")
    assert (found["number_of_slots"], found["slots"][0]["sealed"]) == (1, 0)
    assert found["memory_taken_bytes"] >= 6 * LAYOUT.nbytes


def test_a_running_job_finds_all_of_its_segments_free_after_a_look(data, nodes: tuple[Path, list[MemoryStore]]) -> None:
    base, stores = nodes
    put(stores[0], SnapshotId(4, 0), said(4, (4, 4)))
    data(base)
    data(base, "--tensors")
    stores[0].free(SnapshotId(4, 0))
    writers = [stores[0].reserve(SnapshotId(iteration, 0), LAYOUT) for iteration in range(5, 11)]
    assert len(writers) == 6


def test_statistics_of_memory_take_one_copy_of_each_snapshot(data, nodes: tuple[Path, list[MemoryStore]]) -> None:
    base, stores = nodes
    for store in stores:
        window(store, 4, 5)
    rows = data(base, "--tensors", "layer0.router*")["statistics"]
    assert [row["tensor"] for row in rows] == ["rank 0: layer0.router/master", "rank 1: layer0.router/master"]
    assert {row["max"] for row in rows} == {9.0}


# The command


def test_tables_are_cut_for_a_person_and_whole_on_demand(output: Call, saves: Path) -> None:
    few, all_ = (output("inspect", saves, "--rows", rows)[1] for rows in (1, 0))
    assert "more rows; --rows 0 or --json shows all" in few
    assert "more rows" not in all_
    assert "router buffers" in all_
    assert "router buffers" not in few


def test_neither_torch_nor_megatron_core_is_needed_to_look_at_snapshots(tmp_path: Path) -> None:
    window(FilesystemStore(tmp_path, 0), 4, 5)
    said = "print({'torch', 'megatron.core.utils'} & set(sys.modules))"
    code = f"import sys, moe_ckpt\ntry: moe_ckpt.main()\nfinally: {said}"
    result = subprocess.run(
        [sys.executable, "-c", code, "inspect", str(tmp_path)], capture_output=True, text=True, check=False, timeout=120
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.endswith("set()\n")


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_completion_script_asks_the_command(shell: str, output: Call) -> None:
    code, out, err = output("completion", shell)
    assert (code, err) == (0, "")
    assert f"_MOE_CKPT_COMPLETE={shell}_complete" in out


@pytest.mark.parametrize(
    ("words", "offered"), [("moe-ckpt ins", "plain,inspect"), ("moe-ckpt inspect --ten", "plain,--tensors")]
)
def test_the_shell_is_offered_commands_and_options(
    words: str, offered: str, output: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("_MOE_CKPT_COMPLETE", "bash_complete")
    monkeypatch.setenv("COMP_WORDS", words)
    monkeypatch.setenv("COMP_CWORD", str(words.count(" ")))
    assert output()[:2] == (0, f"{offered}\n")


def test_another_shell_is_wrong_usage(output: Call) -> None:
    assert output("completion", "csh")[0] == 2


# Lost tokens


def test_what_faults_have_cost_is_told_by_all_three_definitions(data, tmp_path: Path) -> None:
    ledger = TokenLedger.started((1, 3), 2, 0).advance(1, [[30, 10], [20, 20]])
    ledger = ledger.saved(1, [expert(1, 0), expert(3, 0), expert(3, 1)], Level.SNAPSHOT)
    ledger = ledger.recovered(2, 1, {expert(1, 1): 0})
    facts = said(1, (1, 1))
    facts.scalars["strategy"] = {"ledger": ledger.to_data(), "planned": [100, 2]}  # type: ignore[index]
    put(FilesystemStore(tmp_path / "storage", 0), SnapshotId(1, 0), facts)
    found = data(tmp_path / "storage")
    assert found["lost_tokens_of_all_faults"] == 10
    shares = {"plt_moc": 10 / 200 / 2, "plt_pec": 10 / 400, "mlt": 10 / 200}
    assert {name: found[name] for name in shares} == pytest.approx(shares)
    assert found["lost_tokens"] == [{"fault_after": 2, "continued_from": 1, "lost_tokens": 10, **shares}]


def test_a_job_that_counts_no_tokens_has_no_line_about_lost_ones(data, tmp_path: Path) -> None:
    put(FilesystemStore(tmp_path / "storage", 0), SnapshotId(1, 0), said(1, (1, 1)))
    assert not {"mlt", "lost_tokens"} & data(tmp_path / "storage").keys()
