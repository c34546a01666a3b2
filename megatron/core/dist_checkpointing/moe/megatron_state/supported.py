"""What of a model and its optimizer is known, so that their whole state can be enumerated."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params, FP32Optimizer

from .optimizer_state import optimizer_members

_KNOWN = ("Adam", "AdamW", "FusedAdam", "TensorParallelMuon")
"""Of torch, Apex, Transformer Engine and core: optimizers whose whole state is what is enumerated here."""


def unsupported_settings(config: Any, wrapping: Any) -> Iterator[str]:
    """What of a model's settings has state that cannot be enumerated.

    Args:
        config: Core's configuration of the model.
        wrapping: Core's configuration of its DistributedDataParallel.

    Yields:
        What cannot be protected, as a noun.
    """
    tp = config.tensor_model_parallel_size
    # Without expert parallelism core reduces the gradients of experts with the rest's, over other tensor ranks.
    astray = config.expert_model_parallel_size == 1 and (config.expert_tensor_parallel_size or tp) != tp
    found = {
        "fp4": config.fp4,
        f"weights in {config.fp8_recipe} eight bits, which are kept by rows and by columns": config.fp8_param
        and config.fp8_recipe not in ("delayed", "tensorwise"),
        "attention in eight bits": config.fp8_dot_product_attention or config.fp8_multi_head_attention,
        "Megatron-FSDP": wrapping.use_megatron_fsdp,
        "layers that predict further tokens on another stage than the last": getattr(config, "mtp_standalone", False),
        "several instances of the distributed optimizer": wrapping.num_distributed_optimizer_instances > 1,
        "an expert-tensor-parallel size of its own and no expert parallelism": bool(config.num_moe_experts) and astray,
    }
    yield from (reason for reason, applies in found.items() if applies)


def unsupported_optimizers(optimizer: MegatronOptimizer) -> Iterator[str]:
    """Which optimizers of a chain keep state that is not known here.

    Args:
        optimizer: The chain, or one alone.

    Yields:
        What cannot be protected, as a noun.
    """
    for member in optimizer_members(optimizer):
        inner = type(member.optimizer)
        # Masters and moments of one that offloads are copies in the host's memory, which it swaps in its step.
        if not any(base.__name__ in _KNOWN for base in inner.__mro__):
            yield f"the optimizer {inner.__name__}"
        if type(member) not in (DistributedOptimizer, Float16OptimizerWithFloat16Params, FP32Optimizer):
            yield f"the optimizer {type(member).__name__}"
