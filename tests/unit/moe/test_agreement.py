"""What fails on one rank fails on all: the same error, that names the rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from thread_ranks import on_ranks

from megatron.core.dist_checkpointing.moe.errors import (
    MoECheckpointError,
    UnreadableCheckpoint,
    UsageError,
    format_error,
    ranks_named,
)
from megatron.core.dist_checkpointing.moe.ports import StoreFailure
from megatron.core.dist_checkpointing.moe.replication.agreement import of_first, raise_on_all_ranks

KINDS = (UnreadableCheckpoint, StoreFailure)


def failing(error: Exception) -> Callable[[], None]:
    def work() -> None:
        raise error

    return work


def outcomes(*works: Callable[[], Any], kinds: Any = (UsageError,)) -> list[Any]:
    """What ranks with this work return or raise."""
    return on_ranks(*(lambda transport, work=work: raise_on_all_ranks(transport, work, kinds) for work in works))


def well() -> int:
    return 7


def test_what_the_work_gives_is_returned_where_it_fails_on_no_rank() -> None:
    assert outcomes(well, lambda: 8, well) == [7, 8, 7]


@pytest.mark.parametrize("error", [UsageError("no"), StoreFailure("no"), MoECheckpointError("no")])
def test_a_failure_is_raised_on_all_with_the_rank_that_it_was_on(error: MoECheckpointError) -> None:
    found = outcomes(well, failing(error), well)
    assert [(type(one), str(one)) for one in found] == [(UsageError, "rank 1: no")] * 3


def test_the_lowest_rank_says_why_and_the_first_others_are_named_and_counted() -> None:
    found = outcomes(well, failing(StoreFailure("one")), *[failing(UnreadableCheckpoint("two"))] * 20, kinds=KINDS)
    told = "rank 1: one (also on ranks 2, 3, 4, 5, 6, 7, 8, 9 and 12 more)"
    assert {(type(one), str(one)) for one in found} == {(StoreFailure, told)}


def test_few_ranks_are_all_named() -> None:
    assert [ranks_named(some) for some in ([3], range(8))] == ["rank 3", "ranks 0, 1, 2, 3, 4, 5, 6, 7"]
    assert ranks_named(range(100, 16_384)) == "ranks 100, 101, 102, 103, 104, 105, 106, 107 and 16276 more"


def test_the_kind_of_the_error_is_the_same_on_all_ranks() -> None:
    for error, kind in ((UnreadableCheckpoint("no"), UnreadableCheckpoint), (UsageError("no"), StoreFailure)):
        assert {type(one) for one in outcomes(well, failing(error), kinds=KINDS)} == {kind}


def test_a_defect_is_not_told() -> None:
    with pytest.raises(ZeroDivisionError):
        raise_on_all_ranks(None, lambda: 1 // 0)  # type: ignore[arg-type]


def test_the_value_of_the_first_rank_is_that_of_all() -> None:
    assert (
        on_ranks(*(lambda transport: of_first(transport, [transport.rank], list[int]) for _ in range(5))) == [[0]] * 5
    )


def test_errors_for_people_speak_for_themselves_and_others_by_their_type() -> None:
    assert format_error(StoreFailure("the disk is full")) == "the disk is full"
    assert format_error(KeyError("window")) == "KeyError: 'window'"
