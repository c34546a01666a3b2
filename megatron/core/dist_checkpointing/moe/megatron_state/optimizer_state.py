"""The state of optimizers before their first step: it has to exist before it can be enumerated or restored."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch.utils.hooks import RemovableHandle

from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer.cpu_offloading.hybrid_optimizer import HybridDeviceOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.layer_wise_optimizer import LayerWiseDistributedOptimizer
from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params, FP32Optimizer

from .operators import Shard
from .quantization import is_quantized, recipes_of_modules

# What Transformer Engine's `FusedAdam` needs to train with state of few bits, until its own releases have it.
#
# Checked against 2.11.0 and 2.20.2. Changed are attributes of one optimizer, never of the class.

Rescale = Callable[[str, torch.Tensor, torch.Tensor, torch.Tensor], None]


def guard_scales(fused: Any) -> None:
    """Let moments become zero that are too small for a scale; a second call does nothing.

    `FusedAdam` scales each tensor so that its largest value fills the format, and divides by that scale. The moments of
    an expert that no token has reached are zero: for fp8 the quotient is infinite, and zero times infinity makes the
    moments NaN, and in the next step the weights, while the loss is finite still. Without tokens for hundreds of
    iterations first moments decay below 1e-34, where it is infinite for fp16 too. Other values stay to the bit.
    """
    if "_apply_scale" in vars(fused):
        return
    rescale: Rescale = fused._apply_scale
    largest_of = {torch.float16: torch.finfo(torch.float16).max / 2, torch.uint8: 448.0}

    def guarded(name: str, unscaled: torch.Tensor, scaled: torch.Tensor, scale: torch.Tensor) -> None:
        quantized = is_quantized(scaled)
        if not quantized and scaled.dtype is not torch.float16:
            rescale(name, unscaled, scaled, scale)
            return
        largest = largest_of[torch.uint8 if quantized else torch.float16]
        lowest, highest = torch.aminmax(unscaled)
        torch.div(torch.maximum(-lowest, highest), torch.full_like(scale, largest), out=scale)
        factor = scale.reciprocal()
        is_usable = torch.isfinite(factor) & (scale > 0)
        if quantized:
            scaled._quantizer.scale.copy_(torch.where(is_usable, factor, 1.0))
            scaled.copy_(unscaled)
        else:
            unscaled.mul_(torch.where(is_usable, factor, 0.0))
            scaled.copy_(unscaled)

    fused._apply_scale = guarded


def level_scales(optimizer: Any, weights: Sequence[Any]) -> None:
    """After each step: eight-bit weights have the scale they were cast with, on all ranks; a second call does nothing.

    `FusedAdam` writes `_scale_inv` of the shards that a rank steps, and only their bytes are gathered. The other
    data-parallel ranks would read them with the scale of the initialization for ever, and train visibly worse. All
    ranks know the scale: largest values are reduced over them, as `tp_only_amax_red` is refused.

    Args:
        optimizer: The chain of optimizers, whose `step_with_ready_grads` all ranks call in each step.
        weights: Float8Tensors whose masters `FusedAdam` keeps, of all ranks.
    """
    if not weights or "step_with_ready_grads" in vars(optimizer):
        return
    step: Callable[[], bool] = optimizer.step_with_ready_grads

    def leveled() -> bool:
        updated = step()
        for one in weights if updated else ():
            one._scale_inv.copy_(one._quantizer.scale.reciprocal().view(one._scale_inv.shape))
        return updated

    optimizer.step_with_ready_grads = leveled


def keep_masters_in_fp8(fused: Any) -> None:
    """Let masters be kept in fp8 (E4M3), each with a scale, as FP8-LM does; before any state is there.

    The class takes fp32 and fp16 only; what is behind that check takes eight bits for masters as it does for moments.
    """
    fused.master_weight_dtype = fused.name_to_dtype_map["master_param"] = torch.uint8


@torch.no_grad()
def reload_masters(fused: Any) -> None:
    """Make the masters those of the compute weights, which Megatron-Core leaves to `FusedAdam` and that to nobody."""
    for group in fused.param_groups:
        for parameter in group["params"]:
            if fused.state[parameter]["master_param"].dtype is torch.int16:
                fused.state[parameter]["master_param"].zero_()
            else:
                fused.set_scaled_state(parameter, "master_param", parameter.detach().float())


MASTER_OF_FUSED = "master_param"
"""What `FusedAdam` calls master weights that it keeps itself, among the state of a shard of compute weights."""


class SteppedTensor(NamedTuple):
    """A tensor that an inner optimizer steps: what it is the master weights of, and the dtype of its gradient."""

    shard: Shard
    main: torch.Tensor
    gradient_dtype: torch.dtype

    @property
    def gradient(self) -> torch.Tensor | None:
        """What the optimizer reads: `decoupled_grad` where its dtype need not be that of the parameter."""
        decoupled: torch.Tensor | None = getattr(self.main, "decoupled_grad", None)
        return self.main.grad if decoupled is None else decoupled


def holds_masters(member: MegatronOptimizer) -> bool:
    """Whether the inner optimizer keeps master weights itself, and steps shards of compute weights."""
    return bool(getattr(member.config, "use_precision_aware_optimizer_no_fp8_or_ds_fp8", False))


def scale_of(inner: Any, main: torch.Tensor, field: str) -> torch.Tensor | None:
    """By what `FusedAdam` multiplies a field of the state of `main` whenever it reads it: fp32 of one element.

    It writes a scale down for every field that is not fp32, but reads those of fp16 only: a Float8Tensor has its own.

    Args:
        inner: The `FusedAdam`.
        main: The tensor that it steps.
        field: The name of the state, such as `exp_avg`.

    Returns:
        None where it multiplies by nothing.
    """
    if inner.state[main][field].dtype is not torch.float16:
        return None
    scale: torch.Tensor | None = getattr(inner, "_scales", {}).get(main, {}).get(field)
    return scale


def optimizer_members(optimizer: MegatronOptimizer) -> list[MegatronOptimizer]:
    """The optimizers that a chain is made of, in whatever chains they lie, without the stubs of ranks that train
    nothing."""
    return [member for member, _ in members_by_layer(optimizer) if not member.is_stub_optimizer]


def members_by_layer(optimizer: MegatronOptimizer, by_layer: bool = False) -> Iterator[tuple[MegatronOptimizer, bool]]:
    """All optimizers of a chain, and whether each steps whole parameters that no other data-parallel rank steps.

    Args:
        optimizer: A chain, which may have others in it, or one alone.
        by_layer: Whether it lies in a chain that does so.
    """
    chained = getattr(optimizer, "chained_optimizers", None)
    if chained is None:
        yield optimizer, by_layer
        return
    for member in chained:
        yield from members_by_layer(member, by_layer or isinstance(optimizer, LayerWiseDistributedOptimizer))


def layer_wise_chains(optimizer: MegatronOptimizer) -> list[LayerWiseDistributedOptimizer]:
    """The chains in a chain, or it itself, whose members step whole parameters, and which gather these themselves."""
    members = (optimizer, *getattr(optimizer, "chained_optimizers", ()))
    return [member for member in members if isinstance(member, LayerWiseDistributedOptimizer)]


@torch.no_grad()
def allocate_optimizer_state(optimizer: MegatronOptimizer) -> None:
    """Allocate moments and step counts that do not exist yet, as the first step would; nothing else changes.

    Core's own allocations do not serve torch's Adam: `init_state_fn` leaves out the step count, and
    `_init_optimizer_states_with_dummy_values` takes a step, which counts and decays weights. For the fused Adams of
    Apex and Transformer Engine, which count steps in their groups, `init_state_fn` is right, but where the latter
    keeps master weights too: there core passes fewer arguments than Transformer Engine from 2.1 on takes.

    Takes what `state_tensors` takes: optimizers alone or chained, distributed or not.
    """
    for member in optimizer_members(optimizer):
        if isinstance(member.optimizer, HybridDeviceOptimizer):
            for adam in member.optimizer.sub_optimizers:
                allocate_adam(adam)
            member.optimizer._sync_sub_optimizers_state_to_hdo()
        elif isinstance(member.optimizer, torch.optim.Adam | torch.optim.AdamW):
            allocate_adam(member.optimizer)
        elif member.config.use_precision_aware_optimizer:
            _allocate_precision_aware(member.optimizer)
        elif member.init_state_fn is not None:
            member.init_state_fn(member.optimizer, member.config)
    level_scales(optimizer, [weights for member in optimizer_members(optimizer) for weights in _left_to_fused(member)])


def _left_to_fused(member: MegatronOptimizer) -> list[torch.nn.Parameter]:
    """Weights of eight bits, of all data-parallel ranks, that `FusedAdam` casts in its step."""
    if not holds_masters(member):
        return []
    return [weights for buffer in member.buffers for weights in buffer.params if is_quantized(weights)]


def allocate_adam(adam: torch.optim.Optimizer) -> None:
    """As `allocate_optimizer_state`, for one of torch's."""
    counted: set[int] = set()
    for group in adam.param_groups:
        for parameter in group["params"]:
            state = adam.state[parameter]
            if "step" not in state:
                state["step"] = step_count(parameter, group)
            elif state["step"].data_ptr() in counted:
                # After core loaded a state, all parameters share one tensor, which each of them would count up.
                state["step"] = state["step"].clone()
            counted.add(state["step"].data_ptr())
            moments = ("exp_avg", "exp_avg_sq", *(("max_exp_avg_sq",) if group["amsgrad"] else ()))
            for name in moments:
                if name not in state:
                    state[name] = torch.zeros_like(parameter, memory_format=torch.preserve_format)


def _allocate_precision_aware(fused: Any) -> None:
    """As the first step of Transformer Engine's `FusedAdam` does it, and guarded from then on."""
    guard_scales(fused)
    for group in fused.param_groups:
        for parameter in group["params"]:
            if not fused.state[parameter]:
                remainders = fused.store_param_remainders and parameter.dtype is torch.bfloat16
                fused.initialize_state(parameter, remainders)


def step_count(parameter: torch.Tensor, group: dict[str, Any]) -> torch.Tensor:
    """A step count of 0. Adam compares dtype and device of the count with what its kernels want.

    Args:
        parameter: The tensor that is stepped, on whose device kernels may want the count.
        group: Its parameter group, with `capturable` and `fused`.
    """
    on_device = group["capturable"] or group["fused"]
    wide = torch.get_default_dtype() is torch.float64 and not group["fused"]
    dtype = torch.float64 if wide else torch.float32
    return torch.zeros((), dtype=dtype, device=parameter.device if on_device else "cpu")


# The step counts of torch's Adam while core loads a checkpoint: without Transformer Engine and Apex it loses them.
#
# Core (0.17 to 0.19) keeps one count in checkpoints, in the groups of an optimizer, and asks an optimizer that has made
# no step for it in vain. What it loads it hands to all weights as one tensor, which torch's Adam would count up once
# for each of them; its distributed optimizer then overwrites that with the count from before loading
# (`dp_reshardable`), or fails for want of it (`fully_reshardable`). So counts are out of the way while core loads, and
# come back afterwards.


def torch_adams(optimizer: MegatronOptimizer) -> list[torch.optim.Optimizer]:
    """Those inside Megatron's optimizer; none where fused ones of Apex or Transformer Engine serve."""
    return [member.optimizer for member in _members_with_adam(optimizer)]


def allocate_step_counts(optimizer: MegatronOptimizer) -> None:
    """Give each weight the state of Adam before its first step: core cannot save where no step was made yet, as with
    fp16 whose first iterations are all skipped."""
    for adam in torch_adams(optimizer):
        allocate_adam(adam)


@contextmanager
def loading_step_counts(optimizer: MegatronOptimizer) -> Iterator[None]:
    """A block in which core loads a checkpoint into an optimizer, whether that has made a step or not."""
    allocate_step_counts(optimizer)
    handles = set_steps_aside_in_loads(optimizer)
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
        separate_steps(optimizer)


def set_steps_aside_in_loads(optimizer: MegatronOptimizer) -> list[RemovableHandle]:
    """From here on core can load; `separate_steps` has to follow. For an optimizer whose state is allocated."""
    handles = []
    for member in _members_with_adam(optimizer):
        handles.append(member.optimizer.register_load_state_dict_pre_hook(_count_from_zero))
        if isinstance(member, DistributedOptimizer):
            handles.append(member.optimizer.register_load_state_dict_post_hook(_set_steps_aside))
            handles.append(member.optimizer.register_state_dict_pre_hook(_put_steps_back))
    return handles


def separate_steps(optimizer: MegatronOptimizer) -> None:
    """Give every weight its own step count after core loaded a state; Adam refuses to step before that."""
    for adam in torch_adams(optimizer):
        _put_steps_back(adam)
        for group in adam.param_groups:
            group.pop("step", None)  # as in a job that has loaded nothing


def _members_with_adam(optimizer: MegatronOptimizer) -> list[MegatronOptimizer]:
    members = optimizer_members(optimizer)
    return [member for member in members if isinstance(member.optimizer, torch.optim.Adam | torch.optim.AdamW)]


def _set_steps_aside(adam: torch.optim.Optimizer) -> None:
    """Move the step counts from the weights to their group, which is where core keeps them in checkpoints."""
    for group in adam.param_groups:
        for parameter in group["params"]:
            group["step"] = float(adam.state[parameter].pop("step"))


def _put_steps_back(adam: torch.optim.Optimizer) -> None:
    """Give a step count to every weight that has none."""
    for group in adam.param_groups:
        for parameter in group["params"]:
            state = adam.state[parameter]
            if "step" not in state:
                state["step"] = step_count(parameter, group).fill_(group["step"])


def _count_from_zero(adam: torch.optim.Optimizer, state_dict: dict[str, Any]) -> None:
    """Supply the step count of a checkpoint from before the first step: core leaves it out where it is zero."""
    for state in state_dict["state"].values():
        state.setdefault("step", torch.tensor(0.0, dtype=torch.float32))


# What of a model and its optimizer is known, so that their whole state can be enumerated.

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
    tp, recipes = config.tensor_model_parallel_size, recipes_of_modules(config)
    own = [config.fp8 and config.fp8_recipe, config.fp4 and config.fp4_recipe]
    own += [one.get(f"fp{bits}_quantization_recipe") for bits in (8, 4) for one in recipes]
    # Without expert parallelism core reduces the gradients of experts with the rest's, over other tensor ranks.
    astray = config.expert_model_parallel_size == 1 and (config.expert_tensor_parallel_size or tp) != tp
    found = {
        "quantizers of its own": "custom" in own or getattr(config, "use_kitchen", False),
        "weights that modules quantize by a recipe of their own": any(
            one.get(f"fp{bits}_param") for bits in (8, 4) for one in recipes
        ),
        # Their state would be taken for scales that change in size with the first pass.
        "delayed scaling with recipes of modules": (bool(recipes) and config.fp8 and config.fp8_recipe == "delayed"),
        "Megatron-FSDP": wrapping.use_megatron_fsdp,
        # Their scales are in no module of the model.
        "operations that Transformer Engine fuses with delayed scaling": (
            getattr(config, "use_transformer_engine_op_fuser", False) and config.fp8 and config.fp8_recipe == "delayed"
        ),
        "layers that predict further tokens on another stage than the last": getattr(config, "mtp_standalone", False),
        # Names and shards of parameters would be those of another rank.
        "weights that ranks share out and gather (--tensor-parallel-num-weight-shards)": any(
            (getattr(config, f"{of}gtp_weight_remat_size", None) or 1) > 1 for of in ("", "expert_")
        ),
        # It rounds weights apart from their masters, of which a restore makes the cast.
        "qk_clip of weights that have masters": getattr(config, "qk_clip", False) and (config.bf16 or config.fp16),
        # Routers draw it once, and the process keeps it.
        "moe_router_force_biased below 0": (getattr(config, "moe_router_force_biased", None) or 0) < 0,
        "an expert-tensor-parallel size of its own and no expert parallelism": bool(config.num_moe_experts) and astray,
    }
    yield from (reason for reason, applies in found.items() if applies)


def unsupported_optimizers(optimizer: MegatronOptimizer, config: Any) -> Iterator[str]:
    """Which optimizers of a chain keep state that is not known here.

    Args:
        optimizer: The chain, or one alone.
        config: Core's configuration of the model.

    Yields:
        What cannot be protected, as a noun.
    """
    for member in optimizer_members(optimizer):
        inner = type(member.optimizer)
        if isinstance(member.optimizer, HybridDeviceOptimizer):
            yield from _unsupported_offloading(member)
        elif not any(base.__name__ in _KNOWN for base in inner.__mro__):
            yield f"the optimizer {inner.__name__}"
        if type(member) not in (DistributedOptimizer, Float16OptimizerWithFloat16Params, FP32Optimizer):
            yield f"the optimizer {type(member).__name__}"
        # Data-parallel ranks then scale the parts of a weight that they step apart: `level_scales` has not one scale.
        if getattr(config, "tp_only_amax_red", False) and _left_to_fused(member):
            yield "tp_only_amax_red and eight-bit weights whose masters FusedAdam keeps"


def _unsupported_offloading(member: MegatronOptimizer) -> Iterator[str]:
    """Masters and moments lie on the host, in the state of an Adam of torch for each parameter, and stay there. What
    lies on the device beside them may count steps in groups that are nobody's but its own."""
    if not holds_masters(member):
        yield "an optimizer on the host without --use-precision-aware-optimizer"
    for inner in member.optimizer.sub_optimizers:
        if not isinstance(inner, torch.optim.Adam | torch.optim.AdamW):
            yield f"the optimizer {type(inner).__name__} beside one on the host (use --optimizer-offload-fraction 1.0)"
    if _left_to_fused(member):
        yield "eight-bit weights whose masters lie on the host"
