"""Agreement among some ranks of a job while the others do something else."""

from __future__ import annotations

from typing import Any

import pytest
from simulated_world.network import Network
from simulated_world.transport import FakeTransport
from simulated_world.world import World

from megatron.core.dist_checkpointing.moe.ports import Json, PeerLost
from megatron.core.dist_checkpointing.moe.replay.execution import SubsetGather

WHAT = "say how it came out"


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
    mains = {
        rank: lambda transport: SubsetGather(transport, members, WHAT).gather({"of": transport.rank, "text": "ä"})
        for rank in members
    }
    ended = run(World(3), mains)
    assert ended == {member: [{"of": rank, "text": "ä"} for rank in members] for member in members}


def test_disjoint_groups_and_a_gathering_of_all_do_not_disturb_each_other() -> None:
    def main(members: tuple[int, ...]) -> Any:
        def work(transport: FakeTransport) -> Json:
            told = SubsetGather(transport, members, WHAT).gather(transport.rank) if members else None
            return [told, *transport.gather(transport.rank)]

        return work

    groups: dict[int, tuple[int, ...]] = {0: (0, 3), 3: (0, 3), 1: (1, 4), 4: (1, 4), 2: ()}
    for seed in range(20):
        ended = run(World(seed), {rank: main(members) for rank, members in groups.items()})
        assert ended == {rank: [list(members) or None, *range(5)] for rank, members in groups.items()}


def test_who_does_not_answer_is_named_with_what_was_waited_for() -> None:
    ended = run(World(1), {0: lambda transport: SubsetGather(transport, (0, 3), WHAT).gather(1), 3: lambda _: None})
    assert "rank 0 waited for rank 3 to say how it came out" in str(ended[0])


def test_a_member_that_is_killed_ends_the_others_wait() -> None:
    world = World(1, should_crash=lambda rank, event: rank == 3 and "send" in event.text)
    ended = run(world, dict.fromkeys((0, 3), lambda transport: SubsetGather(transport, (0, 3), WHAT).gather(1)))
    assert isinstance(ended[0], PeerLost) and "rank 3" in str(ended[0])
