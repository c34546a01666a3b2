"""What a save asks of all ranks: tables of the model and single numbers, and texts only where one has failed."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import reduce
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from thread_ranks import on_ranks

from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.dist_checkpointing.moe.dense_saves import writing
from megatron.core.dist_checkpointing.moe.dense_saves.directory import CheckpointDirectory
from megatron.core.dist_checkpointing.moe.dense_saves.writing import RankFailure, raise_on_all_ranks
from megatron.core.dist_checkpointing.moe.extensions.partial_saves import saving, shards
from megatron.core.dist_checkpointing.moe.extensions.partial_saves.saving import ExpertSaves, content_of, live_experts

Work = Callable[[], Any]


class ThreadGroup:
    """In place of `torch.distributed`, for ranks that are threads: what a save may ask of all of them."""

    ReduceOp = SimpleNamespace(MAX=torch.maximum, SUM=torch.add)

    def __init__(self) -> None:
        self._own, self.calls = threading.local(), list[str]()

    def of_rank(self, work: Work) -> Callable[[Any], Any]:
        def run(transport: Any) -> Any:
            self._own.transport = transport
            return work()

        return run

    def get_rank(self) -> int:
        return int(self._own.transport.rank)

    def get_world_size(self) -> int:
        return int(self._own.transport.world_size)

    def all_reduce(self, tensor: torch.Tensor, op: Any) -> None:
        self.calls += ["all_reduce"] * (self.get_rank() == 0)
        tensor.copy_(reduce(op, self._own.transport.together.all(self.get_rank(), tensor.clone())))

    def broadcast_object_list(self, objects: list[Any], src: int) -> None:
        self.calls += ["broadcast"] * (self.get_rank() == 0)
        objects[:] = self._own.transport.together.all(self.get_rank(), list(objects))[src]


@pytest.fixture
def group(monkeypatch: pytest.MonkeyPatch) -> ThreadGroup:
    group = ThreadGroup()
    monkeypatch.setattr(torch.cuda, "current_device", lambda: "cpu")
    for module in (writing, saving):
        monkeypatch.setattr(module, "dist", group)
    stages = SimpleNamespace(
        get_pipeline_model_parallel_rank=lambda: group.get_rank() // 2,
        get_pipeline_model_parallel_world_size=lambda: 2,
    )
    monkeypatch.setattr(saving, "parallel_state", stages)
    monkeypatch.setattr(saving, "layers_of_routers", lambda layers: dict(enumerate(layers)))
    monkeypatch.setattr(saving, "entries", lambda shapes: shapes)
    return group


def told(group: ThreadGroup, *problems: str | None) -> set[str]:
    """What ranks with these problems raise."""
    works = (group.of_rank(lambda problem=problem: raise_on_all_ranks(problem)) for problem in problems)  # type: ignore[misc]
    found = on_ranks(*works)
    assert all(one is None or type(one) is RankFailure for one in found), found
    return {str(one) for one in found}


def test_where_no_rank_fails_one_number_is_reduced(group: ThreadGroup) -> None:
    assert told(group, *[None] * 6) == {"None"}
    assert group.calls == ["all_reduce"]


def test_the_first_rank_that_fails_says_why_and_the_others_are_named(group: ThreadGroup) -> None:
    assert told(group, None, "the disk is full", None, "the disk is gone") == {"the disk is full (on ranks 1, 3)"}
    assert told(group, None, None, "no") == {"no (on rank 2)"}
    assert told(group, None, *["no"] * 20) == {"no (on ranks 1, 2, 3, 4, 5, 6, 7, 8 and 12 more)"}


def shape(experts: int, layers: int | None) -> Any:
    """An entry of a sharded state dict, and its shard."""
    shard = SimpleNamespace(global_shape=(experts, 16) if layers is None else (layers, experts, 16))
    return SimpleNamespace(axes=1 if layers is None else 2), shard


@pytest.mark.parametrize("stacked", [None, 6])
def test_ranks_learn_the_layers_of_each_stage_and_the_tokens_of_all(group: ThreadGroup, stacked: int | None) -> None:
    of_rank = [(1, 2), (1, 2), (4,), ()]  # the last rank has no experts, and so says nothing of their shape

    def work() -> Any:
        layers = of_rank[group.get_rank()]
        counted = {layer: (layer, 10 * group.get_rank(), 1) for layer in layers}
        return live_experts([shape(3, stacked)] if layers else [], layers, counted)  # type: ignore[arg-type]

    first, *others = on_ranks(*[group.of_rank(work)] * 4)
    assert all(one == first for one in others), others
    assert first.stages == ((1, 2), (4,))
    assert (first.num_experts, first.stacked_layers) == (3, stacked)
    assert first.tokens == {1: (2, 10, 2), 2: (4, 10, 2), 4: (4, 20, 1)}


def test_without_counts_no_tokens_are_added_up(group: ThreadGroup) -> None:
    works = [group.of_rank(lambda: live_experts([shape(4, None)], [0], None))] * 4  # type: ignore[arg-type,list-item]
    assert {str(one.tokens) for one in on_ranks(*works)} == {"{}"}


class Ahead:
    """A router of a layer that predicts a further token."""

    is_mtp_layer = True


def test_experts_of_layers_that_predict_further_tokens_are_in_no_rotation(
    group: ThreadGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Checkpoints name them apart from the decoder's, so each holds all of them."""
    monkeypatch.setattr(saving, "layers_of_routers", lambda layers: {**dict(enumerate(layers)), Ahead(): 4})
    works = [group.of_rank(lambda: live_experts([shape(2, None)], [3], {3: (1, 1), 4: (5, 5)}))] * 2  # type: ignore[arg-type,list-item]
    for found in on_ranks(*works):
        assert (found.stages, found.tokens) == (((3,), ()), {3: (2, 2)})


SAVED = {
    "save": "saves", "save_experts": 1, "save_experts_selection": "sequential", "save_experts_scope": "both",
    "bf16": True, "fp16": False, "finetune": False, "no_load_optim": False, "no_save_optim": False,
    "use_distributed_optimizer": True, "pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2,
    "tensor_model_parallel_size": 2, "expert_model_parallel_size": 1, "expert_tensor_parallel_size": 1,
}  # fmt: skip


class Stage:
    """A model chunk of one layer, with two experts or without."""

    def __init__(self, layer: int, *, experts: bool) -> None:
        self.layers = [layer] if experts else []
        key = f"decoder.layers.{layer}.mlp.{'experts.experts.linear_fc1' if experts else 'linear_fc1'}.weight"
        cut = [(0, index, 2) for index in range(2)] if experts else [(0, 0, 1)]
        axes = {"prepend_axis_num": 1} if experts else {}
        self.state = {
            f"{at}": ShardedTensor.from_rank_offsets(key, torch.zeros(4, 4), one, **axes) for at, one in enumerate(cut)
        }

    def sharded_state_dict(self) -> dict[str, Any]:
        return dict(self.state)


def test_experts_are_found_where_the_first_chunks_of_all_stages_are_dense(
    group: ThreadGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(saving, "entries", shards.entries)
    monkeypatch.setattr(saving, "_obstacle", lambda *_: None)
    of_chunks = lambda chunks: {object(): layer for chunk in chunks for layer in chunk.layers}  # noqa: E731
    monkeypatch.setattr(saving, "layers_of_routers", of_chunks)

    def work() -> Any:
        stage = group.get_rank() // 2
        chunks: list[Any] = [Stage(stage, experts=False), Stage(2 + stage, experts=True)]
        saves, kept = ExpertSaves(SimpleNamespace(**SAVED), chunks, None), []
        for iteration in (1, 2):
            with saves.generating(None, CheckpointDirectory("saves"), iteration):
                kept.append([chunk.sharded_state_dict() for chunk in chunks])
            saves.published(iteration)
        return [[len(one) for one in states] for states in kept]

    assert on_ranks(*[group.of_rank(work)] * 4) == [[[1, 2], [1, 1]]] * 4


def test_checkpoints_of_another_layout_are_no_continuation() -> None:
    sizes = [name for name in SAVED if name.endswith("_parallel_size")]
    contents = {content_of(SimpleNamespace(**SAVED | changed)) for changed in ({}, *({one: 4} for one in sizes))}
    assert len(contents) == 1 + len(sizes) == 6
    none = SAVED | {"virtual_pipeline_model_parallel_size": None, "expert_tensor_parallel_size": None}
    assert "VPP 1" in content_of(SimpleNamespace(**none))
