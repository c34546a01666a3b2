"""Passes that core runs again: they begin with expert biases as they were, and results are judged from the first on."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import pretrain_gpt_moe
from megatron.core import rerun_state_machine
from megatron.core.dist_checkpointing.moe.core_versions.training import judging_results
from megatron.core.dist_checkpointing.moe.megatron_state.pass_state import PassState
from megatron.core.rerun_state_machine import RerunMode, RerunStateMachine

NAN, FAILED, TO_DISAMBIGUATE = float("nan"), 17, 16


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> RerunStateMachine:
    """Core's own, of one rank on a CPU; what Megatron-LM lets it save is noted."""
    found = RerunStateMachine(mode=RerunMode.VALIDATE_RESULTS)
    monkeypatch.setattr(rerun_state_machine, "_GLOBAL_RERUN_STATE_MACHINE", found)
    monkeypatch.setattr(found, "_reduce_any", lambda value: tuple(value) if isinstance(value, list) else value)
    places = {"get_rng_state": torch.get_rng_state, "set_rng_state": torch.set_rng_state, "current_device": lambda: 0}
    for name, value in places.items():
        monkeypatch.setattr(torch.cuda, name, value)
    return found


class Router(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("expert_bias", torch.zeros(4))
        self.register_buffer("tokens", torch.zeros(4, dtype=torch.int64), persistent=False)

    def moves(self) -> None:
        self.expert_bias.add_(0.001)
        self.tokens.add_(1)


def iteration(router: Router, losses: Iterable[float], *, fatal: bool = True) -> tuple[bool, bool, int]:
    """One of core's loop, whose passes give these losses, and how it ends."""
    machine, given = rerun_state_machine.get_rerun_state_machine(), iter(losses)
    while machine.should_run_forward_backward(None):
        router.moves()
        loss = torch.tensor(next(given))
        machine.validate_result(loss, lambda one: not one < 10, "large or NaN", fatal=fatal)
    outcome: tuple[bool, bool, int] = machine.should_checkpoint_and_exit()
    return outcome


def test_a_doubtful_result_moves_expert_biases_once(machine: RerunStateMachine) -> None:
    router = Router()
    state = PassState(router.buffers())
    with judging_results(state.note, state.put_back, from_first=True):
        assert iteration(router, (99.0, 99.0), fatal=False) == (False, False, 0)
        assert iteration(router, (1.0,)) == (False, False, 0)
    assert router.expert_bias.tolist() == pytest.approx([0.002] * 4)
    assert router.tokens.tolist() == [2] * 4


@pytest.mark.parametrize(("again", "saves", "code"), [(NAN, True, TO_DISAMBIGUATE), (1.0, False, FAILED)])
def test_what_is_saved_in_place_of_a_rejected_iteration_is_the_state_before_it(
    again: float, saves: bool, code: int, machine: RerunStateMachine
) -> None:
    router = Router()
    state = PassState(router.buffers())
    with judging_results(state.note, state.put_back, from_first=True):
        assert iteration(router, (NAN, again)) == (saves, True, code)
    assert not router.expert_bias.any() and not router.tokens.any()


@pytest.mark.parametrize("recovered", [True, False])
def test_the_first_iteration_behind_a_recovery_is_judged_as_any_other(
    recovered: bool, machine: RerunStateMachine
) -> None:
    router = Router()
    state = PassState(router.buffers())
    with judging_results(state.note, state.put_back, from_first=recovered):
        outcome = iteration(router, (NAN, NAN))
    assert outcome == ((True, True, TO_DISAMBIGUATE) if recovered else (False, False, 0))


def test_random_states_that_the_loop_puts_back_twice_are_the_same_each_time(machine: RerunStateMachine) -> None:
    """As Megatron-LM's tracker, which goes on with the dictionary that it is given."""
    states, router = {"model-parallel-rng": 0}, Router()

    def take(saved: Any) -> None:
        nonlocal states
        states = saved["rng_tracker_states"]

    def losses() -> Iterator[float]:
        while True:
            states["model-parallel-rng"] += 1
            yield NAN

    machine.state_save_func, machine.state_restore_func = (lambda: {"rng_tracker_states": dict(states)}), take
    before, state = (machine.state_save_func, machine.state_restore_func), PassState(router.buffers())
    with judging_results(state.note, state.put_back, from_first=True):
        assert iteration(router, losses()) == (True, True, TO_DISAMBIGUATE)
    assert states == {"model-parallel-rng": 0}
    assert (machine.state_save_func, machine.state_restore_func) == before


def test_the_driver_has_passes_run_again_for_a_loss_of_ten_times_the_largest(
    machine: RerunStateMachine, monkeypatch: pytest.MonkeyPatch
) -> None:
    args = SimpleNamespace(check_for_nan_in_loss_and_grad=True, check_for_spiky_loss=True)
    monkeypatch.setattr(pretrain_gpt_moe, "get_args", lambda: args)

    def passes(loss: float) -> int:
        ran = 0
        while machine.should_run_forward_backward(None):
            pretrain_gpt_moe.loss_func(torch.ones(1), torch.tensor([loss]))
            ran += 1
        assert machine.should_checkpoint_and_exit() == (False, False, 0)
        return ran

    assert {passes(1.0) for _ in range(101)} == {1}  # the first one is not judged, and a hundred are samples
    assert [passes(9.0), passes(10.0)] == [1, 2]


def test_a_loop_without_a_machine_of_core_gets_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that it makes later would be refused as a second one."""
    monkeypatch.setattr(rerun_state_machine, "_GLOBAL_RERUN_STATE_MACHINE", None)
    state = PassState(Router().buffers())
    with judging_results(state.note, state.put_back, from_first=True):
        assert vars(rerun_state_machine)["_GLOBAL_RERUN_STATE_MACHINE"] is None


def test_what_was_never_noted_stays_as_it_is() -> None:
    router = Router()
    router.moves()
    PassState(router.buffers()).put_back()
    assert router.tokens.tolist() == [1] * 4
