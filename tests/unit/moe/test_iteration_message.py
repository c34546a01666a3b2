"""The message of an iteration: minima, maxima and equality through one collective that gives the least."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import astuple, replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.core.dist_checkpointing.moe.errors import MoECheckpointError
from megatron.core.dist_checkpointing.moe.snapshot.iteration_message import (
    IterationMessage,
    IterationNews,
    MessageExchange,
)
from megatron.core.dist_checkpointing.moe.strategies import Costs, Throughput
from megatron.core.dist_checkpointing.moe.types import SnapshotPlan, expert, full_plan

COSTS = Costs(1.0, 0.5, 0.25)
PLAN = full_plan(7, (expert(0, 0), expert(0, 1)))


class AtOnce:
    """A thread that does its work when it is asked for the result."""

    def submit(self, work: Callable[[], Any]) -> AtOnce:
        self.work = work
        return self

    def result(self, timeout: float | None = None) -> Any:
        return self.work()


class Others:
    """A transport between this rank and others whose numbers are known."""

    def __init__(self, least: Sequence[Sequence[int]] = (), totals: Sequence[Sequence[int]] = ()) -> None:
        self._least, self._totals = least, totals
        self.sent: list[tuple[int, ...]] = []

    def least_and_total(self, values: Sequence[int], added: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        self.sent.append(tuple(values))
        least = tuple(map(min, values, *self._least)) if self._least else tuple(values)
        return least, tuple(map(sum, zip(added, *self._totals, strict=True)))


def message(
    plan: SnapshotPlan | None = PLAN, costs: Costs = COSTS, statuses: Sequence[int] = (), **more: Any
) -> IterationMessage:
    return IterationMessage(7, plan, costs, lambda: statuses, partial(tuple, more.pop("counts", ())), **more)


def exchanged(own: IterationMessage, *others: IterationMessage) -> IterationNews:
    """What comes of the messages of all ranks."""
    rows = []
    for other in others:
        alone = Others()
        exchange = MessageExchange(alone, AtOnce(), None)  # type: ignore[arg-type]
        exchange.send(other, (), 0.0)
        exchange.receive(1.0)
        rows.append(alone.sent[0])
    transport = Others(rows, [other.counts() for other in others])
    exchange = MessageExchange(transport, AtOnce(), None)  # type: ignore[arg-type]
    exchange.send(own, (), 0.0)
    news = exchange.receive(1.0)
    assert news is not None
    return news


def test_a_round_is_as_far_as_the_slowest_rank_and_counts_are_summed() -> None:
    news = exchanged(
        message(statuses=[2, 4, 1], counts=[1, 2]),
        message(statuses=[3, 1, 2], counts=[10, 20]),
        message(statuses=[4, 4, 4], counts=[0, 5]),
    )
    assert (news.iteration, news.statuses, news.counts) == (7, (2, 1, 1), (11, 27))


times_s = st.floats(0.0, 1e4).map(lambda value: round(value, 6))


@given(st.lists(st.tuples(*[times_s] * 6, st.integers(0, 10**12)), min_size=1, max_size=4))
def test_costs_are_those_of_the_slowest_rank_and_the_pace_is_the_least(
    ranks: list[tuple[float, float, float, float, float, float, int]],
) -> None:
    messages = [
        message(costs=Costs(*costs), pace=Throughput(copy, float(bandwidth))) for *costs, copy, bandwidth in ranks
    ]
    news = exchanged(*messages)
    columns = list(zip(*ranks, strict=True))
    highest, least = list(map(max, columns)), list(map(min, columns))
    assert astuple(news.costs) == pytest.approx(highest[:5], abs=1e-6)
    assert (news.pace.iteration_s, news.pace.bandwidth_bytes_per_s) == pytest.approx(least[5:], abs=1e-6)


@pytest.mark.parametrize("other", [None, full_plan(7, (expert(0, 0),)), full_plan(8, (expert(0, 0), expert(0, 1)))])
def test_ranks_that_plan_differently_are_found_out(other: SnapshotPlan | None) -> None:
    for first, second in ((PLAN, other), (other, PLAN)):
        with pytest.raises(MoECheckpointError, match="planned different snapshots of iteration 7: this is a defect"):
            exchanged(message(plan=first), message(plan=second), message(plan=first))


def test_ranks_without_a_plan_agree() -> None:
    assert exchanged(message(plan=None), message(plan=None)).statuses == ()


def test_without_a_message_there_is_no_news() -> None:
    assert MessageExchange(Others(), AtOnce(), None).receive(1.0) is None  # type: ignore[arg-type]


def test_counts_are_waited_for_by_the_thread_that_sends_and_not_by_training() -> None:
    """They may still be on a device."""
    waiting: list[Any] = []
    lane = SimpleNamespace(submit=waiting.append)
    asked: list[str] = []

    def counts() -> tuple[int, ...]:
        asked.append("waited for the device")
        return (3, 4)

    exchange = MessageExchange(Others(), lane, None)  # type: ignore[arg-type]
    exchange.send(replace(message(), counts=counts), (), 0.0)
    assert asked == []
    assert waiting[0]()[1] == (3, 4)
