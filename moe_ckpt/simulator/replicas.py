"""What a placement of replicas survives (MOETION 5.1)."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from megatron.core.dist_checkpointing.moe.policy.placement import Placement


@dataclass(frozen=True)
class Survival:
    """What a loss of nodes leaves: owners on them that a replica still serves, and owners with no copy at all."""

    from_peers: tuple[int, ...]
    lost: tuple[int, ...]


def surviving(placement: Placement, lost_nodes: Collection[int]) -> Survival:
    """Which of the owners on `lost_nodes` can be restored from a peer's memory, and which lose all copies.

    Args:
        placement: Nodes of the owners, and the peers that hold their replicas.
        lost_nodes: Numbers of the nodes whose memory is gone.
    """
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
    """

    fatal_nodes: int
    fatal_sets: int
    same_node: int


def coverage(placement: Placement) -> ReplicaCoverage:
    """What a placement survives, exactly: losing an owner takes all nodes that hold it, and that is enough."""
    nodes = placement.nodes
    holders = {placement.holders(owner) for owner in range(len(nodes))}
    fatal = min(map(len, holders))
    return ReplicaCoverage(
        fatal_nodes=fatal,
        fatal_sets=sum(len(held) == fatal for held in holders),
        same_node=sum(nodes[owner] == nodes[peer] for owner, peers in enumerate(placement.peers) for peer in peers),
    )
