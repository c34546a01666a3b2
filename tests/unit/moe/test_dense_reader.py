"""The safe reader of dense checkpoints: what it reads, and what it refuses."""

from __future__ import annotations

import os
import pickle
import signal
from argparse import Namespace
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.moe.errors import UnreadableCheckpoint
from megatron.pretrain.testing import cpu_device
from moe_ckpt.dense.chain import says_partial
from moe_ckpt.dense.dense import DenseCheckpoint, open_dense

if TYPE_CHECKING:
    from conftest import Content, Save


class RunsCode:
    """Unpickled by an unsafe reader, this makes a directory."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, (str(self.path),)


def whole(checkpoint: DenseCheckpoint, name: str) -> torch.Tensor:
    info = checkpoint.tensors[name]
    return torch.cat([torch.empty(0, dtype=info.dtype), *checkpoint.read_blocks(name)]).reshape(info.shape)


def data_files(directory: Path) -> list[Path]:
    return sorted(directory.glob("*.distcp"))


def test_every_tensor_comes_back_bit_equal_whatever_it_was_cut_into(
    content: Content, save: Save, tmp_path: Path
) -> None:
    checkpoint = open_dense(save(content, tmp_path / "saved", pieces=4))
    assert set(checkpoint.tensors) == set(content.tensors)
    for name, tensor in content.tensors.items():
        assert (checkpoint.tensors[name].shape, checkpoint.tensors[name].dtype) == (tuple(tensor.shape), tensor.dtype)
        assert torch.equal(whole(checkpoint, name), tensor)


def test_objects_and_the_common_part_come_back(content: Content, save: Save, tmp_path: Path) -> None:
    checkpoint = open_dense(save(content, tmp_path / "saved"))
    rng = checkpoint.read_object("rng_state/shard_0_1")[0]
    saved = content.objects["rng_state"][0]
    assert (rng["np_rng_state"][1] == saved["np_rng_state"][1]).all()
    assert torch.equal(rng["torch_rng_state"], saved["torch_rng_state"])
    assert checkpoint.common["args"].consumed_train_samples == 96
    assert checkpoint.common["opt_param_scheduler"] == content.common["opt_param_scheduler"]


def test_a_tensor_without_axes_is_read(save: Save, new_content: type[Content], tmp_path: Path) -> None:
    checkpoint = open_dense(save(new_content({"scalar": torch.tensor(2.5)}), tmp_path / "saved"))
    assert torch.equal(whole(checkpoint, "scalar"), torch.tensor(2.5))


def test_the_common_part_is_found_inside_the_sharded_files_of_newer_megatron_core(
    content: Content, save_newer: Save, tmp_path: Path
) -> None:
    directory = save_newer(content, tmp_path / "saved")
    checkpoint = open_dense(directory)
    assert checkpoint.common["iteration"] == 12
    assert "common_state/shard_0_1" not in checkpoint.objects


def test_a_save_directory_stands_for_the_iteration_that_its_tracker_names(
    content: Content, save: Save, tmp_path: Path
) -> None:
    for iteration in (6, 12):
        save(content, tmp_path / f"iter_{iteration:07d}")
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("6")
    assert open_dense(tmp_path).directory == tmp_path / "iter_0000006"


def test_a_tracker_that_names_a_missing_iteration_is_refused_with_what_is_there(tmp_path: Path) -> None:
    (tmp_path / "iter_0000006").mkdir()
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("12\n")
    with pytest.raises(UnreadableCheckpoint, match=r"iter_0000012, which is missing \(there: iter_0000006\)"):
        open_dense(tmp_path)


def test_a_tracker_that_holds_no_number_is_refused(tmp_path: Path) -> None:
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("../../etc")
    with pytest.raises(UnreadableCheckpoint, match="not an iteration; give one of the iter_ directories"):
        open_dense(tmp_path)


@pytest.mark.parametrize("text", ["1" * 5000, "\u0661\u0662", "12 13"])
def test_a_tracker_with_a_number_that_is_none_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "latest_checkpointed_iteration.txt").write_text(text)
    with pytest.raises(UnreadableCheckpoint, match="not an iteration"):
        open_dense(tmp_path)


def test_a_tracker_that_cannot_be_read_is_a_checkpoint_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "latest_checkpointed_iteration.txt").mkdir()
    with pytest.raises(UnreadableCheckpoint, match="cannot be read"):
        open_dense(tmp_path)


def test_a_place_that_cannot_even_be_looked_at_is_a_checkpoint_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(UnreadableCheckpoint, match="cannot be read"):
        open_dense(tmp_path / ("a" * 300))


def test_a_commit_marker_that_is_nested_without_end_is_damaged(content: Content, save: Save, tmp_path: Path) -> None:
    directory = save(content, tmp_path / "saved")
    (directory / "metadata.json").write_bytes(b"[" * 100_000)
    with pytest.raises(UnreadableCheckpoint, match=r"metadata.json is damaged"):
        open_dense(directory)
    assert not says_partial(directory)


def test_a_directory_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnreadableCheckpoint, match="is not a directory"):
        open_dense(tmp_path / "nowhere")


def test_an_empty_directory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnreadableCheckpoint, match="is empty"):
        open_dense(tmp_path)


def test_a_directory_of_something_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "mp_rank_00").mkdir()
    with pytest.raises(UnreadableCheckpoint, match="holds no torch_dist checkpoint"):
        open_dense(tmp_path)


def test_another_checkpoint_format_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "metadata.json").write_text('{"sharded_backend": "zarr"}')
    with pytest.raises(UnreadableCheckpoint, match="'zarr'"):
        open_dense(tmp_path)


@pytest.mark.parametrize("name", [".metadata", "metadata.json"])
def test_a_save_that_lacks_one_of_its_files_is_refused_naming_it(
    name: str, content: Content, save: Save, tmp_path: Path
) -> None:
    directory = save(content, tmp_path / "saved")
    (directory / name).unlink()
    with pytest.raises(UnreadableCheckpoint, match=name.replace(".", r"\.")):
        open_dense(directory)


@pytest.mark.usefixtures("common_apart")
def test_a_save_that_lacks_its_common_part_is_refused_naming_it(content: Content, save: Save, tmp_path: Path) -> None:
    directory = save(content, tmp_path / "saved")
    (directory / "common.pt").unlink()
    with pytest.raises(UnreadableCheckpoint, match=r"common\.pt"):
        open_dense(directory)


def test_a_missing_data_file_is_refused_naming_file_and_entry(content: Content, save: Save, tmp_path: Path) -> None:
    directory = save(content, tmp_path / "saved")
    lost = data_files(directory)[0]
    lost.unlink()
    with pytest.raises(UnreadableCheckpoint, match=rf"{lost.name}, which holds \S+, is missing"):
        open_dense(directory)


def test_a_truncated_data_file_is_refused_before_anything_is_read(content: Content, save: Save, tmp_path: Path) -> None:
    directory = save(content, tmp_path / "saved")
    torn = data_files(directory)[0]
    os.truncate(torn, torn.stat().st_size - 1)
    with pytest.raises(UnreadableCheckpoint, match=rf"{torn.name} is cut short"):
        open_dense(directory)


def test_a_truncated_index_is_refused(content: Content, save: Save, tmp_path: Path) -> None:
    directory = save(content, tmp_path / "saved")
    os.truncate(directory / ".metadata", 100)
    with pytest.raises(UnreadableCheckpoint, match=r"index \(\.metadata\) is damaged"):
        open_dense(directory)


def test_overwritten_bytes_of_a_tensor_are_refused_naming_file_and_tensor(
    save: Save, new_content: type[Content], tmp_path: Path
) -> None:
    directory = save(new_content({"weight": torch.ones(4)}), tmp_path / "saved")
    extent = open_dense(directory).tensors["weight"].chunks[0].extent
    with (directory / extent.file).open("r+b") as file:
        file.seek(extent.offset_bytes)
        file.write(bytes(extent.length_bytes))
    with pytest.raises(UnreadableCheckpoint, match=rf"weight in {extent.file} is damaged"):
        whole(open_dense(directory), "weight")


def test_pieces_of_another_save_are_refused(save: Save, new_content: type[Content], tmp_path: Path) -> None:
    directory = save(new_content({"weight": torch.ones(4)}), tmp_path / "saved")
    other = save(new_content({"weight": torch.ones(4, dtype=torch.int32)}), tmp_path / "other")
    (directory / ".metadata").write_bytes((other / ".metadata").read_bytes())
    for file in data_files(directory):
        file.write_bytes(file.read_bytes().ljust(data_files(other)[0].stat().st_size, b"\0"))
    with pytest.raises(UnreadableCheckpoint, match="not of one save"):
        whole(open_dense(directory), "weight")


def test_code_in_the_index_is_refused_by_name_and_does_not_run(content: Content, save: Save, tmp_path: Path) -> None:
    directory = save(content, tmp_path / "saved")
    (directory / ".metadata").write_bytes(pickle.dumps(RunsCode(tmp_path / "harm")))
    with pytest.raises(UnreadableCheckpoint, match=r"names posix\.mkdir"):
        open_dense(directory)
    assert not (tmp_path / "harm").exists()


def test_an_index_cannot_reach_functions_through_an_allowed_class(content: Content, save: Save, tmp_path: Path) -> None:
    directory = save(content, tmp_path / "saved")
    dotted = pickle.dumps("x", protocol=4)[:-1] + b"0\x8c\x13torch.serialization\x8c\x09os.system\x93."
    (directory / ".metadata").write_bytes(dotted)
    with pytest.raises(UnreadableCheckpoint, match=r"torch\.serialization\.os\.system"):
        open_dense(directory)


def test_an_index_that_copies_one_list_again_and_again_is_refused_before_it_fills_the_memory(
    content: Content, save: Save, tmp_path: Path
) -> None:
    directory = save(content, tmp_path / "saved")
    one = b"\x80\x04](" + b"K\x01" * 1000 + b"e\x94"  # a list that is remembered
    copies = b"".join(b"\x8c\x05torch\x8c\x04Size\x93h\x00\x85R" for _ in range(1000))
    (directory / ".metadata").write_bytes(one + copies + b".")
    with pytest.raises(UnreadableCheckpoint, match="copies more than is in it"):
        open_dense(directory)


def test_an_index_that_points_outside_the_checkpoint_is_refused(content: Content, save: Save, tmp_path: Path) -> None:
    directory = save(content, tmp_path / "saved")
    data = (directory / ".metadata").read_bytes()
    assert b"__0_0.distcp" in data
    (directory / ".metadata").write_bytes(data.replace(b"__0_0.distcp", b"../00.distcp"))
    with pytest.raises(UnreadableCheckpoint, match="points outside the checkpoint"):
        open_dense(directory)


def index_of(directory: Path, change: Callable[[Any], None]) -> None:
    metadata = pickle.loads((directory / ".metadata").read_bytes())
    change(metadata)
    (directory / ".metadata").write_bytes(pickle.dumps(metadata))


@pytest.mark.parametrize("shape", [(4,), (4, 3)])
def test_pieces_that_overlap_and_leave_a_gap_are_refused(
    shape: tuple[int, ...], save: Save, new_content: type[Content], tmp_path: Path
) -> None:
    directory, inner = save(new_content({"weight": torch.ones(shape)}), tmp_path / "saved", pieces=2), shape[1:]

    def overlap(metadata: Any) -> None:
        moved, there = torch.Size([1, *(0 for _ in inner)]), torch.Size([2, *(0 for _ in inner)])
        metadata.state_dict_metadata["weight"].chunks[1].offsets = moved
        metadata.storage_data = {
            replace(key, offset=moved) if key.offset == there else key: place
            for key, place in metadata.storage_data.items()
        }

    index_of(directory, overlap)
    with pytest.raises(UnreadableCheckpoint, match=r"pieces of weight at .* overlap"):
        open_dense(directory)


def test_a_shape_of_other_numbers_than_whole_ones_is_refused(
    save: Save, new_content: type[Content], tmp_path: Path
) -> None:
    directory = save(new_content({"weight": torch.ones(4)}), tmp_path / "saved")
    index_of(directory, lambda metadata: setattr(metadata.state_dict_metadata["weight"], "size", (4.0,)))
    with pytest.raises(UnreadableCheckpoint, match="does not say where weight is stored"):
        open_dense(directory)


def test_code_in_the_common_part_is_refused_by_name_and_does_not_run(
    content: Content, save: Save, tmp_path: Path
) -> None:
    directory = save(content, tmp_path / "saved")
    torch.save({"iteration": RunsCode(tmp_path / "harm")}, directory / "common.pt")
    with pytest.raises(UnreadableCheckpoint, match=r"common\.pt holds an object of posix\.mkdir"):
        open_dense(directory)
    assert not (tmp_path / "harm").exists()


def test_code_in_a_saved_object_is_refused_and_does_not_run(
    save: Save, new_content: type[Content], tmp_path: Path
) -> None:
    directory = save(new_content(objects={"rng_state": RunsCode(tmp_path / "harm")}), tmp_path / "saved")
    assert not (tmp_path / "harm").exists()
    with pytest.raises(UnreadableCheckpoint, match=r"rng_state/shard_0_1 in \S+ holds an object of posix\.mkdir"):
        open_dense(directory).read_object("rng_state/shard_0_1")
    assert not (tmp_path / "harm").exists()


@pytest.mark.parametrize(
    "reduced",
    [lambda member, _protocol: member.name, lambda member, _protocol: (signal.Signals, (int(member),))],
    ids=["by its own name", "by its number"],
)
def test_a_signal_is_read_as_whatever_release_of_python_wrote_it(
    reduced: Callable[..., Any], content: Content, save: Save, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(signal.Signals, "__reduce_ex__", reduced)
    content.common["args"].exit_signal = signal.SIGTERM
    assert open_dense(save(content, tmp_path / "saved")).common["args"].exit_signal is signal.SIGTERM


def test_reading_leaves_the_safe_names_of_this_process_as_they_were(
    content: Content, save: Save, tmp_path: Path
) -> None:
    directory = save(content, tmp_path / "saved")
    before = set(torch.serialization.get_safe_globals())
    assert Namespace in before
    open_dense(directory).read_object("rng_state/shard_0_1")
    assert set(torch.serialization.get_safe_globals()) == before
    with cpu_device.installed():
        assert dist_checkpointing.load_common_state_dict(str(directory))["iteration"] == 12
