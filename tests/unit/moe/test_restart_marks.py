"""Where the time of a restart goes: a process's start, its imports, and the time that ranks take to connect."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from megatron.core.dist_checkpointing.moe import bridge_survivors
from megatron.core.dist_checkpointing.moe.boot_clock import since_boot_s, started
from megatron.core.dist_checkpointing.moe.in_place import process_restart
from megatron.core.dist_checkpointing.moe.recovery.timeline import Timestamps
from megatron.core.dist_checkpointing.moe.standby.slot import WorkerSlot
from megatron.core.dist_checkpointing.moe.stock import survivors as stock_survivors

STARTED_S = started(os.getpid()) / os.sysconf("SC_CLK_TCK")
CONNECT = "_initialize_distributed"


class Connecting:
    """What a loop connects ranks with, and whether they are; when that began and ended."""

    def __init__(self) -> None:
        self.is_done, self.begun_s, self.ended_s = False, 0.0, 0.0

    def __call__(self) -> None:
        self.begun_s = since_boot_s()
        self.is_done, self.ended_s = True, since_boot_s()


Start = Callable[[Connecting, "str | None"], Timestamps]


def of_stock_loop(monkeypatch: pytest.MonkeyPatch, connect: Connecting, reason: str | None) -> Timestamps:
    initialize = ModuleType("initialize")
    vars(initialize).update({CONNECT: connect, "_initialize_tp_communicators": lambda: None})
    config = SimpleNamespace(strategy="full", timeout_s=1.0)
    monkeypatch.setitem(sys.modules, "megatron.training.initialize", initialize)
    monkeypatch.setattr(stock_survivors.flags, "read", lambda args: config)
    monkeypatch.setattr(stock_survivors, "why_not", lambda *given, **named: reason)
    held = stock_survivors.Survivors(SimpleNamespace(get_args=lambda: None), "0.19.2")
    return connected(held.building(), initialize, held)


def of_bridge(monkeypatch: pytest.MonkeyPatch, connect: Connecting, reason: str | None) -> Timestamps:
    initialize = ModuleType("initialize")
    vars(initialize).update({CONNECT: connect, "_initialize_tp_communicators": lambda: None})
    modules = {"pretrain": SimpleNamespace(train=print), "initialize": initialize}
    modules["setup"] = SimpleNamespace(setup_data_iterators=print)
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, f"{bridge_survivors.TRAINING}.{name}", module)  # type: ignore[arg-type]
    monkeypatch.setattr(bridge_survivors, "why_not", lambda cfg: reason)
    held = bridge_survivors.BridgeSurvivors(1.0)
    return connected(held.building(None), initialize, held)


def connected(building: AbstractContextManager[None], initialize: Any, held: Any) -> Timestamps:
    with building:
        getattr(initialize, CONNECT)()
    marks = held.marks
    assert isinstance(marks, Timestamps)
    return marks


@pytest.fixture(params=[of_stock_loop, of_bridge], ids=["stock loop", "Bridge"])
def start(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    """Runs a loop in a process of no job, to where its ranks are connected."""

    def run(connect: Connecting, reason: str | None) -> Timestamps:
        for module in (stock_survivors, bridge_survivors, process_restart):
            fake = SimpleNamespace(is_initialized=lambda: connect.is_done, get_rank=lambda: 0)
            monkeypatch.setattr(module, "dist", fake)
        monkeypatch.setattr(process_restart, "own_slot", lambda: WorkerSlot(None))
        monkeypatch.setattr(process_restart, "own_build", lambda: SimpleNamespace(connected=lambda: None))
        monkeypatch.setattr(process_restart, "process_group_backend", lambda: "gloo")
        monkeypatch.setattr(process_restart, "built_beside_survivors", lambda build: nullcontext())
        found: Timestamps = request.param(monkeypatch, connect, reason)
        return found

    return run


@pytest.mark.parametrize("reason", [None, "--async-save: its queue holds process groups"])
def test_imports_are_over_before_ranks_connect(start: Start, reason: str | None) -> None:
    connect = Connecting()
    times = start(connect, reason).times()
    assert times["restarted"] == pytest.approx(STARTED_S)
    assert STARTED_S < float(str(times["imported"])) <= connect.begun_s
    assert connect.ended_s <= float(str(times["rendezvous"]))


def test_what_a_script_connected_before_the_loop_is_not_taken_for_a_rendezvous(start: Start) -> None:
    connect = Connecting()
    connect()
    assert list(start(connect, "torch.distributed was started by the script").times()) == ["restarted"]


def test_a_slot_began_when_it_was_taken_and_else_when_its_process_started() -> None:
    slot = WorkerSlot(None)
    assert slot.began_s == pytest.approx(STARTED_S)
    slot.taken_s = 7.5
    assert slot.began_s == 7.5
