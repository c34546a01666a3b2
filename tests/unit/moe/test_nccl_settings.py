"""What torch is told about NCCL before process groups are made, and what is said where it was told otherwise."""

from __future__ import annotations

import importlib
import os
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch

from megatron.core.dist_checkpointing.moe.runtime.peer_links import (
    SETTINGS,
    process_group_timeout_s,
    set_for_parking,
    wrong_settings,
)
from megatron.core.dist_checkpointing.moe.stock import protected
from megatron.core.dist_checkpointing.moe.stock.seams import TRAINING
from megatron.core.parallel_state import update_pg_timeout

WATCHDOG, RETHROW = "TORCH_NCCL_ASYNC_ERROR_HANDLING", "TORCH_NCCL_RETHROW_CUDA_ERRORS"
PARKING = {name: value for name, (value, _) in SETTINGS.items()}


def test_torchs_watchdog_is_told_to_leave_errors_alone() -> None:
    environment: dict[str, str] = {}
    set_for_parking("nccl", environment)
    assert environment == PARKING
    assert environment.keys() >= {WATCHDOG, RETHROW, "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC"}
    assert not list(wrong_settings(environment, "nccl"))


def test_what_torchrun_tells_its_workers_is_replaced() -> None:
    environment = {"TORCHELASTIC_RUN_ID": "job", WATCHDOG: "1"}
    set_for_parking("cpu:gloo,cuda:nccl", environment)
    assert environment.items() > PARKING.items()


def test_what_a_user_has_set_stays_and_is_warned_about_by_name() -> None:
    environment = {WATCHDOG: "3", RETHROW: "0"}
    set_for_parking("nccl", environment)
    assert environment[WATCHDOG] == "3"
    (line,) = wrong_settings(environment, "nccl")
    assert line.startswith(f"{WATCHDOG} is 3: when a peer is lost, torch's watchdog ends the process")
    assert f"set {WATCHDOG}=0 before process groups are made" in line


def test_groups_that_were_made_before_are_warned_about() -> None:
    assert [line.split(" ")[0] for line in wrong_settings({}, "nccl")] == list(PARKING)


@pytest.mark.parametrize("backend", ["gloo", ""])
def test_other_backends_need_nothing(backend: str) -> None:
    environment: dict[str, str] = {}
    set_for_parking(backend, environment)
    assert not environment
    assert not list(wrong_settings(environment, backend))


@pytest.mark.parametrize(("strategy", "told"), [("full", "0"), ("none", None), (None, "0")])
def test_with_a_strategy_or_where_flags_are_not_read_yet_the_stock_loop_leaves_errors_alone(
    strategy: str | None, told: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop = importlib.import_module(TRAINING)
    if strategy is not None:
        monkeypatch.setattr(loop, "get_args", lambda: SimpleNamespace(moe_ckpt_strategy=strategy))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(os, "environ", {name: value for name, value in os.environ.items() if name not in PARKING})
    assert protected(lambda: os.environ.get(WATCHDOG))() == told


def test_how_long_a_collective_may_take_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1, timeout=timedelta(seconds=77))
    try:
        assert process_group_timeout_s("cpu") == 77.0
        # Behind the first iteration, with --distributed-timeout-seconds-after-init.
        monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
        update_pg_timeout(timedelta(seconds=33), torch.distributed.group.WORLD)
        assert process_group_timeout_s("cpu") == 33.0
    finally:
        torch.distributed.destroy_process_group()
