"""The precision-aware optimizer: what its flags come to, and what they cannot be combined with."""

from __future__ import annotations

import pytest
import torch

from megatron.pretrain.config import PretrainConfig, parse_config
from megatron.pretrain.config.validate import Environment, resolve
from megatron.pretrain.errors import InvalidInput
from megatron.pretrain.low_precision import precision_options

GOOD = (
    "--device cpu --num-layers 4 --hidden-size 32 --num-attention-heads 4 --seq-length 32 --micro-batch-size 1 "
    "--global-batch-size 8 --train-iters 10 --lr 1e-3 --mock-data --num-experts 4 --disable-bias-linear "
    "--pipeline-model-parallel-size 2 --expert-model-parallel-size 2"
)
ENGINE = "--transformer-impl transformer_engine"
AWARE = f"{ENGINE} --use-distributed-optimizer --use-precision-aware-optimizer"
FP8 = f"{AWARE} --bf16 --fp8-format hybrid --fp8-param-gather"
WITH_ENGINE = Environment(world_size=4, cuda=False, transformer_engine=True, engine_on_cpu=True)

REFUSED = {
    f"{ENGINE} --bf16 --exp-avg-dtype fp8": "--exp-avg-dtype fp8 has an effect only with --use-precision-aware-",
    f"{ENGINE} --bf16 --main-grads-dtype bf16": "--main-grads-dtype bf16 has an effect only with --use-precision-",
    f"{ENGINE} --bf16 --fp8-main-params": "--fp8-main-params has an effect only with --use-precision-aware-optimizer",
    f"{ENGINE} --bf16 --use-precision-aware-optimizer": "needs --use-distributed-optimizer",
    "--bf16 --use-distributed-optimizer --use-precision-aware-optimizer": f"give {ENGINE}",
    AWARE: "needs --bf16 or --fp16",
    f"{AWARE} --bf16 --fp8-main-params --main-params-dtype fp16": "--main-params-dtype fp16 exclude each other",
    f"{AWARE} --bf16 --main-grads-dtype bf16 --accumulate-allreduce-grads-in-fp32": "exclude each other",
    f"{AWARE} --fp16 --main-grads-dtype bf16": "--main-grads-dtype bf16 needs --bf16",
    f"{AWARE} --fp16": "add --accumulate-allreduce-grads-in-fp32",
    f"{AWARE} --bf16 --dist-ckpt-optim-fully-reshardable": "leave it out with --use-precision-aware-optimizer",
    FP8: "remainders of bf16 weights, which weights in eight bits do not have; give --main-params-dtype fp16",
    f"{FP8} --fp8-recipe tensorwise --main-params-dtype fp16": "--fp8-recipe tensorwise and --main-params-dtype fp16",
    f"{FP8} --fp8-recipe tensorwise --fp8-main-params": "--fp8-recipe tensorwise and --fp8-main-params",
    f"{AWARE} --bf16 --exp-avg-dtype int8": "invalid choice: 'int8'",
}


def resolved(flags: str) -> PretrainConfig:
    return resolve(parse_config(f"{GOOD} {flags}".split()), WITH_ENGINE)


@pytest.mark.parametrize("flags", REFUSED)
def test_what_cannot_be_combined_is_refused_in_one_line_that_says_what_to_give(flags: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        resolved(flags)
    assert REFUSED[flags] in str(caught.value)
    assert "\n" not in str(caught.value)


def test_gradients_are_accumulated_in_fp32_with_bf16_unless_they_are_wanted_in_bf16() -> None:
    assert resolved(f"{AWARE} --bf16").optimizer.accumulate_allreduce_grads_in_fp32
    assert not resolved(f"{AWARE} --bf16 --main-grads-dtype bf16").optimizer.accumulate_allreduce_grads_in_fp32


def test_flags_are_dtypes_of_megatron_core() -> None:
    flags = (
        f"{AWARE} --bf16 --main-grads-dtype bf16 --main-params-dtype fp16 --exp-avg-dtype fp8 --exp-avg-sq-dtype bf16"
    )
    assert precision_options(resolved(flags).optimizer) == {
        "use_precision_aware_optimizer": True,
        "main_grads_dtype": torch.bfloat16,
        "main_params_dtype": torch.float16,
        "exp_avg_dtype": torch.uint8,
        "exp_avg_sq_dtype": torch.bfloat16,
    }


@pytest.mark.parametrize("masters", ["--fp8-main-params", "--main-params-dtype fp16"])
def test_weights_in_eight_bits_take_masters_of_few_bits_under_delayed_scaling(masters: str) -> None:
    assert resolved(f"{FP8} {masters}").optimizer.use_precision_aware_optimizer
