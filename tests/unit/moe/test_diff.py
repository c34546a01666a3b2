"""`moe-ckpt diff`: silent for equal states, exact about where others differ."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from test_cli import run
from test_digest import BUCKET, WEIGHT, bucket
from verify_places import chained, facts, storage

from megatron.core.dist_checkpointing.moe.errors import UnreadableCheckpoint
from megatron.core.dist_checkpointing.moe.ports import Facts, Field, Json, Layout, SnapshotId
from megatron.core.dist_checkpointing.moe.storage.filesystem import FilesystemStore
from megatron.core.dist_checkpointing.moe.types import Part, expert
from moe_ckpt.checkpoints.comparison import Difference, differing_values, natural, structure
from moe_ckpt.checkpoints.places import locate
from moe_ckpt.checkpoints.values import LoadedValue
from moe_ckpt.dense.export import export_merged

if TYPE_CHECKING:
    from conftest import Content, Save

DTYPES = (torch.bool, torch.uint8, torch.int64, torch.float16, torch.bfloat16, torch.float64, torch.float8_e4m3fn)
DTYPES += (torch.complex64, torch.complex128)

pytestmark = pytest.mark.usefixtures("single_process_group")


def differences(first: Path, second: Path) -> list[Difference]:
    one, other = (locate(str(place)).state_view().values for place in (first, second))
    return [*structure(one, other), *differing_values(one, other, lambda nbytes: None)]


def of_tensors(first: torch.Tensor, second: torch.Tensor) -> list[Difference]:
    one, other = (
        LoadedValue("t", partial(tensor.reshape(-1).split, 700_001), tensor.dtype, tuple(tensor.shape))
        for tensor in (first, second)
    )
    return [*structure([one], [other]), *differing_values([one], [other], lambda nbytes: None)]


@pytest.fixture
def output(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    def call(*arguments: str | Path) -> tuple[int, str, str]:
        code = run(monkeypatch, "diff", *arguments)
        return code, *capsys.readouterr()

    return call


def test_equal_checkpoints_are_silent_whatever_their_files_look_like(
    output: Callable[..., tuple[int, str, str]], content: Content, save: Save, tmp_path: Path
) -> None:
    few = save(content, tmp_path / "few files", pieces=1, thread_count=1)
    content.common["args"].save = "/elsewhere"
    many = save(content, tmp_path / "many files", pieces=4, thread_count=3)
    assert output(few, many) == (0, "", "")
    assert json.loads(output(few, many, "--json")[1])["equal"] is True


def test_where_the_first_tensor_differs_is_told_and_by_how_much(
    output: Callable[..., tuple[int, str, str]], content: Content, save: Save, tmp_path: Path
) -> None:
    first = save(content, tmp_path / "first")
    for name in (WEIGHT, f"optimizer.state.exp_avg.{WEIGHT}"):
        content.tensors[name].zero_()[3, 4] = 7.5
    second = save(content, tmp_path / "second")
    code, out, err = output(first, second, "--json")
    (told,) = json.loads(out)["differing"]
    before = locate(str(first)).state_view()
    (value,) = (torch.cat(list(one.read())).reshape(one.shape) for one in before.values if one.name == WEIGHT)
    assert (code, err, told["entry"], told["what"], told["index"]) == (1, "", WEIGHT, "value", [0, 0])
    assert (told["first"], told["second"]) == (repr(value[0, 0].item()), "0.0")
    assert (told["differing"], told["elements"]) == (48, 48)
    assert told["largest_difference"] == float((value.double() - content.tensors[WEIGHT]).abs().max())
    assert len(json.loads(output(first, second, "--all", "--json")[1])["differing"]) == 2
    assert WEIGHT in output(first, second)[1]


def test_what_only_one_has_and_other_shapes_and_dtypes_are_told(content: Content, save: Save, tmp_path: Path) -> None:
    first = save(content, tmp_path / "first")
    bias = "decoder.layers.mlp.router.expert_bias"
    content.tensors["new"] = content.tensors.pop(bias)
    content.tensors[WEIGHT] = content.tensors[WEIGHT].float()
    content.tensors["decoder.layers.mlp.router.weight"] = torch.zeros(4, 7)
    content.common["iteration"] = 13
    content.objects["rng_state"][0]["torch_rng_state"][5] ^= 1
    found = {
        one.name: (one.what, one.first, one.second) for one in differences(first, save(content, tmp_path / "second"))
    }
    assert found[bias] == ("only in the first", "float32 [2, 4]", "")
    assert found["new"] == ("only in the second", "", "float32 [2, 4]")
    assert found[WEIGHT] == ("dtype", "bfloat16 [8, 6]", "float32 [8, 6]")
    assert found["decoder.layers.mlp.router.weight"] == ("shape", "float32 [4, 6]", "float32 [4, 7]")
    assert found["iteration"] == ("value", "12", "13")
    assert len(found) == 6


def test_alignment_padding_between_parameters_does_not_count(
    save: Save, new_content: type[Content], tmp_path: Path
) -> None:
    places = [
        save(new_content(common={"bucket": bucket(padding, parameter)}), tmp_path / f"{at}")
        for at, (padding, parameter) in enumerate(((0.0, 1.0), (float("nan"), 1.0), (0.0, 1.5)))
    ]
    assert not differences(places[0], places[1])
    (found,) = differences(places[0], places[2])
    assert (found.name, found.index, found.differing) == (f"{BUCKET}.param", (0,), 100)


def test_every_bit_of_a_number_counts() -> None:
    nan = torch.tensor([float("nan"), 1.0])
    assert not of_tensors(nan, nan.clone())
    (found,) = of_tensors(torch.tensor(0.0), torch.tensor(-0.0))
    assert (found.index, found.differing, found.elements, found.largest) == ((), 1, 1, 0.0)
    (found,) = of_tensors(nan, torch.tensor([2.0, 3.0]))
    assert found.largest is not None and found.largest != found.largest


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_tensors_of_every_dtype_are_compared(dtype: torch.dtype) -> None:
    first = torch.ones(3, 5).to(dtype)
    second = first.clone()
    assert not of_tensors(first, second)
    second[2, 1] = 0
    (found,) = of_tensors(first, second)
    assert (found.index, found.differing, found.largest) == ((2, 1), 1, 1.0)


@pytest.mark.parametrize("seed", range(20))
def test_the_first_the_number_and_the_size_of_differences_in_large_tensors_are_right(seed: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    first = torch.randn(3, 11, 50021, generator=draw)
    places = torch.randperm(first.numel(), generator=draw)[: 1 + seed * 7]
    second = first.clone()
    second.view(-1)[places] += 1 + torch.rand(len(places), generator=draw)
    (found,) = of_tensors(first, second)
    at = int(places.min())
    assert found.index == (at // (11 * 50021), at // 50021 % 11, at % 50021)
    assert found.differing == len(places)
    assert found.largest == float((first.double() - second.double()).abs().max())


def test_layer_2_comes_before_layer_10() -> None:
    assert sorted(["layers.10.w", "layers.2.w", "layers", "a1b"], key=natural) == [
        "a1b",
        "layers",
        "layers.2.w",
        "layers.10.w",
    ]


def test_a_chain_is_what_it_is_converted_to(tmp_path: Path) -> None:
    parts = chained(tmp_path / "saved", 5)
    converted = export_merged(parts, tmp_path / "converted")
    assert not differences(parts, converted)
    assert [one.name for one in differences(parts / "iter_0000012", converted) if "experts" in one.name] == [
        f"decoder.layers.{layer}.mlp.experts.experts.w" for layer in range(2)
    ]


def test_two_storages_are_compared_by_their_newest_states_whichever_job_made_them(tmp_path: Path) -> None:
    first = storage(tmp_path / "first", 5)
    second = shutil.copytree(first, tmp_path / "second")
    assert not differences(first, second)
    newest = sorted(path.name for path in second.iterdir())[-1]
    snapshot = SnapshotId.parse(newest)
    assert snapshot is not None
    store = FilesystemStore(second, snapshot.rank)
    with store.open(snapshot) as reader:
        manifest = reader.manifest
        bytes_by_key = {record.key: bytearray(reader.read(record.key)) for record in manifest.records}
    bytes_by_key["weight 0"][0] ^= 255
    store.free(snapshot)
    with store.reserve(snapshot, manifest.layout) as writer:
        for key, data in bytes_by_key.items():
            writer.put(key, data)
        writer.seal(manifest.facts)
    (found,) = differences(first, second)
    assert (found.name, found.index, found.differing) == (f"{newest}/weight 0", (0,), 1)
    (found,) = differences(first / newest, second / newest)
    assert found.name == "weight 0"


def pec(root: Path, old: bytes = b"old") -> Path:
    """A storage whose newest state needs experts of an older one."""
    groups = {"dense": expert(-1, 0), "expertsa": expert(0, 0), "expertsb": expert(0, 1)}
    store = FilesystemStore(root, 0)
    for iteration, kinds in ((1, ("dense", "expertsa", "expertsb")), (2, ("dense", "expertsa"))):
        for kind in kinds:
            own = groups[kind]
            scalars: dict[str, Json] = {
                "operators": [[own.layer, own.kind.value, own.expert, Part.MASTER_AND_MOMENTS.value]],
                "timeline": [["first", 0]],
                "window": [iteration, iteration],
                "made_by": "pec",
            }
            if kind == "dense":
                scalars["trainer"] = {"iteration": iteration}
            with store.reserve(SnapshotId(iteration, 0, kind), Layout.of([Field("weight", "uint8", (3,))])) as writer:
                writer.put("weight", old if (iteration, kind) == (1, "expertsb") else b"new")
                writer.seal(Facts("job", "plan", {"world_size": 1}, scalars))
    return root


def test_storages_that_differ_in_what_the_newest_state_takes_from_an_older_one_are_not_equal(tmp_path: Path) -> None:
    first, second = pec(tmp_path / "first"), pec(tmp_path / "second", b"odd")
    assert not differences(first, first)
    (found,) = differences(first, second)
    assert found.name == "iter_0000001-rank_00000-expertsb/weight"


def test_a_state_without_the_older_snapshots_that_it_needs_is_none(tmp_path: Path) -> None:
    root = pec(tmp_path / "storage")
    shutil.rmtree(root / "iter_0000001-rank_00000-dense")
    shutil.rmtree(root / "iter_0000002-rank_00000-dense")
    with pytest.raises(UnreadableCheckpoint, match="no state that can be restored"):
        locate(str(root)).state_view()


def test_what_a_snapshot_says_of_its_job_does_not_count_and_the_state_of_the_trainer_does(tmp_path: Path) -> None:
    layout = Layout.of([Field("weight", "float32", (4,)), Field("empty", "float32", (0,))])
    for name, attempt, lr in (("a", "first", 0.1), ("b", "second", 0.1), ("c", "first", 0.2)):
        store = FilesystemStore(tmp_path / name, 0)
        said = facts(1, timeline=((attempt, 0),))
        trainer = {"param_groups": [{"lr": lr}], "command": {"flags": ["--save", name], "folder": name}}
        said = type(said)(f"job {name}", said.plan_digest, {"world_size": 1}, {**said.scalars, "trainer": trainer})
        with store.reserve(SnapshotId(1, 0), layout) as writer:
            writer.put("weight", bytes(16))
            writer.put("empty", b"")
            writer.seal(said)
    assert not differences(tmp_path / "a", tmp_path / "b")
    (found,) = differences(tmp_path / "a", tmp_path / "c")
    assert found.name.endswith("trainer.param_groups.0.lr")
    assert (found.first, found.second) == ("0.1", "0.2")


def test_what_cannot_be_compared_is_one_line(
    output: Callable[..., tuple[int, str, str]], content: Content, save: Save, tmp_path: Path
) -> None:
    dense, snapshots = save(content, tmp_path / "dense"), storage(tmp_path / "storage", 3)
    for arguments, code, said in (
        ((dense, snapshots), 2, "convert these first"),
        ((dense, tmp_path / "nowhere"), 2, "does not exist"),
        ((dense, tmp_path), 1, "nothing in a format that moe-ckpt supports"),
    ):
        ended, out, err = output(*arguments)
        assert (ended, out) == (code, "")
        (line,) = err.splitlines()
        assert said in line
    newest = sorted(snapshots.iterdir())[-1] / "segment.bin"
    draw = random.Random(1)
    newest.write_bytes(draw.randbytes(newest.stat().st_size))
    ended, out, err = output(snapshots, snapshots)
    assert (ended, out) == (1, "")
    assert "does not match its checksum" in err
