"""Which command lines of Megatron-LM can save some of the experts."""

from __future__ import annotations

import argparse

import pytest

from megatron.core.dist_checkpointing.moe.extensions.partial_saves.flags import unfit_expert_saves

SAVING = {
    "save": "here",
    "num_experts": 4,
    "moe_layer_freq": 1,
    "ckpt_format": "torch_dist",
    "use_distributed_optimizer": False,
    "dist_ckpt_optim_fully_reshardable": False,
    "no_save_optim": None,
    "save_experts": 1,
    "save_experts_selection": "sequential",
    "save_experts_scope": "both",
}


def refused(strategy: str = "full", **changes: object) -> list[str]:
    return [*unfit_expert_saves(argparse.Namespace(**SAVING | changes), strategy)]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"save": None}, "--save-experts 1 needs --save"),
        ({"strategy": "none"}, "--save-experts 1 needs a --moe-ckpt-strategy"),
        ({"save_experts": 0}, "--save-experts 0 must be at least 1"),
        ({"save_experts": 5}, "--save-experts 5 must be at most --num-experts 4"),
        ({"moe_layer_freq": [0, 0]}, "has no layer with experts"),
        ({"num_experts": None}, "--save-experts 1 needs --num-experts"),
        ({"ckpt_format": "fsdp_dtensor"}, "needs --ckpt-format torch_dist, not fsdp_dtensor"),
        ({"save_experts": None, "save_experts_selection": "load-aware"}, "load-aware needs --save-experts"),
        ({"save_experts": None, "save_experts_scope": "weights"}, "weights needs --save-experts"),
        ({"save_experts_scope": "optimizer", "no_save_optim": True}, "nothing would be left out"),
        ({"use_distributed_optimizer": True}, "add --dist-ckpt-optim-fully-reshardable"),
        ({"ckpt_assume_constant_structure": True}, "each checkpoint holds other experts"),
        ({"save_retain_interval": 10}, "--save-retain-interval 10: it would remove checkpoints"),
        ({"non_persistent_ckpt_type": "global"}, "which keeps one checkpoint only"),
    ],
)
def test_flags_that_cannot_leave_experts_out_are_refused(changes: dict[str, object], reason: str) -> None:
    (sentence,) = refused(**changes)
    assert reason in sentence


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"save_experts": 4, "save_experts_selection": "load-aware"},
        {"save_experts_scope": "weights", "no_save_optim": True},
        {"use_distributed_optimizer": True, "dist_ckpt_optim_fully_reshardable": True},
        {"use_distributed_optimizer": True, "no_save_optim": True},
        {"save_experts": None, "save": None},
    ],
)
def test_flags_that_can_leave_experts_out_are_taken(changes: dict[str, object]) -> None:
    assert refused(**changes) == []
