"""Replicas between real processes: verified copies, refusals and damage, silent and killed peers, renewal."""

from __future__ import annotations

import json
from functools import partial
from typing import Any

import pytest
from replica_hooks import DAMAGED, FULL, RANKS, SKIPPING, TIMEOUT_S, VICTIM, replicating
from world import World

from megatron.core.dist_checkpointing.moe.policy.placement import Placement, place_replicas
from megatron.core.dist_checkpointing.moe.replication.transports import TRANSPORTS
from megatron.core.dist_checkpointing.moe.types import Topology

SURVIVORS = [rank for rank in range(RANKS) if rank != VICTIM]


def placement(replicas: int) -> Placement:
    return place_replicas(Topology(RANKS, ranks_per_node=1), replicas)


@pytest.fixture(
    scope="module", params=[pytest.param(name, marks=() if name == "tcp" else pytest.mark.full) for name in TRANSPORTS]
)
def facts(
    request: pytest.FixtureRequest, world: World, tmp_path_factory: pytest.TempPathFactory
) -> list[dict[str, Any]]:
    """What each rank found in one scenario; the victim's facts end before it is killed."""
    folder = tmp_path_factory.mktemp("replicas")
    outcome = world.run([], RANKS, [partial(replicating, str(folder), request.param)])
    assert set(outcome.codes) == {0}, outcome.said
    return [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(RANKS)]


def all_acknowledged(found: dict[str, Any]) -> bool:
    return bool(found["acknowledged"]) and all(found["acknowledged"].values())


def test_numbers_of_all_ranks_are_combined_exactly(facts: list[dict[str, Any]]) -> None:
    for found in facts:
        assert found["numbers"]["least"] == [0, 1 - RANKS, 2**60]
        assert found["numbers"]["total"] == [6, -6, 4 * 2**60 + 6]
        assert found["numbers"]["nothing"] == []


def test_json_values_of_different_sizes_are_gathered_by_rank(facts: list[dict[str, Any]]) -> None:
    for found in facts:
        expected = [{"rank": rank, "text": "ä" * rank, "none": None} for rank in range(RANKS)]
        assert found["numbers"]["gathered"] == expected


def test_messages_arrive_whole_in_order_and_their_buffers_are_let_go(facts: list[dict[str, Any]]) -> None:
    assert [found["bytes"] for found in facts] == [[True] * 6] * RANKS


@pytest.mark.parametrize("replicas", [1, 2])
def test_every_peer_holds_the_exact_bytes_that_it_acknowledged(facts: list[dict[str, Any]], replicas: int) -> None:
    place = placement(replicas)
    for rank, found in enumerate(facts):
        result = found[f"r={replicas}"]
        assert result["acknowledged"] == {str(peer): True for peer in place.peers[rank]}
        assert sorted(result["kept"]) == list(place.kept_by[rank])
        assert result["exact"] == sorted([rank, *place.kept_by[rank]])
        assert (result["sent"], result["received"], result["failures"]) == (replicas, replicas, [])


def test_pieces_that_are_held_already_are_not_sent(facts: list[dict[str, Any]]) -> None:
    for rank, found in enumerate(facts):
        result = found["again"]
        assert all_acknowledged(result)
        assert (result["sent"], result["received"]) == (0, 0)
        assert sorted(result["kept"]) == list(placement(2).kept_by[rank])


def test_a_bit_that_flips_on_the_way_is_found_and_the_piece_sent_again(facts: list[dict[str, Any]]) -> None:
    assert facts[DAMAGED]["flipped"]["received"] == 3
    assert sorted(found["flipped"]["sent"] for found in facts) == [2, 2, 2, 3]
    for rank, found in enumerate(facts):
        assert all_acknowledged(found["flipped"])
        assert found["flipped"]["exact"] == sorted([rank, *placement(2).kept_by[rank]])


def test_a_peer_without_room_refuses_and_the_others_are_served(facts: list[dict[str, Any]]) -> None:
    for rank, found in enumerate(facts):
        peers, result = placement(2).peers[rank], found["full"]
        assert result["acknowledged"] == {str(peer): peer != FULL for peer in peers}
        assert result["sent"] == sum(peer != FULL for peer in peers)
        if FULL in peers:
            assert f"rank {FULL} did not keep snapshot" in " ".join(result["failures"])
    assert facts[FULL]["full"]["exact"] == [FULL]
    assert "all segments are in use" in " ".join(facts[FULL]["full"]["failures"])


def test_a_rank_with_nothing_to_give_still_keeps_for_others(facts: list[dict[str, Any]]) -> None:
    for rank, found in enumerate(facts):
        result = found["skip"]
        assert result["acknowledged"] == {str(peer): rank != SKIPPING for peer in placement(2).peers[rank]}
        assert sorted(result["kept"]) == [owner for owner in placement(2).kept_by[rank] if owner != SKIPPING]


def test_a_silent_peer_is_lost_within_the_timeout_and_nothing_is_kept(facts: list[dict[str, Any]]) -> None:
    for rank, found in enumerate(facts):
        lost = found["silent"]
        assert lost["error"]
        assert lost["sealed"] == [[6, rank]]
        assert rank == VICTIM or lost["waited_s"] < 3 * TIMEOUT_S
    assert any(f"rank {VICTIM}" in facts[rank]["silent"]["error"] for rank in SURVIVORS)


@pytest.mark.parametrize("failure", ["silent", "killed"])
def test_a_lost_peer_leaves_no_buffer_in_use(facts: list[dict[str, Any]], failure: str) -> None:
    for found in facts:
        assert failure not in found or found[failure]["free"] == 3


def test_a_broken_transport_refuses_until_it_is_renewed_and_then_works(facts: list[dict[str, Any]]) -> None:
    for rank, found in enumerate(facts):
        result = found["renewed"]
        assert "before connections are renewed" in result["before"]
        assert all_acknowledged(result)
        assert result["exact"] == sorted([rank, *placement(2).kept_by[rank]])


def test_a_killed_peer_is_lost_within_the_timeout_and_none_of_its_bytes_is_sealed(facts: list[dict[str, Any]]) -> None:
    for rank in SURVIVORS:
        lost = facts[rank]["killed"]
        assert lost["error"]
        assert lost["waited_s"] < 3 * TIMEOUT_S
        assert VICTIM not in [owner for _, owner in lost["sealed"]]
    assert "killed" not in facts[VICTIM]


def test_a_renewal_without_all_ranks_ends_in_time_and_names_who_is_missing(facts: list[dict[str, Any]]) -> None:
    for rank in SURVIVORS:
        assert f"rank {VICTIM} did not come" in facts[rank]["killed"]["renewal"]
        assert facts[rank]["killed"]["renewal_s"] < 3 * TIMEOUT_S


def test_training_continues_beside_replication_even_while_a_peer_is_waited_for(facts: list[dict[str, Any]]) -> None:
    for rank in SURVIVORS:
        *_, silent, renewed, killed = facts[rank]["rounds of training"]
        assert min(silent, killed) > 10
        assert renewed >= 1
