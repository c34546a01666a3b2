"""Makes a rank's compute weights whole again after its master weights, or its share of the compute weights, changed.

All of it is what Megatron-Core 0.19.2 does at the end of an optimizer's step, in the same order and over the same
buckets, so that no bit differs from training.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch

from megatron.core.fp8_utils import post_all_gather_processing
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer.optimizer import FP32Optimizer

from ..core_versions.eight_bit_weights import cast_rows, casts_itself, quantized_rows
from .operators import StateTensor
from .optimizer_state import MASTER_OF_FUSED, holds_masters, optimizer_members
from .quantized import is_quantized


def settle_gathers(chunks: Sequence[torch.nn.Module]) -> None:
    """Wait for parameter gathers under way (`--overlap-param-gather`), which would overwrite what a restore writes."""
    for chunk in chunks:
        for group in (*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups):
            if getattr(group, "param_gather_handle", None) is not None:
                group.param_gather_handle.wait()
                group.param_gather_handle = None


def gather_compute_weights(chunks: Sequence[torch.nn.Module]) -> None:
    """Make the compute weights whole from the shards that the data-parallel ranks own; a collective.

    Does nothing without the distributed optimizer. Call `settle_gathers` before shards are written.
    """
    # Where a gather is under way, `start_param_sync(force_sync=True)` would only wait for that one.
    settle_gathers(chunks)
    for chunk in chunks:
        if chunk.ddp_config.use_distributed_optimizer:
            chunk.start_param_sync(force_sync=True)
    quantized = [parameter for chunk in chunks for parameter in chunk.parameters() if is_quantized(parameter)]
    if quantized:  # core does this after some gathers only: backward passes would read the transposes of before
        post_all_gather_processing(quantized)


def any_rank(condition: bool) -> bool:
    """Whether it holds on any rank; a collective."""
    found = torch.tensor([condition], dtype=torch.int32, device=torch.cuda.current_device())
    torch.distributed.all_reduce(found, op=torch.distributed.ReduceOp.MAX)
    return bool(found.item())


@torch.no_grad()
def recast_quantized_weights(optimizer: MegatronOptimizer, chosen: Collection[torch.nn.Parameter]) -> None:
    """Make this rank's shards of eight-bit weights from master weights, as the optimizer's step ends; a collective.

    Scales of delayed scaling must be those that the step found: restore them before. chosen: the same parameters on
    all data-parallel ranks; of others neither weights nor scales change.
    """
    for member in optimizer_members(optimizer):
        if casts_itself(member):
            cast_rows(member, quantized_rows(member, lambda parameter: parameter in chosen))


@torch.no_grad()
def recast_compute_weights(chunks: Sequence[torch.nn.Module], optimizer: MegatronOptimizer) -> None:
    """Make the compute weights from the master weights after a restore that had none; a collective."""
    settle_gathers(chunks)
    for member in optimizer_members(optimizer):
        if holds_masters(member):
            _recast_from_fused(member.optimizer)
        elif not isinstance(member, FP32Optimizer):  # there both are one tensor
            member._copy_main_params_to_model_params()
    gather_compute_weights(chunks)


def _recast_from_fused(inner: Any) -> None:
    """Core leaves the cast to `FusedAdam`, which makes it in its step only. Masters of fewer bits were restored with
    their compute weights: those of fp32 are all that may have come alone."""
    for parameter, state in inner.state.items():
        master = state[MASTER_OF_FUSED]
        if master.dtype is torch.float32 and not is_quantized(master):
            parameter.data.copy_(master)


@torch.no_grad()
def level_step_counts(tensors: Sequence[StateTensor]) -> None:
    """Give all parameters of all ranks the largest step count, as Megatron, which knows one for all; a collective.

    They differ only after a lossy recovery, where experts come back with older moments.
    """
    counts = [tensor.tensor for tensor in tensors if tensor.field == "step"]
    if not counts:
        return
    largest = torch.stack([count.max() for count in counts]).max().to(torch.cuda.current_device())
    torch.distributed.all_reduce(largest, op=torch.distributed.ReduceOp.MAX)
    for count in counts:
        count.fill_(largest.item())
