"""The precision-aware optimizer in the loop of Megatron-LM: what its flags cannot be combined with."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from typing import Any

import pytest
import torch

from megatron.pretrain import low_precision
from megatron.pretrain.errors import InvalidInput

PLAIN = {
    "use_precision_aware_optimizer": False,
    "fp8_main_params": None,
    "transformer_impl": "transformer_engine",
    "bf16": True,
    "fp16": False,
    "main_params_dtype": torch.float32,
    "main_grads_dtype": torch.float32,
    "accumulate_allreduce_grads_in_fp32": True,
    "dist_ckpt_optim_fully_reshardable": False,
    "fp8_param_gather": False,
    "fp8_recipe": "delayed",
    "reuse_grad_buf_for_mxfp8_param_ag": False,
    "optimizer_cpu_offload": False,
}
"""Arguments of Megatron-LM as it has checked them."""
AWARE = {"use_precision_aware_optimizer": True}
IN_FP8 = AWARE | {"fp8_main_params": True}
IN_FP16 = AWARE | {"main_params_dtype": torch.float16}
WEIGHTS_IN_FP8 = {"fp8_param_gather": True}
TENSORWISE = {"fp8_param_gather": True, "fp8_recipe": "tensorwise"}
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"fp8_param_gather": True, "fp8_recipe": "mxfp8"}, "needs --reuse-grad-buf-for-mxfp8-param-ag"),
    ({"fp8_main_params": True}, "--fp8-main-params has an effect only with --use-precision-aware-optimizer"),
    (AWARE | {"transformer_impl": "local"}, "give --transformer-impl transformer_engine"),
    (AWARE | {"bf16": False}, "needs --bf16 or --fp16"),
    (IN_FP8 | IN_FP16, "--fp8-main-params and --main-params-dtype fp16 exclude each other"),
    (AWARE | {"bf16": False, "fp16": True, "main_grads_dtype": torch.bfloat16}, "bf16 needs --bf16"),
    (
        AWARE | {"bf16": False, "fp16": True, "accumulate_allreduce_grads_in_fp32": False},
        "add --accumulate-allreduce-grads-in-fp32",
    ),
    (AWARE | {"dist_ckpt_optim_fully_reshardable": True}, "leave it out with --use-precision-aware-optimizer"),
    (
        AWARE | WEIGHTS_IN_FP8,
        "remainders of bf16 weights, which weights in eight bits do not have; give --main-params-dtype fp16",
    ),
    (IN_FP16 | TENSORWISE, "--fp8-recipe tensorwise and --main-params-dtype fp16"),
    (IN_FP8 | TENSORWISE, "--fp8-recipe tensorwise and --fp8-main-params"),
]


@pytest.mark.parametrize(("flags", "reason"), REFUSED)
def test_what_cannot_be_combined_is_refused_in_one_line_that_says_what_to_give(
    flags: dict[str, Any], reason: str
) -> None:
    with pytest.raises(InvalidInput) as caught:
        low_precision.check(Namespace(**PLAIN | flags))
    assert reason in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("masters", [IN_FP8, IN_FP16])
def test_weights_in_eight_bits_take_masters_of_few_bits_under_delayed_scaling(masters: dict[str, Any]) -> None:
    low_precision.check(Namespace(**PLAIN | masters | WEIGHTS_IN_FP8))


def test_without_the_flag_arguments_are_as_in_jobs_that_had_no_such_flag() -> None:
    parser = ArgumentParser()
    low_precision.add_flags(parser)
    assert parser.parse_args([]).fp8_main_params is None
    assert parser.parse_args(["--fp8-main-params"]).fp8_main_params is True
