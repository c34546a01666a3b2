"""Futures that were left behind are not met again."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.core.dist_checkpointing.moe.errors import UsageError
from megatron.core.dist_checkpointing.moe.policy.lineage import (
    MAX_ATTEMPTS,
    RECENT_ATTEMPTS,
    Identity,
    attempt_name,
    attempt_of,
    belongs,
    continued,
    largest_number,
    newest_first,
    number_of,
    past,
    shortened,
)
from megatron.core.dist_checkpointing.moe.types import PARKED, OperatorKind, Part, Piece, SnapshotPlan, expert

FIRST = continued((), "a", 0)
SECOND = continued(past(FIRST, 6), "b", 6)


def test_an_attempt_continues_the_one_that_it_recovered_from() -> None:
    assert SECOND == (("a", 0), ("b", 6))
    assert [attempt_of(SECOND, iteration) for iteration in (1, 6, 7, 100)] == ["a", "a", "b", "b"]


def test_what_the_first_attempt_did_after_the_point_of_return_is_no_past_of_the_second() -> None:
    assert belongs(FIRST, 6, SECOND)
    assert not belongs(FIRST, 9, SECOND), "a node that was away may still have it"
    assert belongs(SECOND, 9, SECOND)
    assert not belongs(SECOND, 9, FIRST)


def test_an_attempt_that_left_nothing_is_no_part_of_the_past() -> None:
    third = continued(past(SECOND, 6), "c", 6)
    assert third == (("a", 0), ("c", 6))


def test_a_state_before_the_timeline_is_not_continued() -> None:
    with pytest.raises(UsageError, match="after iteration 3"):
        continued(SECOND, "c", 3)


def test_what_continues_another_is_tried_first_and_what_says_nothing_not_at_all() -> None:
    assert newest_first([(FIRST, 6), ((), 9), (SECOND, 7), (FIRST, 5)]) == [SECOND, FIRST]


def test_what_continues_another_is_newer_whatever_the_clock_said_when_it_began() -> None:
    """In names of earlier versions, of which the second began on a node whose clock was a day behind."""
    day_ns = 86_400_000_000_000
    elder = ((f"{20_000 * day_ns:020d}-a1", 0),)
    newer = (*elder, (f"{19_999 * day_ns:020d}-b2", 8))
    assert newest_first([(newer, 12), (elder, 8)]) == [newer, elder]
    ahead_once = (*elder, (f"{30_000 * day_ns:020d}-c3", 8), (f"{20_001 * day_ns:020d}-d4", 10))
    assert newest_first([(ahead_once[:2], 10), (ahead_once, 12), (elder, 8)])[0] == ahead_once


def test_of_two_ways_on_that_is_newer_which_has_the_largest_number_from_where_they_part() -> None:
    first, left, taken = (attempt_name(number, "x") for number in (1, 2, 3))
    assert newest_first([(((first, 0), (left, 8)), 12), (((first, 0), (taken, 4)), 6)])[0][-1][0] == taken


def test_of_two_ways_on_that_did_not_see_each_other_that_is_newer_which_came_farther() -> None:
    one, other = (((attempt_name(1, "x"), 0), (attempt_name(2, token), 8)) for token in "ab")
    assert newest_first([(one, 20), (other, 12)]) == [one, other]
    assert newest_first([(one, 10), (other, 12)]) == [other, one]


@pytest.mark.parametrize("name", ["", "x", "12x-3", "-5-a", "9" * 20 + "-a", "9" * 5000, "1.5-a", "\u0663-a"])
def test_a_name_that_counting_does_not_lead_to_has_no_number(name: str) -> None:
    assert number_of(name) == 0
    assert number_of(attempt_name(1 + largest_number([((name, 0),)]), "a")) == 1


def test_no_timeline_has_more_attempts_than_a_manifest_may_have() -> None:
    timeline = FIRST
    for index in range(MAX_ATTEMPTS):
        timeline = continued(timeline, f"b{index:03}", index + 1)
    assert len(timeline) == MAX_ATTEMPTS
    assert not belongs(FIRST, 1, timeline)


def test_attempts_of_which_anything_is_left_are_never_forgotten_and_others_once_they_are_old() -> None:
    timeline, made = FIRST, {1: FIRST}
    for number in range(1, 10 * RECENT_ATTEMPTS):
        timeline = continued(shortened(timeline, {"a", "b200"}), f"b{number}", 4 * number)
        made[4 * number + 1] = timeline
    assert len(timeline) <= RECENT_ATTEMPTS + 5
    newest = 4 * (9 * RECENT_ATTEMPTS - 1)
    kept = {iteration for iteration, led in made.items() if belongs(led, iteration, timeline)}
    assert kept == {1, 801, *(iteration for iteration in made if iteration > newest)}


def test_what_an_attempt_did_after_the_point_of_return_stays_out_of_the_past_when_the_next_one_is_forgotten() -> None:
    timeline = continued(SECOND, "c", 12)
    for number in range(RECENT_ATTEMPTS):
        timeline = continued(timeline, f"d{number}", 20 + number)
    timeline = shortened(timeline, {"a"})
    assert belongs(FIRST, 6, timeline)
    assert not belongs(FIRST, 9, timeline)


def test_a_timeline_with_forgotten_attempts_is_newer_than_those_that_led_to_it() -> None:
    way, ways = (("z", 0),), []
    for number in range(1, 3 * RECENT_ATTEMPTS):
        way = continued(shortened(way, {"z"}), attempt_name(number, "x"), number)
        ways.append((way, number + 1))
    assert newest_first(reversed(ways)) == [led for led, _ in reversed(ways)]


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(1, 8)), min_size=1, max_size=8))
def test_each_iteration_of_any_history_has_exactly_one_attempt(faults: list[tuple[int, int]]) -> None:
    """Each fault goes back some iterations after some progress; the model is a list of who trained what."""
    trained: dict[int, str] = {}
    timeline, at, made = continued((), "000", 0), 0, []
    for number, (back, ahead) in enumerate(faults, start=1):
        for iteration in range(at + 1, at + ahead + 1):
            trained[iteration] = timeline[-1][0]
            made.append((timeline, iteration))
        reached = at + ahead
        at = max(0, reached - back)
        timeline = continued(past(timeline, at), f"{number:03}", at)
        trained = {iteration: name for iteration, name in trained.items() if iteration <= at}
    for snapshot, iteration in made:
        expected = trained.get(iteration) == snapshot[-1][0]
        assert belongs(snapshot, iteration, timeline) == expected


@pytest.mark.parametrize("kind", ["snapshot", PARKED])
def test_the_piece_with_the_trainers_state_says_what_else_its_rank_owns(kind: str) -> None:
    identity = Identity("job", {}, frozenset({expert(0, 1), expert(0, 0)}))
    piece = Piece(kind, SnapshotPlan(4, {expert(0, 1): Part.MASTER}))
    leading, other = identity.facts(piece, {"trainer": {}}), identity.facts(piece, {})
    assert leading.scalars.get("left_out") == (None if kind == PARKED else [[0, OperatorKind.EXPERT.value, 0]])
    assert "left_out" not in other.scalars
    whole = Piece(kind, SnapshotPlan(4, dict.fromkeys(identity.operators, Part.MASTER)))
    assert "left_out" not in identity.facts(whole, {"trainer": {}}).scalars
