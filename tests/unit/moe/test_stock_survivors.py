"""What a process in the stock loop keeps through a fault, and what makes it end."""

from __future__ import annotations

import argparse
import contextlib
import inspect
from collections.abc import Iterator
from operator import methodcaller
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from megatron.core.dist_checkpointing.moe import bridge_survivors
from megatron.core.dist_checkpointing.moe.errors import PeerLost
from megatron.core.dist_checkpointing.moe.in_place import process_restart
from megatron.core.dist_checkpointing.moe.stock import survivors
from megatron.core.dist_checkpointing.moe.stock.seams import Call
from megatron.core.dist_checkpointing.moe.stock.survivors import KeptData, KeptGlobals, why_not


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("async_save", True),
        ("non_persistent_ckpt_type", "local"),
        ("enable_ft_package", True),
        ("log_straggler", True),
        ("profile", True),
        ("logits_load_dir", "logits"),
        ("moe_routing_trace_path", "traces"),
        ("run_workload_inspector_server", True),
        ("ckpt_assume_constant_structure", True),
        ("full_validation", True),
        ("save_activations_interval", 10),
        ("save_dgrads_interval", 10),
        ("save_tokens_per_expert_interval", 10),
        ("lazy_mpu_init", True),
        ("moe_flex_dispatcher_backend", "ncclep"),
    ],
)
def test_a_flag_with_which_a_process_cannot_stay_is_named(flag: str, value: object) -> None:
    args = argparse.Namespace(**{"moe_token_dispatcher_type": "flex", "expert_model_parallel_size": 2} | {flag: value})
    assert f"--{flag.replace('_', '-')}" in str(why_not(args, "0.19.2"))


def test_gradient_buffers_that_nccl_has_registered_are_named_by_their_flag_in_both_loops() -> None:
    assert "--use-nccl-ub: " in str(why_not(argparse.Namespace(nccl_ub=True), "0.19.2"))
    bridges = SimpleNamespace(ddp=SimpleNamespace(nccl_ub=True), model=SimpleNamespace())
    assert "ddp.nccl_ub: " in str(bridge_survivors.why_not(bridges))


def test_what_a_process_of_one_loop_cannot_keep_one_of_the_other_cannot_either() -> None:
    """Of settings that both have, by the name of Megatron-LM's flag."""
    names = {name for name, _, _ in vars(survivors)["_RULES"]}
    bridges = {name: section for section, name, _ in vars(bridge_survivors)["_RULES"]}
    shared = {
        "async_save",
        "ckpt_assume_constant_structure",
        "enable_ft_package",
        "lazy_mpu_init",
        "log_straggler",
        "nccl_ub",
    }
    assert shared <= names and shared <= bridges.keys()
    for name in shared:
        there = SimpleNamespace(**{bridges[name]: SimpleNamespace(**{name: True}), "model": SimpleNamespace()})
        assert str(bridge_survivors.why_not(there)).startswith(f"{bridges[name]}.{name}: ")


def test_a_process_stays_with_other_flags() -> None:
    args = argparse.Namespace(
        async_save=False, non_persistent_ckpt_type="global", profile=False, lazy_mpu_init=None, tp_comm_overlap=True,
        moe_token_dispatcher_type="flex", expert_model_parallel_size=2, cuda_graph_impl="local",
    )  # fmt: skip
    assert [why_not(args, version) for version in ("0.17.1", "0.18.0", "0.19.2")] == [None] * 3


def test_a_process_of_a_release_that_is_not_known_does_not_stay() -> None:
    for version in ("0.16.1", "0.25.0"):
        assert f"Megatron-Core {version} was never tested with" in str(why_not(argparse.Namespace(), version))


def test_a_script_that_starts_torch_distributed_is_told_to_say_how() -> None:
    assert "connect=" in str(why_not(argparse.Namespace(), "0.19.2", is_started_by_script=True))


class Reader:
    """A data iterator."""

    def __init__(self, data: list[int], start: int) -> None:
        self.rest = data[start:]


class Loop:
    """The functions of the stock loop that read data."""

    def __init__(self) -> None:
        self.args = SimpleNamespace(start=0, do_train=1, do_valid=0, do_test=0, eval_iters=2)

    def get_args(self) -> Any:
        return self.args

    def build_train_valid_test_data_iterators(self, provider: Any) -> Any:
        assert provider.is_distributed
        train, valid = provider((6, 2))
        return Reader(train, self.args.start), [Reader(valid, 0)], None


class Provider:
    """Datasets that are counted."""

    is_distributed, made = True, 0

    def __call__(self, sizes: tuple[int, int]) -> Any:
        self.made += 1
        return [list(range(size)) for size in sizes]


@pytest.mark.parametrize("by_name", [True, False])
def test_iterators_that_others_hold_read_on_from_elsewhere_over_the_same_datasets(by_name: bool) -> None:
    loop, provider = Loop(), Provider()
    build, data = loop.build_train_valid_test_data_iterators, KeptData(loop)
    (name,) = inspect.signature(build).parameters
    call = Call(build, (), {name: provider}) if by_name else Call(build, (provider,), {})
    train, valid, test = data.build(call)
    loop.args.start = 4
    data.renew()
    assert (train.rest, valid[0].rest, test) == ([4, 5], [0, 1], None)
    assert provider.made == 1


def test_what_ranks_agreed_on_of_their_data_is_taken_over() -> None:
    ours, theirs = Loop(), Loop()
    theirs.args.do_train = 0
    KeptData(theirs).set_facts(KeptData(ours).facts())
    assert theirs.args == ours.args


def test_a_process_that_stays_loads_as_its_flags_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """Core takes a pretrained checkpoint as with `--finetune`, and remembers that in `args`."""
    args = argparse.Namespace(finetune=False, ckpt_step=2, rerun_mode="disabled")
    loop = SimpleNamespace(get_args=lambda: args, get_timers=lambda: SimpleNamespace(_timers={}))
    monkeypatch.setattr(survivors, "get_model_config", lambda _: SimpleNamespace())
    monkeypatch.setattr(survivors.rerun, "_GLOBAL_RERUN_STATE_MACHINE", None)
    kept = KeptGlobals(loop, [object()])
    args.finetune, args.ckpt_step = True, None
    kept.as_before_training()
    assert (args.finetune, args.ckpt_step) == (False, 2)


@pytest.fixture
def config(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Of a model, as it is when `train` is entered for the first time."""
    made = SimpleNamespace(timers="of the loop", moe_paged_stash=True)
    monkeypatch.setattr(survivors, "get_model_config", lambda _: made)
    monkeypatch.setattr(bridge_survivors, "get_model_config", lambda _: made)
    monkeypatch.setattr(survivors.rerun, "_GLOBAL_RERUN_STATE_MACHINE", None)
    return made


def test_what_a_fault_keeps_train_from_putting_back_is_put_back(config: Any) -> None:
    """Evaluations take the timers away, and passes that run again the paged stash; then ranks would differ."""
    args = argparse.Namespace(finetune=False, rerun_mode="disabled")
    packed = {"_seqlen_stats_active": True, "_seqlen_stats_in_iteration": torch.ones(2)}
    loop = SimpleNamespace(get_args=lambda: args, get_timers=lambda: SimpleNamespace(_timers={}), **packed)
    kept = KeptGlobals(loop, [object()])
    config.timers, config.moe_paged_stash = None, False
    kept.as_before_training()
    assert (config.timers, config.moe_paged_stash) == ("of the loop", True)
    assert packed["_seqlen_stats_in_iteration"].tolist() == [0, 0]  # type: ignore[attr-defined]


def test_the_loop_of_bridge_puts_it_back_too(config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[object] = []

    class Kept(SimpleNamespace):
        has_left = False

        def stay(self, *_: object) -> None:
            self.has_left = True

    def train(model: Any, optimizer: Any, global_state: Any, checkpoint_manager: Any) -> None:
        found.append((config.timers, config.moe_paged_stash))
        if len(found) == 1:
            config.timers, config.moe_paged_stash = None, False
            raise PeerLost("in an evaluation")

    monkeypatch.setattr(bridge_survivors, "InProcessRestart", lambda *_: Kept())
    monkeypatch.setattr(bridge_survivors, "_as_before_training", lambda *_: None)
    stays = bridge_survivors.BridgeSurvivors(1.0)
    vars(stays).update(_connect=print, _connect_again=lambda *_: None)
    manager = SimpleNamespace(left_with=lambda error: (error, None), load_again=lambda: None)
    state = SimpleNamespace(train_state=SimpleNamespace(do_train=1, do_valid=1, do_test=0))
    methodcaller("_train", train, [object()], None, state, manager)(stays)
    assert found == [("of the loop", True)] * 2


def test_nobody_watches_a_process_that_waits_for_its_launcher_since_its_connections_came_to_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    watched: list[str] = []

    @contextlib.contextmanager
    def watching(*_: object) -> Iterator[None]:
        watched.append("begins")
        yield
        watched.append("ends")

    def lost(*_: object) -> None:
        raise RuntimeError("Connection reset by peer")

    for name, value in {"unless_called_off": lambda *_: None, "watched_start": watching, "tell": lost}.items():
        monkeypatch.setattr(process_restart, name, value)
    monkeypatch.setattr(process_restart, "process_group_backend", lambda: "nccl")
    monkeypatch.setattr(process_restart.dist, "get_rank", lambda: 0)
    monkeypatch.setattr(survivors.flags, "read", lambda args: SimpleNamespace(timeout_s=1.0))
    kept = cast("Any", SimpleNamespace(as_before_training=lambda: None))
    stays = survivors.Survivors(Loop(), "0.19.2")
    vars(stays).update(_kept=kept, _globals=kept)
    with pytest.raises(RuntimeError, match="reset by peer"):
        stays.connect()
    assert watched == ["begins", "ends"]
