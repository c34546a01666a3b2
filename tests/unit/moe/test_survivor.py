"""A survivor over stand-ins: which memory it releases, where gradients are final, how long parking will take."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from test_step_guard import Chain

from megatron.core.dist_checkpointing.moe.boot_clock import SystemClock
from megatron.core.dist_checkpointing.moe.local_recovery import survivor as survivors
from megatron.core.dist_checkpointing.moe.local_recovery.boundary_copies import LogPlan
from megatron.core.dist_checkpointing.moe.local_recovery.step_guard import StepGuard
from megatron.core.dist_checkpointing.moe.local_recovery.survivor import LiveTensors, Passes, Survivor, SurvivorBuffers
from megatron.core.dist_checkpointing.moe.policy.lineage import Identity
from megatron.core.dist_checkpointing.moe.policy.parking import Cause, ParkingBudget, StepPhase
from megatron.core.dist_checkpointing.moe.ports import NoRoom
from megatron.core.dist_checkpointing.moe.recovery.recovery import RollForward
from megatron.core.dist_checkpointing.moe.snapshot.capturer import LiveCapturer
from megatron.core.dist_checkpointing.moe.snapshot.copy_engines import ThreadEngine
from megatron.core.dist_checkpointing.moe.storage.manifest import checksum, checksum_bytes_per_s, checksums
from megatron.core.dist_checkpointing.moe.storage.memory import MemoryStore
from megatron.core.dist_checkpointing.moe.types import StepJournal, Topology

BUFFERS = SurvivorBuffers((4096, 8192), 4096)
PLAN = LogPlan(Topology(2, pp=2), 0, (4, 1, 8), "float32", 3)


class Trainer:
    """Nothing random."""

    def scalars(self) -> dict[str, Any]:
        return {}

    def tensors(self) -> dict[str, memoryview]:
        return {}

    def restore(self, scalars: dict[str, Any], tensors: dict[str, memoryview]) -> None:
        pass


@pytest.fixture
def new(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Survivor]]:
    communicator = SimpleNamespace(connect=lambda: None, sink=None)
    monkeypatch.setattr(survivors.parallel_state, "get_pipeline_model_parallel_group", lambda: None)
    monkeypatch.setattr(survivors, "BoundaryCommunicator", lambda *_: communicator)
    monkeypatch.setattr(survivors, "StreamEngine", lambda locks: ThreadEngine("device"))
    made: list[Survivor] = []

    def build(*, on_device: bool = False) -> Survivor:
        trainer: Any = Trainer()
        tensors: Any = [SimpleNamespace(tensor=SimpleNamespace(is_cuda=True), field="weight")] * on_device
        optimizer: Any = Chain()
        live = LiveTensors(LiveCapturer((), trainer, ThreadEngine()), trainer, optimizer, tensors, ())
        store = MemoryStore(tmp_path, "job", 0, BUFFERS.sizes(PLAN), area="standby")
        survivor = Survivor(store, BUFFERS, live, PLAN, Passes(None, 4, 1, 2), SystemClock(), 60.0, 25.0)
        survivor.set_lineage(Identity("job", {}, frozenset(), "sparse"), 4)
        made.append(survivor)
        return survivor

    yield build
    for survivor in made:
        survivor.end(keep_memory=False)


def test_copies_of_logs_have_ended_before_any_segment_goes(
    new: Callable[..., Survivor], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    survivor, there = new(), list[set[Path]]()
    before = {*tmp_path.rglob("segment-*.bin")}
    settle = lambda recorder: there.append({*tmp_path.rglob("segment-*.bin")})  # noqa: E731
    monkeypatch.setattr(survivors.BoundaryRecorder, "settle", settle)
    survivor.resize_logs(PLAN.lookback + 2)
    assert there == [before]
    assert len(list(tmp_path.rglob("segment-*.bin"))) == len(BUFFERS.sizes(replace(PLAN, lookback=PLAN.lookback + 2)))


def test_a_log_that_is_being_recorded_stays_where_more_logs_are_kept(
    new: Callable[..., Survivor], monkeypatch: pytest.MonkeyPatch
) -> None:
    survivor = new()
    survivor.passes(5)
    given_up: list[object] = []
    monkeypatch.setattr(survivors.BoundaryLogs, "abandon", lambda logs: given_up.append(logs))
    survivor.resize_logs(PLAN.lookback + 2)
    assert not given_up


def no_room(*_: object, **__: object) -> None:
    raise NoRoom("the tmpfs is full")


def test_logs_that_find_no_room_are_said_once(
    new: Callable[..., Survivor], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    survivor = new()
    monkeypatch.setattr(survivor.store, "resize", no_room)
    for _ in range(3):
        survivor.resize_logs(6)
    assert len([line for line in caplog.messages if "find no room" in line]) == 1


@pytest.mark.parametrize("continues", [True, False])
def test_live_state_is_that_of_its_parked_snapshot_until_training_continues_or_nothing_is_parked(
    continues: bool, new: Callable[..., Survivor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a later recovery would take whatever live state is by then for that snapshot, and copy nothing."""
    survivor = new()
    assert not survivor.park_again({})
    assert survivor.kept is not None and survivor.kept.iteration == 4
    if continues:
        survivor.passes(5, logged=False)
    else:
        monkeypatch.setattr(survivor.store, "reserve", no_room)
        assert "the tmpfs is full" in survivor.park_again({})
    assert survivor.kept is None


def test_a_state_that_is_parked_behind_the_step_tells_all_that_a_replay_of_its_passes_needs(
    new: Callable[..., Survivor],
) -> None:
    survivor, passed = new(), StepJournal(None, False, 1.5, 96, out_of_pages=True)
    survivor.passes(5, logged=False)
    survivor.reduced()
    with survivor.stepping(5, passed):
        survivor.live.optimizer.step()
    assert not survivor.park(Cause.PEER_LOST, {}, {})
    assert survivor.unreported(5) == replace(passed, grad_norm=0.5)


def test_of_an_iteration_that_was_loaded_there_is_no_outcome_to_report(new: Callable[..., Survivor]) -> None:
    survivor = new()
    assert not survivor.park(Cause.PEER_LOST, {}, {})
    assert survivor.kept is not None and survivor.kept.iteration == 4
    assert survivor.unreported(4) is None


def test_how_a_step_came_out_that_was_made_later_is_reported_in_the_next_start_too(
    new: Callable[..., Survivor], monkeypatch: pytest.MonkeyPatch
) -> None:
    survivor, gradients = new(), SimpleNamespace(read=None, manifest=SimpleNamespace(by_key={}))
    monkeypatch.setattr(survivors, "roll_forward", lambda *_: None)
    monkeypatch.setattr(Trainer, "restore_common", lambda *_: None, raising=False)
    step = StepJournal(0.5, False)
    survivor.roll_forward(RollForward(5, step, cast("Any", gradients), {}))
    survivor.set_lineage(Identity("job", {}, frozenset(), "sparse"), 5, StepPhase.REJOINING)
    assert not survivor.park_again({})
    vars(survivor)["_rolled"] = None  # as in another process
    assert survivor.unreported(5) == step


@pytest.mark.parametrize("passed", [True, False])
def test_on_a_device_gradients_are_kept_where_an_event_behind_their_reduction_had_passed(
    passed: bool, new: Callable[..., Survivor], monkeypatch: pytest.MonkeyPatch
) -> None:
    recorded: list[bool] = []
    event = SimpleNamespace(record=lambda: recorded.append(True), query=lambda: passed)
    monkeypatch.setattr(torch.cuda, "Event", lambda: event)
    guard = StepGuard(cast("Any", Chain()))
    monkeypatch.setattr(survivors, "StepGuard", lambda optimizer: guard)
    survivor = new(on_device=True)
    survivor.passes(5, logged=False)
    survivor.reduced()
    assert recorded
    assert survivor.interrupt(force=False)
    decision = guard.decide(Cause.PEER_LOST)
    assert (decision.iteration, decision.gradients) == (4, passed)


@pytest.mark.parametrize("told", [1, 2])
def test_an_overflow_that_is_counted_for_experts_without_word_of_them_is_said(
    told: int, new: Callable[..., Survivor], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    survivor, gradients = new(), SimpleNamespace(read=None, manifest=SimpleNamespace(by_key={}))
    monkeypatch.setattr(survivors, "roll_forward", lambda *_: None)
    monkeypatch.setattr(Trainer, "scalars", lambda self: {"grad_scalers": [{}, {}]})
    monkeypatch.setattr(Trainer, "restore_common", lambda *_: None, raising=False)
    survivor.roll_forward(
        RollForward(5, StepJournal(None, True), cast("Any", gradients), {"grad_scalers": [{}] * told})
    )
    assert ("rank 0: iteration 5 overflowed" in caplog.text) == (told == 1)


def test_how_long_parking_takes_is_known_before(new: Callable[..., Survivor]) -> None:
    survivor = new()
    assert survivor.parking_budget().nbytes == sum(BUFFERS.parked)
    assert survivor.parking_budget().allowed_s == 25.0
    budget = ParkingBudget(40 * 10**9, copy_bytes_per_s=20e9, checksum_bytes_per_s=10e9, allowed_s=25.0)
    assert budget.seconds == 6.0
    assert budget.fits
    assert not replace(budget, allowed_s=11.0).fits
    assert str(budget) == (
        "emergency save on failure: 40 GB per rank in 6.0 s (copies 20 GB/s, checksums 10 GB/s);"
        " limit: 25 s until the launcher kills a rank"
    )


def test_checksums_by_several_threads_are_those_by_one() -> None:
    whole = memoryview(bytes(range(256)) * (1 << 18))
    parts = [whole[at : at + 5_000_000] for at in range(0, whole.nbytes, 5_000_000)]
    assert checksums(parts, 4) == checksums(parts, 1) == tuple(map(checksum, parts))
    assert checksum_bytes_per_s(2) > 1e6
