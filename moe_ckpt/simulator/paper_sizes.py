"""Bytes of checkpoints as the papers count them."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.core.dist_checkpointing.moe.extensions.lossy.dynamic_k import check_floor
from megatron.core.dist_checkpointing.moe.policy.partial import BOTH, PecScope
from megatron.core.dist_checkpointing.moe.types import ModelShape, Part, Precision

TABLE_3_SCOPES = tuple(
    PecScope(name, part)
    for name, part in (
        ("weights", Part.COMPUTE),
        ("optimizer", Part.MOMENTS),
        ("both", Part.COMPUTE | Part.MOMENTS),
        ("all", Part.EVERYTHING),
    )
)
"""What checkpoints must leave out to have the sizes of MoC Table 3, and of eq. 6 (`all`).

The published 0.88, 0.54 and 0.42 are those of checkpoints that store compute weights beside master weights, and keep
the master weights of all experts. A job stores no weights twice, so its scopes are those of `policy.partial`.
"""


@dataclass(frozen=True)
class CheckpointBytes:
    """Bytes of one checkpoint: weights are compute weights, optimizer is master weights and moments (MoC Fig. 2)."""

    expert_weights_bytes: int
    non_expert_weights_bytes: int
    expert_optimizer_bytes: int
    non_expert_optimizer_bytes: int

    @property
    def total_bytes(self) -> int:
        """Bytes of the whole checkpoint."""
        return (
            self.expert_weights_bytes
            + self.non_expert_weights_bytes
            + self.expert_optimizer_bytes
            + self.non_expert_optimizer_bytes
        )


def checkpoint_bytes(
    shape: ModelShape, precision: Precision, k: int, scope: PecScope = BOTH, stored: Part = Part.EVERYTHING
) -> CheckpointBytes:
    """Bytes of a checkpoint with K experts per MoE layer (MoC eq. 6; eq. 5 with K = N), by component.

    Eq. 6 is the scope `both`; the sizes of MoC Table 3 are those of TABLE_3_SCOPES.
    Raises UsageError for k outside of 1..num_experts.

    Args:
        shape: The model.
        precision: Bytes per parameter of each part of the state.
        k: K, experts per MoE layer in the checkpoint, from 1 to the number of experts.
        scope: The parts of which only the chosen experts are saved.
        stored: The parts of the state that a checkpoint has.
    """
    check_floor(k, shape.num_experts)
    experts = shape.expert_parameters
    others = shape.total_parameters - experts
    chosen = experts // shape.num_experts * k  # exact: all experts are of one size
    rest = stored & ~scope.partial

    def expert_bytes(component: Part) -> int:
        return chosen * precision.bytes_per_parameter(stored & component) + (
            experts - chosen
        ) * precision.bytes_per_parameter(rest & component)

    optimizer = Part.MASTER | Part.MOMENTS
    return CheckpointBytes(
        expert_bytes(Part.COMPUTE),
        others * precision.bytes_per_parameter(stored & Part.COMPUTE),
        expert_bytes(optimizer),
        others * precision.bytes_per_parameter(stored & optimizer),
    )
