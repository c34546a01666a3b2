"""The state of a precision-aware optimizer in dense checkpoints: the bytes as they are, shard by shard.

Megatron-Core saves it in fp32, from which not all scales come back to the bit, and cannot load all that it saves
(`docs/upstream`). So each rank saves its shards as they lie in memory, under names that tell what they are of:

    optimizer.state.exp_avg.decoder.layers.0.mlp.router.weight.0_to_64_of_128              payload
    optimizer.state.exp_avg_scale.decoder.layers.0.mlp.router.weight.0_to_64_of_128        its scale
    optimizer.state.compute.decoder.layers.0.mlp.linear_fc1.weight.0_to_64_of_128          weights of eight bits
    optimizer.quantization/shard_RANK_RANKS                     scales and histories of delayed scaling of a rank
    optimizer.scalars/shard_RANK_RANKS                            step counts, learning rates, loss scalers of a rank

Scales are those of shards, so the state loads under the layout that it was saved with, data-parallel size included.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.utils import unwrap_model

from .megatron import names_of_parameters, read_topology, state_tensors
from .operators import StateTensor
from .optimizer_state import allocate_optimizer_state, holds_masters, optimizer_members, reload_masters
from .quantization import (
    allocate_quantization_state,
    is_scale,
    keeps_weights_in_blocks,
    packed,
    quantization_tensors,
    unpack,
)
from .restore import gather_compute_weights, recast_compute_weights
from .trainer_state import load_optimizer_scalars, optimizer_scalars

SHARDING = "raw_shards"
"""What `distrib_optim_sharding_type` in the metadata of such a checkpoint says."""


@contextlib.contextmanager
def without_module_scales(chunks: Sequence[torch.nn.Module]) -> Iterator[None]:
    """Layers of Transformer Engine give no state of their own: it would be pickled, and here it is saved beside."""
    silent = {"fp8": False, "fp8_calibration": False, "get_extra_state": lambda: torch.empty(0, dtype=torch.uint8)}
    with contextlib.ExitStack() as stack:
        for module in (module for chunk in chunks for module in chunk.modules() if hasattr(module, "fp8_meta")):
            for attributes, values in ((vars(module), silent), (module.fp8_meta, {"fp8_checkpoint": False})):
                stack.callback(_put_back, attributes, {name: attributes.get(name) for name in values})
                attributes.update(values)
        yield


def _put_back(attributes: dict[str, Any], before: Mapping[str, Any]) -> None:
    attributes.update(before)
    for name in [name for name, value in before.items() if value is None]:
        del attributes[name]


def raw_state_dict(
    chunks: Sequence[torch.nn.Module], optimizer: MegatronOptimizer, *, is_loading: bool
) -> dict[str, Any]:
    """All that the optimizer keeps on this rank.

    Args:
        chunks: The model chunks of this rank.
        optimizer: Its optimizer.
        is_loading: Whether tensors are in new memory, so that a load that fails changes nothing.
    """
    allocate_optimizer_state(optimizer)
    allocate_quantization_state(chunks)
    rank, ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
    tensors = {}
    for state in _kept(chunks, optimizer):
        data = torch.empty_like(state.tensor) if is_loading else state.tensor
        tensors[state.key] = ShardedTensor.from_rank_offsets(_name(state), data, replica_id=state.holders.index(rank))
    scalars = ShardedObject("optimizer.scalars", optimizer_scalars(optimizer), (ranks,), (rank,))
    found = {"tensors": tensors, "scalars": scalars}
    if scales := quantization_tensors(chunks):
        data = torch.frombuffer(bytearray(packed(scales)()), dtype=torch.uint8)
        found["quantization"] = ShardedObject("optimizer.quantization", data, (ranks,), (rank,))
    return found


@torch.no_grad()
def load_raw_state_dict(
    chunks: Sequence[torch.nn.Module], optimizer: MegatronOptimizer, loaded: Mapping[str, Any]
) -> None:
    """Write what `raw_state_dict` described into the live optimizer and the weights.

    Args:
        chunks: The model chunks of this rank.
        optimizer: Its optimizer.
        loaded: The state as it was loaded.
    """
    for state in _kept(chunks, optimizer):
        state.tensor.copy_(loaded["tensors"][state.key])
    load_optimizer_scalars(optimizer, loaded["scalars"])
    allocate_quantization_state(chunks)
    if scales := quantization_tensors(chunks):
        unpack(scales, memoryview(loaded["quantization"].numpy()))
    if keeps_weights_in_blocks(unwrap_model(list(chunks))[0].config):
        recast_compute_weights(chunks, optimizer)
    else:
        gather_compute_weights(chunks, optimizer)


def reload_masters_of(optimizer: MegatronOptimizer) -> None:
    """After weights alone were loaded: the masters that `FusedAdam` keeps become theirs."""
    allocate_optimizer_state(optimizer)
    for member in optimizer_members(optimizer):
        if holds_masters(member):
            reload_masters(member.optimizer)


def _kept(chunks: Sequence[torch.nn.Module], optimizer: MegatronOptimizer) -> Iterator[StateTensor]:
    """The state of this rank without what the model's part of a checkpoint has."""
    topology = read_topology(torch.distributed.get_world_size())
    dtypes = {of: parameter.dtype for parameter, of in names_of_parameters(chunks, topology).items()}
    # A master in another dtype than its weights is none of these, though a forward pass may read a cast of it.
    return (
        state
        for state in state_tensors(chunks, optimizer, topology)
        if (state.part and not state.in_forward)
        or _is_quantized(state)
        or (state.field == "master" and state.tensor.dtype is not dtypes[state.shard.of])
    )


def _is_quantized(state: StateTensor) -> bool:
    """Whether these are weights of eight bits or their scale: the model's part has what they stand for, in bf16."""
    return state.tensor.dtype is torch.uint8 or is_scale(state.field)


def _name(state: StateTensor) -> str:
    shard = state.shard
    partition = f".tp{shard.tp_rank}of{shard.tp_size}" if shard.tp_size > 1 else ""
    return f"optimizer.state.{state.field}.{shard.of.name}{partition}.{shard.start}_to_{shard.end}_of_{shard.numel}"
