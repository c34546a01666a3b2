"""Modules whose weights are frozen, while they are and afterwards."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from megatron.core.dist_checkpointing.moe.core_versions import training
from megatron.core.dist_checkpointing.moe.replay.execution import gradients_down_to
from megatron.core.dist_checkpointing.moe.replay.patches import journaled_step, weights_frozen
from megatron.core.dist_checkpointing.moe.types import StepJournal
from megatron.core.optimizer import ChainedOptimizer


class Grouped(torch.nn.Linear):
    """Adds to gradient buffers itself, as grouped layers of Transformer Engine do."""

    fuse_wgrad_accumulation = True

    def backward_dw(self) -> None:
        """Compute the gradients of weights that the backward pass has stored inputs of."""
        raise RuntimeError("Pop empty queue")


def test_a_layer_that_computes_gradients_of_weights_itself_does_not_while_all_of_these_are_frozen() -> None:
    frozen, half, trained = Grouped(2, 2), Grouped(2, 2), Grouped(2, 2)
    chunk: Any = torch.nn.ModuleList([frozen, half, trained])
    chunk.bucket_groups = chunk.expert_parallel_bucket_groups = []
    chunk.config = SimpleNamespace(finalize_model_grads_func=None)
    with weights_frozen([chunk], {frozen.weight, frozen.bias, half.weight}):
        assert [layer.fuse_wgrad_accumulation for layer in (frozen, half, trained)] == [False, True, True]
        assert [layer.weight.requires_grad for layer in (frozen, half, trained)] == [False, True, True]
        frozen.backward_dw()
        with pytest.raises(RuntimeError):
            half.backward_dw()
    assert frozen.fuse_wgrad_accumulation
    with pytest.raises(RuntimeError):
        frozen.backward_dw()
    assert frozen.weight.requires_grad


class Block(torch.nn.Module):
    """Layers that are recomputed, as core's blocks are: run again if the input needs a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList([torch.nn.Linear(2, 2)])
        self.needed_gradient: list[bool] = []

    def set_input_tensor(self, tensor: torch.Tensor) -> None:
        """Hidden states of the stage before."""

    def forward(self, hidden_states: torch.Tensor | None) -> torch.Tensor:
        """In one piece."""
        assert hidden_states is not None
        self.needed_gradient.append(hidden_states.requires_grad)
        result: torch.Tensor = checkpoint(self.layers[0], hidden_states, use_reentrant=True)
        return result


class Seeing(torch.nn.Module):
    """No plain GPT: a tower ahead of the block, and of the embedding that is frozen in a replay."""

    def __init__(self) -> None:
        super().__init__()
        self.config = SimpleNamespace(overlap_moe_expert_parallel_comm=False)
        self.tower, self.embedding, self.decoder = Block(), torch.nn.Embedding(4, 2), Block()
        for parameter in (*self.embedding.parameters(), *self.decoder.parameters()):
            vars(parameter)["main_grad"] = torch.zeros_like(parameter)  # as of all that training gives a gradient
        self.embedding.requires_grad_(False)
        self.tower.requires_grad_(False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Hidden states."""
        hidden: torch.Tensor = self.decoder(hidden_states=self.embedding(tokens) + self.tower(torch.ones(2)))
        return hidden


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
def test_recomputed_layers_behind_a_frozen_embedding_have_the_gradients_of_training() -> None:
    model = Seeing()
    with gradients_down_to(model, 0):
        model(torch.tensor([1, 3])).sum().backward()
        with torch.no_grad():  # as an evaluation
            model(torch.tensor([1, 3]))
    assert model.decoder.needed_gradient == [True, False]
    assert model.tower.needed_gradient == [False, False], "it has none in training"
    weight: Any = model.decoder.layers[0].weight
    hidden = model.embedding(torch.tensor([1, 3])) + model.tower(torch.ones(2))
    assert torch.equal(weight.grad, hidden.sum(0).expand(2, 2))


@pytest.mark.parametrize("alone", [False, True])
def test_a_stage_that_replays_alone_clips_by_the_norm_as_training_had_it(
    monkeypatch: pytest.MonkeyPatch, alone: bool
) -> None:
    groups = ["all", "experts"]  # of members that compute their norms over different ranks: a number is made of these
    members = [
        SimpleNamespace(is_stub_optimizer=True, optimizer=None, get_grad_stats_parallel_group=lambda group=group: group)
        for group in groups
    ]
    chain: Any = object.__new__(ChainedOptimizer)
    vars(chain).update(chained_optimizers=members)
    monkeypatch.setattr(training.clip_grads, "multi_tensor_scale_tensor_impl", "scales", raising=False)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: "cpu")
    # A rank that has nothing to step would look for zeros among the gradients of its first parameter.
    monkeypatch.setattr(ChainedOptimizer, "count_zeros", lambda self: pytest.fail("replays are not logged"))
    monkeypatch.setattr(ChainedOptimizer, "step", lambda self: (True, self.get_grad_norm(), self.count_zeros()))
    chunk: Any = SimpleNamespace(
        pg_collection=SimpleNamespace(tp_dp_cp="stage"), bucket_groups=[], expert_parallel_bucket_groups=[]
    )
    with journaled_step(chain, [chunk], frozenset(), StepJournal(2.5), alone=alone):
        assert chain.step() == (True, 2.5, None)
        assert isinstance(chain.step()[1], float)
