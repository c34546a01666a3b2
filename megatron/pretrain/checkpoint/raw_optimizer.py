"""The state of a precision-aware optimizer in dense checkpoints: the bytes as they are, shard by shard.

Megatron-Core saves it in fp32, from which not all scales come back to the bit, and cannot load all that it saves
(`docs/upstream`). So each rank saves its shards as they lie in memory, under names that tell what they are of:

    optimizer.state.exp_avg.decoder.layers.0.mlp.router.weight.0_to_64_of_128              payload
    optimizer.state.exp_avg_scale.decoder.layers.0.mlp.router.weight.0_to_64_of_128        its scale
    optimizer.scalars/shard_RANK_RANKS                            step counts, learning rates, loss scalers of a rank

Scales are those of shards, so the state loads under the layout that it was saved with, data-parallel size included.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor
from megatron.core.dist_checkpointing.moe.megatron_state.fused_adam import reload_masters
from megatron.core.dist_checkpointing.moe.megatron_state.megatron import read_topology, state_tensors
from megatron.core.dist_checkpointing.moe.megatron_state.operators import StateTensor
from megatron.core.dist_checkpointing.moe.megatron_state.optimizer_state import holds_masters, optimizer_members
from megatron.core.dist_checkpointing.moe.megatron_state.trainer_state import (
    load_optimizer_scalars,
    optimizer_scalars,
)
from megatron.core.optimizer import MegatronOptimizer

SHARDING = "raw_shards"
"""What `distrib_optim_sharding_type` in the metadata of such a checkpoint says."""


def raw_state_dict(
    chunks: Sequence[torch.nn.Module], optimizer: MegatronOptimizer, *, is_loading: bool
) -> dict[str, Any]:
    """All that the optimizer keeps on this rank; with `is_loading` in new memory, so that a load that fails changes
    nothing."""
    rank, ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
    tensors = {}
    for state in _kept(chunks, optimizer):
        data = torch.empty_like(state.tensor) if is_loading else state.tensor
        tensors[state.key] = ShardedTensor.from_rank_offsets(_name(state), data, replica_id=state.holders.index(rank))
    scalars = ShardedObject("optimizer.scalars", optimizer_scalars(optimizer), (ranks,), (rank,))
    return {"tensors": tensors, "scalars": scalars}


@torch.no_grad()
def load_raw_state_dict(
    chunks: Sequence[torch.nn.Module], optimizer: MegatronOptimizer, loaded: Mapping[str, Any]
) -> None:
    """Write what `raw_state_dict` described, as it was loaded, into the live optimizer."""
    for state in _kept(chunks, optimizer):
        state.tensor.copy_(loaded["tensors"][state.key])
    load_optimizer_scalars(optimizer, loaded["scalars"])


def reload_masters_of(optimizer: MegatronOptimizer) -> None:
    """After weights alone were loaded: the masters that `FusedAdam` keeps become theirs."""
    for member in optimizer_members(optimizer):
        if holds_masters(member):
            reload_masters(member.optimizer)


def _kept(chunks: Sequence[torch.nn.Module], optimizer: MegatronOptimizer) -> Iterator[StateTensor]:
    """The state of this rank without what the model's part of a checkpoint has."""
    topology = read_topology(torch.distributed.get_world_size())
    return (state for state in state_tensors(chunks, optimizer, topology) if not state.in_forward)


def _name(state: StateTensor) -> str:
    shard = state.shard
    partition = f".tp{shard.tp_rank}of{shard.tp_size}" if shard.tp_size > 1 else ""
    return f"optimizer.state.{state.field}.{shard.of.name}{partition}.{shard.start}_to_{shard.end}_of_{shard.numel}"
