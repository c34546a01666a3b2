"""What is changed on live objects of Megatron-Core while operators are frozen, and put back afterwards.

Each is a context manager that sets attributes of instances, and `graphs_off` alone of classes. Checked against
Megatron-Core 0.17.1 to 0.19.2: `core_versions/seams.py` lists the names, `tests/unit/moe/test_frozen_upstream.py`
compares the source of all that is relied on here with what was read.

    graphs_off         modules captured as CUDA graphs run eagerly
    overlap_off        gradients are reduced after the backward pass, weights gathered after the step
    weights_frozen     no gradients of frozen weights are computed, accumulated or reduced
    journaled_step     the optimizer steps active parameters only, with the norm and the verdict of the journal
    journaled_tokens   gradients are divided by the journal's number of tokens, where only some stages replay
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from typing import Any

import torch

from megatron.core.full_cuda_graph import FullCudaGraphWrapper
from megatron.core.optimizer import ChainedOptimizer, MegatronOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params, FP32Optimizer
from megatron.core.transformer.cuda_graphs import CudaGraphManager
from megatron.core.transformer.module import GraphableMegatronModule
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.moe.router import Router
from megatron.core.utils import unwrap_model

from ..core_versions.seams import cast_rows, casts_itself, quantized_rows, scales_kept
from ..core_versions.training import norm_as_in_training, replaced
from ..megatron_state.optimizer_state import layer_wise_chains, members_by_layer, optimizer_members
from ..types import StepJournal

Parameters = AbstractSet[torch.nn.Parameter]

ALIGNED_GROUPS: dict[type[MegatronOptimizer], tuple[tuple[str, ...], ...]] = {
    DistributedOptimizer: (
        ("model_float16_groups", "shard_float16_groups", "shard_fp32_from_float16_groups"),
        ("model_fp32_groups", "shard_fp32_groups"),
    ),
    Float16OptimizerWithFloat16Params: (("float16_groups", "fp32_from_float16_groups"), ("fp32_from_fp32_groups",)),
    FP32Optimizer: (),
}
"""By kind of optimizer: attributes that are lists of groups, aligned with each other, model parameters first."""


@contextlib.contextmanager
def graphs_off() -> Iterator[None]:
    """Pass CUDA graphs by: they have the kernels of all weight gradients in them, frozen or not.

    Nothing that was captured runs or changes, nothing is recorded, and no iteration counts as a warm-up: the first one
    behind this block is to a graph as the first one of a process.
    """
    with contextlib.ExitStack() as stack:
        # Of classes: Python looks `__call__` up there, and loops keep wrappers where nobody else finds them.
        stack.enter_context(replaced(FullCudaGraphWrapper, __call__=_eager_passes))
        stack.enter_context(replaced(CudaGraphManager, __call__=_eager_module))
        stack.enter_context(replaced(GraphableMegatronModule, _should_call_te_cudagraph=lambda *_, **__: False))
        yield


def _eager_passes(wrapper: FullCudaGraphWrapper, **options: Any) -> Any:
    return wrapper.forward_backward_func(**options)


def _eager_module(manager: CudaGraphManager, module: torch.nn.Module, given: Any, named: Any, **_: Any) -> Any:
    """As core runs a layer, or one of its methods, for which it has no graph."""
    if getattr(manager, "func", None) is not None:
        return manager.func(*given, **named)
    return torch.nn.Module.__call__(module, *given, **named)  # not the module's own, which asks for a graph again


def bucket_groups(chunks: Sequence[torch.nn.Module]) -> list[Any]:
    """All groups of gradient buckets of these chunks."""
    return [group for chunk in chunks for group in (*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups)]


@contextlib.contextmanager
def overlap_off(chunks: Sequence[torch.nn.Module], optimizer: MegatronOptimizer) -> Iterator[None]:
    """Reduce gradients after the backward pass, and gather weights after the step.

    Entering is a collective where weights may not be gathered yet. Frozen parameters and overlap exclude each other: a
    bucket is reduced once all of its parameters have reported a gradient, and a frozen one never does.

    Args:
        chunks: The model chunks of this rank.
        optimizer: Theirs, whose step then stages weights of MXFP8 for the gather, which training does otherwise.
    """
    with contextlib.ExitStack() as stack:
        for config in {id(one.config): one.config for one in optimizer_members(optimizer)}.values():
            stack.enter_context(replaced(config, overlap_param_gather=False))
        for chain in layer_wise_chains(optimizer):  # has a setting of its own
            stack.enter_context(replaced(chain, overlap_param_gather=False))
        for chunk in chunks:
            if chunk.remove_forward_pre_hook_handles:
                # Where gradients lie in the buffer of the gather, weights are whole, as a restore has left them.
                chunk.disable_forward_pre_hook(param_sync=not chunk.ddp_config.reuse_grad_buf_for_mxfp8_param_ag)
                stack.callback(chunk.enable_forward_pre_hook)
            # Same buckets, same collectives, only later: so sums have the same order, and no bit differs.
            settings = chunk.ddp_config
            stack.enter_context(replaced(settings, overlap_grad_reduce=False, overlap_param_gather=False))
            # Schedules call these for overlap; the config is shared by all chunks.
            hooks = {"no_sync_func": None, "grad_sync_func": None, "param_sync_func": None}
            stack.enter_context(replaced(unwrap_model(chunk).config, **hooks))
        yield
        for group in bucket_groups(chunks):
            # As after a backward pass: the next forward pass gathers, whatever was written meanwhile.
            group.param_gather_dispatched = False


@contextlib.contextmanager
def weights_frozen(chunks: Sequence[torch.nn.Module], frozen: Parameters) -> Iterator[None]:
    """No gradients of these parameters: none computed, accumulated or reduced.

    Args:
        chunks: The model chunks of this rank.
        frozen: Parameters of frozen operators.
    """
    still = _without_gradient(chunks, frozen)
    fixed = [parameter for _, parameters in still for parameter in parameters if parameter.requires_grad]
    with contextlib.ExitStack() as stack:
        stack.callback(_require_gradients, fixed, True)
        _require_gradients(fixed, False)
        for module in (module for module, _ in still if hasattr(module, "fuse_wgrad_accumulation")):
            # A layer of Transformer Engine 2.11 that adds to gradient buffers itself, and did not ask for them because
            # its weights need no gradient, takes them from its weights in the backward pass, for good.
            stack.enter_context(replaced(module, fuse_wgrad_accumulation=False))
        for module in (module for module, _ in still if hasattr(module, "backward_dw")):
            # With delayed weight gradients Transformer Engine would look for what its backward pass has not stored.
            stack.enter_context(replaced(module, backward_dw=_nothing))
        # Core's gate computes the gradient of its weights whether it is wanted or not.
        for module in (module for chunk in chunks for module in chunk.modules()):
            if isinstance(module, Router) and module.weight in frozen:
                stack.enter_context(replaced(module, gating=_gating_with_frozen_weight(module)))
        # A bucket group with any active parameter is reduced as a whole: in which order ranks are summed up depends on
        # a gradient's place in the bucket, so it may not shrink. Frozen parameters add zeros there.
        for group in _frozen_groups(chunks, frozen):
            stack.enter_context(replaced(group, start_grad_sync=_nothing))
        for config in {id(config): config for config in (unwrap_model(chunk).config for chunk in chunks)}.values():
            if config.finalize_model_grads_func is not None:
                finalize = _finalizing_all(config.finalize_model_grads_func, fixed)
                stack.enter_context(replaced(config, finalize_model_grads_func=finalize))
        yield


def _without_gradient(
    chunks: Sequence[torch.nn.Module], frozen: Parameters
) -> list[tuple[torch.nn.Module, list[torch.nn.Parameter]]]:
    """Modules with frozen parameters and no others, and these: a grouped linear layer of Transformer Engine computes
    the gradients of all its experts or of none."""
    modules = [module for chunk in chunks for module in chunk.modules()]
    owned = [(module, list(module.parameters(recurse=False))) for module in modules]
    return [(module, own) for module, own in owned if own and all(parameter in frozen for parameter in own)]


def _require_gradients(parameters: Sequence[torch.nn.Parameter], required: bool) -> None:
    for parameter in parameters:
        parameter.requires_grad_(required)


def _frozen_groups(chunks: Sequence[torch.nn.Module], frozen: Parameters) -> list[Any]:
    """Groups of buckets that hold nothing else; the same on all ranks that share them."""
    return [group for group in bucket_groups(chunks) if all(parameter in frozen for parameter in group.params)]


def _nothing(*unused: Any, **options: Any) -> None:
    """In place of a collective over what has not changed."""


def _finalizing_all(finalize: Callable[..., None], fixed: Sequence[torch.nn.Parameter]) -> Callable[..., None]:
    """`finalize_model_grads` with all parameters that training has."""

    # With sequence parallelism core packs the gradients of norms, of all that require one, into one tensor to reduce.
    # The order of its sums depends on the place in it: so the frozen ones take part, with gradients of zero.
    def finalized(*arguments: Any, **options: Any) -> None:
        _require_gradients(fixed, True)
        try:
            finalize(*arguments, **options)
        finally:
            _require_gradients(fixed, False)

    return finalized


class _FrozenGating(moe_utils.RouterGatingLinearFunction):
    """Core's gate without the gradient of its weights."""

    @staticmethod
    def backward(ctx: Any, grad_output: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """The gradient of the input, as core computes it."""
        tokens, weight, _ = ctx.saved_tensors
        gradient, wide = grad_output.view(-1, grad_output.shape[-1]), weight.to(ctx.router_dtype)
        engine = moe_utils.te_general_gemm
        if engine is not None and ctx.router_dtype != torch.float64:
            of_tokens = engine(wide, gradient, ctx.router_dtype, layout="NN", grad=True)[0]
        else:
            of_tokens = torch.mm(gradient, wide)
        return of_tokens.to(ctx.input_dtype).view(*tokens.shape), None, None, None


def _gating_with_frozen_weight(router: Router) -> Callable[[torch.Tensor], torch.Tensor]:
    dtypes = {"fp32": torch.float32, "fp64": torch.float64}

    def gating(tokens: torch.Tensor) -> torch.Tensor:
        dtype = dtypes.get(router.config.moe_router_dtype, tokens.dtype)
        logits: torch.Tensor = _FrozenGating.apply(tokens, router.weight, router.bias, dtype)
        return logits

    return gating


def counts_in_groups(inner: torch.optim.Optimizer | None) -> bool:
    """Whether this is a fused Adam of Apex or Transformer Engine: those count steps per group, unless it is empty."""
    return type(inner).__name__ == "FusedAdam"


@contextlib.contextmanager
def journaled_step(
    optimizer: ChainedOptimizer,
    chunks: Sequence[torch.nn.Module],
    frozen: Parameters,
    step: StepJournal,
    *,
    alone: bool = False,
) -> Iterator[None]:
    """Let `optimizer.step` pass by frozen parameters, with the norm and the verdict of a journal.

    Only within the step are frozen parameters out of the optimizers' lists: whoever enumerates the state sees all.

    Args:
        optimizer: The chain of optimizers.
        chunks: The model chunks of this rank.
        frozen: Parameters of frozen operators.
        step: The journal of the iteration.
        alone: Whether only some stages of the pipeline take the step: overflows are then agreed on within the stage.
    """
    stage = unwrap_model(chunks[0]).pg_collection.tp_dp_cp if alone else None

    def stepped() -> tuple[bool, float | None, int | None]:
        # The norm of training is a sum over all operators: from the active ones alone clipping would differ. Asked for
        # before groups are replaced: whether core has a number or a tensor depends on those of training.
        norm = norm_as_in_training(optimizer, None if step.grad_norm is None else float(step.grad_norm))
        with contextlib.ExitStack() as stack:
            emptied = []
            for member, _ in members_by_layer(optimizer):
                groups = stack.enter_context(_only_active(member, frozen))
                emptied += groups if counts_in_groups(member.optimizer) else []
                if alone:
                    stack.enter_context(replaced(member, get_grad_stats_parallel_group=lambda: stage))
                if getattr(member, "grad_scaler", None):
                    verdict = _with_journaled_verdict(member, step.skipped)
                    stack.enter_context(replaced(member, _unscale_main_grads_and_check_for_nan=verdict))
            stack.enter_context(scales_kept(frozen))
            for group in _frozen_groups(chunks, frozen):  # what has not changed needs no gather
                stack.enter_context(replaced(group, start_param_sync=_nothing))
            # Only training logs zeros among gradients, and core cannot count those of a rank with nothing to step.
            stack.enter_context(replaced(optimizer, get_grad_norm=lambda: norm, count_zeros=lambda: None))
            if step.skipped:  # for the norm: a rank without active parameters would not compare it
                stack.enter_context(replaced(optimizer, step_with_ready_grads=lambda: False))
            outcome: tuple[bool, float | None, int | None] = ChainedOptimizer.step(optimizer)
            # Fused Adams count the steps of a group, older ones not of an empty one, and none in a stub: its parameters
            # would lag when thawed.
            for group, counted in emptied if outcome[0] else []:
                group["step"] = counted + 1
        return outcome

    with replaced(optimizer, step=stepped):
        yield


@contextlib.contextmanager
def journaled_tokens(chunks: Sequence[torch.nn.Module], step: StepJournal) -> Iterator[None]:
    """Divide gradients by the number of tokens in a journal: in training the last stage broadcasts it.

    Does nothing where gradients are not divided by it.

    Args:
        chunks: The model chunks of this rank.
        step: The journal of the iteration.
    """
    config = unwrap_model(chunks[0]).config
    if not config.calculate_per_token_loss:
        yield
        return
    finalize = config.finalize_model_grads_func

    def finalized(model: Sequence[torch.nn.Module], num_tokens: torch.Tensor, **options: Any) -> None:
        finalize(model, None, **options)
        if step.num_tokens:
            # A tensor, as core has it: its quotient is rounded to single precision.
            scaling = 1.0 / torch.full_like(num_tokens, step.num_tokens)
            for chunk in model:
                chunk.scale_gradients(scaling)

    with replaced(config, finalize_model_grads_func=finalized):
        yield


def _with_journaled_verdict(member: MegatronOptimizer, skipped: bool) -> Callable[[], bool]:
    """Unscales as in training. An overflow that the journal does not know of counts too: the caller compares."""
    unscale = member._unscale_main_grads_and_check_for_nan

    def judged() -> bool:
        return bool(unscale()) or skipped

    return judged


@contextlib.contextmanager
def _only_active(member: MegatronOptimizer, frozen: Parameters) -> Iterator[list[tuple[dict[str, Any], Any]]]:
    """Take frozen parameters, and their masters, out of all lists of one optimizer; yields groups that became empty,
    each with the steps that it has counted.

    Without any parameter left it counts as a stub, which takes part in collectives only.
    """
    if member.is_stub_optimizer:
        yield []
        return
    with contextlib.ExitStack() as stack:
        removed, emptied = {id(parameter) for parameter in frozen}, []
        for names in ALIGNED_GROUPS[type(member)]:
            # The lists are aligned: a row is one parameter with its shard and its master weights.
            groups = zip(*(getattr(member, name) for name in names), strict=True)
            rows = [list(zip(*group, strict=True)) for group in groups]
            # By id, because tensors compare element by element; the tensors live as long as this block.
            removed |= {id(tensor) for group in rows for row in group if row[0] in frozen for tensor in row}
            active = [[row for row in group if row[0] not in frozen] for group in rows]
            columns = {name: [[row[at] for row in group] for group in active] for at, name in enumerate(names)}
            stack.enter_context(replaced(member, **columns))
        if casts_itself(member):
            stack.enter_context(_casting_only_active(member, frozen))
        for group in member.optimizer.param_groups:
            before = group["params"]
            stack.callback(group.__setitem__, "params", before)
            group["params"] = [parameter for parameter in before if id(parameter) not in removed]
            emptied += [(group, group.get("step", 0))] if before and not group["params"] else []
        if not member.get_parameters():
            stack.enter_context(replaced(member, is_stub_optimizer=True))
        yield emptied


@contextlib.contextmanager
def _casting_only_active(member: DistributedOptimizer, frozen: Parameters) -> Iterator[None]:
    """Keep frozen weights of eight bits out of the cast at the end of a step.

    That is a collective over all such weights of the data-parallel ranks, whichever of them are this rank's. Left as it
    is, a rank without active ones would leave it out as a stub, and current scaling would take frozen ones for zeros.
    """
    rows = quantized_rows(member, lambda parameter: parameter not in frozen)
    copy_all = member._copy_main_params_to_model_params

    def copied() -> None:
        if member.is_stub_optimizer:
            cast_rows(member, rows)
        else:
            copy_all()

    values = {"_get_fp8_params_and_shard_fp32_from_fp8": lambda: rows, "_copy_main_params_to_model_params": copied}
    with replaced(member, **values):
        yield
