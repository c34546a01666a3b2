"""Which peers keep the replicas of a rank's snapshot in their memory (MOETION section 5.1, Algorithm 2)."""

from __future__ import annotations

import heapq
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cached_property

from ..errors import UsageError
from ..types import ModelShape, OperatorId, Part, Precision, Topology
from .shards import owned_operators


@dataclass(frozen=True)
class Placement:
    """For each rank, as owner, the ranks that keep a replica of its snapshot; `nodes` is the node of each rank."""

    peers: tuple[tuple[int, ...], ...] = field(repr=False)
    nodes: tuple[int, ...] = field(repr=False)

    @property
    def r(self) -> int:
        """Replicas of each owner."""
        return len(self.peers[0])

    @cached_property
    def kept_by(self) -> tuple[tuple[int, ...], ...]:
        """For each rank the owners whose replicas it keeps, ascending."""
        kept: list[list[int]] = [[] for _ in self.peers]
        for owner, peers in enumerate(self.peers):
            for peer in peers:
                kept[peer].append(owner)
        return tuple(map(tuple, kept))

    def holders(self, owner: int) -> frozenset[int]:
        """Nodes whose memory has the snapshot of `owner`: its own and those of its peers."""
        return frozenset(self.nodes[rank] for rank in (owner, *self.peers[owner]))


def place_replicas(topology: Topology, r: int) -> Placement:
    """Choose r peers for each rank (MOETION Alg. 2, with the deviations below).

    In this order: every owner has r different peers; none is on the owner's node while a rank elsewhere is free to
    take it; they are on as many nodes as there are; no rank keeps more than r + 1 replicas, and exactly r where nodes
    are equal and groups lie regularly; expert-data-parallel peers come first, then data-parallel ones, which hold
    parts of the same state (`redundant_part`) and are near in the model, so that the order fits every ZeRO stage.

    Survival goes before balance. With more than r nodes the bound gives way only where unequal nodes leave no choice,
    as for a single rank beside one big node, and then to the smallest bound that is possible (`spreading.least_load`);
    with r nodes or fewer, of unequal sizes, replicas go where the fewest are and the bound is not promised.

    Where Algorithm 2 is not followed: its data-parallel group, ranks i mod DP + DP m for m < PP, walks over pipeline
    stages instead of replicas; it caps replicas in a group at DP - 1 though that group has PP members; inside the group
    it takes the first members for every owner and ignores the load; outside it allows r replicas per peer, which can
    leave owners without enough; it places on the owner's own node; and it is quadratic where a search fails. Here
    peers are found by rotating positions over nodes, in linear time.

    Raises UsageError when r is not from 0 to world_size - 1.
    """
    if not 0 <= r < topology.world_size:
        raise UsageError(
            f"replicas is {r}, but must be from 0 to world_size - 1 = {topology.world_size - 1}: a rank keeps at most"
            " one replica of each other rank"
        )
    grid = _grid(topology, r)
    if grid is not None:
        peers = _rotated(grid, r, topology.world_size)
    else:
        peers = spread(topology, r) if r < len(topology.ranks_by_node) else crowd(topology, r)
    return Placement(tuple(peers), tuple(map(topology.node, range(topology.world_size))))


@dataclass(frozen=True)
class _Grid:
    """Ranks of each node by slot, and how many nodes share expert groups, data-parallel groups, and the rest.

    Node n has position n mod radices[0] among those with its expert-data-parallel groups, and so on as digits.
    """

    slots: tuple[tuple[int, ...], ...]
    radices: tuple[int, int, int]


def _grid(topology: Topology, r: int) -> _Grid | None:
    """Equal nodes in an order in which steps lead to peers; None for unequal ones, or when a search finds more peers.

    That is so where groups overlap, as on nodes that straddle stages, unless r replicas need every node anyway.
    """
    ids = group_ids(topology)
    blocks: dict[tuple[int, ...], dict[tuple[tuple[int, int], ...], list[tuple[int, ...]]]] = {}
    for _, slots in sorted(topology.ranks_by_node.items()):
        groups = tuple(ids[rank] for rank in slots)
        blocks.setdefault(tuple(dense for dense, _ in groups), {}).setdefault(groups, []).append(slots)
    nodes = tuple(slots for block in blocks.values() for same in block.values() for slots in same)
    if len(set(map(len, nodes))) > 1:
        return None
    shapes = {(len(same), len(block)) for block in blocks.values() for same in block.values()}
    apart = _disjoint(blocks) and _disjoint(
        [[expert for _, expert in groups] for block in blocks.values() for groups in block]
    )
    if apart and len(shapes) == 1:
        ((same_experts, same_dense),) = shapes
        return _Grid(nodes, (same_experts, same_dense, len(blocks)))
    return _Grid(nodes, (len(nodes), 1, 1)) if r >= len(nodes) else None


def _disjoint(groups: Iterable[Iterable[int]]) -> bool:
    """Whether no group number occurs in two of the collections."""
    once = list(map(set, groups))
    return len(set().union(*once)) == sum(map(len, once))


def _rotated(grid: _Grid, r: int, world_size: int) -> Peers:
    """The k-th peer of every rank is a fixed step away, so that each rank keeps exactly one k-th replica."""
    nodes, slots = len(grid.slots), len(grid.slots[0])
    peers: list[list[int]] = [[] for _ in range(world_size)]
    for index in range(r):
        if index < world_size - slots:
            turn, step = divmod(index, nodes - 1)
            step += 1
        else:
            turn, step = index - (world_size - slots) + 1, 0
        for node, owners in enumerate(grid.slots):
            keepers = grid.slots[_moved(node, step, grid.radices)]
            for slot, owner in enumerate(owners):
                peers[owner].append(keepers[(slot + turn) % slots])
    return list(map(tuple, peers))


def _moved(node: int, step: int, radices: tuple[int, ...]) -> int:
    """The node `step` away, digit by digit without carry, so that small steps stay in the group."""
    moved, weight = 0, 1
    for radix in radices:
        moved += weight * ((node % radix + step) % radix)
        node, step, weight = node // radix, step // radix, weight * radix
    return moved


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


Peers = list[tuple[int, ...]]
"""For each rank the ranks that keep its replicas, in the order of preference."""


def group_ids(topology: Topology) -> list[tuple[int, int]]:
    """For each rank the numbers of its data-parallel and its expert-data-parallel group."""
    dense, experts, per_stage = topology.tp, topology.expert_tp * topology.ep, topology.ranks_per_stage
    ids = []
    for rank in range(topology.world_size):
        stage, within = divmod(rank, per_stage)
        ids.append((stage * dense + within % dense, stage * experts + within % experts))
    return ids


def least_load(node_sizes: Iterable[int], r: int) -> int:
    """The smallest possible number of replicas on the busiest rank when each owner's r replicas are on r other nodes.

    With N ranks on m > r nodes, each owner can avoid at most m - 1 - r of the other nodes. So any m - r + u nodes
    (u from 0 to r) with S ranks together take u replicas of each owner among them and u + 1 of each other one, which
    needs u S + (u + 1)(N - S) <= load x S; the smallest nodes are the tightest. `spread` reaches this bound.
    """
    sizes = sorted(node_sizes)
    ranks, taken, load = sum(sizes), sum(sizes[: len(sizes) - r - 1]), r
    for u, size in enumerate(sizes[len(sizes) - r - 1 :]):
        taken += size
        load = max(load, -(-(u + 1) * ranks // taken) - 1)
    return load


def spread(topology: Topology, r: int) -> Peers:
    """Replicas on r distinct nodes, none of them the owner's, for more than r nodes of any sizes.

    No rank keeps more than r + 1, or than `least_load` where that is more. Nodes with peers of the owner's groups come
    first as far as this allows. Linear in ranks times r, but for a logarithm of the nodes.
    """
    least = least_load(map(len, topology.ranks_by_node.values()), r)
    for prefer, bound in dict.fromkeys(((True, least), (True, max(least, r + 1)), (False, least))):
        found = _GreedyPass(topology, bound).run(r, prefer)
        if found is not None:
            return found
    raise AssertionError(f"no placement of {r} replicas with at most {least} on a rank")


class _GreedyPass:
    """One pass over the owners with an upper bound on the replicas of a rank.

    `room` counts the replicas that a node can still take, `waiting` its own ranks that have not been served. Taking
    the nodes with the largest sum of both never closes the way to a solution: where another choice leads to one, two
    or three replicas can change places so that this one does too. That is the Kleitman-Wang argument for degree
    sequences of directed graphs, with nodes in place of vertices.
    """

    def __init__(self, topology: Topology, bound: int) -> None:
        on = topology.ranks_by_node
        self.topology, self.bound = topology, bound
        self.waiting = {node: len(ranks) for node, ranks in on.items()}
        self.room = {node: len(ranks) * bound for node, ranks in on.items()}
        self.loads = [0] * topology.world_size
        self.heap = [(-self.room[node] - self.waiting[node], node) for node in on]
        self.idlest = {node: [(0, rank) for rank in ranks] for node, ranks in on.items()}
        heapq.heapify(self.heap)

    def run(self, r: int, prefer: bool) -> Peers | None:
        """Peers of all ranks, or None when an owner finds no r nodes with room."""
        groups = _Groups(self.topology)
        peers: Peers = []
        for owner in range(self.topology.world_size):
            self.waiting[self.topology.node(owner)] -= 1
            keepers: dict[int, int] = {}
            for node in groups.nodes_after(owner, 2 * r) if prefer else ():
                if len(keepers) == r:
                    break
                peer = None if node in keepers else self._first_with_room(groups.on_node(owner, node, r))
                if peer is not None:
                    self._take(keepers, node, peer)
            for node in self._roomiest(owner, keepers, r):
                peer = self._first_with_room(groups.on_node(owner, node, r))
                self._take(keepers, node, self._idlest(node) if peer is None else peer)
            if len(keepers) < r:
                return None
            peers.append(tuple(keepers.values()))
        return peers

    def _take(self, keepers: dict[int, int], node: int, keeper: int) -> None:
        keepers[node] = keeper
        self.loads[keeper] += 1
        self.room[node] -= 1

    def _roomiest(self, owner: int, keepers: Mapping[int, int], r: int) -> list[int]:
        """Nodes that fill `keepers` up to r; fewer where there is no room."""
        own = self.topology.node(owner)
        found: list[int] = []
        aside: list[tuple[int, int]] = []
        while len(keepers) + len(found) < r and self.heap:
            key, node = heapq.heappop(self.heap)
            current = -self.room[node] - self.waiting[node]
            if key != current:
                heapq.heappush(self.heap, (current, node))
            elif self.room[node]:
                aside.append((key, node))
                if node != own and node not in keepers:
                    found.append(node)
        for entry in aside:
            heapq.heappush(self.heap, entry)
        return found

    def _first_with_room(self, ranks: Iterable[int]) -> int | None:
        return next((rank for rank in ranks if self.loads[rank] < self.bound), None)

    def _idlest(self, node: int) -> int:
        """The rank of the node that keeps least."""
        heap = self.idlest[node]
        while heap[0][0] != self.loads[heap[0][1]]:
            rank = heap[0][1]
            heapq.heapreplace(heap, (self.loads[rank], rank))
        return heap[0][1]


class _Groups:
    """Where the peers of each rank sit: expert-data-parallel ones first, then data-parallel ones."""

    def __init__(self, topology: Topology) -> None:
        self.topology = topology
        self.keys = [(("experts", experts), ("dense", dense)) for dense, experts in group_ids(topology)]
        self.members: dict[tuple[str, int], dict[int, list[int]]] = {}
        self.places: list[tuple[int, ...]] = []
        for rank, keys in enumerate(self.keys):
            beside = [self.members.setdefault(key, {}).setdefault(topology.node(rank), []) for key in keys]
            self.places.append(tuple(map(len, beside)))
            for ranks in beside:
                ranks.append(rank)
        self.nodes = {key: tuple(by_node) for key, by_node in self.members.items()}
        self.order = {key: {node: at for at, node in enumerate(nodes)} for key, nodes in self.nodes.items()}

    def nodes_after(self, owner: int, count: int) -> list[int]:
        """The next `count` nodes of each of the owner's groups, in cyclic order from its own."""
        own = self.topology.node(owner)
        found: list[int] = []
        for key in self.keys[owner]:
            nodes, at = self.nodes[key], self.order[key][own]
            found += [nodes[(at + step) % len(nodes)] for step in range(1, min(count, len(nodes) - 1) + 1)]
        return found

    def on_node(self, owner: int, node: int, count: int) -> Iterator[int]:
        """A few peers of the owner on the node, at most 1 + `count` of each group, from its own position on."""
        for key, place in zip(self.keys[owner], self.places[owner], strict=True):
            ranks = self.members[key].get(node, ())
            for step in range(min(1 + count, len(ranks))):
                yield ranks[(place + step) % len(ranks)]


def crowd(topology: Topology, r: int) -> Peers:
    """Replicas for at most r nodes of unequal sizes: on each other node, then on more of its ranks, then at home.

    The owner's node is used only when all ranks of the others keep a replica. Owners on larger nodes, which have the
    least choice, come first, and each takes what is left to choose from the nodes with the fewest replicas per rank.
    No bound is promised: up to 12 ranks none keeps more than r + 1 or the least that is possible, in larger worlds
    one or two more have been seen.
    """
    on = topology.ranks_by_node
    world = topology.world_size
    at_home = {node: max(0, r - (world - len(ranks))) for node, ranks in on.items()}
    load = {node: at_home[node] * len(ranks) + world - len(ranks) for node, ranks in on.items()}
    pointer = dict.fromkeys(on, 0)
    peers: Peers = [()] * world
    for owner in sorted(range(world), key=lambda rank: (-len(on[topology.node(rank)]), rank)):
        own = topology.node(owner)
        counts = {node: 1 for node in on if node != own}
        _take_idlest(counts, on, load, r - at_home[own])
        by_node = [_next_on(on[node], pointer[node], count) for node, count in counts.items()]
        for node, count in counts.items():
            pointer[node] += count
        home = _next_on(on[own], on[own].index(owner) + 1, at_home[own])
        peers[owner] = (*_in_turns(by_node), *home)
    return peers


def _take_idlest(counts: dict[int, int], on: Mapping[int, tuple[int, ...]], load: dict[int, int], wanted: int) -> None:
    """Raise `counts` to `wanted` replicas in all, each on the node with the fewest replicas per rank."""
    heap = [(Fraction(load[node], len(on[node])), node) for node in counts]
    heapq.heapify(heap)
    for _ in range(wanted - len(counts)):
        while counts[heap[0][1]] == len(on[heap[0][1]]):
            heapq.heappop(heap)
        node = heap[0][1]
        counts[node] += 1
        load[node] += 1
        heapq.heapreplace(heap, (Fraction(load[node], len(on[node])), node))


def _next_on(ranks: Sequence[int], start: int, count: int) -> list[int]:
    return [ranks[(start + step) % len(ranks)] for step in range(count)]


def _in_turns(lists: Sequence[Sequence[int]]) -> list[int]:
    """First of each list, then second of each, ..."""
    longest = max(map(len, lists), default=0)
    return [items[turn] for turn in range(longest) for items in lists if turn < len(items)]
