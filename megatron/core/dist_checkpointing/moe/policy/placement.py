"""Which peers keep the replicas of a rank's snapshot in their memory (MOETION section 5.1, Algorithm 2)."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import cached_property

from ..errors import UsageError
from ..types import Topology

Peers = list[tuple[int, ...]]
"""For each rank the ranks that keep its replicas, in the order of preference."""


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


def replica_count(asked: int | None, topology: Topology) -> int:
    """How many peers keep a copy of each rank's snapshots: as asked, else one where there are several nodes.

    Args:
        asked: The number that was configured; None: by the number of nodes.
        topology: The rank layout.
    """
    return asked if asked is not None else int(len(topology.ranks_by_node) > 1)


def place_replicas(topology: Topology, r: int) -> Placement:
    """Choose r peers for each rank (MOETION Alg. 2, with the deviations below).

    In this order: every owner has r different peers; none is on the owner's node while a rank elsewhere is free to
    take it; they are on as many nodes as there are, and first on one node of each other allocation unit, where there
    are units of several nodes; no rank keeps more than r + 1 replicas, and exactly r where nodes
    are equal and groups lie regularly; expert-data-parallel peers come first, then data-parallel ones, which hold
    parts of the same state and are near in the model, so that the order fits every ZeRO stage.

    Survival goes before balance. With more than r nodes the bound gives way only where unequal nodes leave no choice,
    as for a single rank beside one big node, and then to the smallest bound that is possible (`least_load`);
    with r nodes or fewer, of unequal sizes, replicas go where the fewest are and the bound is not promised.

    Where Algorithm 2 is not followed: its data-parallel group, ranks i mod DP + DP m for m < PP, walks over pipeline
    stages instead of replicas; it caps replicas in a group at DP - 1 though that group has PP members; inside the group
    it takes the first members for every owner and ignores the load; outside it allows r replicas per peer, which can
    leave owners without enough; it places on the owner's own node; and it is quadratic where a search fails. Here
    peers are found by rotating positions over nodes, in linear time.

    Args:
        topology: The rank layout, with the node of each rank.
        r: Replicas of each rank's snapshots.

    Raises:
        UsageError: `r` is not from 0 to world_size - 1.
    """
    if not 0 <= r < topology.world_size:
        raise UsageError(
            f"replicas is {r}, but must be from 0 to world_size - 1 = {topology.world_size - 1}: a rank keeps at most"
            " one replica of each other rank"
        )
    units = len(set(topology.units or ()))
    peers = _over_units(topology, r, units) if 1 < units < len(topology.ranks_by_node) else _over_nodes(topology, r)
    return Placement(tuple(peers), tuple(map(topology.node, range(topology.world_size))))


def _over_nodes(topology: Topology, r: int) -> Peers:
    grid = _grid(topology, r)
    if grid is not None:
        return _rotated(grid, r, topology.world_size)
    return spread(topology, r) if r < len(topology.ranks_by_node) else crowd(topology, r)


def _over_units(topology: Topology, r: int, units: int) -> Peers:
    """On another unit each while there are any, by the rule for nodes; then on other nodes. Balance gives way there."""
    apart = min(r, units - 1)
    peers = _over_nodes(replace(topology, nodes=topology.units), apart)
    if apart == r:
        return peers
    # Of so many others on different nodes, or in the end on any, enough are left.
    wanted = min(topology.world_size - 1, r + apart * max(map(len, topology.ranks_by_node.values())))
    found = []
    for rank, (first, more) in enumerate(zip(peers, _over_nodes(replace(topology, units=None), wanted), strict=True)):
        taken = {topology.node(peer) for peer in (rank, *first)}
        elsewhere = [peer for peer in more if topology.node(peer) not in taken]
        rest = [peer for peer in more if peer not in first and peer not in elsewhere]
        rest.sort(key=lambda peer: topology.node(peer) == topology.node(rank))  # its own node protects from least
        found.append((*first, *(elsewhere + rest)[: r - apart]))
    return found


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

    Args:
        node_sizes: Ranks of each node.
        r: Replicas of each rank's snapshots, fewer than there are nodes.
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

    Args:
        topology: The rank layout, with the node of each rank.
        r: Replicas of each rank's snapshots.
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

    Args:
        topology: The rank layout, with the node of each rank.
        r: Replicas of each rank's snapshots.
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
