"""Which flags of Megatron-LM shape what an iteration computes: where it is run again, they have to be as they were."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, fields
from functools import cache
from typing import Any

from megatron.core.optimizer import OptimizerConfig
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

from ..errors import UsageError
from ..ports import Json

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
    """Iterations that are run again must be run as they were. Raises UsageError for flags that change them."""
    changed = [f"{flag} was {was} and is {now}" for flag, was, now in changed_flags(recorded, given, _defaults())]
    if changed:
        raise UsageError(
            f"iterations have to be run again as they were, but {'; '.join(changed)}: start with the flags of before"
            " until a checkpoint is saved, and change them then"
        )


def changed_flags(
    recorded: Mapping[str, Any], given: Mapping[str, Any], names: Iterable[str]
) -> list[tuple[str, Json, Json]]:
    """Those of `names` that differ: the flag, its value then and now."""
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
