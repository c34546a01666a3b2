"""How Megatron-Core casts master weights to weights of eight bits: together on all data-parallel ranks.

Whoever casts only some of them has to choose the same ones on all of these ranks. Checked against 0.17.1 and 0.19.2.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from megatron.core.fp8_utils import quantize_param_shard
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

Rows = tuple[list[Any], list[Any], list[Any]]


def casts_itself(member: Any) -> bool:
    """Whether core casts the weights that this optimizer steps, and not `FusedAdam` in its step."""
    held_by_fused = getattr(member.config, "use_precision_aware_optimizer_no_fp8_or_ds_fp8", False)
    return isinstance(member, DistributedOptimizer) and not held_by_fused


def quantized_rows(member: DistributedOptimizer, wanted: Callable[[torch.nn.Parameter], bool]) -> Rows:
    """Eight-bit weights of all data-parallel ranks of an optimizer, this rank's master weights of them, and where in
    the weight these begin: None where it has none. In the order that all of them have."""
    every = zip(*member._get_fp8_params_and_shard_fp32_from_fp8(), strict=True)
    rows = [row for row in every if wanted(row[0])]
    return [row[0] for row in rows], [row[1] for row in rows], [row[2] for row in rows]


def cast_rows(member: DistributedOptimizer, rows: Rows) -> None:
    """Cast them, and take the scales that follow; a collective over these ranks."""
    quantize_param_shard(*rows, member.data_parallel_group)


@contextlib.contextmanager
def scales_kept(weights: Iterable[torch.nn.Parameter]) -> Iterator[None]:
    """For a step: those of eight bits among these weights, which are not cast, keep the scale they have."""
    scales = [scale for one in weights if (scale := getattr(one, "_scale_inv", None)) is not None]
    before = [scale.clone() for scale in scales]
    try:
        yield
    finally:
        for scale, value in zip(scales, before, strict=True):
            scale.copy_(value)
