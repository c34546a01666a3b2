"""In the stock loop training ends for nodes that wait, on all ranks alike, and only where nothing is lost by that."""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from stock_stand_in import Manager, arguments, one_rank, stand_in
from torch.distributed.launcher import api as launcher

from megatron.core.dist_checkpointing.moe import manager
from megatron.core.dist_checkpointing.moe.config import MoECheckpointConfig
from megatron.core.dist_checkpointing.moe.errors import NewProcessesNeeded, PeerLost, Terminated, UsageError
from megatron.core.dist_checkpointing.moe.extensions.elastic import growth
from megatron.core.dist_checkpointing.moe.extensions.elastic.growth import Growth
from megatron.core.dist_checkpointing.moe.standby.joining import FOLDER, Joining
from megatron.core.dist_checkpointing.moe.stock.hooks import Hooks
from megatron.core.dist_checkpointing.moe.stock.seams import installed
from megatron.pretrain.standby.growth import PATIENCE_S, DeferredNodeCount, patient_nodes

SIZES = {"world_size": 1, "tensor_model_parallel_size": 1, "pipeline_model_parallel_size": 1, "num_experts": 4}
SIZES |= {"context_parallel_size": 1, "expert_model_parallel_size": 1, "distributed_timeout_minutes": 1}
ELASTIC = MoECheckpointConfig(strategy="full", elastic="1:2", interval=2)


class Work:
    """A collective that has ended, or never does."""

    def __init__(self, *, ends: bool) -> None:
        self._ends = ends

    def is_completed(self) -> bool:
        return self._ends

    def wait(self) -> None:
        pass


@pytest.fixture(autouse=True)
def one_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: "cpu")
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda vote, **_: Work(ends=True))
    monkeypatch.setattr(torch.distributed, "get_rank", lambda *_: 0)


def args(**changes: Any) -> argparse.Namespace:
    return arguments(**SIZES | {"train_iters": 6} | changes)


def test_training_ends_for_nodes_behind_an_iteration_with_a_snapshot(tmp_path: Path) -> None:
    joining = Joining(tmp_path)
    own = Growth(ELASTIC, args(), joining)
    assert not own.ends_training(2, begins=True)
    joining.ask()
    assert not own.ends_training(3, begins=True), "no snapshot is due"
    assert not own.ends_training(6, begins=True), "nothing is left to train"
    assert own.ends_training(4, begins=True) and own.makes_way


def test_where_earlier_snapshots_are_still_under_way_nodes_wait_for_the_next(tmp_path: Path) -> None:
    joining = Joining(tmp_path)
    joining.ask()
    own = Growth(ELASTIC, args(), joining)
    assert not own.ends_training(2, begins=False) and not own.makes_way, "iterations would be trained again"
    assert own.ends_training(4, begins=True)
    saves = Growth(replace(ELASTIC, strategy="pec"), args(exit_interval=None), joining)
    assert saves.ends_training(2, begins=False)


@pytest.mark.parametrize(("strategy", "exits"), [("full", None), ("sparse", 4), ("pec", 4), ("selective", 4)])
def test_where_snapshots_are_parts_of_a_state_the_loop_saves_all_of_it_before_it_leaves(
    strategy: str, exits: int | None, tmp_path: Path
) -> None:
    joining, given = Joining(tmp_path), args(exit_interval=None)
    joining.ask()
    assert Growth(replace(ELASTIC, strategy=strategy), given, joining).ends_training(4, begins=True)
    assert given.exit_interval == exits


def test_where_a_fault_strikes_the_save_that_ends_training_survivors_leave_no_earlier_than_others(
    tmp_path: Path,
) -> None:
    joining, given = Joining(tmp_path), args(exit_interval=50)
    joining.ask()
    own = Growth(replace(ELASTIC, strategy="sparse"), given, joining)
    exits: list[int] = []
    with contextlib.suppress(PeerLost), own.ending(4, begins=True) as makes_way:
        exits += [given.exit_interval] * makes_way
        raise PeerLost("rank 1")
    assert [*exits, given.exit_interval] == [4, 50]


@pytest.mark.parametrize(("others", "ends"), [([1, 0], True), ([0, 0], False), ([1, 1], False)])
def test_what_only_another_rank_knows_counts(
    others: list[int], ends: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def all_reduce(vote: torch.Tensor, **_: Any) -> Work:
        vote.copy_(torch.maximum(vote, torch.tensor(others)))
        return Work(ends=True)

    monkeypatch.setattr(torch.distributed, "all_reduce", all_reduce)
    assert Growth(ELASTIC, args(), Joining(tmp_path)).ends_training(2, begins=True) == ends


def test_a_rank_that_does_not_vote_is_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda vote, **_: Work(ends=False))
    with pytest.raises(PeerLost, match="--distributed-timeout-minutes"):
        Growth(ELASTIC, args(distributed_timeout_minutes=0.001), Joining(tmp_path)).ends_training(2, begins=True)


def test_without_a_launcher_nobody_votes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "all_reduce", None)
    own = Growth(ELASTIC, args())
    assert not own.ends_training(2, begins=True)
    own.make_way(lambda: False)


@pytest.mark.parametrize(("told", "error"), [(True, Terminated), (False, NewProcessesNeeded)])
def test_workers_that_made_way_wait_to_be_started_again(
    told: bool, error: type[Exception], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(growth, "MAKE_WAY_S", 0.05)
    joining = Joining(tmp_path)
    joining.ask()
    own = Growth(ELASTIC, args(), joining)
    own.make_way(lambda: told)
    assert not joining.is_ready, "training has not ended"
    assert own.ends_training(2, begins=True)
    with pytest.raises(error):
        own.make_way(lambda: told)
    assert joining.is_ready


def test_workers_that_made_way_end_once_their_launcher_calls_them_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    joining = Joining(tmp_path)
    joining.ask()
    own = Growth(ELASTIC, args(), joining)
    assert own.ends_training(2, begins=True)
    monkeypatch.setattr(growth, "own_slot", lambda: SimpleNamespace(is_called_off=True))
    with pytest.raises(Terminated, match="told to end by the launcher; nodes have joined"):
        own.make_way(lambda: False)


def test_workers_that_made_way_hear_of_sigterm_where_the_loop_only_notes_it(tmp_path: Path) -> None:
    joining = Joining(tmp_path)
    joining.ask()
    own = Growth(ELASTIC, args(), joining)
    assert own.ends_training(2, begins=True)
    noted: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _frame: noted.append(number))  # as with --exit-signal-handler
    try:
        loops = signal.getsignal(signal.SIGTERM)
        threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGTERM)).start()
        with pytest.raises(Terminated):
            own.make_way(lambda: False)
        assert signal.getsignal(signal.SIGTERM) is loops
    finally:
        signal.signal(signal.SIGTERM, before)


def test_the_loop_leaves_with_its_memory_kept_once_nodes_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(growth, "MAKE_WAY_S", 0.05)
    monkeypatch.setenv(FOLDER, str(tmp_path))
    Joining(tmp_path).ask()
    given = args(moe_ckpt_elastic="1:2", moe_ckpt_interval=2, save="somewhere", save_interval=2)
    loop = stand_in(given)
    manager = Manager(loop.calls)
    manager.is_told_to_end = False
    hooks = Hooks(loop, "0.19.2", manager)
    with (
        one_rank(),
        pytest.raises(NewProcessesNeeded),
        hooks,
        installed(loop, hooks.by_name(), "0.19.2", is_on=hooks.is_on),
    ):
        loop.pretrain()
    said = " ".join(loop.calls)
    assert said.count("passes") == 2, said
    assert "save saved after_step reported finish, memory kept left with NewProcessesNeeded" in said


def test_any_loop_is_refused_sizes_that_it_could_not_have() -> None:
    model = SimpleNamespace(tensor_model_parallel_size=1, pipeline_model_parallel_size=1, context_parallel_size=1)
    model.expert_model_parallel_size, model.expert_tensor_parallel_size, model.num_moe_experts = 1, None, 4
    manager.refuse_sizes_that_do_not_fit(ELASTIC, model, 4, 1)
    with pytest.raises(UsageError, match="--global-batch-size 3 does not divide"):
        manager.refuse_sizes_that_do_not_fit(ELASTIC, model, 3, 1)


def test_workers_that_start_again_are_asked_anew_though_nodes_still_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    waiting, joining = 0, Joining(tmp_path)
    handler = SimpleNamespace(num_nodes_waiting=lambda: waiting, next_rendezvous=lambda: "met")
    agent = SimpleNamespace(get_worker_group=lambda: SimpleNamespace(spec=SimpleNamespace(rdzv_handler=handler)))
    monkeypatch.setattr(launcher, "LocalElasticAgent", lambda: agent)
    with patient_nodes(tmp_path):
        launcher.LocalElasticAgent()
    waiting = 1
    assert handler.num_nodes_waiting() == 0 and joining.is_asked
    joining.ready()
    assert handler.num_nodes_waiting() == 1
    assert handler.next_rendezvous() == "met"
    assert not joining.is_asked, "workers would make way in their first iteration"
    assert handler.num_nodes_waiting() == 0, "these workers have just begun, and one more node waits"
    assert joining.is_asked


def test_workers_that_have_ended_are_started_again_though_the_node_is_gone(tmp_path: Path) -> None:
    waiting, joining = 1, Joining(tmp_path)
    deferred = DeferredNodeCount(lambda: waiting, joining)
    assert deferred() == 0 and joining.is_asked
    joining.ready()
    waiting = 0
    assert deferred() == deferred() == 1


def test_where_a_file_took_the_place_of_the_folder_no_launcher_ends_and_a_line_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    deferred = DeferredNodeCount(lambda: 0, Joining(tmp_path / "file"))
    deferred.meeting()
    assert deferred() == deferred() == 0
    assert caplog.text.count("workers may make way for nodes that no longer wait") == 1


def test_a_folder_that_is_gone_delays_nodes_and_ends_no_launcher(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    now_s, gone = 0.0, tmp_path / "removed by a cleaner of temporary files"
    deferred = DeferredNodeCount(lambda: 1, Joining(gone), lambda: now_s)
    assert deferred() == 0
    assert deferred() == 0
    assert caplog.text.count("cannot be asked to make way") == 1 and str(gone) in caplog.text
    now_s = PATIENCE_S + 1
    assert deferred() == 1
    own = Growth(ELASTIC, args(), Joining(gone))
    own.makes_way = True
    with pytest.raises(NewProcessesNeeded, match=r"does not learn of the end.*removed by a cleaner"):
        own.make_way(lambda: False)
