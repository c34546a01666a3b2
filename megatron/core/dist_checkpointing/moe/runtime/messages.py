"""What the ranks tell each other in every iteration, in one small message each, beside training."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from ..errors import MoECheckpointError
from ..ports import Clock, Lane, Task, Transport
from ..strategies import Costs, Pace
from ..types import SnapshotPlan

MICROSECONDS = 1e6
_HEAD = 7

Joined = tuple[tuple[int, ...], tuple[int, ...]]


@dataclass(frozen=True)
class Message:
    """What one rank knows after `iteration`.

    plan: what it snapshots of it. costs: what it measured. pace: the time that a copy has, and how fast the last one
    was, None if nobody wants to know. statuses: how far it has come with each open round, asked for when the message
    leaves. counts: tokens that its routers sent to the experts of all MoE layers, empty if nobody wants to know.
    """

    iteration: int
    plan: SnapshotPlan | None
    costs: Costs
    statuses: Callable[[], Sequence[int]]
    counts: Sequence[int]
    pace: Pace | None = None


@dataclass(frozen=True)
class News:
    """What the messages of all ranks come to: the least statuses and pace, the highest costs, the sums of counts."""

    iteration: int
    statuses: tuple[int, ...]
    costs: Costs
    counts: tuple[int, ...]
    pace: Pace


class Messages:
    """Sends on a lane of its own, so that training never waits for a slow rank before it must know."""

    def __init__(self, transport: Transport, lane: Lane, clock: Clock) -> None:
        self._transport, self._lane, self._clock = transport, lane, clock
        self._sent: tuple[int, Task[Joined]] | None = None

    def send(self, message: Message, awaiting: Sequence[Task[None]], until_s: float) -> None:
        """Begin to exchange; work that is almost done is waited for until then: news that miss this come one later."""
        mark = int(message.plan.digest()[:15], 16) if message.plan else 0
        costs = message.costs.iteration_s, message.costs.stall_s, message.costs.round_s
        pace = message.pace or Pace(0.0, 0.0)
        least_of_all = round(pace.iteration_s * MICROSECONDS), int(pace.bandwidth_bytes_per_s)
        head = [mark, -mark, *(-round(cost * MICROSECONDS) for cost in costs), *least_of_all]

        def exchange() -> Joined:
            for task in awaiting:
                # How it ended is looked at by training's thread.
                with suppress(Exception):
                    task.result(max(0.0, until_s - self._clock.now_s()))
            least = self._transport.least([*head, *message.statuses()])
            return least, self._transport.total(message.counts) if message.counts else ()

        self._sent = message.iteration, self._lane.submit(exchange)

    def receive(self, timeout_s: float) -> News | None:
        """What came of the message that was sent last; None when there was none.

        Raises PeerLost and TimeoutError when it did not come about, MoECheckpointError when ranks planned differently.
        """
        sent, self._sent = self._sent, None
        if sent is None:
            return None
        iteration, task = sent
        least, counts = task.result(timeout_s)
        mark, negative, *costs, passes, bandwidth = least[:_HEAD]
        if mark != -negative:
            raise MoECheckpointError(
                f"the ranks planned different snapshots of iteration {iteration}: this is a defect, as plans depend"
                " only on what all ranks know; training cannot be protected"
            )
        iteration_s, stall_s, round_s = (-cost / MICROSECONDS for cost in costs)
        pace = Pace(passes / MICROSECONDS, float(bandwidth))
        return News(iteration, least[_HEAD:], Costs(iteration_s, stall_s, round_s), counts, pace)
