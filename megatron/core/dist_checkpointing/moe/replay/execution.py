"""Training iterations in which some operators are frozen (MoEvement 3.3), on live models and optimizers.

For the active operators to come to the same bits as when nothing was frozen, every sum must add the same numbers in the
same order. So the model's forward pass is left alone, and what is changed is only what a frozen operator would
otherwise *take*: gradients of its weights (`weights_frozen`), its place in the optimizer's step (`journaled_step`), and
gradients below the lowest layer that anything active needs (`gradients_down_to`). Three results are sums over all
operators, or known to other stages only, and so come from the journal: the norm for clipping, whether a step was
skipped for an overflow, and with a stage on its own the number of tokens.
"""

from __future__ import annotations

import contextlib
import struct
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import torch

from megatron.core.optimizer import ChainedOptimizer, MegatronOptimizer
from megatron.core.optimizer import optimizer as core_optimizer
from megatron.core.transformer.moe.router import Router
from megatron.core.utils import make_viewless_tensor, unwrap_model

from ..core_versions.seams import require_seams
from ..core_versions.training import has_norm_of_its_own, offloading_alone, pages_as_noted, skips_for_norm
from ..errors import UsageError
from ..megatron_state.module_tree import gpt_operators, is_plain_gpt, layers_ahead
from ..megatron_state.optimizer_state import members_by_layer
from ..megatron_state.quantization import keeps_scales, multiplies_in_four_bits
from ..ports import PeerLost, Transport
from ..replication.agreement import combined
from ..types import OperatorId, StepJournal
from .patches import counts_in_groups, graphs_off, journaled_step, journaled_tokens, overlap_off, weights_frozen


class LiveExecution:
    """The `ports.Execution` of live training.

    Frozen operators take part in the forward pass, and gradients flow through them. Their weights get none, and the
    optimizer passes by them: their master weights and moments are neither read nor written, and may hold anything. A
    router's counters and expert biases continue also where it is frozen: they depend on the forward pass only.

    Args:
        chunks: The model chunks of this rank, wrapped in DistributedDataParallel, which `state_tensors` has accepted.
        optimizer: What core's `get_megatron_optimizer` gave for them.
        operator_of: The operator of each parameter of these chunks.

    Raises:
        UsageError: This model or optimizer cannot be frozen; with the reason, on all ranks alike.
    """

    def __init__(
        self,
        chunks: Sequence[torch.nn.Module],
        optimizer: MegatronOptimizer,
        operator_of: Mapping[torch.nn.Parameter, OperatorId],
    ) -> None:
        _refuse_unfreezable(chunks, optimizer)
        named = [item for chunk in chunks for item in chunk.named_parameters()]
        unknown = [name for name, parameter in named if parameter not in operator_of]
        if unknown:
            raise UsageError(f"{len(unknown)} parameters have no operator, such as {unknown[0]}: nothing can be frozen")
        self._chunks, self._optimizer, self._operator_of = list(chunks), optimizer, dict(operator_of)
        _ask_for_norm_groups(optimizer)
        self._until_thaw, self._until_next = contextlib.ExitStack(), contextlib.ExitStack()
        self._is_prepared = False

    def freeze(self, frozen: Collection[OperatorId], step: StepJournal, *, alone: bool = False) -> None:
        """As `ports.Execution.freeze`. All ranks must call it alike, after their compute weights became whole.

        With no operators the step is that of training: its norm and verdict are computed, and can be compared; unless
        it runs alone, where nothing but what this stage sees of an overflow can be compared with the journal.
        After an iteration whose journal says that the step was skipped, restore the loss scales with the rest of the
        trainer state: here all parts of the optimizer count the overflow, in training only those that saw it.

        Args:
            frozen: Operators of all ranks and stages that take no update in the next iteration.
            step: The journal of the iteration, from when it ran first.
            alone: Whether only some stages of the pipeline run it.

        Raises:
            UsageError: The journal lacks what the step needs: the job's flags are not those it was written with.
        """
        _check_journal(self._optimizer, step)
        if alone:
            _check_tokens(self._chunks, step)
        if not self._is_prepared:
            # Graphs are captured behind `thaw`, with all operators active.
            self._until_thaw.enter_context(graphs_off())
            # Overlap stays off until `thaw`: to switch it off is a collective where weights may not be gathered yet.
            self._until_thaw.enter_context(overlap_off(self._chunks, self._optimizer))
            self._is_prepared = True
        self._until_next.close()  # what the iteration before had frozen
        operators = frozenset(frozen)
        parameters = {parameter for parameter, operator in self._operator_of.items() if operator in operators}
        self._until_next.enter_context(weights_frozen(self._chunks, parameters))
        # With nothing frozen the ranks compute norm and verdict themselves, as in training.
        if operators or alone:
            journaled = journaled_step(self._optimizer, self._chunks, parameters, step, alone=alone)
            self._until_next.enter_context(journaled)
        if alone:
            self._until_next.enter_context(journaled_tokens(self._chunks, step))
        self._until_next.enter_context(offloading_alone())
        self._until_next.enter_context(pages_as_noted(step.out_of_pages))
        # From the operators of all ranks, not from this one's parameters: a backward pass has collectives.
        lowest = lowest_active_layer(unwrap_model(self._chunks[0]).config, operators)
        for chunk in self._chunks:
            self._until_next.enter_context(gradients_down_to(chunk, lowest))

    def thaw(self) -> None:
        """As `ports.Execution.thaw`; does nothing where nothing was frozen."""
        self._until_next.close()
        self._until_thaw.close()
        self._is_prepared = False


def _ask_for_norm_groups(optimizer: ChainedOptimizer) -> None:
    """Core 0.19 asks all ranks in the first step which groups of parameters are clipped by norms of their own, and
    remembers the answer: it must not be a step of some stages only, or one with frozen operators. A collective."""
    for group in getattr(core_optimizer, "SEPARATE_GRAD_NORM_GROUPS", ()):
        optimizer.has_grad_norm_group(group)


def _check_journal(optimizer: ChainedOptimizer, step: StepJournal) -> None:
    members = [member for member, _ in members_by_layer(optimizer)]
    # The norm is needed for clipping only; a step that was skipped clips nothing.
    clips = any(member.config.clip_grad > 0 for member in members)
    # A step that was skipped for its norm has one; before an overflow none is computed.
    overflowed, too_large = step.skipped and step.grad_norm is None, step.skipped and step.grad_norm is not None
    if overflowed and not any(getattr(member, "grad_scaler", None) for member in members):
        raise UsageError(
            "the journal says that the optimizer skipped this step, which it does only with a loss scale: give the"
            " precision and the loss scale that the journal was written with"
        )
    if too_large and not any(skips_for_norm(member.config) for member in members):
        raise UsageError(
            f"the journal says that the optimizer skipped this step for its gradient norm of {step.grad_norm}: give"
            " the grad_norm_skip_threshold that the journal was written with"
        )
    if clips and step.grad_norm is None and not step.skipped:
        raise UsageError(
            "the journal has no gradient norm, but gradients are clipped: give the --clip-grad that the journal was"
            " written with"
        )


def _check_tokens(chunks: Sequence[torch.nn.Module], step: StepJournal) -> None:
    if unwrap_model(chunks[0]).config.calculate_per_token_loss and step.num_tokens is None:
        raise UsageError(
            "the journal does not say by how many tokens gradients were divided: give --calculate-per-token-loss only"
            " if the journal was written with it"
        )


def unfreezable_settings(config: Any) -> Iterator[str]:
    """What of a model's settings would break where operators are frozen.

    Args:
        config: Core's configuration of the model.

    Yields:
        What does not go with frozen operators, as a noun.
    """
    found = {
        # These compute or move by a schedule of their own what a frozen operator no longer has.
        "layers whose activations Transformer Engine offloads": config.cpu_offloading,
        "weight gradients of the head computed later": config.defer_embedding_wgrad_compute,
        # It reduces gradients of inputs while those of weights are multiplied, which frozen weights leave out.
        "gradients that Transformer Engine reduces within others": config.tp_comm_overlap and config.tp_comm_bulk_wgrad,
        # They are made once, and take all weights of a layer's experts for frozen or none.
        "operations that Transformer Engine fuses": getattr(config, "use_transformer_engine_op_fuser", False)
        or getattr(config, "use_grouped_gemm_for_shared_expert", False),
        # Gradients are rounded by random numbers, of which a frozen operator draws none.
        "products in four bits": multiplies_in_four_bits(config),
    }
    yield from (reason for reason, applies in found.items() if applies)


def _refuse_unfreezable(chunks: Sequence[torch.nn.Module], optimizer: MegatronOptimizer) -> None:
    """Refuse what frozen operators would break; what no state can be enumerated of `state_tensors` has refused."""
    require_seams()
    config = unwrap_model(chunks[0]).config
    of_group = any(has_norm_of_its_own(parameter) for chunk in chunks for parameter in chunk.parameters())
    reasons = dict.fromkeys(unfreezable_settings(config), True) | {
        # Which parameters share a norm would have to be in the journal too.
        "gradients that are clipped by a norm of their own group": of_group,
        f"the optimizer {type(optimizer).__name__}": type(optimizer) is not ChainedOptimizer,
    }
    for inner in (member.optimizer for member, _ in members_by_layer(optimizer)):
        # Muon steps one matrix after the other, with collectives of tensor-parallel ranks, which freeze the same ones.
        is_known = inner is None or type(inner) in (torch.optim.Adam, torch.optim.AdamW) or counts_in_groups(inner)
        is_known = is_known or type(inner).__name__ == "TensorParallelMuon"
        reasons[f"the inner optimizer {type(inner).__name__}"] = not is_known
    for router in (module for chunk in chunks for module in chunk.modules() if isinstance(module, Router)):
        reasons[f"the router {type(router).__name__}"] = type(router).gating is not Router.gating
    for reason, applies in reasons.items():
        if applies:
            raise UsageError(f"operators cannot be frozen with {reason}: use --moe-ckpt-strategy full or none")


# Agreement among some of the ranks of a job, while the others wait or agree on something of their own.

_SIZE = struct.Struct("<q")
_MOST_BYTES = 1 << 30


class Subset:
    """Merges values of `members` alone, over messages of a transport between all ranks.

    Args:
        transport: Between all ranks.
        members: Global ranks, this one among them, the same on each of them.
        what: They agree on, for errors.
    """

    def __init__(self, transport: Transport, members: Sequence[int], what: str) -> None:
        self._transport, self.members, self._what = transport, tuple(sorted(members)), what
        self.rank = transport.rank

    def merge(self, value: bytes, combine: Callable[[bytes, bytes], bytes]) -> bytes:
        """As `ports.Transport.merge`, of the members. Raises PeerLost that names who did not answer."""
        at = self.members.index(self.rank)
        return combined(at, len(self.members), value, combine, self._send, self._receive)

    def _send(self, at: int, data: bytes) -> None:
        to = self.members[at]
        try:
            for transfer in [self._transport.send(to, part) for part in (_SIZE.pack(len(data)), data)]:
                transfer.wait()
        except PeerLost as error:
            raise self._lost(to, error) from error

    def _receive(self, at: int) -> bytes:
        size, source = bytearray(_SIZE.size), self.members[at]
        try:
            self._transport.receive(source, memoryview(size)).wait()
            (nbytes,) = _SIZE.unpack(size)
            if not 0 <= nbytes <= _MOST_BYTES:
                raise PeerLost(f"it announced {nbytes} bytes, which cannot be: the connection is bad")
            data = bytearray(nbytes)
            self._transport.receive(source, memoryview(data)).wait()
        except PeerLost as error:
            raise self._lost(source, error) from error
        return bytes(data)

    def _lost(self, other: int, error: PeerLost) -> PeerLost:
        return PeerLost(f"rank {self.rank} waited for rank {other} to {self._what}: {error}")


# How far gradients flow down a model in which operators are frozen.
#
# A backward pass has collectives: tensor- and expert-parallel ranks must run the same ones, and pipeline stages must
# send each other what the others wait for. So how far gradients flow is decided per layer, from the operators that
# are frozen anywhere, not from the parameters that a rank has.

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
        with _entered_with_gradient(model):
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
    at the end of a backward pass, which is where the lowest layer's is. Offloaded activations come back in the backward
    pass of the layer above.
    """
    recomputed = config.recompute_granularity == "full" or (
        config.recompute_granularity == "selective" and "moe" in config.recompute_modules
    )
    offloaded = config.fine_grained_activation_offloading
    compiled = (
        config.bias_dropout_fusion
        or getattr(config, "qk_l2_norm", False)
        or getattr(config, "attention_output_gate", False)
    )
    return bool(recomputed or offloaded or compiled or keeps_scales(config))


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
        return (*map(change, args[:1]), *args[1:]), kwargs

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
    handle = embedding.register_forward_hook(lambda _, __, output: _with_gradient(output))
    try:
        yield
    finally:
        handle.remove()


@contextlib.contextmanager
def _entered_with_gradient(model: torch.nn.Module) -> Iterator[None]:
    """Let gradients flow through all blocks of layers, whatever is frozen ahead of them.

    A block that is recomputed is run again for the gradient of its input alone: without one its weights get none
    either, and its routers count no tokens. Where nothing of a block is trained it had none in training.
    """
    with contextlib.ExitStack() as stack:
        for module in model.modules():
            is_block = hasattr(module, "set_input_tensor") and hasattr(module, "layers")
            if is_block and any(hasattr(parameter, "main_grad") for parameter in module.parameters()):
                stack.enter_context(_input_changed(module, _with_gradient))
        yield


def _with_gradient(hidden: Any) -> Any:
    """Hidden states, if any come from the embedding; an evaluation needs no gradient."""
    return hidden if hidden is None or not torch.is_grad_enabled() else hidden.requires_grad_()


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
