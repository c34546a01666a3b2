"""What the precision-aware optimizer cannot be combined with, each with the reason and what to set instead."""

from __future__ import annotations

from collections.abc import Iterator

from megatron.pretrain.config import PretrainConfig

_STATE = ("main_params_dtype", "exp_avg_dtype", "exp_avg_sq_dtype")


def precision_aware(config: PretrainConfig) -> Iterator[str]:
    """Checked against Megatron-Core 0.16.1 with Transformer Engine 2.11.0, and 0.19.2 with 2.20.2."""
    flags, layout = config.optimizer, config.parallel
    if not flags.use_precision_aware_optimizer:
        given = [
            f"--{name.replace('_', '-')} {getattr(flags, name)}"
            for name in ("main_grads_dtype", *_STATE)
            if getattr(flags, name) != "fp32"
        ] + ["--fp8-main-params"] * flags.fp8_main_params
        if given:
            yield f"{given[0]} has an effect only with --use-precision-aware-optimizer"
        return
    if not layout.use_distributed_optimizer:
        yield (
            "--use-precision-aware-optimizer needs --use-distributed-optimizer: in Megatron-Core no other optimizer"
            " leaves master weights to FusedAdam"
        )
    if config.model.transformer_impl != "transformer_engine":
        yield (
            "--use-precision-aware-optimizer needs Transformer Engine, whose FusedAdam it is: give --transformer-impl"
            " transformer_engine"
        )
    if not (flags.fp16 or flags.bf16):
        yield (
            "--use-precision-aware-optimizer needs --bf16 or --fp16: weights of fp32 are their own masters, and"
            " FusedAdam would keep a second copy that nothing reads"
        )
    if flags.fp8_main_params and flags.main_params_dtype != "fp32":
        yield f"--fp8-main-params and --main-params-dtype {flags.main_params_dtype} exclude each other: give one"
    if flags.main_grads_dtype == "bf16" and flags.accumulate_allreduce_grads_in_fp32:
        yield "--main-grads-dtype bf16 and --accumulate-allreduce-grads-in-fp32 exclude each other: give one"
    if flags.main_grads_dtype == "bf16" and not flags.bf16:
        yield "--main-grads-dtype bf16 needs --bf16: gradients are reduced in the dtype of the weights or in fp32"
    if config.checkpoint.dist_ckpt_optim_fully_reshardable:
        yield (
            "--dist-ckpt-optim-fully-reshardable saves optimizer state in fp32, from which scales do not come back to"
            " the bit: leave it out with --use-precision-aware-optimizer, whose state is saved as it is"
        )
    if flags.fp16 and not flags.accumulate_allreduce_grads_in_fp32:
        yield (
            "--use-precision-aware-optimizer takes gradients of fp32 and bf16, and --fp16 accumulates them in fp16: add"
            " --accumulate-allreduce-grads-in-fp32"
        )
    yield from _with_weights_in_fp8(config)


def _with_weights_in_fp8(config: PretrainConfig) -> Iterator[str]:
    """What core and FusedAdam cannot do with weights of eight bits, found by running it."""
    flags, weights = config.optimizer, config.fp8
    if not weights.fp8_param_gather:
        return
    low = flags.fp8_main_params or flags.main_params_dtype != "fp32"
    if weights.fp8_recipe == "delayed" and not low:
        yield (
            "--fp8-param-gather with --fp8-recipe delayed and --main-params-dtype fp32: Megatron-Core lets FusedAdam"
            " keep masters as remainders of bf16 weights, which weights in eight bits do not have; give"
            " --main-params-dtype fp16, or leave out --use-precision-aware-optimizer"
        )
    if weights.fp8_recipe != "delayed" and low:
        masters = "--fp8-main-params" if flags.fp8_main_params else f"--main-params-dtype {flags.main_params_dtype}"
        yield (
            f"--fp8-param-gather with --fp8-recipe {weights.fp8_recipe} and {masters}: only with --fp8-recipe delayed"
            " does Megatron-Core leave the masters of weights in eight bits to FusedAdam; use that, or fp32 masters"
        )
