"""From which of several states training begins again."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from megatron.core.dist_checkpointing.moe.runtime.restart import Restart
from megatron.core.dist_checkpointing.moe.types import OperatorId, OperatorKind, RecoveryPlan, Scope

LOST = {OperatorId(0, OperatorKind.EXPERT, 1): 5}


def restart(plan: RecoveryPlan, *older: object) -> tuple[Restart, list[str]]:
    """One that has found a plan, and what it came to do."""
    did: list[str] = []
    recovery = SimpleNamespace(look=lambda: plan, plan=None, is_own=True, diverged=(), discard=lambda: None)
    recovery.restore_through = lambda _: did.append("loaded")
    own: Any = SimpleNamespace(timelines=lambda: older, discard=lambda: None)
    state = SimpleNamespace(refresh=lambda: None, restorer=None)
    found: Any = Restart(recovery, own, None, state, *[None] * 4, renew_strategy=lambda: None)
    found.carry_out = lambda: did.append("restored") or True
    return found, did


@pytest.mark.parametrize(
    ("target", "lost", "older", "began"),
    [
        (4, {}, ("past",), "restored"),
        (4, LOST, (), "restored"),
        (4, LOST, ("past",), "loaded"),
        (5, LOST, ("past",), "restored"),
        (3, {}, (), "loaded"),
    ],
)
def test_a_whole_checkpoint_beats_snapshots_of_another_layout_that_lose_tokens_of_the_same_iteration(
    target: int, lost: dict[OperatorId, int], older: tuple[str, ...], began: str
) -> None:
    plan = RecoveryPlan(target, Scope.GLOBAL, (), (), lost_tokens=lost)
    own, did = restart(plan, *older)
    trainer: Any = SimpleNamespace(iteration=0, of_another_device=False)
    request: Any = SimpleNamespace(load=lambda: 4, newest=4, asked_for=False, run_again=None, survivors=0)
    own.restore(trainer, request)
    assert did == [began]
