"""All operators of a model, also those that other ranks own, from its configuration."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megatron.core.utils import unwrap_model

from ..types import OperatorId, OperatorKind, expert


def model_operators(chunks: Sequence[torch.nn.Module]) -> tuple[OperatorId, ...]:
    """The operators of the whole model that these chunks are a part of, ascending; the same on all ranks."""
    config = unwrap_model(list(chunks))[0].config
    layers, experts = config.num_layers, config.num_moe_experts or 0
    found = [OperatorId(-1, OperatorKind.EMBEDDING), OperatorId(layers, OperatorKind.HEAD)]
    found += [OperatorId(layer, OperatorKind.NON_EXPERT) for layer in range(layers)]
    for layer in _moe_layers(config.moe_layer_freq, layers) if experts else ():
        found.append(OperatorId(layer, OperatorKind.ROUTER))
        found += [expert(layer, index) for index in range(experts)]
    return tuple(sorted(found))


def _moe_layers(frequency: int | Sequence[int], layers: int) -> list[int]:
    """Core's reading of `--moe-layer-freq`: every n-th layer from the first, or a 1 for each MoE layer."""
    if isinstance(frequency, int):
        return list(range(0, layers, frequency))
    return [layer for layer, has_experts in enumerate(frequency) if has_experts]
