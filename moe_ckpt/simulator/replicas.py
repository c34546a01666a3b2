"""What a placement of replicas takes, sends and survives (MOETION 5.1)."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

from megatron.core.dist_checkpointing.moe.errors import UsageError
from megatron.core.dist_checkpointing.moe.policy.placement import Placement, group_ids
from megatron.core.dist_checkpointing.moe.types import ModelShape, OperatorId, Part, Precision, Topology

from .shards import owned_operators


def redundant_part(zero_stage: int, is_expert: bool, dp: int, edp: int) -> Part:
    """Components that data-parallel peers hold anyway, so that they need no transfer (MOETION 5.1).

    `dp` and `edp` are the ranks that share non-expert and expert state. Everything with ZeRO 0, the compute weights
    with 1 and 2, nothing with 3 or without a peer. It protects only as far as those peers are on other nodes, which
    `replica_bytes` takes into account. Raises UsageError when zero_stage is not from 0 to 3.
    """
    if zero_stage not in range(4):
        raise UsageError(f"zero_stage is {zero_stage}, but must be from 0 to 3")
    if (edp if is_expert else dp) == 1 or zero_stage == 3:
        return Part.NOTHING
    return Part.EVERYTHING if zero_stage == 0 else Part.COMPUTE


@dataclass(frozen=True)
class ReplicaBytes:
    """Bytes of one full round by rank: its own snapshot, what it sends to peers, what it keeps for others.

    `node_bytes` is the memory that each node needs for one round: snapshots of its ranks and replicas that they keep.
    """

    snapshot_bytes: tuple[int, ...] = field(repr=False)
    sent_bytes: tuple[int, ...] = field(repr=False)
    kept_bytes: tuple[int, ...] = field(repr=False)
    node_bytes: dict[int, int] = field(repr=False)


def replica_bytes(
    shape: ModelShape,
    topology: Topology,
    precision: Precision,
    zero_stage: int,
    placement: Placement,
    *,
    part: Part = Part.EVERYTHING,
) -> ReplicaBytes:
    """Bytes that each rank copies, sends and keeps when every operator's `part` is replicated once (MOETION 5.1).

    Ranks that hold the same state share the work: each answers for an equal share, rounded up, of every operator. A
    redundant component (`redundant_part`) already lies on all nodes of its group; it is sent only for the copies that
    these leave missing to r + 1 nodes, and only to peers on other nodes. All else goes to all peers.
    Raises UsageError for a placement of another world and as `redundant_part` and `owned_operators` do.
    """
    if len(placement.peers) != topology.world_size:
        raise UsageError(f"placement is for {len(placement.peers)} ranks, but world_size is {topology.world_size}")
    world, nodes = range(topology.world_size), placement.nodes
    group_nodes = _nodes_of_groups(topology, nodes)
    dense_ranks = topology.cp * topology.dp
    shares = _shares(shape, topology)
    snapshot, sent, kept = ([0] * len(world) for _ in range(3))
    for owner, ids in enumerate(group_ids(topology)):
        at = topology.coordinates(owner)
        for is_expert in (False, True):
            parameters = shares[at.pp, at.ep][is_expert]
            redundant = redundant_part(zero_stage, is_expert, dense_ranks, topology.edp)
            holders = group_nodes[is_expert, ids[is_expert]]
            outside = [peer for peer in placement.peers[owner] if nodes[peer] not in holders]
            missing = outside[: max(0, placement.r + 1 - len(holders))]
            snapshot[owner] += parameters * precision.bytes_per_parameter(part)
            for moved, targets in ((part & ~redundant, placement.peers[owner]), (part & redundant, missing)):
                moved_bytes = parameters * precision.bytes_per_parameter(moved)
                sent[owner] += moved_bytes * len(targets)
                for peer in targets:
                    kept[peer] += moved_bytes
    node_bytes = dict.fromkeys(sorted(set(nodes)), 0)
    for rank in world:
        node_bytes[nodes[rank]] += snapshot[rank] + kept[rank]
    return ReplicaBytes(tuple(snapshot), tuple(sent), tuple(kept), node_bytes)


def _nodes_of_groups(topology: Topology, nodes: tuple[int, ...]) -> dict[tuple[bool, int], set[int]]:
    """Nodes of each (is expert, group number)."""
    found: dict[tuple[bool, int], set[int]] = {}
    for rank, (dense, experts) in enumerate(group_ids(topology)):
        found.setdefault((False, dense), set()).add(nodes[rank])
        found.setdefault((True, experts), set()).add(nodes[rank])
    return found


def _shares(shape: ModelShape, topology: Topology) -> dict[tuple[int, int], tuple[int, int]]:
    """Parameters that each rank of a (stage, expert rank) answers for: of non-experts, and of experts."""
    dense_ways, expert_ways = topology.tp * topology.cp * topology.dp, topology.expert_tp * topology.edp

    def share(operators: Collection[OperatorId], ways: int) -> int:
        return sum(-(-shape.parameters[operator] // ways) for operator in operators)

    return {
        place: (
            share([operator for operator in operators if not operator.is_expert], dense_ways),
            share([operator for operator in operators if operator.is_expert], expert_ways),
        )
        for place, operators in owned_operators(shape, topology).items()
    }


@dataclass(frozen=True)
class Survival:
    """What a loss of nodes leaves: owners on them that a replica still serves, and owners with no copy at all."""

    from_peers: tuple[int, ...]
    lost: tuple[int, ...]


def surviving(placement: Placement, lost_nodes: Collection[int]) -> Survival:
    """Which of the owners on `lost_nodes` can be restored from a peer's memory, and which lose all copies."""
    gone = set(lost_nodes)
    hit = [owner for owner, node in enumerate(placement.nodes) if node in gone]
    lost = tuple(owner for owner in hit if placement.holders(owner) <= gone)
    return Survival(tuple(sorted(set(hit) - set(lost))), lost)


@dataclass(frozen=True)
class ReplicaCoverage:
    """Facts of a placement.

    fatal_nodes: the smallest number of nodes whose simultaneous loss loses some owner's state, and
    fatal_sets: how many different sets of so many nodes do.
    same_node: replicas that lie on their owner's node and protect against nothing but the loss of a process.
    expert_group, dense_group, elsewhere: replicas on expert-data-parallel peers, other data-parallel peers, the rest.
    least_kept, most_kept: replicas that the idlest and the busiest rank keep.
    """

    fatal_nodes: int
    fatal_sets: int
    same_node: int
    expert_group: int
    dense_group: int
    elsewhere: int
    least_kept: int
    most_kept: int


def coverage(placement: Placement, topology: Topology) -> ReplicaCoverage:
    """What a placement survives, exactly: losing an owner takes all nodes that hold it, and that is enough."""
    ids, nodes = group_ids(topology), placement.nodes
    holders = {placement.holders(owner) for owner in range(len(nodes))}
    fatal = min(map(len, holders))
    pairs = [(owner, peer) for owner, peers in enumerate(placement.peers) for peer in peers]
    experts = sum(ids[owner][1] == ids[peer][1] for owner, peer in pairs)
    dense = sum(ids[owner][0] == ids[peer][0] and ids[owner][1] != ids[peer][1] for owner, peer in pairs)
    kept = [len(owners) for owners in placement.kept_by]
    return ReplicaCoverage(
        fatal_nodes=fatal,
        fatal_sets=sum(len(held) == fatal for held in holders),
        same_node=sum(nodes[owner] == nodes[peer] for owner, peer in pairs),
        expert_group=experts,
        dense_group=dense,
        elsewhere=len(pairs) - experts - dense,
        least_kept=min(kept),
        most_kept=max(kept),
    )
