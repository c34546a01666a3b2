"""What the adapter expects of Megatron-Bridge, asked of the classes and functions in its wheel."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import inspect
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import bridge_wheel
import pytest

REASON = bridge_wheel.why_not()
pytestmark = pytest.mark.skipif(bool(REASON), reason=REASON)
NAME = "megatron.core.dist_checkpointing.moe.bridge.BridgeCheckpointManager"


@pytest.fixture(scope="module")
def wheel() -> Any:
    bridge_wheel.prepare()
    from megatron.bridge.training import checkpointing, setup, train

    should_load, resolve = vars(setup)["_should_load_checkpoint"], vars(checkpointing)["_resolve_checkpoint_iteration"]
    return SimpleNamespace(checkpointing=checkpointing, should_load=should_load, resolve=resolve, train=train)


@pytest.fixture
def made(wheel: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A manager that Bridge made, by name."""
    monkeypatch.setenv("MOE_CKPT_FLAGS", "--moe-ckpt-strategy full")
    config = SimpleNamespace(custom_manager_class=NAME, non_persistent_ckpt_type=None)
    return wheel.checkpointing.create_checkpoint_manager(config)


def test_bridge_makes_the_manager_by_its_name(wheel: Any, made: Any) -> None:
    assert isinstance(made, wheel.checkpointing.CheckpointManager)
    assert type(made).__module__ + "." + type(made).__qualname__ == NAME


def test_overrides_of_bridge_reach_the_settings_in_the_configuration(wheel: Any) -> None:
    """As `process_config_with_overrides` does it with a YAML file, behind the merge by OmegaConf."""
    apply = vars(importlib.import_module("megatron.bridge.training.utils.omegaconf_utils"))["_apply_overrides"]

    @dataclasses.dataclass
    class Checkpoint:
        custom_manager_class: str | None = None
        non_persistent_ckpt_type: str | None = None

    @dataclasses.dataclass
    class Configuration:
        checkpoint: Checkpoint = dataclasses.field(default_factory=Checkpoint)

    cfg = Configuration()
    vars(cfg.checkpoint)["moe_ckpt"] = {}  # in the recipe: cfg.checkpoint.moe_ckpt = {}
    apply(cfg, {"checkpoint": {"custom_manager_class": NAME, "moe_ckpt": {"strategy": "full", "interval": "auto"}}})
    settings = wheel.checkpointing.create_checkpoint_manager(cfg.checkpoint)._run.settings
    assert (settings.strategy, settings.interval) == ("full", "auto")


def test_a_name_outside_of_the_allow_list_is_refused(wheel: Any) -> None:
    with pytest.raises(Exception, match="elsewhere"):
        wheel.checkpointing.create_checkpoint_manager(SimpleNamespace(custom_manager_class="elsewhere.Manager"))


@pytest.mark.parametrize("method", ["__init__", "save", "load", "finalize_async_saves"])
def test_methods_take_what_those_of_the_protocol_take(wheel: Any, made: Any, method: str) -> None:
    own, asked = (
        [(one.name, one.kind, one.default) for one in inspect.signature(getattr(kind, method)).parameters.values()]
        for kind in (type(made), wheel.checkpointing.CheckpointManager)
    )
    assert own == asked


def test_bridge_asks_the_manager_to_load_where_it_knows_of_no_checkpoint(wheel: Any, made: Any) -> None:
    checkpoint = SimpleNamespace(load=None, pretrained_checkpoint=None, non_persistent_ckpt_type=None)
    cfg = SimpleNamespace(checkpoint=checkpoint, peft=None, _checkpoint_load_required=False)
    assert wheel.should_load(cfg, made)
    default = wheel.checkpointing.DefaultCheckpointManager(checkpoint)
    assert not wheel.should_load(cfg, default)


def test_functions_that_the_adapter_calls_have_their_parameters(wheel: Any) -> None:
    loop = importlib.import_module("megatron.bridge.training.pretrain")
    assert vars(loop)["train"] is wheel.train.train
    initialize = vars(importlib.import_module("megatron.bridge.training.initialize"))
    assert {"_initialize_distributed", "_initialize_tp_communicators", "init_rerun_state"} <= initialize.keys()
    kept = {"model", "optimizer", "global_state", "checkpoint_manager"}
    assert kept <= inspect.signature(wheel.train.train).parameters.keys()
    functions = {
        wheel.should_load: ["cfg", "checkpoint_manager"],
        wheel.resolve: ["load_dir", "ckpt_step_override"],
    }
    for function, names in functions.items():
        assert list(inspect.signature(function).parameters) == names


def test_contexts_have_what_is_read_of_them(wheel: Any) -> None:
    fields = wheel.checkpointing.CheckpointLoadContext.__dataclass_fields__
    assert {"state", "model", "optimizer", "opt_param_scheduler", "module_name"} <= set(fields)


def test_the_loop_finalizes_before_each_step_and_before_it_ends(wheel: Any) -> None:
    """The order that protection rests on: read from the source of the loop that is installed."""
    tree = ast.parse(Path(wheel.train.__file__).read_text(encoding="utf-8"))
    (train,) = (node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == "train")
    (loop,) = (node for node in train.body if isinstance(node, ast.While))

    def lines(scope: ast.AST, said: str) -> list[int]:
        return [node.lineno for node in ast.walk(scope) if isinstance(node, ast.Call) and said in ast.unparse(node)]

    finalize = lines(loop, "checkpoint_manager.finalize_async_saves(")
    assert len(finalize) == 1
    assert finalize[0] < min(lines(loop, "wrapped_train_step("))
    ends = lines(train, "terminate=True")
    assert max(node.end_lineno or 0 for node in ast.walk(loop) if hasattr(node, "end_lineno")) < min(ends)
    assert min(ends) < min(lines(train, "sys.exit("))
