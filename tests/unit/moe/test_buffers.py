"""How much memory a strategy's rooms take, agreed on by all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from simulated_world.model import FakeModel, spread
from simulated_world.rank import FakeCapturer
from simulated_world.world import World
from thread_ranks import on_ranks

from megatron.core.dist_checkpointing.moe.ports import NoRoom
from megatron.core.dist_checkpointing.moe.snapshot.memory_limit import (
    fit_memory,
    gathered_sizes,
    gathered_unchanging,
    operator_sizes,
    segment_sizes,
)
from megatron.core.dist_checkpointing.moe.strategies import STRATEGIES, BufferSpec
from megatron.core.dist_checkpointing.moe.types import (
    OperatorId,
    OperatorKind,
    OperatorSize,
    Part,
    SnapshotPlan,
    expert,
    full_plan,
)

OPERATORS = (OperatorId(0, OperatorKind.NON_EXPERT), *(expert(0, index) for index in range(4)))


class Alone:
    """A job of one rank, or of more that all say what `others` say."""

    rank = 0

    def __init__(self, others: Sequence[int] = ()) -> None:
        self.others = others

    def least(self, values: Sequence[int]) -> tuple[int, ...]:
        return tuple(map(min, values, self.others)) if self.others else tuple(values)

    def merge(self, value: bytes, combine: Any) -> bytes:
        return value


class Memory:
    def __init__(self, problem: str = "") -> None:
        self.problem = problem

    def resize(self, segment_bytes: Sequence[int]) -> None:
        if self.problem:
            raise NoRoom(self.problem)


@pytest.fixture
def capturer() -> FakeCapturer:
    world = World(0)
    return FakeCapturer(FakeModel(world, 0, spread(OPERATORS, 0, 2, numel=512)), world)


def test_segments_are_as_large_as_the_largest_piece_of_any_rank(capturer: FakeCapturer) -> None:
    mine = capturer.layout(full_plan(0, OPERATORS), trainer=True).nbytes
    room = BufferSpec(full_plan(0, OPERATORS), own=3, replica=2, trainer=True)
    assert segment_sizes((room,), capturer, Alone(), (1, 2)) == [mine] * 7  # type: ignore[arg-type]
    assert segment_sizes((room,), capturer, Alone([-mine - 8]), ()) == [mine + 8] * 3  # type: ignore[arg-type]


def test_segments_of_a_window_hold_each_of_its_snapshots_with_little_to_spare(capturer: FakeCapturer) -> None:
    plans = (full_plan(0, OPERATORS[:1]), full_plan(1, OPERATORS), full_plan(2, OPERATORS[1:2]))
    largest = max(capturer.layout(plan, trainer=True).nbytes for plan in plans)
    room = BufferSpec(plans[0], own=9, replica=6, trainer=True, also=plans[1:])
    sizes = segment_sizes((room,), capturer, Alone(), ())  # type: ignore[arg-type]
    assert len(sizes) == 9
    assert largest <= sizes[0] <= 1.04 * largest


def test_sizes_of_operators_are_those_of_their_records(capturer: FakeCapturer) -> None:
    sizes = operator_sizes(capturer)
    assert sizes.keys() == capturer.operators
    whole = SnapshotPlan(0, {OPERATORS[0]: Part.MASTER_AND_MOMENTS})
    assert sizes[OPERATORS[0]].full_bytes == sum(one.nbytes for one in capturer.layout(whole).fields)
    assert sizes[OPERATORS[0]] == OperatorSize(12 * 512, 2 * 512)
    assert gathered_sizes(capturer, Alone(), of_all=True) == {0: sizes}  # type: ignore[arg-type]


def test_ranks_with_the_same_operators_and_sizes_are_told_once(capturer: FakeCapturer) -> None:
    world = World(0)
    other = FakeCapturer(FakeModel(world, 0, spread(OPERATORS[:3], 0, 2, numel=64)), world)
    mine, its = operator_sizes(capturer), operator_sizes(other)
    capturers = [other, capturer, other, capturer, capturer]
    found = on_ranks(*(lambda transport, one=one: gathered_sizes(one, transport, of_all=True) for one in capturers))
    assert found[:3] == [{0: its, 1: mine}, {0: its, 1: mine}, {0: its, 1: mine, 2: its}]
    assert [list(one) for one in found] == [[0, 1], [0, 1], [0, 1, 2], [0, 1, 3], [0, 1, 4]]


def test_nobody_is_asked_for_sizes_that_nothing_follows_from(capturer: FakeCapturer) -> None:
    class Silent:
        rank = 5

    assert gathered_sizes(capturer, Silent(), of_all=False) == {5: operator_sizes(capturer)}  # type: ignore[arg-type]
    assert {name for name, one in STRATEGIES.items() if one.plans_by_sizes} == {"sparse", "pec", "selective"}


@pytest.mark.parametrize("owners_agree", [True, False])
def test_an_operator_is_unchanging_where_no_rank_that_owns_a_part_changes_it(owners_agree: bool) -> None:
    dense, *experts = OPERATORS
    owned = [OPERATORS[:3], (dense, *experts[1:]), ()]
    stays = [{dense, experts[0], experts[1]}, {dense, *experts[1:]} if owners_agree else {dense}, set[OperatorId]()]
    found = on_ranks(
        *(
            lambda transport, own=own, stays=some: gathered_unchanging(
                frozenset(stays), frozenset(own), OPERATORS, transport
            )
            for own, some in zip(owned, stays, strict=True)
        )
    )
    # Experts only together: one that is trained keeps all of them among what changes.
    assert found == [frozenset(OPERATORS) if owners_agree else frozenset({dense})] * 3


def test_memory_fits_only_if_it_does_on_all_ranks() -> None:
    assert fit_memory(Memory(), [1], Alone()) == (True, "")  # type: ignore[arg-type]
    assert fit_memory(Memory("it is full"), [1], Alone()) == (False, "it is full")  # type: ignore[arg-type]
    assert fit_memory(Memory(), [1], Alone([0])) == (False, "")  # type: ignore[arg-type]
