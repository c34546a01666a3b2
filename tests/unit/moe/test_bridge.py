"""The adapter for Megatron-Bridge without Bridge: settings, what is refused, and how a run ends."""

from __future__ import annotations

import contextlib
import os
import sys
import types
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from operator import methodcaller
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron.core.dist_checkpointing.moe import MoECheckpointConfig, bridge
from megatron.core.dist_checkpointing.moe.bridge_survivors import BridgeSurvivors
from megatron.core.dist_checkpointing.moe.errors import UsageError
from megatron.core.dist_checkpointing.moe.ports import Facts, Field, Layout, SnapshotId
from megatron.core.dist_checkpointing.moe.runtime.peer_links import SETTINGS
from megatron.core.dist_checkpointing.moe.runtime.session import Loadable
from megatron.core.dist_checkpointing.moe.storage.memory import MemoryStore

FULL = MoECheckpointConfig(strategy="full")
WATCHDOG = "TORCH_NCCL_ASYNC_ERROR_HANDLING"


def resolved(load: str | None, step: int | None) -> tuple[int, bool]:
    """As Bridge's: a folder with iterations 4 and 6."""
    if step == 7:
        raise RuntimeError("[gloo] Connection closed by peer")
    if step == 5:
        raise FileNotFoundError("ckpt_step=5 specified but checkpoint directory does not exist")
    return (-1 if load is None else 6 if step is None else step), False


@pytest.fixture(autouse=True)
def wheel(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the adapter imports of Bridge."""
    names = ("megatron.bridge", "megatron.bridge.training", "megatron.bridge.training.checkpointing")
    modules = {name: types.ModuleType(name) for name in (*names, "megatron.bridge.training.setup")}
    vars(modules[names[2]]).update(
        DefaultCheckpointManager=lambda config: SimpleNamespace(
            checkpointing_context={}, finalize_async_saves=lambda *_: None, save=lambda *_: None
        ),
        _resolve_checkpoint_iteration=resolved,
    )
    vars(modules["megatron.bridge.training.setup"])["_should_load_checkpoint"] = lambda cfg, manager: bool(
        cfg.checkpoint.load or cfg.checkpoint.pretrained_checkpoint
    )
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 0)
    monkeypatch.setattr(torch.distributed, "broadcast_object_list", lambda values, src: None)
    monkeypatch.delenv("MOE_CKPT_FLAGS", raising=False)
    environment = {name: value for name, value in os.environ.items() if name not in SETTINGS}
    monkeypatch.setattr(os, "environ", environment)


class Section(SimpleNamespace):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return None


def configuration(**sections: Section) -> Section:
    names = ("train", "optimizer", "dist", "ddp", "dataset", "checkpoint", "model")
    return Section(**{name: Section() for name in names} | sections)


class Recorder:
    """In the place of `MoECheckpointManager`."""

    def __init__(self, *_: Any, **named: Any) -> None:
        self.iteration, self.calls, self.state = 0, [], named.get("state")
        made.append(self)

    def resume(self, load: Any, newest: Loadable) -> int:
        self.calls.append(
            ("resume", load is not None, newest.iteration, newest.asked_for, newest.in_part, newest.lacks)
        )
        self.in_doubt = newest.in_doubt
        return 0

    def saved(self) -> None:
        self.calls.append("saved")

    def after_step(self) -> None:
        self.calls.append("after_step")
        self.iteration += 1

    def reported(self) -> None:
        self.calls.append("reported")

    def rejoin(self) -> None:
        self.calls.append("rejoin")

    def passes_begin(self) -> None:
        self.calls.append("passes_begin")

    def finish(self, *, keep_memory: bool) -> None:
        self.calls.append(f"finish {keep_memory}")

    def lost_before(self, lost_tokens: Any) -> None:
        assert lost_tokens is None

    @contextlib.contextmanager
    def run(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            self.calls.append(str(error))
            raise


made: list[Recorder] = []


def context(cfg: Section) -> Section:
    return Section(state=Section(cfg=cfg, train_state=Section(floating_point_operations_so_far=0)))


def loads(config: Section, forward_step: Any) -> None:
    """A `pretrain` that gets as far as its first passes."""
    name = config.checkpoint.custom_manager_class
    assert name == "megatron.core.dist_checkpointing.moe.bridge.BridgeCheckpointManager"
    bridge.BridgeCheckpointManager(config.checkpoint).load(context(config))
    forward_step()


def fails() -> None:
    raise RuntimeError("out of memory")


def test_an_error_out_of_pretrain_reaches_the_manager(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bridge, "MoECheckpointManager", Recorder)
    with pytest.raises(RuntimeError, match="out of memory"):
        bridge.protected(loads, FULL)(configuration(), fails)
    assert made[-1].calls[-1] == "out of memory"


def test_torchs_watchdog_leaves_errors_alone_where_pretrain_is_protected_and_only_there() -> None:
    told: list[str | None] = []
    for settings in (replace(FULL, strategy="none"), FULL):
        pretrain = bridge.protected(lambda config: told.append(os.environ.get(WATCHDOG)), settings)
        pretrain(configuration(dist=Section(distributed_backend="nccl")))
    assert told == [None, "0"]


def trains(config: Any, iterations: int) -> None:
    """As Bridge does, whose `train` finishes saves at the head of each iteration and twice at the end."""
    loading = context(config)
    manager = bridge.BridgeCheckpointManager(config.checkpoint)
    manager.load(loading)
    made[-1].calls.clear()
    for loading.state.train_state.step in range(iterations):
        manager.finalize_async_saves(loading.state)
    loading.state.train_state.step = iterations
    for _ in range(2):
        made[-1].calls.append("train ends")
        manager.finalize_async_saves(loading.state, blocking=True, terminate=True)


def test_memory_is_given_back_behind_the_last_evaluations_and_passes_begin_at_the_head_of_iterations(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    waiting: list[int] = []

    @contextlib.contextmanager
    def waiting_for_no_rank() -> Iterator[None]:
        waiting.append(len(made[-1].calls))
        yield

    monkeypatch.setattr(bridge, "MoECheckpointManager", Recorder)
    monkeypatch.setattr(bridge, "waiting_for_no_rank", waiting_for_no_rank)
    bridge.protected(partial(trains, iterations=2), FULL)(configuration(train=Section(train_iters=2)))
    passes, counted = ["rejoin", "passes_begin"], ["after_step", "reported"]
    assert made[-1].calls == [*passes, *counted, *passes, "train ends", *counted, "train ends", "finish False"]
    assert waiting == [7, 10], "storage may take long to finish the last saves"


@pytest.mark.parametrize("code", [0, 1])
@pytest.mark.parametrize("left", [0, 4])
def test_a_job_that_leaves_before_its_last_iteration_is_told_from_one_that_has_trained(
    left: int, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []

    def pretrain(config: Any) -> None:
        trains(config, 2)
        sys.exit(code)

    monkeypatch.setattr(bridge, "MoECheckpointManager", Recorder)
    monkeypatch.setattr(bridge, "leave_early", lambda: told.append("early"))
    with pytest.raises(SystemExit):
        bridge.protected(pretrain, FULL)(configuration(train=Section(train_iters=2 + left)))
    assert told == ["early"] * bool(left and not code)


def test_an_error_is_told_to_others_before_bridge_aborts_its_process_groups() -> None:
    told: list[Exception] = []

    def train(checkpoint_manager: Any) -> None:
        fails()

    def left_with(error: Exception) -> tuple[Exception, None]:
        told.append(error)
        return error, None

    survivors = BridgeSurvivors(1.0)  # of a job whose ranks cannot stay
    with pytest.raises(RuntimeError, match="out of memory") as raised:
        methodcaller("_train", train, SimpleNamespace(left_with=left_with))(survivors)
    assert told == [raised.value]


def test_each_call_of_pretrain_keeps_what_is_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[BridgeSurvivors] = []
    monkeypatch.setattr(BridgeSurvivors, "building", lambda self, cfg: contextlib.nullcontext(kept.append(self)))
    pretrain = bridge.protected(lambda config: None, FULL)
    for _ in range(2):
        pretrain(configuration())
    first, second = kept
    assert first is not second


LOADS: dict[str, Any] = {"load_optim": True, "load_rng": True}
SAVES = LOADS | {"load": "there", "save": "there/", "save_optim": True, "save_rng": True}


@pytest.mark.parametrize(
    ("checkpoint", "asked"),
    [
        (LOADS, (False, -1, False, False, False)),
        (LOADS | {"load": "there"}, (True, 6, False, False, False)),
        (LOADS | {"load": "there", "ckpt_step": 4}, (True, 4, True, False, False)),
        (LOADS | {"load": "there", "ckpt_step": 5}, (True, -1, True, False, False)),  # which retention has removed
        (LOADS | {"load": "there", "finetune": True}, (True, 6, True, True, False)),
        (LOADS | {"load": "there", "load_optim": False}, (True, 6, False, True, False)),
        (LOADS | {"load": "there", "load_rng": False}, (True, 6, False, False, False)),
        (LOADS | {"pretrained_checkpoint": "there", "save": "here"}, (True, 0, False, False, False)),
        (SAVES, (True, 6, False, False, False)),
        (SAVES | {"save_rng": False}, (True, 6, False, False, True)),
        (SAVES | {"save_optim": False}, (True, -1, False, False, True)),
        (SAVES | {"save_optim": False, "save": "elsewhere"}, (True, 6, False, False, False)),
        (SAVES | {"save_optim": False, "load_optim": False}, (True, 6, False, True, False)),
    ],
)
def test_what_bridge_would_load_is_offered(
    checkpoint: dict[str, Any], asked: tuple[bool, int, bool, bool, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bridge, "MoECheckpointManager", Recorder)
    bridge.protected(loads, FULL)(config=configuration(checkpoint=Section(**checkpoint)), forward_step=lambda: None)
    assert made[-1].calls == [("resume", *asked)]


def test_a_rank_that_is_lost_while_bridge_looks_for_its_checkpoint_is_no_checkpoint_that_is_missing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Others look for more of it together."""
    monkeypatch.setattr(bridge, "MoECheckpointManager", Recorder)
    lost = configuration(checkpoint=Section(load="there", ckpt_step=7))
    with pytest.raises(RuntimeError, match="closed by peer"):
        bridge.protected(loads, FULL)(config=lost, forward_step=lambda: None)


@pytest.mark.parametrize("doubts", [False, True])
def test_a_checkpoint_that_core_saves_over_a_doubtful_iteration_is_told_apart_at_the_next_start(
    doubts: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(bridge, "MoECheckpointManager", Recorder)
    monkeypatch.setattr(bridge, "is_in_doubt", lambda: doubts)
    (tmp_path / "iter_0000006").mkdir()
    checkpoint = Section(**SAVES | {"load": str(tmp_path), "save": str(tmp_path)}, moe_ckpt={"strategy": "full"})
    saving = context(configuration(checkpoint=checkpoint))
    saving.state.train_state.step = 6
    bridge.BridgeCheckpointManager(checkpoint).save(saving, None)
    bridge.BridgeCheckpointManager(checkpoint).load(saving)
    assert made[-1].in_doubt is doubts


def test_a_process_that_stays_loads_as_its_configuration_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bridge takes a pretrained checkpoint as with `finetune`, and remembers that in its configuration."""
    monkeypatch.setattr(bridge, "MoECheckpointManager", Recorder)
    checkpoint = Section(**SAVES, finetune=False, moe_ckpt={"strategy": "full"})
    keeper = bridge.BridgeCheckpointManager(checkpoint)
    keeper.load(context(configuration(checkpoint=checkpoint)))
    checkpoint.finetune = True
    keeper.load_again()
    assert [call for one in made[-2:] for call in one.calls] == 2 * [("resume", True, 6, False, False, False)]


def test_another_model_than_the_state_of_the_job_is_refused_before_it_is_built(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    recipe = configuration(model=Section(num_layers=4, mtp_num_layers=1), optimizer=Section(optimizer="adam"))
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "recipes")
    monkeypatch.setenv("MOE_CKPT_NODE", "n0")
    monkeypatch.setattr(bridge, "MoECheckpointManager", Recorder)
    settings, layout = replace(FULL, memory_dir=str(tmp_path)), Layout.of([Field("w/master", "float32", (4,))])
    bridge.protected(loads, settings)(recipe, lambda: None)
    (tmp_path / "n0").mkdir()
    with contextlib.closing(MemoryStore(tmp_path / "n0", "recipes", 0, [layout.nbytes])) as store:
        with store.reserve(SnapshotId(3, 0), layout) as writer:
            writer.put("w/master", bytes(16))
            writer.seal(Facts("recipes", scalars={"trainer": made[-1].state.state_dict()}))
        built: list[Any] = []
        pretrain = bridge.protected(built.append, settings)
        pretrain(recipe)
        recipe.model.mtp_num_layers, recipe.optimizer.optimizer = 2, "muon"
        told = "model.mtp_num_layers was 1 and is 2; optimizer.optimizer was adam and is muon, but .*n0.*start with the"
        monkeypatch.setattr(bridge, "refusals", lambda *_: ())  # whether there is a Muon here
        with pytest.raises(UsageError, match=told):
            pretrain(recipe)
    assert built == [recipe]


def test_sparse_is_refused_by_name_before_anything_is_called() -> None:
    with pytest.raises(UsageError, match=r"sparse runs iterations again.*no hook between passes and step.*full or pec"):
        bridge.protected(loads, MoECheckpointConfig(strategy="sparse"))


def test_pretrain_without_a_strategy_is_given_back_as_it_is() -> None:
    assert bridge.protected(loads, MoECheckpointConfig()) is loads


def test_a_manager_without_settings_is_refused() -> None:
    with pytest.raises(UsageError, match=r"missing strategy.*cfg.checkpoint.moe_ckpt.*MOE_CKPT_FLAGS"):
        bridge.BridgeCheckpointManager(Section())


@pytest.mark.parametrize("is_wrapped", [True, False])
def test_settings_may_be_a_field_of_the_configuration_of_checkpoints(
    is_wrapped: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[Any] = []
    monkeypatch.setattr(bridge, "MoECheckpointManager", lambda *all_, **_: given.append(all_[3]) or Recorder())
    field = {
        "strategy": "full",
        "interval": "auto",
        "window": 3,
        "strict": True,
        "mtbf_s": None,
        "inject_fault": ["1@2", "0@3"],
    }
    named = "megatron.core.dist_checkpointing.moe.bridge.BridgeCheckpointManager"
    config = configuration(checkpoint=Section(moe_ckpt=field, custom_manager_class=None if is_wrapped else named))
    train = bridge.protected(loads) if is_wrapped else loads
    train(config, lambda: None)
    assert given == [
        MoECheckpointConfig(strategy="full", interval="auto", window="3", strict=True, inject_fault=("1@2", "0@3"))
    ]


@pytest.mark.parametrize(
    ("field", "said"),
    [
        ({"strategy": "full", "intervall": 3}, "checkpoint.moe_ckpt has --moe-ckpt-intervall 3"),
        ({"strategy": "full", "interval": "often"}, "checkpoint.moe_ckpt: .*interval.*invalid auto.int value: 'often'"),
        ({}, "missing strategy"),
    ],
)
def test_a_field_that_cannot_be_read_is_refused_by_name(field: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        bridge.protected(loads)(configuration(checkpoint=Section(moe_ckpt=field)), None)


def test_another_checkpoint_manager_is_left_alone() -> None:
    config = configuration(checkpoint=Section(custom_manager_class="theirs.Manager"))
    with pytest.raises(UsageError, match=r"custom_manager_class is theirs.Manager"):
        bridge.protected(loads, FULL)(config, None)


@pytest.mark.parametrize(
    ("flags", "said"),
    [("--moe-ckpt-strateggy full", "strateggy"), ("--moe-ckpt-interval x", "interval"), ("full", "only --moe-ckpt-")],
)
def test_flags_in_the_environment_that_are_none_are_named(
    flags: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MOE_CKPT_FLAGS", flags)
    with pytest.raises(UsageError, match=f"MOE_CKPT_FLAGS.*{said}"):
        bridge.protected(loads)


def test_an_empty_environment_variable_leaves_protection_to_the_recipe(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bridge, "MoECheckpointManager", Recorder)
    monkeypatch.setenv("MOE_CKPT_FLAGS", " ")
    config = configuration(checkpoint=Section(moe_ckpt={"strategy": "full"}))
    bridge.protected(loads)(config, lambda: None)
    assert config.checkpoint.custom_manager_class


def test_flags_in_the_environment_without_a_strategy_switch_nothing_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOE_CKPT_FLAGS", "--moe-ckpt-interval 1")
    with pytest.raises(UsageError, match=r"MOE_CKPT_FLAGS has no --moe-ckpt-strategy: .*cfg.checkpoint.moe_ckpt"):
        bridge.protected(loads)


def test_the_strategy_none_in_the_environment_leaves_pretrain_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOE_CKPT_FLAGS", "--moe-ckpt-strategy none")
    assert bridge.protected(loads) is loads


def test_training_that_was_never_loaded_is_not_called_protected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOE_CKPT_FLAGS", "--moe-ckpt-strategy full")
    manager = bridge.BridgeCheckpointManager(Section())
    with pytest.raises(UsageError, match="nothing would be protected"):
        manager.finalize_async_saves(Section())


@pytest.mark.parametrize(
    ("sections", "named"),
    [
        ({"train": Section(iterations_to_skip=[3])}, "iterations_to_skip"),
        ({"optimizer": Section(optimizer_cuda_graph=True)}, "optimizer_cuda_graph"),
        ({"optimizer": Section(optimizer_cpu_offload=True)}, "optimizer_cpu_offload"),
        ({"inprocess_restart": Section(enabled=True)}, "inprocess_restart"),
        ({"rerun_state_machine": Section(error_injection_rate=1000)}, "error_injection_rate"),
        ({"peft": Section()}, "peft"),
        ({"dist": Section(use_decentralized_pg=True)}, "use_decentralized_pg"),
        ({"dist": Section(use_torch_fsdp2=True)}, "fsdp"),
        ({"ddp": Section(use_megatron_fsdp=True)}, "fsdp"),
        ({"dataset": Section(dataloader_type="external")}, "dataloader_type"),
        ({"dataset": Section(fim_data=True)}, "fim_data"),
        ({"checkpoint": Section(non_persistent_ckpt_type="local")}, "non_persistent_ckpt_type"),
        ({"optimizer": Section(optimizer="dist_muon")}, "dist_muon: a package is missing"),
        ({"model": Section(moe_token_dispatcher_type="flex", num_moe_experts=8)}, "-backend deepep needs deep_ep.Buff"),
    ],
)
def test_what_cannot_be_protected_is_refused_by_name_before_it_is_built_and_when_it_is_loaded(
    sections: dict[str, Section], named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bridge, "find_spec", lambda _: None)
    assert [named in sentence for sentence in bridge.refusals(configuration(**sections), Section())] == [True]
    with pytest.raises(UsageError, match=named):
        bridge.protected(lambda _: pytest.fail("called"), FULL)(configuration(**sections))
    with pytest.raises(UsageError, match=named):
        bridge.BridgeCheckpointManager(Section(moe_ckpt={"strategy": "full"})).load(context(configuration(**sections)))


def test_a_plain_configuration_is_not_refused() -> None:
    assert list(bridge.refusals(configuration(), Section())) == []
