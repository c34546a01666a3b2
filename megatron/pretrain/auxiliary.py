"""The auxiliary losses of routers, as Megatron-Core collects them."""

from __future__ import annotations

from typing import Any

from megatron.core.dist_checkpointing.moe.core_versions import training
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.pretrain.config.model import MoEConfig

_NAMES = {
    "aux_loss": "load_balancing_loss",
    "seq_aux_loss": "seq_load_balancing_loss",
    "global_aux_loss": "global_load_balancing_loss",
}


def auxiliary_losses(
    moe: MoEConfig, transformer: TransformerConfig, microbatches: int, iteration: int, board: Any
) -> dict[str, float]:
    """The mean auxiliary losses of an iteration by name, which are forgotten then; a collective.

    board: the TensorBoard writer that gets them too, or None.
    """
    names = [_NAMES[kind] for kind in moe.moe_router_load_balancing_type if kind in _NAMES]
    if moe.moe_z_loss_coeff is not None:
        names.append("z_loss")
    losses = training.auxiliary_losses(
        names,
        loss_scale=1 / microbatches,
        iteration=iteration,
        writer=board,
        per_layer_logging=moe.moe_per_layer_logging,
        num_layers=transformer.num_layers,
        moe_layer_freq=transformer.moe_layer_freq,
    )
    return {name: float(value) for name, value in losses.items()}
