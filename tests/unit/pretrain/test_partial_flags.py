"""Which command lines can save some of the experts."""

from __future__ import annotations

import pytest

from megatron.pretrain.config import PretrainConfig, parse_config
from megatron.pretrain.config.validate import Environment, resolve
from megatron.pretrain.errors import InvalidInput

DENSE = (
    "--device cpu --num-layers 4 --hidden-size 32 --num-attention-heads 4 --seq-length 32 --micro-batch-size 1 "
    "--global-batch-size 8 --train-iters 10 --lr 1e-3 --mock-data"
)
EXPERTS = f"{DENSE} --num-experts 4 --disable-bias-linear"
DISTRIBUTED = f"{EXPERTS} --save here --use-distributed-optimizer"


def resolved(flags: str) -> PretrainConfig:
    return resolve(parse_config(flags.split()), Environment(world_size=1, cuda=False, transformer_engine=False))


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (f"{EXPERTS} --save-experts 1", "--save-experts needs --save"),
        (f"{EXPERTS} --save here --save-experts 0", "--save-experts 0 must be at least 1"),
        (f"{EXPERTS} --save here --save-experts 5", "--save-experts 5 must be at most --num-experts 4"),
        (f"{EXPERTS} --save here --save-experts 1 --moe-layer-freq [0]*4", "has no layer with experts"),
        (f"{DENSE} --save here --save-experts 1", "--save-experts 1 needs --num-experts"),
        (f"{EXPERTS} --save here --save-experts-selection load-aware", "load-aware needs --save-experts"),
        (f"{EXPERTS} --save here --save-experts-scope weights", "weights needs --save-experts"),
        (f"{EXPERTS} --save here --save-experts 1 --save-experts-scope all", "invalid choice"),
        (
            f"{EXPERTS} --save here --save-experts 1 --save-experts-scope optimizer --no-save-optim",
            "nothing would be left out",
        ),
        (f"{DISTRIBUTED} --save-experts 1", "add --dist-ckpt-optim-fully-reshardable"),
    ],
)
def test_flags_that_cannot_leave_experts_out_are_refused(flags: str, reason: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        resolved(flags)
    assert reason in str(caught.value)


@pytest.mark.parametrize(
    "flags",
    [
        f"{EXPERTS} --save here --save-experts 1",
        f"{EXPERTS} --save here --save-experts 4 --save-experts-selection load-aware",
        f"{EXPERTS} --save here --save-experts 4 --save-experts-scope weights --no-save-optim",
        f"{DISTRIBUTED} --save-experts 1 --dist-ckpt-optim-fully-reshardable",
        f"{DISTRIBUTED} --save-experts 1 --no-save-optim",
    ],
)
def test_flags_that_can_leave_experts_out_are_taken(flags: str) -> None:
    assert resolved(flags).checkpoint.save_experts in (1, 4)
