"""What fails on one rank fails on all: the same error, that names the rank."""

from __future__ import annotations

import pytest

from megatron.core.dist_checkpointing.moe.errors import (
    MoECheckpointError,
    UnreadableCheckpoint,
    UsageError,
    format_error,
)
from megatron.core.dist_checkpointing.moe.ports import Json, StoreFailure
from megatron.core.dist_checkpointing.moe.replication.agreement import raise_on_all_ranks


class Group:
    """A group whose other ranks answer this; `told` is what this rank, the first one, tells them."""

    def __init__(self, *others: Json) -> None:
        self.others, self.told = others, list[Json]()

    def gather(self, value: Json) -> list[Json]:
        self.told.append(value)
        return [value, *self.others]


WELL: Json = [-1, ""]


def failing(error: Exception) -> None:
    raise error


def test_what_the_work_gives_is_returned_where_it_fails_on_no_rank() -> None:
    assert raise_on_all_ranks(Group(WELL, WELL), lambda: 7) == 7


@pytest.mark.parametrize("error", [UsageError("no"), StoreFailure("no"), MoECheckpointError("no")])
def test_a_failure_here_is_raised_here_and_told_to_the_others(error: MoECheckpointError) -> None:
    group = Group(WELL)
    with pytest.raises(UsageError, match=r"^rank 0: no$"):
        raise_on_all_ranks(group, lambda: failing(error))
    assert group.told == [[0, "no"]]


def test_a_failure_elsewhere_is_raised_here_with_the_rank_that_it_was_on() -> None:
    with pytest.raises(UsageError, match=r"^rank 5: no$"):
        raise_on_all_ranks(Group(WELL, [0, "no"]), lambda: 7, ranks=(1, 3, 5))


def test_the_kind_of_the_error_is_the_same_on_all_ranks() -> None:
    kinds = (UnreadableCheckpoint, StoreFailure)
    for error, kind in ((UnreadableCheckpoint("no"), UnreadableCheckpoint), (UsageError("no"), StoreFailure)):
        group = Group(WELL)
        with pytest.raises(kind):
            raise_on_all_ranks(group, lambda error=error: failing(error), kinds)
        with pytest.raises(kind):
            raise_on_all_ranks(Group(*group.told), lambda: 7, kinds)


def test_a_defect_is_not_gathered() -> None:
    group = Group(WELL)
    with pytest.raises(ZeroDivisionError):
        raise_on_all_ranks(group, lambda: 1 // 0)
    assert not group.told


def test_errors_for_people_speak_for_themselves_and_others_by_their_type() -> None:
    assert format_error(StoreFailure("the disk is full")) == "the disk is full"
    assert format_error(KeyError("window")) == "KeyError: 'window'"
