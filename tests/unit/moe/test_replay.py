"""Sparse-to-dense conversion over fakes: what is restored, frozen and compared in which order, and what ends it."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any

import msgspec
import pytest
from simulated_world.lanes import FakeClock
from simulated_world.memory import Memory
from simulated_world.model import FakeModel
from simulated_world.rank import FakeCapturer, FakeExecution, FakeRestorer, FakeTrainerState
from simulated_world.storage import FakeStore
from simulated_world.world import World

from megatron.core.dist_checkpointing.moe.errors import ReplayDiverged, UnreadableCheckpoint
from megatron.core.dist_checkpointing.moe.ports import Facts, Json, Reader, SnapshotId, StoreFailure
from megatron.core.dist_checkpointing.moe.replay.densify import (
    Compared,
    Replay,
    ReplayPorts,
    ReplayStep,
    SnapshotLoad,
    restore_trainer,
)
from megatron.core.dist_checkpointing.moe.types import (
    Direction,
    OperatorId,
    OperatorKind,
    Part,
    StepJournal,
    Window,
    expert,
)

ROUTER, DENSE = OperatorId(0, OperatorKind.ROUTER), OperatorId(0, OperatorKind.NON_EXPERT)
OPERATORS = (DENSE, ROUTER, expert(0, 0), expert(0, 1))
WINDOW = Window(4, ((expert(0, 0),), (ROUTER, expert(0, 1)), (DENSE,)))
LOSSES = {5: 2.5, 6: 2.25}
JOURNALS = {iteration: StepJournal(1.5, False, loss) for iteration, loss in LOSSES.items()}


class Ranks:
    """A transport on which the other ranks say `others`."""

    def __init__(self, rank: int = 0, others: tuple[Json, ...] = ()) -> None:
        self.rank, self.others = rank, map(msgspec.msgpack.encode, others)

    def merge(self, value: bytes, combine: Callable[[bytes, bytes], bytes]) -> bytes:
        return reduce(combine, self.others, value)


@dataclass
class Rank:
    """A rank that was restored as of the first iteration of WINDOW, and the replay that makes its state dense."""

    model: FakeModel
    execution: FakeExecution
    restorer: FakeRestorer
    replay: Replay
    readers: dict[int, Reader]

    def iterate(self, step: StepJournal | None = None) -> None:
        self.model.forward_backward()
        self.model.step()
        self.replay.stepped(step or JOURNALS[self.model.iteration])

    def run(self) -> None:
        self.replay.begin()
        while not self.replay.is_done:
            self.iterate()
        self.restorer.complete()


def snapshots(world: World) -> FakeStore:
    """What a rank sealed while it trained through the window."""
    model, store = FakeModel(world, 0, dict.fromkeys(OPERATORS, 8)), FakeStore(Memory(), 0, (8192,) * 3)
    capturer, trainer = FakeCapturer(model, world), FakeTrainerState(model, world)
    for iteration in range(1, WINDOW.last_iteration + 1):
        model.forward_backward()
        model.step()
        if iteration >= WINDOW.first_iteration:
            layout = capturer.layout(WINDOW.plan(iteration), trainer=True)
            with store.reserve(SnapshotId(iteration, 0), layout) as writer:
                for field in layout.fields:
                    writer.put(field.key, bytes(model.live[field.key]))
                writer.seal(Facts("job", "", {}, {"trainer": trainer.scalars()}))
    return store


def parts_of(iteration: int) -> dict[Part, frozenset[OperatorId]]:
    plan = WINDOW.plan(iteration)
    return {
        Part.MASTER_AND_MOMENTS: plan.anchored,
        Part.COMPUTE: frozenset(operator for operator, part in plan.parts.items() if part is Part.COMPUTE),
    }


def resumed(
    transport: Any = None,
    tolerance: float = 0.0,
    change: Callable[[ReplayStep], ReplayStep] = lambda s: s,
    boundary: Any = None,
    ended: Callable[[], None] = lambda: None,
    **more: Any,
) -> Rank:
    world = World(3)
    store = snapshots(world)
    readers = {iteration: store.open(SnapshotId(iteration, 0)) for iteration in (4, 5, 6)}
    model = FakeModel(world, 0, dict.fromkeys(OPERATORS, 8))
    execution, restorer, trainer = (
        FakeExecution(model, world),
        FakeRestorer(model, world),
        FakeTrainerState(model, world),
    )
    restorer.poison()
    restorer.restore(readers[4].read, parts_of(4))
    restore_trainer(trainer, readers[4])
    steps = [
        change(
            ReplayStep(
                iteration,
                parts_of(iteration - 1)[Part.COMPUTE],
                JOURNALS[iteration],
                (SnapshotLoad(readers[iteration], parts_of(iteration)),),
                readers[iteration],
            )
        )
        for iteration in (5, 6)
    ]
    ports = ReplayPorts(
        restorer=restorer,
        trainer=trainer,
        execution=execution,
        transport=transport or Ranks(),
        clock=FakeClock(world),
        boundary=boundary,
        ended=ended,
    )
    return Rank(model, execution, restorer, Replay(ports, steps, len(OPERATORS), tolerance, **more), readers)


def test_a_replayed_window_is_the_state_that_training_had() -> None:
    rank = resumed()
    rank.run()
    assert rank.model.iteration == WINDOW.last_iteration
    assert not rank.model.wrong()
    assert rank.model.frozen is None


def test_each_iteration_runs_with_the_operators_frozen_that_are_not_anchored_yet_and_with_its_journal() -> None:
    rank = resumed()
    rank.run()
    assert rank.execution.steps == [
        (frozenset({DENSE, ROUTER, expert(0, 1)}), JOURNALS[5]),
        (frozenset({DENSE}), JOURNALS[6]),
    ]


def test_frozen_operators_have_no_master_weights_until_their_snapshot_is_loaded() -> None:
    rank = resumed()
    rank.replay.begin()
    rank.iterate()
    assert rank.model.versions()[f"{DENSE}.weight/master"] is None
    assert not {one for one in rank.model.wrong() if not one.startswith(f"{DENSE}.")}


def test_a_step_over_stale_weights_would_not_have_been_exact() -> None:
    rank = resumed(
        change=lambda step: replace(
            step,
            loads=(
                SnapshotLoad(step.loads[0].reader, {Part.MASTER_AND_MOMENTS: parts_of(5)[Part.MASTER_AND_MOMENTS]}),
            ),
        )
    )
    rank.replay.begin()
    rank.iterate()
    rank.model.forward_backward()
    rank.model.step()
    assert None in {rank.model.versions()[f"{expert(0, 0)}.weight/master"]}


def test_another_loss_than_the_recorded_one_ends_the_replay_with_both() -> None:
    rank = resumed()
    rank.replay.begin()
    with pytest.raises(ReplayDiverged, match=r"iteration 5 .* gave the loss 2\.5000001, recorded was 2\.5;.*tolerance"):
        rank.iterate(StepJournal(1.5, False, 2.5000001))


def test_a_loss_within_the_tolerance_is_accepted_and_one_beyond_is_not() -> None:
    rank = resumed(tolerance=0.01)
    rank.replay.begin()
    rank.iterate(StepJournal(1.5, False, 2.52))
    with pytest.raises(ReplayDiverged):
        rank.iterate(StepJournal(1.5, False, 2.28))


def test_a_loss_that_is_no_number_is_not_the_recorded_one_unless_that_was_none_either() -> None:
    rank = resumed(tolerance=1e9)
    rank.replay.begin()
    with pytest.raises(ReplayDiverged):
        rank.iterate(StepJournal(1.5, False, math.nan))
    rank = resumed(change=lambda step: replace(step, journal=StepJournal(1.5, False, math.nan)))
    rank.replay.begin()
    rank.iterate(StepJournal(1.5, False, math.nan))


def test_a_step_that_was_skipped_only_once_ends_the_replay() -> None:
    rank = resumed()
    rank.replay.begin()
    with pytest.raises(ReplayDiverged, match="skipped its optimizer step, recorded was that it made"):
        rank.iterate(StepJournal(None, True, 2.5))


def test_ranks_off_the_last_stage_know_no_loss_and_compare_none() -> None:
    rank = resumed(change=lambda step: replace(step, journal=StepJournal(1.5)))
    rank.replay.begin()
    rank.iterate(StepJournal(1.5))
    assert rank.model.iteration == 5


def test_what_another_rank_finds_wrong_ends_the_replay_here_too() -> None:
    rank = resumed(Ranks(others=([1, [1], 0, "the loss of another rank"],)))
    rank.replay.begin()
    with pytest.raises(ReplayDiverged, match="the loss of another rank"):
        rank.iterate()


def test_a_snapshot_that_went_bad_since_it_was_verified_is_worth_a_restart() -> None:
    rank = resumed()
    rank.replay.begin()
    rank.readers[5].close()
    world = World(3)
    memory = Memory()
    damaged = FakeStore(memory, 0, (8192,))
    model = FakeModel(world, 0, dict.fromkeys(OPERATORS, 8))
    layout = FakeCapturer(model, world).layout(WINDOW.plan(5), trainer=True)
    with damaged.reserve(SnapshotId(5, 0), layout) as writer:
        for field in layout.fields:
            writer.put(field.key, bytes(model.live[field.key]))
        writer.seal(Facts("job", "", {}, {}))
    memory.flip(SnapshotId(5, 0), layout.offsets[0] + 5)
    reader = damaged.open(SnapshotId(5, 0))
    rank = resumed(change=lambda step: replace(step, loads=(SnapshotLoad(reader, parts_of(step.iteration)),)))
    rank.replay.begin()
    with pytest.raises(StoreFailure, match="rank 0: the replay has to begin again"):
        rank.iterate()


def test_state_that_no_snapshot_gave_is_noticed_before_it_is_trained_on() -> None:
    rank = resumed(change=lambda step: replace(step, loads=()))
    rank.replay.begin()
    with pytest.raises(StoreFailure, match="were not restored"):
        rank.iterate()


def test_progress_says_how_far_it_is_and_how_many_operators_are_active(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        resumed().run()
    first, second = caplog.messages
    assert first.startswith("replay: iteration 5 (1 of 2), 3 of 4 operators active; about ")
    assert second == "replay: iteration 6 (2 of 2), 4 of 4 operators active; the state is dense again"


def test_only_the_first_rank_speaks(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        resumed(Ranks(rank=1)).run()
    assert not caplog.messages


class Feed:
    """What feeds an iteration, and whether all of it was taken."""

    def __init__(self, logs: Any, *, is_taken: bool = True, unlike: list[str] | None = None) -> None:
        self.logs, self.is_taken, self.unlike = logs, is_taken, unlike

    def check_all_taken(self) -> None:
        if not self.is_taken:
            raise UnreadableCheckpoint("a tensor was left")

    def differences(self) -> list[str] | None:
        return self.unlike


def fed(step: ReplayStep) -> ReplayStep:
    return replace(step, logs={Direction.FORWARD: step.loads[0].reader})


def test_each_iteration_is_fed_from_its_own_logs_and_nothing_after_the_last() -> None:
    rank = resumed(change=fed, boundary=Feed, members=(0,))
    rank.replay.begin()
    for iteration in (5, 6):
        assert rank.replay.iteration == iteration
        assert rank.replay.boundary is not None
        assert rank.replay.boundary.logs[Direction.FORWARD] is rank.readers[iteration]
        rank.iterate()
    assert rank.replay.is_done
    assert rank.replay.boundary is None


def test_a_tensor_that_nobody_received_means_that_the_replay_was_another() -> None:
    rank = resumed(change=fed, boundary=lambda logs: Feed(logs, is_taken=False), members=(0,))
    rank.replay.begin()
    with pytest.raises(StoreFailure, match="rank 0: the replay has to begin again: a tensor was left"):
        rank.iterate()


def test_a_part_of_the_pipeline_agrees_only_among_itself_and_freezes_alone() -> None:
    class Nobody(Ranks):
        def merge(self, value: bytes, combine: Callable[[bytes, bytes], bytes]) -> bytes:
            raise AssertionError("the other stages wait and answer nothing")

    rank = resumed(Nobody(), members=(0,), unlogged={6})
    assert rank.replay.alone
    assert rank.replay.unlogged == {6}
    rank.run()
    assert not rank.model.wrong()


def test_operators_outside_count_as_frozen_but_not_as_missing() -> None:
    outside = frozenset({expert(7, 0)})
    rank = resumed(change=lambda step: replace(step, outside=outside), members=(0,))
    rank.run()
    assert [frozen & outside for frozen, _ in rank.execution.steps] == [outside, outside]
    assert not rank.model.wrong()


def test_without_a_snapshot_of_its_own_a_rank_takes_what_all_share_and_keeps_its_random_states() -> None:
    rank = resumed(
        change=lambda step: replace(step, trainer={"iteration": step.iteration, "consumed_samples": 8 * step.iteration})
    )
    rank.run()
    assert not rank.model.wrong()


def test_the_end_of_a_replay_is_told_once() -> None:
    ends: list[int] = []
    resumed(ended=lambda: ends.append(1)).run()
    assert ends == [1]


def fed_and_compared(step: ReplayStep) -> ReplayStep:
    return replace(fed(step), compares=True)


def test_a_stage_that_sends_otherwise_than_when_the_iteration_ran_first_ends_the_replay() -> None:
    rank = resumed(change=fed_and_compared, boundary=lambda logs: Feed(logs, unlike=["one", "other"]), members=(0,))
    rank.replay.begin()
    with pytest.raises(ReplayDiverged, match=r"the replay of iteration 5 came out otherwise: one \(and 1 more\)"):
        rank.iterate()


def test_it_is_known_of_each_iteration_with_what_it_was_compared() -> None:
    rank = resumed(change=fed_and_compared, boundary=lambda logs: Feed(logs, unlike=[]), members=(0,))
    rank.run()
    assert rank.replay.compared == dict.fromkeys((5, 6), frozenset({Compared.LOSS, Compared.SENT}))


def test_without_fingerprints_what_is_sent_counts_as_compared_with_nothing() -> None:
    rank = resumed(change=fed_and_compared, boundary=Feed, members=(0,))
    rank.run()
    assert set(rank.replay.compared.values()) == {frozenset({Compared.LOSS})}


def test_where_not_all_gradients_flow_out_what_is_sent_is_not_compared() -> None:
    rank = resumed(change=fed, boundary=lambda logs: Feed(logs, unlike=["zeros"]), members=(0,))
    rank.run()
    assert set(rank.replay.compared.values()) == {frozenset({Compared.LOSS})}


def test_with_a_tolerance_a_tensor_that_differs_ends_nothing_and_proves_nothing() -> None:
    options = {"change": fed_and_compared, "boundary": lambda logs: Feed(logs, unlike=["one"]), "members": (0,)}
    rank = resumed(tolerance=0.1, **options)
    rank.run()
    assert set(rank.replay.compared.values()) == {frozenset({Compared.LOSS})}


def test_the_norm_is_compared_where_it_is_computed() -> None:
    rank = resumed(change=lambda step: replace(step, frozen=frozenset()))
    rank.replay.begin()
    with pytest.raises(ReplayDiverged, match=r"gave the gradient norm 1\.25, recorded was 1\.5"):
        rank.iterate(replace(JOURNALS[5], grad_norm=1.25))


def test_the_norm_of_a_step_with_frozen_operators_is_the_recorded_one_and_proves_nothing() -> None:
    rank = resumed(change=lambda step: replace(step, journal=replace(step.journal, lm_loss=None)))
    rank.replay.begin()
    rank.iterate()
    assert rank.replay.compared == {5: frozenset()}
