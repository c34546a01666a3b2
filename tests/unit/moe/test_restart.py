"""From which of several states training begins again."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from megatron.core.dist_checkpointing.moe.config import MoECheckpointConfig
from megatron.core.dist_checkpointing.moe.errors import UsageError
from megatron.core.dist_checkpointing.moe.policy.lineage import Identity
from megatron.core.dist_checkpointing.moe.recovery.recovery import Waiting
from megatron.core.dist_checkpointing.moe.replay.densify import Replay
from megatron.core.dist_checkpointing.moe.resharding.store import PreviousWindow
from megatron.core.dist_checkpointing.moe.runtime.restart import Restart
from megatron.core.dist_checkpointing.moe.runtime.session import Loadable, Request
from megatron.core.dist_checkpointing.moe.types import OperatorId, OperatorKind, RecoveryPlan, Scope

LOST = {OperatorId(0, OperatorKind.EXPERT, 1): 5}


def restart(plan: RecoveryPlan | None) -> tuple[Restart, list[str]]:
    """One that has found a plan, and what it came to do."""
    did: list[str] = []
    recovery = SimpleNamespace(look=lambda: plan, plan=None, is_own=True, diverged=(), discard=lambda: None)
    recovery.is_of = lambda jobs: "own" in jobs
    recovery.foreign = (-1, "")
    recovery.restore_through = lambda _: did.append("loaded")
    own: Any = SimpleNamespace(window=None, restored=lambda iteration: None, freed=[])
    own.discard = lambda: own.freed.append(True)
    state = SimpleNamespace(refresh=lambda: None, restorer=None, clear_counters=lambda: None)
    alone = SimpleNamespace(rank=0, merge=lambda value, combine: value)
    found: Any = Restart(recovery, own, None, state, *[None] * 3, alone, renew_strategy=lambda: None)
    found.carry_out = lambda: did.append("restored") or True
    return found, did


def request_of(load: Any = lambda: 4, *, run_again: Any = None, iteration: int = 4, **found: Any) -> Request:
    """A start with a checkpoint of iteration 4."""
    return Request(load, Loadable(iteration, **found), run_again)


@pytest.mark.parametrize(
    ("target", "lost", "in_part", "began"),
    [
        (4, {}, False, "restored"),
        (4, LOST, False, "loaded"),
        (4, LOST, True, "restored"),
        (5, LOST, False, "restored"),
        (3, {}, False, "loaded"),
    ],
)
def test_a_whole_checkpoint_beats_snapshots_of_the_same_iteration_that_lose_tokens(
    target: int, lost: dict[OperatorId, int], in_part: bool, began: str
) -> None:
    own, did = restart(RecoveryPlan(target, Scope.GLOBAL, (), (), lost_tokens=lost))
    trainer: Any = SimpleNamespace(iteration=0, of_another_device=False)
    own.restore(trainer, request_of(in_part=in_part))
    assert did == [began]


@pytest.mark.parametrize(
    ("target", "in_part", "began"), [(3, False, "loaded"), (3, True, "restored"), (4, False, "restored")]
)
def test_a_checkpoint_that_was_asked_for_is_passed_by_only_where_this_job_has_come_to_it(
    target: int, in_part: bool, began: str
) -> None:
    own, did = restart(RecoveryPlan(target, Scope.GLOBAL, (), ()))
    trainer: Any = SimpleNamespace(iteration=0, of_another_device=False)
    own.restore(trainer, request_of(asked_for=True, in_part=in_part))
    assert did == [began]


@pytest.mark.parametrize(("job", "began"), [("own", "restored"), ("of the past that was left", "loaded")])
def test_once_training_went_back_only_snapshots_of_the_jobs_that_did_are_compared(job: str, began: str) -> None:
    own, did = restart(RecoveryPlan(9, Scope.GLOBAL, (), ()))
    trainer: Any = SimpleNamespace(iteration=0, of_another_device=False)
    own.restore(trainer, request_of(only_of=frozenset({job})))
    assert did == [began]


@pytest.mark.parametrize(("lost", "began"), [({}, "restored"), (LOST, "loaded")])
def test_an_older_snapshot_without_loss_beats_a_checkpoint_with_stale_experts(
    lost: dict[OperatorId, int], began: str
) -> None:
    own, did = restart(RecoveryPlan(3, Scope.GLOBAL, (), (), lost_tokens=lost))
    trainer: Any = SimpleNamespace(iteration=0, of_another_device=False)
    own.restore(trainer, request_of(lacks=True))
    assert did == [began]


@pytest.mark.parametrize(("target", "began"), [(4, "loaded"), (5, "restored")])
def test_a_checkpoint_that_tells_of_a_doubtful_iteration_beats_snapshots_that_stand_before_it_too(
    target: int, began: str
) -> None:
    own, did = restart(RecoveryPlan(target, Scope.GLOBAL, (), ()))
    trainer: Any = SimpleNamespace(iteration=0, of_another_device=False)
    own.restore(trainer, request_of(in_doubt=True))
    assert did == [began]


@pytest.mark.parametrize("is_own", [True, False])
def test_a_restart_that_leaves_out_again_what_the_job_left_out_when_it_began_says_so(
    is_own: bool, caplog: pytest.LogCaptureFixture
) -> None:
    own, did = restart(RecoveryPlan(3, Scope.GLOBAL, (), ()))
    vars(own.recovery).update(is_own=is_own)
    trainer: Any = SimpleNamespace(iteration=0, of_another_device=False)
    own.restore(trainer, request_of(in_part=True))
    assert did == ["loaded"]
    assert ("snapshot of iteration 3 has all, and is passed by" in caplog.text) is is_own


@pytest.mark.parametrize("target", [None, 5])
@pytest.mark.parametrize("asked_for", [False, True])
def test_memory_that_only_its_strategy_makes_unusable_is_not_freed_for_an_older_state(
    target: int | None, asked_for: bool
) -> None:
    plan = None if target is None else RecoveryPlan(target, Scope.GLOBAL, (), ())
    own, did = restart(plan)
    finds: Any = own.recovery
    finds.of_others, finds.unusable, own.older.unusable = (-1, ""), "", ""  # type: ignore[misc]
    finds.foreign = (6, "it was made with --moe-ckpt-strategy full, this job has sparse")
    own.config, own.identity = MoECheckpointConfig(memory_dir="/memory"), SimpleNamespace(job="run")  # type: ignore[assignment]
    trainer: Any = SimpleNamespace(iteration=0, of_another_device=False)
    with pytest.raises(UsageError, match=r"iteration 6 .*strategy full,.*\(rm -r /memory/\*/run\)$"):
        own.restore(trainer, request_of(asked_for=asked_for))
    assert not did
    finds.foreign = (4, "it was made with --moe-ckpt-strategy full, this job has sparse")
    own.restore(trainer, request_of())
    assert did


@pytest.mark.parametrize(
    ("target", "in_memory", "runs_again", "asked_for", "comes_to"),
    [
        (None, True, True, False, "ran again"),
        (None, False, True, False, "ran again"),
        (5, True, True, False, "ran again"),
        (5, False, True, False, "restored"),  # it may be of a past that was given up
        (9, True, True, False, "restored"),
        (5, True, True, True, "restored"),
        (None, True, False, False, "refused"),
        (5, True, False, False, "refused"),
        (None, False, False, False, "loaded"),
    ],
)
def test_a_window_of_another_layout_in_memory_is_not_freed_for_an_older_state(
    target: int | None, in_memory: bool, runs_again: bool, asked_for: bool, comes_to: str
) -> None:
    own, did = restart(None if target is None else RecoveryPlan(target, Scope.GLOBAL, (), ()))
    finds: Any = own.recovery
    finds.of_others, finds.unusable, own.older.unusable = (-1, ""), "", ""  # type: ignore[misc]
    own.older.window = PreviousWindow(6, 8, "world_size 4", "run", in_memory)  # type: ignore[misc]
    own.config, own.identity = MoECheckpointConfig(memory_dir="/memory"), SimpleNamespace(job="run")  # type: ignore[assignment]
    run_again = (lambda window, copy: did.append("ran again") or window.last) if runs_again else None
    trainer: Any = SimpleNamespace(iteration=0, of_another_device=False)
    own.older.copy_to = None  # type: ignore[assignment, method-assign]
    request = request_of(asked_for=asked_for, run_again=run_again)
    if comes_to == "refused":
        with pytest.raises(
            UsageError, match=r"holds iteration 8 .*iterations 6 to 8 of the layout world_size 4 run again"
        ):
            own.restore(trainer, request)
        assert not did
        return
    own.restore(trainer, request)
    assert did[0] == comes_to
    assert bool(own.older.freed) == (comes_to == "loaded")  # type: ignore[attr-defined]


def damaged(target: int) -> tuple[Restart, list[str]]:
    """One whose copies all prove damaged as they are read: live state is NaN by then."""
    own, did = restart(RecoveryPlan(target, Scope.GLOBAL, (), ()))
    own.carry_out = lambda: did.append("poisoned")  # type: ignore[assignment, method-assign, return-value]
    return own, did


def test_behind_damaged_copies_training_begins_from_a_whole_checkpoint() -> None:
    own, did = damaged(7)
    trainer: Any = SimpleNamespace(iteration=0, of_another_device=False)
    own.restore(trainer, request_of())
    assert did == ["poisoned", "loaded"] and trainer.iteration == 4


@pytest.mark.parametrize(
    "given",
    [
        {"asked_for": True, "in_part": True},  # --finetune
        {"in_part": True},  # --no-load-optim
        {"load": lambda: 0, "iteration": -1},  # a folder that has no checkpoint yet
        {"load": lambda: 0, "iteration": 0},  # a released model
    ],
)
def test_behind_damaged_copies_nothing_is_loaded_that_leaves_a_part_of_the_state_as_it_is(
    given: dict[str, Any],
) -> None:
    own, did = damaged(7)
    trainer: Any = SimpleNamespace(iteration=0, of_another_device=False)
    with pytest.raises(UsageError, match=r"damaged or lost.* without --finetune and --no-load-optim"):
        own.restore(trainer, request_of(**given))
    assert did == ["poisoned"]


def test_nor_is_it_where_the_checkpoint_proved_older_than_the_damaged_copies() -> None:
    own, did = damaged(4)
    trainer: Any = SimpleNamespace(iteration=0, of_another_device=False)
    with pytest.raises(UsageError, match="damaged or lost"):
        own.restore(trainer, request_of(load=lambda: 2, iteration=6, in_part=True))
    assert did == ["loaded", "poisoned"]


def test_behind_damaged_copies_memory_that_only_its_strategy_makes_unusable_stays() -> None:
    own, did = damaged(7)
    finds: Any = own.recovery
    finds.foreign = (6, "it was made with --moe-ckpt-strategy full, this job has sparse")
    own.config, own.identity = MoECheckpointConfig(memory_dir="/memory"), SimpleNamespace(job="run")  # type: ignore[assignment]
    trainer: Any = SimpleNamespace(iteration=0, of_another_device=False)
    with pytest.raises(UsageError, match="holds iteration 6 of this job"):
        own.restore(trainer, request_of())
    assert did == ["poisoned"]


def test_while_peers_replay_logs_take_no_more_memory_than_the_strategy_had_room_for() -> None:
    own, _ = restart(None)
    asked: list[int] = []
    waiting, plan = Waiting(), SimpleNamespace(target=7)
    own.recovery = SimpleNamespace(carry_out=lambda: waiting, plan=plan, timeline=())  # type: ignore[assignment]
    own.survivor = SimpleNamespace(set_lineage=lambda *_: None, resize_logs=asked.append)  # type: ignore[assignment]
    own.strategy = SimpleNamespace(lookback=9, logged=3)  # type: ignore[assignment]
    own.identity = Identity("run", {}, frozenset())
    del own.carry_out
    assert own.carry_out() is waiting and own.prepare(7)
    assert asked == [3]


@pytest.mark.parametrize("exact", [True, False])
def test_only_a_replay_that_came_out_as_recorded_is_parked_for_the_next_recovery(exact: bool) -> None:
    """Which would call it exact: it sees nothing of this one."""
    own, did = restart(None)
    outcome, replay = SimpleNamespace(table=SimpleNamespace(lines=list)), Replay.__new__(Replay)
    own.recovery = SimpleNamespace(  # type: ignore[assignment]
        plan=SimpleNamespace(target=7), timeline=(), carry_out=lambda: replay, is_exact=lambda _: exact,
        finish=lambda _: outcome, close=lambda: did.append("closed"),
    )  # fmt: skip
    own.survivor = SimpleNamespace(  # type: ignore[assignment]
        set_lineage=lambda identity, iteration, phase: did.append(phase.name), resize_logs=lambda logged: None,
        park_again=lambda data: did.append("parked") or "",
    )  # fmt: skip
    own.strategy = SimpleNamespace(logged=3, to_data=lambda: None)  # type: ignore[assignment]
    own.identity = Identity("run", {}, frozenset())
    del own.carry_out
    assert own.carry_out() is replay
    assert own.rejoin() is outcome
    assert did == (["REJOINING", "closed", "parked"] if exact else ["REPLAYING"])
