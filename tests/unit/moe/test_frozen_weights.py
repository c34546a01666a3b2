"""Modules whose weights are frozen, while they are and afterwards."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron.core.dist_checkpointing.moe.core_versions import training
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
    monkeypatch.setattr(ChainedOptimizer, "step", lambda self: (True, self.get_grad_norm(), None))
    chunk: Any = SimpleNamespace(
        pg_collection=SimpleNamespace(tp_dp_cp="stage"), bucket_groups=[], expert_parallel_bucket_groups=[]
    )
    with journaled_step(chain, [chunk], frozenset(), StepJournal(2.5), alone=alone):
        assert chain.step() == (True, 2.5, None)
        assert isinstance(chain.step()[1], float)
