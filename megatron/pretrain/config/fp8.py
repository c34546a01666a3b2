"""Flags of eight-bit training through Transformer Engine, with Megatron's names and defaults, and what they exclude."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from megatron.core.dist_checkpointing.moe.config import flag

if TYPE_CHECKING:
    from megatron.pretrain.config import PretrainConfig
    from megatron.pretrain.config.derived import Environment

_IN_BLOCKS = ("mxfp8", "blockwise")


@dataclass(frozen=True)
class Fp8Config:
    """Products of linear layers, and their weights, in eight bits."""

    fp8_format: str | None = flag(
        None,
        "multiply in eight bits: E4M3 throughout, or E4M3 forward and E5M2 backward",
        choices=("e4m3", "hybrid"),
    )
    fp8_recipe: str = flag(
        "delayed",
        "where scales come from: the largest values of iterations before, or of the tensor itself; mxfp8 and blockwise"
        " need a GPU",
        choices=("tensorwise", "delayed", *_IN_BLOCKS),
    )
    fp8_margin: int = flag(0, "with delayed scaling: scales are divided by 2 to the power of this", minimum=0)
    fp8_amax_history_len: int = flag(1, "with delayed scaling: how many largest values are kept", minimum=1)
    fp8_amax_compute_algo: str = flag(
        "most_recent", "with delayed scaling: which of them counts", choices=("most_recent", "max")
    )
    fp8_param_gather: bool = flag(False, "keep the weights of linear layers in eight bits, and gather them so")
    first_last_layers_bf16: bool = flag(False, "compute the first and the last layers in bf16")
    num_layers_at_start_in_bf16: int = flag(1, "with --first-last-layers-bf16: so many first layers", minimum=0)
    num_layers_at_end_in_bf16: int = flag(1, "with --first-last-layers-bf16: so many last layers", minimum=0)


def fp8(config: PretrainConfig, _: Environment) -> Iterator[str]:
    """What cannot work, each as a sentence."""
    flags = config.fp8
    if flags.fp8_format is None:
        for field in dataclasses.fields(flags):
            if getattr(flags, field.name) != field.default:
                yield f"--{field.name.replace('_', '-')} has an effect only with --fp8-format"
        return
    if config.model.transformer_impl != "transformer_engine":
        yield f"--fp8-format {flags.fp8_format} needs Transformer Engine: give --transformer-impl transformer_engine"
    if not config.optimizer.bf16:
        yield f"--fp8-format {flags.fp8_format} needs --bf16: what is not in eight bits is in bf16"
    yield from _recipe(config)
    yield from _sizes(config)
    yield from _checkpoints(config)


def _recipe(config: PretrainConfig) -> Iterator[str]:
    flags, on_cpu = config.fp8, config.parallel.device == "cpu"
    delayed = flags.fp8_recipe == "delayed"
    if flags.fp8_recipe in _IN_BLOCKS and on_cpu:
        yield f"--fp8-recipe {flags.fp8_recipe} has no kernels for --device cpu; use delayed or tensorwise"
    if flags.fp8_recipe in _IN_BLOCKS and flags.fp8_param_gather:
        yield (
            f"--fp8-recipe {flags.fp8_recipe} with --fp8-param-gather keeps each weight twice, by rows and by columns,"
            " which cannot be protected; use delayed or tensorwise, or leave out --fp8-param-gather"
        )
    if flags.fp8_param_gather and not config.parallel.use_distributed_optimizer:
        yield "--fp8-param-gather needs --use-distributed-optimizer"
    if flags.first_last_layers_bf16 and delayed:
        yield "--first-last-layers-bf16 cannot be combined with --fp8-recipe delayed; use tensorwise"
    if not flags.first_last_layers_bf16:
        for name in ("num_layers_at_start_in_bf16", "num_layers_at_end_in_bf16"):
            if getattr(flags, name) != 1:
                yield f"--{name.replace('_', '-')} has an effect only with --first-last-layers-bf16"
    for name, default in (("fp8_margin", 0), ("fp8_amax_history_len", 1), ("fp8_amax_compute_algo", "most_recent")):
        if not delayed and getattr(flags, name) != default:
            yield f"--{name.replace('_', '-')} has an effect only with --fp8-recipe delayed"


def _checkpoints(config: PretrainConfig) -> Iterator[str]:
    flags, checkpoint = config.fp8, config.checkpoint
    if checkpoint.dist_ckpt_optim_fully_reshardable:
        yield (
            "--dist-ckpt-optim-fully-reshardable leaves out scales: leave the flag out with --fp8-format, whose state"
            " is saved as it is"
        )
    if flags.fp8_param_gather and checkpoint.load and (checkpoint.finetune or not checkpoint.load_optim):
        yield (
            f"--fp8-param-gather with {'--finetune' if checkpoint.finetune else '--no-load-optim'}: masters would be"
            " taken from weights of eight bits; leave out --fp8-param-gather"
        )


def _sizes(config: PretrainConfig) -> Iterator[str]:
    """Transformer Engine's products in eight bits take sizes in multiples of 16, and rows in multiples of 8."""
    model, training, layout = config.model, config.training, config.parallel
    tp = layout.tensor_model_parallel_size
    sizes = {
        "--hidden-size": model.hidden_size,
        "--ffn-hidden-size": model.ffn_hidden_size and model.ffn_hidden_size // tp,
        "--moe-ffn-hidden-size": config.moe.moe_ffn_hidden_size
        and config.moe.moe_ffn_hidden_size // (layout.expert_tensor_parallel_size or tp),
    }
    for name, size in sizes.items():
        if size is not None and size % 16:
            yield f"--fp8-format needs sizes of layers in multiples of 16, and {name} gives a rank {size}"
    rows = (training.seq_length or 0) * (training.micro_batch_size or 0) // layout.context_parallel_size // tp
    if rows % 8:
        yield (
            f"--fp8-format needs rows in multiples of 8, and --seq-length {training.seq_length} with --micro-batch-size"
            f" {training.micro_batch_size} gives a rank {rows}"
        )
