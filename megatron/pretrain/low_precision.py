"""The precision-aware optimizer in the loop of Megatron-LM: masters of eight bits, and what it does not go with."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

import torch

from megatron.pretrain.errors import InvalidInput


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add what Megatron-LM has no flag for."""
    parser.add_argument(
        "--fp8-main-params",
        action="store_true",
        default=None,
        help="keep master weights in fp8 (E4M3), each with a scale; with --use-precision-aware-optimizer",
    )


def check(args: Any) -> None:
    """Judge the flags of a job before it begins.

    Args:
        args: Of Megatron-LM, which has checked them itself.

    Raises:
        InvalidInput: Some do not go together; a sentence for each reason.
    """
    if wrong := "; ".join(refusals(args)):
        raise InvalidInput(wrong)


def refusals(args: Any) -> Iterator[str]:
    """A sentence for each reason why state cannot be kept in few bits as these flags say, with what to give instead.

    Checked against Megatron-Core 0.19.2 with Transformer Engine 2.20.2.

    Args:
        args: Of Megatron-LM.
    """
    in_blocks = args.fp8_param_gather and args.fp8_recipe == "mxfp8"
    if in_blocks and not getattr(args, "reuse_grad_buf_for_mxfp8_param_ag", True):
        yield (
            "--fp8-param-gather with --fp8-recipe mxfp8 needs --reuse-grad-buf-for-mxfp8-param-ag: Megatron-Core has no"
            " place for such weights in its buffer of parameters"
        )
    in_fp8 = bool(getattr(args, "fp8_main_params", None))
    if not args.use_precision_aware_optimizer:
        if in_fp8:
            yield "--fp8-main-params has an effect only with --use-precision-aware-optimizer"
        return
    # Under --optimizer-cpu-offload core steps with Adams of torch, on the host.
    if args.transformer_impl != "transformer_engine" and not args.optimizer_cpu_offload:
        yield (
            "--use-precision-aware-optimizer needs Transformer Engine, whose FusedAdam it is: give --transformer-impl"
            " transformer_engine"
        )
    if not (args.fp16 or args.bf16):
        yield (
            "--use-precision-aware-optimizer needs --bf16 or --fp16: weights of fp32 are their own masters, and"
            " FusedAdam would keep a second copy that nothing reads"
        )
    if in_fp8 and args.main_params_dtype != torch.float32:
        yield "--fp8-main-params and --main-params-dtype fp16 exclude each other: give one"
    if args.main_grads_dtype == torch.bfloat16 and not args.bf16:
        yield "--main-grads-dtype bf16 needs --bf16: gradients are reduced in the dtype of the weights or in fp32"
    if args.dist_ckpt_optim_fully_reshardable:
        yield (
            "--dist-ckpt-optim-fully-reshardable saves optimizer state in fp32, from which scales do not come back to"
            " the bit: leave it out with --use-precision-aware-optimizer, whose state is saved as it is"
        )
    if args.fp16 and not args.accumulate_allreduce_grads_in_fp32:
        yield (
            "--use-precision-aware-optimizer takes gradients of fp32 and bf16, and --fp16 accumulates them in fp16: add"
            " --accumulate-allreduce-grads-in-fp32"
        )
    if args.fp8_param_gather:
        yield from _with_weights_in_fp8(args, in_fp8=in_fp8)


def _with_weights_in_fp8(args: Any, *, in_fp8: bool) -> Iterator[str]:
    """What core and FusedAdam cannot do with weights of eight bits, found by running it."""
    low = in_fp8 or args.main_params_dtype != torch.float32
    if args.fp8_recipe == "delayed" and not low:
        yield (
            "--fp8-param-gather with --fp8-recipe delayed and --main-params-dtype fp32: Megatron-Core lets FusedAdam"
            " keep masters as remainders of bf16 weights, which weights in eight bits do not have; give"
            " --main-params-dtype fp16, or leave out --use-precision-aware-optimizer"
        )
    if args.fp8_recipe != "delayed" and low:
        masters = "--fp8-main-params" if in_fp8 else "--main-params-dtype fp16"
        yield (
            f"--fp8-param-gather with --fp8-recipe {args.fp8_recipe} and {masters}: only with --fp8-recipe delayed"
            " does Megatron-Core leave the masters of weights in eight bits to FusedAdam; use that, or fp32 masters"
        )


@contextlib.contextmanager
def optimizers_in_few_bits() -> Iterator[None]:
    """A block in which the loop builds precision-aware optimizers with all their state, in the dtypes of the flags.

    Raises whatever `pretrain` raises, which is called inside.
    """
    from megatron.core.dist_checkpointing.moe.megatron_state.optimizer_state import (
        allocate_optimizer_state,
        keep_masters_in_fp8,
        optimizer_members,
    )
    from megatron.training import get_args, training

    build = training.get_megatron_optimizer

    @functools.wraps(build)
    def built(config: Any, *given: Any, **options: Any) -> Any:
        in_fp8 = get_args().fp8_main_params
        if in_fp8:  # the nearest that core takes
            config = dataclasses.replace(config, main_params_dtype=torch.float16)
        optimizer = build(config, *given, **options)
        if in_fp8:
            for member in optimizer_members(optimizer):
                keep_masters_in_fp8(member.optimizer)
        if config.use_precision_aware_optimizer:
            allocate_optimizer_state(optimizer)  # which guards its scales, also where nothing is protected
        return optimizer

    training.get_megatron_optimizer = built
    try:
        yield
    finally:
        training.get_megatron_optimizer = build
