"""Flags that differ from those of what a job continues from: the flag holds, or a line says which value does.

Megatron-LM (0.17 to 0.19) loads the settings of the optimizer's groups with its state: --adam-beta2 or --adam-eps of a
resumed job has no effect, and with another --lr it finds no group that fits. Memory and storage have no such settings:
there the flags hold, and here they do in checkpoints as well. Of the learning rate's schedule Megatron-LM's own flags
decide: --override-opt_param-scheduler, --use-checkpoint-opt_param-scheduler, or neither, where both have to agree.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, fields
from functools import cache, partial
from typing import Any

from megatron.core.optimizer import OptimizerConfig
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

from ..core_versions.training import replaced
from ..errors import UsageError
from ..megatron_state.optimizer_state import members_by_layer
from ..megatron_state.trainer_state import load_scheduler
from ..ports import Json

# Which flags of Megatron-LM shape what an iteration computes: where it is run again, they have to be as they were.

_SHAPES = """
seq_length micro_batch_size global_batch_size seed data_parallel_random_init split mock_data dataloader_type sft
reset_position_ids reset_attention_mask eod_mask_loss vocab_size make_vocab_size_divisible_by max_position_embeddings
position_embedding_type rope_scaling_factor use_rope_scaling rotary_seq_len_interpolation_factor num_experts
untie_embeddings_and_output_weights swiglu squared_relu openai_gelu quick_geglu group_query_attention
bias_swiglu_fusion bias_gelu_fusion fp16_lm_cross_entropy accumulate_allreduce_grads_in_fp32 grad_reduce_in_bf16
ddp_average_in_collective ddp_reduce_scatter_with_fp32_accumulation freeze_all_layers freeze_experts fp8_main_params
lr_decay_style lr_warmup_init start_weight_decay end_weight_decay weight_decay_incr_style override_opt_param_scheduler
use_checkpoint_opt_param_scheduler
""".split()
"""Where data lie may change; a loss that differs from the recorded one shows data that are others."""
_ONLY_TOLD = {
    "barrier_with_L1_time", "config_logger_dir", "log_max_attention_logit", "log_num_zeros_in_grad",
    "moe_per_layer_logging",
}  # fmt: skip
"""Of the settings of core, those that change what is said of an iteration."""


def shaping_flags(args: Any) -> dict[str, Json]:
    """Those of this job that are not what core has by default."""
    given = {name: _plain(getattr(args, name)) for name in _defaults() if hasattr(args, name)}
    return {name: value for name, value in given.items() if value != _defaults()[name]}


def refuse_other_flags(recorded: Mapping[str, Any], given: Mapping[str, Any]) -> None:
    """Iterations that are run again must be run as they were.

    Args:
        recorded: The flags of the run that is repeated, of `shaping_flags`.
        given: Those of this run.

    Raises:
        UsageError: Flags that change the iterations differ.
    """
    changed = [f"{flag} was {was} and is {now}" for flag, was, now in changed_flags(recorded, given, _defaults())]
    if changed:
        raise UsageError(
            f"iterations have to be run again as they were, but {'; '.join(changed)}: start with the flags of before"
            " until a checkpoint is saved, and change them then"
        )


_OF_STATE = (
    *("num_layers", "hidden_size", "num_experts", "mtp_num_layers", "mtp_use_repeated_layer", "optimizer"),
    *("bf16", "fp16", "main_params_dtype", "exp_avg_dtype", "exp_avg_sq_dtype"),
)
"""What decides which tensors a state has, and their dtypes: that of another model or optimizer fits none of them."""
_OF_ORDER = "moe_token_dispatcher_type", "moe_flex_dispatcher_backend", "moe_enable_deepep"
"""What decides in which order tokens are added up: a replay with another dispatcher comes to other bits."""


def changed_model(recorded: Mapping[str, Any], given: Mapping[str, Any], *, replays: bool) -> list[str]:
    """Flags of another model or another optimizer than those of a state, each with both values.

    Args:
        recorded: What that state says of its loop.
        given: The flags of this run, of `shaping_flags`.
        replays: Whether iterations have to be run again behind that state.
    """
    flags, names = recorded.get("flags"), _OF_STATE + _OF_ORDER * replays
    found = changed_flags(flags, given, names) if isinstance(flags, Mapping) else []
    return [f"{flag} was {was} and is {now}" for flag, was, now in found]


def changed_flags(
    recorded: Mapping[str, Any], given: Mapping[str, Any], names: Iterable[str]
) -> list[tuple[str, Json, Json]]:
    """Flags that differ: the flag, its value then and now.

    Args:
        recorded: The settings then; one that is missing had core's default.
        given: The settings now.
        names: The settings to compare.
    """
    default = _defaults()
    pairs = ((name, recorded.get(name, default.get(name)), given.get(name, default.get(name))) for name in names)
    return [(f"--{name.replace('_', '-')}", was, now) for name, was, now in pairs if was != now]


@cache
def _defaults() -> dict[str, Json]:
    """The value that is not written down, by name of the flag in `args`."""
    settings = {
        field.name: None if field.default is MISSING else _plain(field.default)
        for kind in (TransformerConfig, MLATransformerConfig, OptimizerConfig)
        for field in fields(kind)
        if field.name not in _ONLY_TOLD
    }
    return dict[str, Json].fromkeys(_SHAPES) | settings


def _plain(value: Any) -> Json:
    """As it is read back from JSON."""
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    if value is None or isinstance(value, bool | int | str) or (isinstance(value, float) and math.isfinite(value)):
        return value
    return str(getattr(value, "name", value))


TOLD = (
    "global_batch_size lr min_lr decoupled_lr decoupled_min_lr lr_decay_style lr_warmup_init weight_decay"
    " start_weight_decay end_weight_decay weight_decay_incr_style adam_beta1 adam_beta2 adam_eps sgd_momentum clip_grad"
    " seq_length seed split cuda_graph_impl cuda_graph_modules cuda_graph_scope"
    " moe_token_dispatcher_type moe_flex_dispatcher_backend moe_enable_deepep"
).split()
"""What a user may have meant to change, and what changes the course of training unsaid."""
_SCHEDULED = ("max_lr", "min_lr", "start_wd", "end_wd")
"""Of a group, what the scheduler reads: by core 0.18 and later a part of what tells groups apart."""
_TELLS_APART = ("wd_mult", "lr_mult", "optimizer", "is_expert_parallel", "is_decoupled_lr")
_STATE = ("params", "lr", "weight_decay", "step", *_SCHEDULED, *_TELLS_APART)
"""Of a group, what is no setting of the optimizer itself."""


@contextlib.contextmanager
def flags_hold(optimizer: Any, scheduler: Any) -> Iterator[None]:
    """A block in which Megatron-LM loads a checkpoint, and the settings that flags give stay.

    Args:
        optimizer: The optimizer that is loaded, or None.
        scheduler: The scheduler that is loaded, or None.

    Raises:
        UsageError: Schedules do not agree.
    """
    members = [] if optimizer is None else [member for member, _ in members_by_layer(optimizer)]
    before = [[_settings(group) for group in member.param_groups] for member in members]
    with contextlib.ExitStack() as stack:
        for member in members:
            loading = partial(_load, member, member.load_state_dict)
            stack.enter_context(replaced(member, load_state_dict=loading))
        if scheduler is not None:
            loading = partial(load_scheduler, scheduler, source="checkpoint")
            stack.enter_context(replaced(scheduler, load_state_dict=loading))
        yield
    for member, groups in zip(members, before, strict=True):
        for group, settings in zip(member.param_groups, groups, strict=True):
            group.update(settings)


def told(recorded: Mapping[str, Any], given: Mapping[str, Any], *, keeps_schedule: bool) -> str:
    """What differs, for a log line; empty where nothing does.

    Args:
        recorded, given: As `shaping_flags`, of the start that made the state, and of this one.
        keeps_schedule: Whether --use-checkpoint-opt_param-scheduler was given.
    """
    lines = []
    for flag, was, now in changed_flags(recorded, given, TOLD):
        if keeps_schedule and flag in ("--lr", "--min-lr"):
            lines.append(f"{flag} stays {was} and is not {now}, for --use-checkpoint-opt_param-scheduler was given")
        else:
            lines.append(f"{flag} was {was} and is {now}")
    return "; ".join(lines)


def _load(member: Any, load: Callable[[Any], Any], state_dict: Any) -> Any:
    """Into one optimizer, from groups that are told apart by what its own are."""
    saved = _groups_of(state_dict)
    for group in member.param_groups:
        same = [other for other in saved if _key(other) == _key(group)]
        alike = [other for other in member.param_groups if _key(other) == _key(group)]
        if len(same) == len(alike) == 1:
            for name in _SCHEDULED:
                same[0].pop(name, None)
            same[0].update({name: group[name] for name in _SCHEDULED if name in group})
    return load(state_dict)


def _groups_of(state_dict: Any) -> Sequence[dict[str, Any]]:
    for key in ("optimizer", "optimizer_state_dict"):
        if isinstance(state_dict.get(key), dict):
            state_dict = state_dict[key]
    groups: Sequence[dict[str, Any]] = state_dict.get("param_groups", ())
    return groups


def _key(group: Mapping[str, Any]) -> tuple[Any, ...]:
    """NeMo calls the factors `pre_lr_mult` and `pre_wd_mult`."""
    return tuple(group.get(name, group.get(f"pre_{name}")) for name in _TELLS_APART)


def _settings(group: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in group.items() if name.removeprefix("pre_") not in _STATE}
