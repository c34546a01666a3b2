"""How tensor parallelism cuts each tensor of the model, for those who put it together from another layout's shares."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.utils import unwrap_model

from ..errors import UsageError
from ..policy.resharding import Grid
from ..types import Topology
from .megatron import names_of_parameters
from .operators import GlobalName

_GATED = ("mlp.linear_fc1.weight", "mlp.linear_fc1.bias")
_GATED_SHARED = ("mlp.shared_experts.linear_fc1.weight", "mlp.shared_experts.linear_fc1.bias")


def tensor_grids(chunks: Sequence[torch.nn.Module], topology: Topology) -> Mapping[str, Grid]:
    """Of every tensor of this rank that tensor parallelism cuts, the whole of it as a matrix; others are missing.

    Checked against Megatron-Core 0.19.2: column-parallel layers are cut along their first dimension, row-parallel ones
    along the second; a gated first layer keeps on each rank its part of the gates before its part of the values.

    Raises:
        UsageError: A tensor is cut in another way.
    """
    is_gated = bool(unwrap_model(list(chunks))[0].config.gated_linear_unit)
    grids = {}
    for parameter, of in names_of_parameters(chunks, topology).items():
        axis = _axis(parameter, of)
        if axis is not None:
            ranks = topology.expert_tp if of.operator.is_expert else topology.tp
            grids[of.name] = _grid(of.name, tuple(parameter.shape), axis, ranks, is_gated and _holds_gates(of))
    return grids


def random_draws(config: TransformerConfig) -> str:
    """What of the model draws random numbers while it is trained, by the names of settings; empty if nothing does."""
    names = ("hidden_dropout", "attention_dropout", "moe_input_jitter_eps", "moe_router_force_load_balancing")
    return ", ".join(f"{name} {getattr(config, name)}" for name in names if getattr(config, name, None))


def _axis(parameter: torch.nn.Parameter, of: GlobalName) -> int | None:
    """The dimension that tensor ranks share; None where each of them has the whole."""
    if of.operator.is_expert:  # Transformer Engine's experts lack the attributes
        return 0 if "linear_fc1." in of.name else 1 if of.name.endswith("linear_fc2.weight") else None
    if not getattr(parameter, "tensor_model_parallel", False):
        return None
    axis: int = getattr(parameter, "partition_dim", 0)
    return axis


def _holds_gates(of: GlobalName) -> bool:
    return of.name.endswith((*_GATED, *_GATED_SHARED)) or (of.operator.is_expert and "linear_fc1." in of.name)


def _grid(name: str, shape: tuple[int, ...], axis: int, ranks: int, is_gated: bool) -> Grid:
    numel = ranks
    for size in shape:
        numel *= size
    if axis == 0:
        return Grid(2, numel // 2) if is_gated else Grid(1, numel)
    if axis == 1 and len(shape) == 2:
        return Grid(shape[0], shape[1] * ranks)
    raise UsageError(f"{name} of shape {shape} is cut along dimension {axis}, which cannot be laid out anew")
