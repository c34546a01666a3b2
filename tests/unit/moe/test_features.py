"""The table of features by loop is what the code does, and each "works" has a test."""

from __future__ import annotations

import ast
import dataclasses
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from stock_stand_in import arguments
from tiers import tier_of

from megatron.core.dist_checkpointing.moe import bridge, features, manager
from megatron.core.dist_checkpointing.moe.config import MoECheckpointConfig
from megatron.core.dist_checkpointing.moe.errors import UsageError
from megatron.core.dist_checkpointing.moe.features import FEATURES, Feature, Loop, Refused, Works
from megatron.core.dist_checkpointing.moe.stock import flags

ROOT = Path(__file__).parents[3]
CELLS = [(feature, loop) for feature in FEATURES for loop in Loop]
NEEDED: dict[str, dict[str, Any]] = {
    "pec_scope": {"strategy": "pec"},
    "pec_adaptive": {"strategy": "pec"},
}
"""What else a setting takes, to say nothing but that."""


TESTS = sorted({cell.test for feature, loop in CELLS if isinstance(cell := feature.cell(loop), Works)})


@cache
def functions(path: Path) -> dict[str, ast.FunctionDef]:
    nodes = ast.walk(ast.parse(path.read_text()))
    return {node.name: node for node in nodes if isinstance(node, ast.FunctionDef)}


def asking(feature: Feature, value: Any) -> MoECheckpointConfig:
    """Settings that ask for a feature."""
    needed = NEEDED.get(feature.setting, {} if feature.setting == "strategy" else {"strategy": "full"})
    return MoECheckpointConfig(**needed | {feature.setting: value})


def refusal(loop: Loop, config: MoECheckpointConfig) -> str:
    """What the loop says of these settings; empty where it accepts them."""
    try:
        if loop is Loop.MEGATRON_LM:
            flags.check(config, arguments(), "0.19.2")
        elif loop is Loop.BRIDGE:
            bridge.protected(lambda: None, config)
        else:
            model = SimpleNamespace(num_moe_experts=4, pipeline_model_parallel_size=2)
            manager.refuse_contradictions(config, SimpleNamespace(ddp_config=None), model)  # type: ignore[arg-type]
    except UsageError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("test", TESTS)
def test_what_works_is_shown_by_a_test_that_is_there(test: str) -> None:
    path, _, name = test.partition("::")
    assert name.startswith("test_") and name in functions(ROOT / path)


@pytest.mark.parametrize("test", TESTS)
def test_what_works_is_shown_by_a_case_that_each_change_has_to_pass(test: str) -> None:
    path, _, name = test.partition("::")
    assert tier_of(ROOT / path, name) in ("test", "test-ci")


def test_names_of_features_are_theirs_alone_and_settings_are_those_of_the_flags() -> None:
    assert len({feature.name for feature in FEATURES}) == len(FEATURES)
    known = {field.name for field in dataclasses.fields(MoECheckpointConfig)}
    default = MoECheckpointConfig()
    for feature in FEATURES:
        assert feature.setting in known | {""}
        assert bool(feature.setting) == bool(feature.values)
        assert not feature.is_asked_for(default), "nobody asks for anything by saying nothing"


@pytest.mark.parametrize(
    ("feature", "loop", "value"),
    [
        pytest.param(feature, loop, value, id=f"{loop.value}-{feature.setting}-{value}")
        for feature, loop in CELLS
        for value in feature.values
    ],
)
def test_a_loop_refuses_what_the_table_says_and_nothing_else(feature: Feature, loop: Loop, value: Any) -> None:
    said, cell = refusal(loop, asking(feature, value)), feature.cell(loop)
    name = f"--moe-ckpt-{feature.setting.replace('_', '-')}" + ("" if value is True else f" {value}")
    assert said == (f"{name} {cell.reason}" if isinstance(cell, Refused) else "")


@pytest.mark.parametrize("loop", list(Loop))
def test_each_loop_reads_the_table(loop: Loop, monkeypatch: pytest.MonkeyPatch) -> None:
    (row,) = (feature for feature in FEATURES if feature.setting == "replicate")
    cells = dict.fromkeys(("megatron_lm", "bridge", "api"), Refused("is not there; use state"))
    monkeypatch.setattr(features, "FEATURES", (dataclasses.replace(row, **cells),))
    said = refusal(loop, MoECheckpointConfig(strategy="full", replicate="gradients"))
    assert said == "--moe-ckpt-replicate gradients is not there; use state"
