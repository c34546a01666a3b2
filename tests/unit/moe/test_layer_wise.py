"""Chains of core whose members step whole parameters, each on one data-parallel rank."""

from __future__ import annotations

import pytest

from megatron.core.dist_checkpointing.moe.megatron_state.restore import gather_compute_weights
from megatron.core.optimizer import ChainedOptimizer
from megatron.core.optimizer.layer_wise_optimizer import LayerWiseDistributedOptimizer


@pytest.mark.parametrize(("nested", "layout"), [(False, False), (True, False), (True, True)])
def test_a_chain_without_the_layout_of_buckets_gathers_what_its_ranks_restored(nested: bool, layout: bool) -> None:
    gathered = []
    chain = object.__new__(LayerWiseDistributedOptimizer)
    known = {"use_buffer_param_sync": layout, "chained_optimizers": [], "allgather_params": lambda: gathered.append(1)}
    vars(chain).update(known)
    outer = object.__new__(ChainedOptimizer)
    vars(outer).update(chained_optimizers=[chain])
    gather_compute_weights([], outer if nested else chain)
    assert len(gathered) == (not layout)
