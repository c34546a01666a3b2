"""How many of Megatron-Bridge's recipes are protected: never fewer than before, and read from the wheel as it is."""

from __future__ import annotations

import argparse
import importlib.metadata
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from bridge_wheel import why_not

from .test_docs import tool

ROOT = Path(__file__).parents[2]
LEAST = {
    "training": {"full": 47, "in place": 46, "sparse": 45, "local recovery": 32},
    "performance": {"full": 180, "in place": 178, "sparse": 113, "local recovery": 60},
    "performance, `moe_router_force_load_balancing` false": {
        "full": 306,
        "in place": 303,
        "sparse": 209,
        "local recovery": 98,
    },
}
"""Raise a number when more is protected. Where Transformer Engine fuses operations, `sparse` cannot freeze experts."""


def test_no_fewer_recipes_are_protected_than_before() -> None:
    found = tool("recipe_coverage").totals()
    accepted = {kind: {column: row[column][0] for column in row} for kind, row in found.items()}
    assert accepted == LEAST


OTHERS = {
    # All recipes are of experts and bf16, which matters with `qk_clip` alone.
    "bf16", "fp16", "num_moe_experts",
    # By other names: `cpu_offloading`, `mtp_standalone`.
    "cpu_offloading_num_layers", "pipeline_model_parallel_layout",
    # No recipe has these, or another value than the default.
    "adlr_autoresume", "dataloader_inter_document_masking", "error_injection_rate",
    "expert_gtp_weight_remat_size", "fim_data",
    "fp4_quantizer_factory", "fp8_quantizer_factory", "gtp_weight_remat_size", "inprocess_restart",
    "logits_save_dir", "moe_use_upcycling", "perform_rl_step", "result_rejected_tracker_filename", "save_experts",
    "save_experts_scope", "save_experts_selection", "sft", "step_batch_size_schedule", "tp_comm_bootstrap_backend",
    "use_custom_fsdp", "use_kitchen", "vision_pretraining_type",
    # Of folders, where checkpoints are signed or compared with storage.
    "ckpt_format", "load", "save",
    # Two have recipes of modules, which come from files: of MXFP8 and of NVFP4.
    "quant_recipe",
}  # fmt: skip
"""Settings that refusals read, and that recipes are not judged by."""


def test_recipes_are_judged_by_each_setting_that_refusals_read(monkeypatch: pytest.MonkeyPatch) -> None:
    coverage, read = tool("recipe_coverage"), set()

    class Noting(argparse.Namespace):
        def __getattribute__(self, name: str) -> Any:
            read.update({name} - set(dir(argparse.Namespace)))
            return super().__getattribute__(name)

    monkeypatch.setattr(coverage, "SimpleNamespace", Noting)
    monkeypatch.setattr(coverage.argparse, "Namespace", Noting)
    for recipe in coverage.all_recipes()[::10]:
        coverage.verdicts(recipe)
    assert read - set(coverage.JUDGED) == OTHERS


def test_a_router_that_cannot_be_frozen_is_a_reason_against_sparse() -> None:
    (recipe,) = (recipe for recipe in tool("recipe_coverage").all_recipes() if recipe.model == "MiniMax-M3")
    found = tool("recipe_coverage").verdicts(recipe)
    assert (found["full"], found["sparse"]) == ((), ("the router MiniMaxM3TopKRouter",))


@pytest.mark.ci
@pytest.mark.skipif(bool(why_not()), reason=why_not())
def test_routers_of_recipes_are_those_of_the_wheel() -> None:
    models = Path(str(importlib.metadata.distribution("megatron-bridge").locate_file("megatron/bridge/models")))
    kinds = (re.findall(r"^class (\w+)\(TopKRouter\)", path.read_text(), re.M) for path in models.rglob("*.py"))
    # No recipe pretrains Gemma 4 with experts.
    assert {kind for found in kinds for kind in found} - {"Gemma4TopKRouter"} == {
        *tool("recipe_coverage").ROUTERS.values()
    }


@pytest.mark.ci
@pytest.mark.skipif(bool(why_not()), reason=why_not())
def test_the_settings_of_recipes_are_those_of_the_wheel() -> None:
    # In a process of its own: stand-ins for parts of Bridge stay in one.
    code = "import recipe_coverage as tool; assert tool.read() == tool.DATA.read_text()"
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], cwd=ROOT / "tools", check=True, timeout=120)
