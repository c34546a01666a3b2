"""How far gradients flow down a model in which operators are frozen.

A backward pass has collectives: tensor- and expert-parallel ranks must run the same ones, and pipeline stages must send
each other what the others wait for. So how far gradients flow is decided per layer, from the operators that are frozen
anywhere, not from the parameters that a rank has.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator
from typing import Any

import torch

from megatron.core.utils import make_viewless_tensor, unwrap_model

from ..megatron_state.module_tree import gpt_operators, is_plain_gpt, layers_ahead
from ..megatron_state.quantization import keeps_scales
from ..types import OperatorId

EMBEDDING_LAYER = -1


def lowest_active_layer(config: Any, frozen: Collection[OperatorId]) -> int:
    """The lowest layer with an operator that is not frozen, on whatever rank.

    Args:
        config: The TransformerConfig that the model's modules share.
        frozen: Operators of all ranks that take no update.

    Returns:
        Its number in the whole model: -1 for the embedding, the number of layers for the head, one more where all
        operators are frozen.
    """
    operators = gpt_operators(config)
    return next((operator.layer for operator in operators if operator not in frozen), operators[-1].layer + 1)


@contextlib.contextmanager
def gradients_down_to(chunk: torch.nn.Module, lowest: int) -> Iterator[None]:
    """Let gradients flow through a model chunk as in training, but not below layer `lowest` of the whole model.

    Layer `lowest` still has its input's gradient computed, as in training; a stage below gets zeros.

    Args:
        chunk: A model chunk of this rank, wrapped in DistributedDataParallel.
        lowest: As `lowest_active_layer` gives it, the same on all ranks.
    """
    model = unwrap_model(chunk)
    if model.config.overlap_moe_expert_parallel_comm:
        with _embeddings_with_gradient(model):
            yield
        return
    # Which module comes after which is not known: as in training. Layers that predict further tokens read the last
    # layer's output, and what they send down goes by the head.
    if not is_plain_gpt(model) or getattr(model, "mtp_process", False):
        yield
        return
    with contextlib.ExitStack() as stack:
        entrances = _entrances(model)
        bottom = EMBEDDING_LAYER if model.pre_process or not entrances else entrances[0][0]
        if lowest > bottom and _flow_everywhere(model.config):
            # All layers run backward as in training; only the embedding is spared.
            if model.pre_process and entrances:
                stack.enter_context(_input_changed(model.decoder, _beginning))
        elif lowest > bottom and entrances:
            first = entrances[0][1]
            begin = next((module for layer, module in entrances if layer >= lowest), None)
            # Without this the layers between would be run backward for gradients that nobody takes.
            if begin is not first:
                stack.enter_context(_input_changed(first, torch.Tensor.detach))
            if begin is not None:
                stack.enter_context(_input_changed(begin, _beginning))
            # The stage below waits for a gradient of what it sent, or its own part of the 1F1B schedule hangs.
            if not model.pre_process:
                handle = chunk.register_forward_hook(lambda _, __, output: _zeros_to(model.decoder, output))
                stack.callback(handle.remove)
        yield


def _flow_everywhere(config: Any) -> bool:
    """Whether stopping gradients would change more than gradients.

    A recomputed router counts tokens only when it runs again in the backward pass, and a recomputed layer needs
    an input with a gradient to run at all. Compiled fusions are compiled again where nothing requires a gradient, and
    may then draw other random numbers. Delayed scaling notes the largest gradient of each layer, and takes new scales
    at the end of a backward pass, which is where the lowest layer's is.
    """
    recomputed = config.recompute_granularity == "full" or (
        config.recompute_granularity == "selective" and "moe" in config.recompute_modules
    )
    return bool(recomputed or config.bias_dropout_fusion or keeps_scales(config))


def _entrances(model: Any) -> list[tuple[int, torch.nn.Module]]:
    """Modules that hidden states pass one after the other, with the layer of the whole model that each begins."""
    found = [(layer.layer_number - 1, layer) for layer in model.decoder.layers]
    head = model.config.num_layers + layers_ahead(model.config)
    # Where layers predict further tokens, the norm is on the stage of the last layer before them.
    if model.decoder.final_layernorm is not None:
        found.append((head, model.decoder.final_layernorm))
    elif model.post_process:
        found.append((head, model.output_layer))
    return found


@contextlib.contextmanager
def _input_changed(module: torch.nn.Module, change: Callable[[torch.Tensor], torch.Tensor]) -> Iterator[None]:
    """Change the hidden states that a module is called with."""

    def hook(_: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        if "hidden_states" in kwargs:
            return args, kwargs | {"hidden_states": change(kwargs["hidden_states"])}
        return (change(args[0]), *args[1:]), kwargs

    handle = module.register_forward_pre_hook(hook, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()


@contextlib.contextmanager
def _embeddings_with_gradient(model: Any) -> Iterator[None]:
    """Let gradients flow everywhere where passes of two microbatches run in one.

    Core cuts layers into parts there, calls no layer as a whole, and runs each part backward by itself: its output has
    to need a gradient, whatever is frozen below.
    """
    embedding = getattr(model, "embedding", None)  # of the first stage, and of the last one that predicts further
    if embedding is None:
        yield
        return
    handle = embedding.register_forward_hook(
        lambda _, __, output: output.requires_grad_() if torch.is_grad_enabled() else output
    )
    try:
        yield
    finally:
        handle.remove()


def _beginning(hidden: torch.Tensor) -> torch.Tensor:
    """The same values, at which gradients end that flow down."""
    # Kernels may take another way where their input needs no gradient: it needs one in training, so it does here.
    return hidden.detach().requires_grad_()


def _zeros_to(decoder: Any, output: torch.Tensor) -> torch.Tensor:
    """The output of a chunk, made to give the chunk's input a gradient of zeros: the stage below waits for one."""
    received = decoder.input_tensor
    if received is None or not torch.is_grad_enabled():  # nothing was received, or this is an evaluation
        return output
    joined: torch.Tensor = _ZerosBelow.apply(output, received)
    # Core frees the data of what it has sent, which it refuses for views.
    viewless: torch.Tensor = make_viewless_tensor(joined, requires_grad=True, keep_graph=True)
    return viewless


class _ZerosBelow(torch.autograd.Function):
    """Hands on its first argument; the gradient of the second one is zero."""

    @staticmethod
    def forward(ctx: Any, output: torch.Tensor, received: torch.Tensor) -> torch.Tensor:
        """The output, as a view: autograd takes an input that is returned as it is for one that was changed."""
        ctx.shape, ctx.dtype, ctx.device = received.shape, received.dtype, received.device
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, grad_output: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The gradient of the output as it is, and zeros."""
        return grad_output, torch.zeros(ctx.shape, dtype=ctx.dtype, device=ctx.device)
