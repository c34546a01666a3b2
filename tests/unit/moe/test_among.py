"""Agreement among some ranks of a job while the others do something else."""

from __future__ import annotations

from typing import Any

import pytest
from simulated_world.network import Network
from simulated_world.transport import FakeTransport
from simulated_world.world import World

from megatron.core.dist_checkpointing.moe.ports import PeerLost
from megatron.core.dist_checkpointing.moe.replay.execution import Subset

WHAT = "say how it came out"


def merged_ranks(transport: FakeTransport, members: tuple[int, ...]) -> list[int]:
    """The ranks whose values come together, in the order in which they do."""
    return list(Subset(transport, members, WHAT).merge(bytes([transport.rank]), lambda one, other: one + other))


def run(world: World, mains: dict[int, Any], ranks: int = 5) -> dict[int, Any]:
    """What each rank returned, or the PeerLost that ended it."""
    network = Network(world, ranks)
    ended: dict[int, Any] = {}

    def main(rank: int) -> None:
        try:
            ended[rank] = mains[rank](FakeTransport(network, rank, "data", 2.0))
        except PeerLost as error:
            ended[rank] = error

    for rank in mains:
        world.spawn(rank, "main", lambda rank=rank: main(rank))  # type: ignore[misc]
    world.run()
    return ended


@pytest.mark.parametrize("members", [(1,), (1, 3), (0, 2, 4), (0, 1, 2, 3, 4)])
def test_all_members_get_the_values_of_all_members_in_the_order_of_their_ranks(members: tuple[int, ...]) -> None:
    ended = run(World(3), {rank: lambda transport: merged_ranks(transport, members) for rank in members})
    assert ended == {member: list(members) for member in members}


def test_the_messages_of_a_member_grow_with_the_logarithm_of_their_number() -> None:
    messages: dict[int, int] = {}

    class Counted(FakeTransport):
        def send(self, to: int, data: Any) -> Any:
            messages[self.rank] = messages.get(self.rank, 0) + 1
            return super().send(to, data)

    members = tuple(range(64))

    def main(transport: FakeTransport) -> list[int]:
        transport.__class__ = Counted
        return merged_ranks(transport, members)

    assert run(World(4), dict.fromkeys(members, main), 64) == {member: list(members) for member in members}
    assert max(messages.values()) == 2 * 6  # a size and a value to each of log2(64)


def test_disjoint_groups_and_a_gathering_of_all_do_not_disturb_each_other() -> None:
    def main(members: tuple[int, ...]) -> Any:
        def work(transport: FakeTransport) -> list[Any]:
            told = merged_ranks(transport, members) if members else None
            return [told, *transport.gather(transport.rank)]

        return work

    groups: dict[int, tuple[int, ...]] = {0: (0, 3), 3: (0, 3), 1: (1, 4), 4: (1, 4), 2: ()}
    for seed in range(20):
        ended = run(World(seed), {rank: main(members) for rank, members in groups.items()})
        assert ended == {rank: [list(members) or None, *range(5)] for rank, members in groups.items()}


def test_who_does_not_answer_is_named_with_what_was_waited_for() -> None:
    ended = run(World(1), {0: lambda transport: merged_ranks(transport, (0, 3)), 3: lambda _: None})
    assert "rank 0 waited for rank 3 to say how it came out" in str(ended[0])


def test_a_member_that_is_killed_ends_the_others_wait() -> None:
    world = World(1, should_crash=lambda rank, event: rank == 3 and "send" in event.text)
    ended = run(world, dict.fromkeys((0, 3), lambda transport: merged_ranks(transport, (0, 3))))
    assert isinstance(ended[0], PeerLost) and "rank 3" in str(ended[0])
