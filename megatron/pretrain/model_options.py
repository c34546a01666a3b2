"""What the model of the entry script is given beside Megatron-LM's own flags."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.pretrain.errors import InvalidInput


class LocalNorm:
    """`WrappedTorchNorm` that also serves sequence parallelism.

    Core's wrapper refuses sequence parallelism because torch's norms do not mark their parameters; marked as
    `sequence_parallel` their gradients are reduced over the tensor-parallel group in `finalize_model_grads`.
    """

    def __new__(cls, config: TransformerConfig, hidden_size: int, eps: float = 1e-5) -> torch.nn.Module:
        unpartitioned = dataclasses.replace(config, sequence_parallel=False, tensor_model_parallel_size=1)
        norm = WrappedTorchNorm(unpartitioned, hidden_size, eps)
        for parameter in norm.parameters():
            parameter.sequence_parallel = config.sequence_parallel
        return norm


def with_local_norms(block: TransformerBlockSubmodules) -> TransformerBlockSubmodules:
    """A block spec with every norm of core replaced by `LocalNorm`."""

    def swapped(node: Any) -> Any:
        if node is WrappedTorchNorm:
            return LocalNorm
        if dataclasses.is_dataclass(node) and not isinstance(node, type):
            changes = {field.name: swapped(getattr(node, field.name)) for field in dataclasses.fields(node)}
            return dataclasses.replace(node, **changes)
        return [swapped(item) for item in node] if isinstance(node, list) else node

    return swapped(block)


def fuse_weight_gradients(model: GPTModel) -> None:
    """Let the layers of Transformer Engine add to the gradient buffers themselves, for which they need no Apex."""
    for module in model.modules():
        if hasattr(module, "fuse_wgrad_accumulation"):
            module.fuse_wgrad_accumulation = True


def freeze_experts(model: GPTModel, args: Any) -> None:
    """Freeze all routed experts, before gradients and the optimizer's state are laid out for the parameters that are
    trained.

    Args:
        model: The model, or a chunk of it.
        args: Of Megatron-LM.

    Raises:
        InvalidInput: The model has no experts.
    """
    pattern = args.moe_layer_freq
    if not args.num_experts or (isinstance(pattern, list) and not any(pattern)):
        raise InvalidInput(
            "--freeze-experts needs --num-experts and a layer that has them: a dense model has no experts"
        )
    for module in model.modules():
        if isinstance(module, MoELayer):
            module.experts.requires_grad_(False)
