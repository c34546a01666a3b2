"""Saves of Megatron-Core that a lost rank ended half-way: what they leave to later ones in the same process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path

import pytest
import torch

from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.moe.core_versions.training import results_in_process
from megatron.core.dist_checkpointing.moe.dense_saves.directory import CheckpointDirectory
from megatron.core.dist_checkpointing.moe.dense_saves.saving import DenseSaves
from megatron.core.dist_checkpointing.moe.errors import PeerLost
from megatron.pretrain.testing import cpu_device


@contextmanager
def losing_a_rank() -> Iterator[None]:
    yield
    raise PeerLost("while others write")


def checkpoint(saves: DenseSaves, root: Path, iteration: int, elements: int) -> None:
    given = {
        "sharded_state_dict": state(elements),
        "checkpoint_dir": str(CheckpointDirectory(root).folder(iteration)),
        "async_sharded_save": False,
        "async_strategy": "mcore",
        "content_metadata": {"sharding": "any"},
    }
    saves.checkpoint(root, iteration, partial(saves.shards, dist_checkpointing.save, given))


def state(elements: int) -> dict[str, ShardedTensor]:
    """Two tensors that share no file with others of their kind, each of this many elements."""
    values = {name: torch.arange(elements) + at for at, name in enumerate(("weight", "bias"))}
    return {name: ShardedTensor.from_rank_offsets(name, value) for name, value in values.items()}


@pytest.fixture
def device(single_process_group: None) -> Iterator[None]:
    """Of the CPU, and results of saves in this process, as in the stock loop."""
    with cpu_device.installed(), results_in_process(lambda: False):
        yield


@pytest.fixture
def struck(device: None, tmp_path: Path) -> DenseSaves:
    """Saves of a process that has lost a rank in the one of iteration 3; the next one goes well."""
    around = [losing_a_rank, nullcontext]
    saves = DenseSaves(None, lambda: around.pop(0)())
    with pytest.raises(PeerLost):
        checkpoint(saves, tmp_path, 3, 4)
    return saves


def test_the_index_of_a_checkpoint_is_not_that_of_one_before_it_which_a_lost_rank_ended(
    struck: DenseSaves, tmp_path: Path
) -> None:
    checkpoint(struck, tmp_path, 6, 64)
    loaded = dist_checkpointing.load(state(64), str(CheckpointDirectory(tmp_path).folder(6)))
    assert [loaded[name].tolist() for name in ("weight", "bias")] == [list(range(64)), list(range(1, 65))]


@pytest.mark.usefixtures("device")
def test_where_the_tracker_cannot_be_written_training_continues_without_a_checkpoint(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "latest_checkpointed_iteration.txt").mkdir()  # whoever runs this may write to all files
    saves = DenseSaves(None)
    checkpoint(saves, tmp_path, 3, 4)
    assert "checkpoint of iteration 3 was NOT saved" in caplog.text and "Is a directory" in caplog.text
    assert not saves.has(tmp_path, 3)


def test_what_a_lost_rank_ended_is_removed_by_the_save_that_follows(struck: DenseSaves, tmp_path: Path) -> None:
    assert CheckpointDirectory(tmp_path).staging(3).is_dir()
    checkpoint(struck, tmp_path, 6, 4)
    assert [path.name for path in tmp_path.iterdir()] == ["iter_0000006"]
