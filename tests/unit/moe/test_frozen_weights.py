"""Modules whose weights are frozen, while they are and afterwards."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron.core.dist_checkpointing.moe.replay.patches import weights_frozen


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
