"""Which peers keep the replicas of a rank's snapshot."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import replace
from itertools import count
from math import lcm

import pytest
from effort import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.core.dist_checkpointing.moe.errors import UsageError
from megatron.core.dist_checkpointing.moe.policy.placement import Placement, place_replicas
from megatron.core.dist_checkpointing.moe.types import ModelShape, Topology
from moe_ckpt.simulator.replicas import coverage, surviving

SMALL = ModelShape("small", 4, 16, 2, 64, 64, 8, 1)


@st.composite
def topologies(draw: st.DrawFn, max_copies: int = 4) -> Topology:
    """Layouts on equal nodes, nodes that straddle stages, uneven nodes, and ranks scattered over nodes."""
    tp, cp, pp = draw(st.sampled_from([1, 1, 2])), draw(st.sampled_from([1, 1, 2])), draw(st.sampled_from([1, 1, 2, 3]))
    etp, ep = draw(st.sampled_from([None, None, 1, 2])), draw(st.sampled_from([1, 2, 3]))
    world = lcm(tp * cp * pp, (etp or tp) * ep * pp) * draw(st.integers(1, max_copies))
    nodes = None
    if draw(st.booleans()):
        nodes = tuple(draw(st.lists(st.integers(0, draw(st.integers(0, 6))), min_size=world, max_size=world)))
    per_node = draw(st.integers(1, 9))
    return Topology(world, tp=tp, cp=cp, pp=pp, ep=ep, etp=etp, ranks_per_node=per_node, nodes=nodes)


@st.composite
def placed(draw: st.DrawFn) -> tuple[Topology, int, Placement]:
    topology = draw(topologies())
    r = draw(st.integers(0, min(5, topology.world_size - 1)) | st.integers(0, topology.world_size - 1))
    return topology, r, place_replicas(topology, r)


def on_nodes_of(*sizes: int) -> Topology:
    """Data-parallel ranks on nodes of the given sizes, one after the other."""
    return Topology(sum(sizes), nodes=tuple(node for node, size in enumerate(sizes) for _ in range(size)))


@st.composite
def uneven_worlds(draw: st.DrawFn) -> Topology:
    """At least two nodes of any sizes, at most 12 ranks."""
    sizes = draw(st.lists(st.sampled_from([1, 1, 1, 2, 2, 3, 4, 6, 9]), min_size=2, max_size=7))
    while sum(sizes) > 12:
        sizes.pop()
    return on_nodes_of(*sizes)


def feasible(sizes: tuple[int, ...], r: int, load: int) -> bool:
    """Whether r replicas of all owners fit the node rule with at most `load` on each rank: a flow between nodes.

    Below as many other nodes as replicas, each node takes at most one of an owner; else each takes at least one, and
    the owner's node takes what all other ranks cannot.
    """
    world, others = sum(sizes), len(sizes) - 1
    flow: dict[object, dict[object, int]] = defaultdict(dict)
    wanted = 0
    for owner, size in enumerate(sizes):
        least, most = (1, sizes) if r >= others else (0, (1,) * len(sizes))
        at_home = max(0, r - (world - size))
        flow["source"]["from", owner] = (r - at_home - least * others) * size
        wanted += flow["source"]["from", owner]
        for node in range(len(sizes)):
            if node != owner:
                flow["from", owner]["on", node] = (most[node] - least) * size
        room = load * size - least * (world - size) - at_home * size
        if room < 0:
            return False
        flow["on", owner]["sink"] = room
    return largest_flow(flow) == wanted


def largest_flow(flow: dict[object, dict[object, int]]) -> int:
    """Augmenting paths from "source" to "sink"."""
    total = 0
    while True:
        before: dict[object, object] = {"source": None}
        queue: list[object] = ["source"]
        for here in queue:
            for there, room in flow[here].items():
                if room and there not in before:
                    before[there] = here
                    queue.append(there)
        if "sink" not in before:
            return total
        path: list[object] = ["sink"]
        while before[path[-1]] is not None:
            path.append(before[path[-1]])
        steps = list(zip(path[1:], path, strict=False))
        amount = min(flow[here][there] for here, there in steps)
        for here, there in steps:
            flow[here][there] -= amount
            flow[there][here] = flow[there].get(here, 0) + amount
        total += amount


def least_possible_load(topology: Topology, r: int) -> int:
    sizes = tuple(sorted(map(len, topology.ranks_by_node.values())))
    return next(load for load in count(r) if feasible(sizes, r, load))


@settings(max_examples=examples(200), deadline=None)
@given(placed())
def test_every_owner_has_r_different_peers_and_never_itself(case: tuple[Topology, int, Placement]) -> None:
    topology, r, placement = case
    assert len(placement.peers) == topology.world_size
    for owner, peers in enumerate(placement.peers):
        assert len(set(peers)) == len(peers) == r
        assert owner not in peers


@settings(max_examples=examples(200), deadline=None)
@given(placed())
def test_the_owners_node_keeps_a_replica_only_when_all_ranks_elsewhere_do(
    case: tuple[Topology, int, Placement],
) -> None:
    topology, r, placement = case
    for owner, peers in enumerate(placement.peers):
        here = topology.node(owner)
        elsewhere = topology.world_size - len(topology.ranks_by_node[here])
        assert sum(topology.node(peer) == here for peer in peers) == max(0, r - elsewhere)


@settings(max_examples=examples(200), deadline=None)
@given(placed())
def test_replicas_are_on_as_many_other_nodes_as_there_are(case: tuple[Topology, int, Placement]) -> None:
    topology, r, placement = case
    for owner, peers in enumerate(placement.peers):
        others = {topology.node(peer) for peer in peers} - {topology.node(owner)}
        assert len(others) == min(r, len(topology.ranks_by_node) - 1)


@settings(max_examples=examples(200), deadline=None)
@given(topologies(), st.integers(1, 5))
def test_no_rank_keeps_more_than_one_over_r_unless_unequal_nodes_leave_no_choice(topology: Topology, r: int) -> None:
    nodes = len(topology.ranks_by_node)
    if r < nodes:
        assert most_kept(place_replicas(topology, r)) <= max(r + 1, least_possible_load(topology, r))


@settings(max_examples=examples(200), deadline=None)
@given(uneven_worlds(), st.data())
def test_uneven_nodes_keep_no_more_than_one_over_r_or_the_least_that_is_possible(
    topology: Topology, data: st.DataObject
) -> None:
    r = data.draw(st.integers(0, topology.world_size - 1))
    assert most_kept(place_replicas(topology, r)) <= max(r + 1, least_possible_load(topology, r))


@pytest.mark.parametrize(
    ("sizes", "r", "least"),
    [
        ((1, 1, 1, 4, 1), 2, 3),
        ((1, 1, 1, 4, 1), 3, 5),  # the four on the big node have but four others to choose three from
        ((3, 1, 1, 1), 2, 3),
        ((2, 2, 5), 3, 5),  # as many nodes as replicas, so that the own node stays out as long as others have ranks
        ((2, 4, 2), 3, 4),
        ((2, 6, 4), 5, 6),
        ((2, 3, 5), 6, 7),
    ],
)
def test_the_least_possible_load_of_uneven_nodes_is_reached(sizes: tuple[int, ...], r: int, least: int) -> None:
    topology = on_nodes_of(*sizes)
    assert least_possible_load(topology, r) == least
    assert most_kept(place_replicas(topology, r)) == least


@settings(deadline=None)
@given(st.integers(1, 6), st.integers(1, 4), st.sampled_from([1, 2, 4]), st.data())
def test_every_rank_keeps_exactly_r_where_groups_lie_regularly_on_equal_nodes(
    nodes_per_stage: int, pp: int, tp: int, data: st.DataObject
) -> None:
    ep = data.draw(st.sampled_from([1, 2, 4, 4 * nodes_per_stage]))
    topology = Topology(4 * nodes_per_stage * pp, tp=tp, pp=pp, ep=ep, etp=1, ranks_per_node=4)
    r = data.draw(st.integers(0, topology.world_size - 1))
    assert {len(kept) for kept in place_replicas(topology, r).kept_by} == {r}


@settings(deadline=None)
@given(topologies(), st.integers(0, 4))
def test_the_same_topology_gives_the_same_placement_whatever_its_nodes_are_called(topology: Topology, r: int) -> None:
    r = min(r, topology.world_size - 1)
    renamed = tuple(7 * topology.node(rank) + 100 for rank in range(topology.world_size))
    again = Topology(
        topology.world_size,
        tp=topology.tp,
        pp=topology.pp,
        cp=topology.cp,
        ep=topology.ep,
        etp=topology.etp,
        nodes=renamed,
    )
    assert place_replicas(topology, r).peers == place_replicas(again, r).peers


def in_expert_group(placement: Placement, topology: Topology) -> int:
    """Replicas on expert-data-parallel peers of their owner."""
    groups = [topology.expert_data_parallel_peers(rank) for rank in range(topology.world_size)]
    return sum(peer in groups[owner] for owner, peers in enumerate(placement.peers) for peer in peers)


def most_kept(placement: Placement) -> int:
    return max(map(len, placement.kept_by))


def test_expert_data_parallel_peers_come_before_data_parallel_ones_before_other_stages() -> None:
    # Two stages of four nodes; experts are spread over two nodes, so that rank 0 shares its own with rank 16 only.
    topology = Topology(64, pp=2, ep=16)
    peers = place_replicas(topology, 5).peers[0]
    assert peers[0] == topology.expert_data_parallel_peers(0)[1] == 16
    assert set(peers[1:3]) <= set(topology.data_parallel_peers(0)) - set(topology.expert_data_parallel_peers(0))
    assert {topology.node(peer) for peer in peers[1:3]} == {1, 3}
    assert all(topology.stage(peer) == 1 for peer in peers[3:])


def test_replicas_stay_in_the_expert_group_on_nodes_that_straddle_stages() -> None:
    topology = Topology(80, pp=2, ep=4, ranks_per_node=16)
    placement = place_replicas(topology, 1)
    assert in_expert_group(placement, topology) == 80
    assert coverage(placement).same_node == 0


def test_as_many_replicas_go_to_the_group_as_it_has_room_for_when_groups_overlap_on_nodes() -> None:
    # Stages of six ranks: four on a node of their own, two on the node in between; one replica on each rank.
    topology = Topology(12, pp=2, ranks_per_node=4)
    placement = place_replicas(topology, 1)
    assert (in_expert_group(placement, topology), most_kept(placement)) == (8, 1)


def test_blocks_of_different_numbers_of_nodes_are_no_regular_layout() -> None:
    # Two stages have two nodes each, the other two share four nodes.
    nodes = (0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3, *(4, 4, 5, 5, 6, 6, 7, 7) * 2)
    topology = Topology(32, pp=4, nodes=nodes)
    placement = place_replicas(topology, 1)
    assert (in_expert_group(placement, topology), most_kept(placement)) == (32, 1)
    assert coverage(placement).same_node == 0


def test_expert_peers_come_first_on_irregular_nodes_too() -> None:
    topology = Topology(96, pp=2, ep=8, ranks_per_node=7)
    assert in_expert_group(place_replicas(topology, 1), topology) == 96


@settings(deadline=None)
@given(st.integers(2, 4), st.integers(2, 4), st.integers(2, 4), st.data())
def test_equal_nodes_keep_exactly_r_when_replicas_need_every_node(
    nodes: int, size: int, pp: int, data: st.DataObject
) -> None:
    topology = Topology(nodes * size * pp, pp=pp, ranks_per_node=size * pp)
    r = data.draw(st.integers(nodes, topology.world_size - 1))
    assert {len(kept) for kept in place_replicas(topology, r).kept_by} == {r}


def test_tensor_ranks_find_their_own_data_parallel_peers() -> None:
    topology = Topology(32, tp=8, ep=4, etp=1)
    placement = place_replicas(topology, 2)
    for owner, peers in enumerate(placement.peers):
        assert set(peers) < set(topology.data_parallel_peers(owner))


def test_one_big_node_beside_a_single_rank_puts_survival_before_balance() -> None:
    topology = on_nodes_of(4, 1)
    placement = place_replicas(topology, 1)
    assert placement.peers[:4] == ((4,),) * 4
    assert most_kept(placement) == 4


def test_uneven_nodes_keep_within_the_bound_where_that_is_possible() -> None:
    topology = on_nodes_of(4, 2)
    assert least_possible_load(topology, 1) == 2
    assert sorted(len(kept) for kept in place_replicas(topology, 1).kept_by) == [0, 0, 1, 1, 2, 2]


def test_on_a_single_node_replicas_rotate_over_its_ranks() -> None:
    assert place_replicas(Topology(4), 2).peers == ((1, 2), (2, 3), (3, 0), (0, 1))


def test_no_replicas_are_no_peers() -> None:
    placement = place_replicas(Topology(3, ranks_per_node=1), 0)
    assert placement.peers == ((), (), ())
    assert placement.r == 0
    assert coverage(placement).fatal_nodes == 1


def test_a_world_of_one_rank_can_have_no_replicas() -> None:
    assert place_replicas(Topology(1), 0).peers == ((),)


@settings(max_examples=examples(100), deadline=None)
@given(placed())
def test_what_is_kept_is_what_was_placed(case: tuple[Topology, int, Placement]) -> None:
    _, _, placement = case
    placed_pairs = Counter((owner, peer) for owner, peers in enumerate(placement.peers) for peer in peers)
    kept_pairs = Counter((owner, keeper) for keeper, owners in enumerate(placement.kept_by) for owner in owners)
    assert placed_pairs == kept_pairs


@settings(max_examples=examples(150), deadline=None)
@given(placed(), st.data())
def test_an_owner_is_lost_exactly_when_every_node_with_a_copy_is(
    case: tuple[Topology, int, Placement], data: st.DataObject
) -> None:
    topology, _, placement = case
    gone = data.draw(st.sets(st.sampled_from(sorted(topology.ranks_by_node))))
    result = surviving(placement, gone)
    for owner, peers in enumerate(placement.peers):
        copies = [rank for rank in (owner, *peers) if topology.node(rank) not in gone]
        assert (owner in result.lost) == (not copies)
        assert (owner in result.from_peers) == (topology.node(owner) in gone and bool(copies))


@settings(max_examples=examples(150), deadline=None)
@given(placed(), st.data())
def test_no_smaller_loss_than_the_fatal_one_loses_anything_and_one_of_that_size_does(
    case: tuple[Topology, int, Placement], data: st.DataObject
) -> None:
    topology, _, placement = case
    facts = coverage(placement)
    nodes = sorted(topology.ranks_by_node)
    fewer = data.draw(st.permutations(nodes))[: facts.fatal_nodes - 1]
    assert surviving(placement, fewer).lost == ()
    holders = [placement.holders(owner) for owner in range(topology.world_size)]
    assert any(surviving(placement, held).lost for held in holders if len(held) == facts.fatal_nodes)
    assert facts.fatal_sets == len({held for held in holders if len(held) == facts.fatal_nodes})


def test_with_enough_nodes_it_takes_one_more_node_than_replicas_to_lose_anything() -> None:
    topology = Topology(64, pp=2, ep=8)
    placement = place_replicas(topology, 2)
    facts = coverage(placement)
    assert (facts.fatal_nodes, facts.same_node, most_kept(placement)) == (3, 0, 2)
    assert in_expert_group(placement, topology) == 128


def test_replicas_on_the_own_node_are_counted_as_such() -> None:
    facts = coverage(place_replicas(Topology(4), 2))
    assert (facts.fatal_nodes, facts.same_node) == (1, 8)


@pytest.mark.parametrize("replicas", [-1, 8, 9])
def test_more_replicas_than_other_ranks_are_refused_with_the_range(replicas: int) -> None:
    with pytest.raises(UsageError, match=f"replicas is {replicas}, but must be from 0 to world_size - 1 = 7"):
        place_replicas(Topology(8), replicas)


@settings(max_examples=examples(200), deadline=None)
@given(topologies(), st.integers(2, 5), st.data())
def test_replicas_leave_their_allocation_unit_while_there_is_another(
    topology: Topology, count: int, data: st.DataObject
) -> None:
    topology = replace(topology, units=tuple(topology.node(rank) % count for rank in range(topology.world_size)))
    r = data.draw(st.integers(0, min(4, topology.world_size - 1)))
    placement, units = place_replicas(topology, r), topology.units
    assert units is not None
    there = len(set(units))
    for owner, peers in enumerate(placement.peers):
        assert len({*peers, owner}) == r + 1
        assert len({units[peer] for peer in peers} - {units[owner]}) == min(r, there - 1)
        elsewhere = len(topology.ranks_by_node) - 1
        assert len({topology.node(peer) for peer in peers} - {topology.node(owner)}) >= min(r, elsewhere, there - 1)


def test_no_replica_is_on_its_owners_node_while_a_rank_elsewhere_is_free() -> None:
    nodes = (0, 0, 1, 1, 2, 2, 2, 2)
    topology = Topology(8, nodes=nodes, units=(0, 0, 0, 0, 1, 1, 1, 1))
    for owner, peers in enumerate(place_replicas(topology, 4).peers):
        assert nodes[owner] not in {nodes[peer] for peer in peers}


def test_replicas_beyond_the_units_are_on_other_nodes() -> None:
    topology = Topology(16, ranks_per_node=2, units=tuple(rank // 8 for rank in range(16)))
    for owner, peers in enumerate(place_replicas(topology, 2).peers):
        assert peers[0] // 8 != owner // 8
        assert len({rank // 2 for rank in (owner, *peers)}) == 3
