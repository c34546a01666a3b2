"""The guard of a step over a plain chain of optimizers that does what core's does, in core's order."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from megatron.core.dist_checkpointing.moe.errors import PeerLost
from megatron.core.dist_checkpointing.moe.local_recovery.step_guard import StepGuard, Stepped
from megatron.core.dist_checkpointing.moe.policy.parking import Cause, Decision, StepPhase


class Lost(RuntimeError):
    """A peer is gone."""


class Chunk:
    """A model chunk of which only the gathering of weights is of interest."""

    def __init__(self, name: str, done: list[str], fails: set[str]) -> None:
        self.name, self.done, self.fails = name, done, fails

    def start_param_sync(self, *unused: object, **options: object) -> None:
        reach(f"gather {self.name}", self.done, self.fails)


def reach(what: str, done: list[str], fails: set[str]) -> None:
    """Do something, or lose a peer in it."""
    if what in fails:
        raise Lost(what)
    done.append(what)


class Member:
    """One optimizer of the chain."""

    is_stub_optimizer, grad_scaler = False, None

    def __init__(self, name: str, chunk: Chunk, done: list[str], fails: set[str]) -> None:
        self.name, self.model_chunks, self.done, self.fails = name, [chunk], done, fails

    def prepare_grads(self) -> bool:
        reach(f"prepare {self.name}", self.done, self.fails)
        return "overflow" in self.fails

    def step_with_ready_grads(self) -> bool:
        reach(f"update {self.name}", self.done, self.fails)
        self.model_chunks[0].start_param_sync()
        return True


class Chain:
    """Two optimizers, as for dense parameters and for experts, that step the same chunk."""

    def __init__(self, *fails: str) -> None:
        self.done: list[str] = []
        self.fails = set(fails)
        chunk = Chunk("chunk", self.done, self.fails)
        self.chained_optimizers = [Member(name, chunk, self.done, self.fails) for name in ("dense", "experts")]

    def get_grad_norm(self) -> float:
        reach("norm", self.done, self.fails)
        return 0.5

    def count_zeros(self) -> int:
        reach("zeros", self.done, self.fails)
        return 3

    def step_with_ready_grads(self) -> bool:
        return all([member.step_with_ready_grads() for member in self.chained_optimizers])

    def step(self) -> tuple[bool, float | None, int | None]:
        if any([member.prepare_grads() for member in self.chained_optimizers]):
            return False, None, None
        norm, zeros = self.get_grad_norm(), self.count_zeros()
        return self.step_with_ready_grads(), norm, zeros


def test_the_norm_of_a_step_is_read_when_somebody_asks_for_it() -> None:
    reads: list[str] = []

    class Made(torch.Tensor):
        def __float__(self) -> float:
            reads.append("float")
            return super().__float__()

    chain = Chain()
    chain.get_grad_norm = lambda: torch.tensor(0.5).as_subclass(Made)  # type: ignore[method-assign, assignment, return-value]
    guard = StepGuard(chain)  # type: ignore[arg-type]
    with guard.stepping(5):
        chain.step()
    assert reads == [] and guard.stepped is not None and guard.stepped.grad_norm is not None
    assert float(guard.stepped.grad_norm) == 0.5


WHOLE_STEP = "prepare dense,prepare experts,norm,zeros,update dense,gather chunk,update experts,gather chunk".split(",")


def begun(chain: Chain) -> StepGuard:
    """A guard after the passes of iteration 5."""
    guard = StepGuard(chain)
    guard.stands(4)
    guard.passes(5)
    guard.reduced()
    return guard


def interrupted(chain: Chain, inside: Callable[[], None] = lambda: None) -> StepGuard:
    """A guard after a step that some peer was lost in."""
    guard = begun(chain)

    def train() -> None:
        with guard.stepping(5):
            chain.step()
            inside()

    with pytest.raises(Lost):
        train()
    return guard


def test_the_phases_of_an_iteration_follow_each_other() -> None:
    chain = Chain()
    guard = StepGuard(chain)
    seen = [guard.phase]
    guard.passes(1)
    seen.append(guard.phase)
    guard.reduced()
    seen.append(guard.phase)
    with guard.stepping(1):
        assert chain.step() == (True, 0.5, 3)
        seen.append(guard.phase)
    assert guard.stepped == Stepped(True, 0.5)
    guard.stands(1)
    seen.append(guard.phase)
    assert [phase.name for phase in seen] == ["IDLE", "PASSES", "REDUCED", "UPDATED", "IDLE"]
    assert chain.done == WHOLE_STEP
    assert guard.iteration == 1


def test_the_optimizer_is_left_as_it_was_found() -> None:
    chain = Chain("norm")
    before = dict(vars(chain)), dict(vars(chain.chained_optimizers[0]))
    interrupted(chain)
    assert (dict(vars(chain)), dict(vars(chain.chained_optimizers[0]))) == before


@pytest.mark.parametrize("collective", ["prepare dense", "prepare experts", "norm"])
def test_before_the_update_a_lost_peer_leaves_the_last_state_and_gradients(collective: str) -> None:
    guard = interrupted(Chain(collective))
    assert guard.phase is StepPhase.REDUCED
    decision = guard.decide(Cause.PEER_LOST)
    assert (decision.iteration, decision.gradients) == (4, True)
    assert guard.stepped is None


def test_a_peer_that_is_lost_while_weights_are_gathered_is_heard_of_after_the_whole_update() -> None:
    chain, reached = Chain("gather chunk"), []
    guard = interrupted(chain, lambda: reached.append("schedule"))
    # The first gather fails, the second is not tried: whoever is left would wait in vain.
    assert chain.done == [what for what in WHOLE_STEP if not what.startswith("gather")]
    assert reached == ["schedule"]
    assert guard.decide(Cause.PEER_LOST).iteration == 5
    assert guard.stepped == Stepped(True, 0.5)


def test_a_peer_that_is_lost_while_zeros_are_counted_is_heard_of_after_the_update() -> None:
    guard = interrupted(Chain("zeros"))
    assert guard.decide(Cause.PEER_LOST).iteration == 5


def test_an_update_that_fails_by_itself_is_parked_nowhere() -> None:
    guard = interrupted(Chain("update experts"))
    assert guard.phase is StepPhase.UPDATING
    assert all(guard.decide(cause).iteration is None for cause in Cause)


def test_a_skipped_step_ends_the_iteration_all_the_same() -> None:
    chain = Chain("overflow")
    guard = begun(chain)
    with guard.stepping(5):
        chain.step()
    assert guard.stepped == Stepped(False, None)
    assert guard.decide(Cause.TOLD_TO_END).iteration == 5


def test_a_replay_is_not_followed() -> None:
    chain = Chain("gather chunk")
    guard = StepGuard(chain)
    guard.enter(StepPhase.REPLAYING)
    guard.passes(5)
    guard.reduced()
    with pytest.raises(Lost), guard.stepping(5):
        chain.step()
    assert guard.phase is StepPhase.REPLAYING
    assert "update experts" not in chain.done
    assert guard.decide(Cause.PEER_LOST).iteration is None


def test_a_process_that_waits_at_the_target_parks_it() -> None:
    guard = StepGuard(Chain())
    guard.enter(StepPhase.REPLAYING)
    guard.stands(7, StepPhase.REJOINING)
    assert guard.decide(Cause.PEER_LOST) == Decision(7, False, "The state of the last iteration is whole.")


class Marker:
    """The end of a reduction, or of a norm, on a device."""

    def __init__(self, *, passed: bool) -> None:
        self.passed = passed

    def query(self) -> bool:
        return self.passed


def reducing(reduction: Marker, chain: Chain | None = None, norm: Marker | None = None) -> StepGuard:
    """A guard whose host is behind the passes of iteration 5, and its device perhaps not."""
    guard = StepGuard(chain or Chain())
    guard.stands(4)
    guard.passes(5)
    guard.reduced(iter([reduction, norm or reduction]).__next__)
    return guard


def test_gradients_are_final_only_where_the_device_had_reduced_them_before_the_abort() -> None:
    for passed in (True, False):
        marker = Marker(passed=passed)
        guard = reducing(marker)
        assert guard.interrupt()
        marker.passed = True  # an aborted reduction ends too
        decision = guard.decide(Cause.PEER_LOST)
        assert (decision.iteration, decision.gradients) == (4, passed)


def test_gradients_on_a_device_are_not_kept_where_something_else_ended_their_reduction() -> None:
    decision = reducing(Marker(passed=True)).decide(Cause.PEER_LOST)
    assert (decision.iteration, decision.gradients) == (4, False)


def test_passes_that_end_after_the_abort_have_reduced_nothing() -> None:
    chain = Chain()
    guard = StepGuard(chain)
    guard.stands(4)
    guard.passes(5)
    assert guard.interrupt()
    guard.reduced(lambda: Marker(passed=True))
    decision = guard.decide(Cause.PEER_LOST)
    assert (decision.iteration, decision.gradients) == (4, False)


def test_no_update_begins_after_an_interruption() -> None:
    chain = Chain()
    guard = begun(chain)
    assert guard.interrupt()
    with pytest.raises(PeerLost, match="update does not begin"), guard.stepping(5):
        chain.step()
    assert not [done for done in chain.done if done.startswith("update")]
    assert guard.decide(Cause.PEER_LOST).iteration == 4


def test_an_update_is_not_interrupted_before_its_iteration_is_whole() -> None:
    chain = Chain()
    guard = begun(chain)
    answers: list[bool] = []
    update = chain.chained_optimizers[1].step_with_ready_grads

    def updating() -> bool:
        answers.append(guard.interrupt())
        return update()

    chain.chained_optimizers[1].step_with_ready_grads = updating  # type: ignore[method-assign]
    with guard.stepping(5):
        chain.step()
        answers.append(guard.interrupt())
    guard.stands(5)
    answers.append(guard.interrupt())
    assert answers == [False, False, True]
    assert chain.done == WHOLE_STEP


def test_an_update_that_is_cut_off_behind_an_aborted_reduction_leaves_nothing_to_park() -> None:
    chain, marker = Chain(), Marker(passed=False)
    guard = reducing(marker, chain)
    with guard.stepping(5):
        chain.step()
        assert guard.interrupt(force=True)
    guard.stands(5)
    assert guard.decide(Cause.PEER_LOST).iteration is None


@pytest.mark.parametrize("force", [True, False], ids=["in the step", "behind it"])
def test_a_step_whose_norm_was_aborted_on_the_device_leaves_nothing_to_park(force: bool) -> None:
    chain, norm = Chain(), Marker(passed=False)
    guard = reducing(Marker(passed=True), chain, norm)
    with guard.stepping(5):
        chain.step()
        if force:
            assert guard.interrupt(force=True)
    guard.stands(5)
    if not force:  # the host does not wait for the device where no other rank asks for the norm
        guard.passes(6)
        assert guard.interrupt()
    norm.passed = True  # an aborted norm ends too
    assert guard.decide(Cause.PEER_LOST).iteration is None


@pytest.mark.parametrize("passed", [True, False])
def test_who_leaves_by_itself_parks_no_step_whose_norm_it_aborts(passed: bool) -> None:
    chain, norm = Chain(), Marker(passed=passed)
    guard = reducing(Marker(passed=True), chain, norm)
    with guard.stepping(5):
        chain.step()
    guard.stands(5)
    guard.await_update()  # for SIGTERM, and closes connections then
    norm.passed = True
    assert guard.decide(Cause.TOLD_TO_END).iteration == (5 if passed else None)


@pytest.mark.parametrize("passed", [True, False])
def test_weights_that_are_not_gathered_leave_the_state_whole_where_the_device_had_the_norm(passed: bool) -> None:
    chain, norm = Chain("gather chunk"), Marker(passed=passed)
    guard = reducing(Marker(passed=True), chain, norm)
    with pytest.raises(Lost), guard.stepping(5):
        chain.step()
    norm.passed = True  # by the abort of what it waited for
    assert guard.decide(Cause.PEER_LOST).iteration == (5 if passed else None)


def test_gradients_that_may_be_clipped_are_not_kept() -> None:
    chain = Chain()
    guard = reducing(Marker(passed=True), chain)
    chain.count_zeros = lambda: int(guard.interrupt())  # type: ignore[method-assign]  # behind the norm
    with pytest.raises(PeerLost), guard.stepping(5):
        chain.step()
    decision = guard.decide(Cause.PEER_LOST)
    assert (decision.iteration, decision.gradients) == (4, False)
