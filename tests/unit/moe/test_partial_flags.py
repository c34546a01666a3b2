"""Which command lines of Megatron-LM can save some of the experts."""

from __future__ import annotations

import argparse

import pytest

from megatron.core.dist_checkpointing.moe.extensions.partial_saves.flags import unfit_expert_saves
from megatron.core.dist_checkpointing.moe.stock.dense import saves_raw

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


@pytest.mark.parametrize("no_save_optim", [None, True])
@pytest.mark.parametrize("distributed", [False, True])
@pytest.mark.parametrize("reshardable", [False, True])
@pytest.mark.parametrize(
    ("low", "named"),
    [
        ({}, None),
        (
            {"fp8": "hybrid", "fp8_recipe": "delayed", "fp8_param_gather": False},
            "--fp8-format hybrid with --fp8-recipe",
        ),
        ({"fp8": "hybrid", "fp8_recipe": "mxfp8", "fp8_param_gather": False}, None),
        ({"fp8": "e4m3", "fp8_recipe": "mxfp8", "fp8_param_gather": True}, "--fp8-param-gather"),
        ({"fp8": None, "fp8_recipe": "delayed", "fp8_param_gather": True}, None),
        ({"fp4_param_gather": True}, "--fp4-param-gather"),
        ({"use_precision_aware_optimizer": True}, "--use-precision-aware-optimizer"),
    ],
)
def test_state_that_is_saved_as_it_is_is_refused_by_the_flag_it_comes_from(
    low: dict[str, object], named: str | None, reshardable: bool, distributed: bool, no_save_optim: bool | None
) -> None:
    changes = {
        "use_distributed_optimizer": distributed,
        "dist_ckpt_optim_fully_reshardable": reshardable,
        "no_save_optim": no_save_optim,
    }
    sentences = refused(**low | changes)
    is_raw = saves_raw(argparse.Namespace(**SAVING | low | changes), object())
    assert is_raw == any("only if it is saved as it is, with all experts; leave one" in one for one in sentences)
    assert is_raw == bool(named and not reshardable)
    assert len(sentences) == (is_raw or (distributed and not reshardable and not no_save_optim))
    assert not is_raw or f"does not go with {named}" in sentences[0]


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
