"""Who saves which bytes of a checkpoint whose state several ranks hold (MoC section 4)."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from ...errors import UsageError
from ...types import ModelShape, OperatorId, Part, Precision, Topology, full_plan


@dataclass(frozen=True, slots=True)
class ParameterRange:
    """Parameters `first` to `end` (exclusive) of an operator, split evenly and in order over `ranks`.

    `part` names the components that are saved, `parameter_bytes` what they take per parameter. Where the parameters do
    not divide evenly, the first ranks take one more.
    """

    operator: OperatorId
    part: Part
    first: int
    end: int
    parameter_bytes: int
    ranks: range

    @property
    def total_bytes(self) -> int:
        """Bytes of the whole stretch."""
        return (self.end - self.first) * self.parameter_bytes


@dataclass(frozen=True)
class ShardAssignment:
    """Who saves what: `stretches` cover each byte of the checkpoint exactly once; `bytes_by_rank` adds them up."""

    strategy: str
    stretches: tuple[ParameterRange, ...] = field(repr=False)
    bytes_by_rank: tuple[int, ...] = field(repr=False)

    @property
    def total_bytes(self) -> int:
        """Bytes of the checkpoint over all ranks."""
        return sum(self.bytes_by_rank)

    @property
    def bottleneck_bytes(self) -> int:
        """Bytes of the rank that saves most: it decides how long saving takes."""
        return max(self.bytes_by_rank)

    @property
    def imbalance(self) -> float:
        """Bytes of the bottleneck rank over the mean of all ranks; 1.0 is even, and so is an empty checkpoint."""
        return self.bottleneck_bytes * len(self.bytes_by_rank) / self.total_bytes if self.total_bytes else 1.0

    def shards(self, rank: int) -> tuple[ParameterRange, ...]:
        """What `rank` saves: its share of each stretch. Raises IndexError for a rank that does not exist."""
        if not 0 <= rank < len(self.bytes_by_rank):
            raise IndexError(f"rank {rank} is not in a world of {len(self.bytes_by_rank)}")
        return tuple(
            replace(stretch, first=first, end=end, ranks=range(rank, rank + 1))
            for ranks in self._ranges_with.get(rank, ())
            for stretch in self._by_ranks[ranks]
            for first, end in (_share(stretch.first, stretch.end, len(ranks), ranks.index(rank)),)
            if first < end
        )

    @cached_property
    def _by_ranks(self) -> dict[range, list[ParameterRange]]:
        return _grouped(self.stretches)

    @cached_property
    def _ranges_with(self) -> dict[int, list[range]]:
        found: dict[int, list[range]] = {}
        for ranks in self._by_ranks:
            for rank in ranks:
                found.setdefault(rank, []).append(ranks)
        return found


Strategy = Callable[[Sequence[ParameterRange], Sequence[int]], list[ParameterRange]]
"""From stretches, each over all ranks that hold it, and the bytes that each rank saves anyway, to who saves them."""


def first_replica(held: Sequence[ParameterRange], loads: Sequence[int]) -> list[ParameterRange]:
    """The baseline of MoC Fig. 7(a): rank 0 of the data-parallel group, and for experts EP group 0.

    Args:
        held: Stretches, each over all ranks that hold it.
        loads: Bytes that each rank saves anyway; not looked at.
    """
    return [replace(stretch, ranks=stretch.ranks[:1]) for stretch in held]


def all_replicas(held: Sequence[ParameterRange], loads: Sequence[int]) -> list[ParameterRange]:
    """MoC 4.1: each expert in equal parts over the EP groups, which are its expert-data-parallel replicas.

    The text of 4.1 and the second condition of eq. 9 take whole experts as the smallest unit, so that half of "Expert0"
    in Fig. 7 is that of half of the layers. Parts of each expert are the same bytes when all experts are saved, and
    stay even when partial selections are not.

    Args:
        held: Stretches, each over all ranks that hold it.
        loads: Bytes that each rank saves anyway; not looked at.
    """
    return list(held)


def fixed_layers(held: Sequence[ParameterRange], loads: Sequence[int]) -> list[ParameterRange]:
    """MoC 4.2: whole layers over all data-parallel ranks, whatever else they save: the same for each checkpoint.

    The paper leaves open which rank takes which layer: larger ones first, to the rank with the fewest non-expert bytes.

    Args:
        held: Stretches, each over all ranks that hold it.
        loads: Bytes that each rank saves anyway; not looked at.
    """
    return [stretch for units in _grouped(held).values() for stretch in _greedy(units, [0] * len(units[0].ranks))]


def adaptive_layers(held: Sequence[ParameterRange], loads: Sequence[int]) -> list[ParameterRange]:
    """MoC 4.3 (ADPS of PEC 3.2): whole layers, larger ones first, to the rank with the fewest bytes; ties by rank.

    A greedy choice can end above the fixed one; where it does, the fixed one is taken, as the paper does not.

    Args:
        held: Stretches, each over all ranks that hold it.
        loads: Bytes that each rank saves anyway, by rank.
    """
    chosen: list[ParameterRange] = []
    for ranks, units in _grouped(held).items():
        begun = [loads[rank] for rank in ranks]
        options = (_greedy(units, begun), _greedy(units, [0] * len(ranks)))
        chosen += min(options, key=lambda option: _highest(option, ranks, loads))
    return chosen


SHARDINGS: Mapping[str, tuple[Strategy, Strategy]] = {
    "none": (first_replica, first_replica),
    "equal": (all_replicas, fixed_layers),
    "adaptive": (all_replicas, adaptive_layers),
    "EE": (all_replicas, first_replica),
    "EN": (first_replica, fixed_layers),
    "AN": (first_replica, adaptive_layers),
}
"""Strategies for (experts, non-experts) by name; EE, EN and AN change one side of the baseline only."""


def shard_checkpoint(
    strategy: str,
    shape: ModelShape,
    topology: Topology,
    precision: Precision,
    parts: Mapping[OperatorId, Part] | None = None,
    *,
    optimizer_sharded: bool = True,
    max_unit_bytes: int | None = None,
) -> ShardAssignment:
    """Assign each byte of a checkpoint to one rank that holds it (MoC section 4).

    With a sharded optimizer each rank saves the equal share of master weights and moments that it owns and the strategy
    decides on the compute weights; without, it decides on all. Pipeline stages and tensor ranks hold pieces of their
    own and are treated alike; what tensor parallelism replicates (norms, routers) counts as split. Context-parallel
    ranks count as data-parallel ones.

    The smallest unit of non-experts is an operator: where the paper has attention and FFN apart, a layer here has them
    in one, and the embedding is one unit that can be the bottleneck however many ranks share the rest.

    Args:
        strategy: A name in SHARDINGS.
        shape: The shape of the model.
        topology: The rank layout.
        precision: Bytes per parameter of each component.
        parts: Components of each operator that are saved, as in `SnapshotPlan.parts`; None: everything.
        optimizer_sharded: Whether the optimizer is distributed (ZeRO-1/2).
        max_unit_bytes: Larger non-expert units are split into equal parts; None: nothing is, as in the paper.

    Raises:
        UsageError: An unknown strategy, operators that the model does not have, a `max_unit_bytes` below the bytes of
            one parameter, layers that cannot fill the stages, and an `ep` that does not divide the experts.
    """
    if strategy not in SHARDINGS:
        raise UsageError(f"sharding is {strategy!r}, but must be one of {', '.join(SHARDINGS)}")
    if parts is None:
        parts = full_plan(0, shape.operators, Part.EVERYTHING).parts
    unknown = [operator for operator in parts if operator not in shape.parameters]
    if unknown:
        raise UsageError(f"parts names {min(unknown)}, which model {shape.name} does not have")
    parameter_bytes = precision.bytes_per_parameter(Part.EVERYTHING)
    if max_unit_bytes is not None and max_unit_bytes < parameter_bytes:
        raise UsageError(f"max_unit_bytes is {max_unit_bytes}, but must be at least {parameter_bytes}, one parameter")

    owned, held = _held(
        shape, topology, precision, parts, Part.MASTER_AND_MOMENTS if optimizer_sharded else Part.NOTHING
    )
    loads = _added([0] * topology.world_size, owned)
    place_experts, place_rest = SHARDINGS[strategy]
    experts = place_experts([stretch for stretch in held if stretch.operator.is_expert], loads)
    loads = _added(loads, experts)
    units = [unit for stretch in held if not stretch.operator.is_expert for unit in _units(stretch, max_unit_bytes)]
    rest = place_rest(units, loads)
    return ShardAssignment(strategy, (*owned, *experts, *rest), tuple(_added(loads, rest)))


def _share(first: int, end: int, ways: int, index: int) -> tuple[int, int]:
    """Bounds of one of `ways` parts, as equal as whole parameters allow, the larger ones first."""
    share, extra = divmod(end - first, ways)
    begin = first + index * share + min(index, extra)
    return begin, begin + share + (index < extra)


def _held(
    shape: ModelShape, topology: Topology, precision: Precision, parts: Mapping[OperatorId, Part], sharded: Part
) -> tuple[list[ParameterRange], list[ParameterRange]]:
    """What is saved, each piece over all ranks that hold it: components in `sharded`, and the others."""
    owned: list[ParameterRange] = []
    held: list[ParameterRange] = []
    for stage, operators in enumerate(shape.operators_of_stages(topology)):
        ranks = topology.stage_ranks(stage)
        for operator in operators:
            part = parts.get(operator, Part.NOTHING)
            ways, step, offset = topology.tp, topology.tp, 0
            if operator.is_expert:
                ways, step = topology.expert_tp, topology.expert_tp * topology.ep
                offset = shape.expert_rank(operator.expert, topology) * topology.expert_tp
            for saved, found in ((part & sharded, owned), (part & ~sharded, held)):
                per_parameter = precision.bytes_per_parameter(saved)
                for piece in range(ways if saved else 0):
                    first, end = _share(0, shape.parameters[operator], ways, piece)
                    if first < end:
                        found.append(
                            ParameterRange(operator, saved, first, end, per_parameter, ranks[offset + piece :: step])
                        )
    return owned, held


def _units(stretch: ParameterRange, max_unit_bytes: int | None) -> Iterable[ParameterRange]:
    if max_unit_bytes is None or stretch.total_bytes <= max_unit_bytes:
        return (stretch,)
    ways = -(-(stretch.end - stretch.first) // (max_unit_bytes // stretch.parameter_bytes))
    bounds = (_share(stretch.first, stretch.end, ways, index) for index in range(ways))
    return (replace(stretch, first=first, end=end) for first, end in bounds)


def _grouped(stretches: Iterable[ParameterRange]) -> dict[range, list[ParameterRange]]:
    found: dict[range, list[ParameterRange]] = {}
    for stretch in stretches:
        found.setdefault(stretch.ranks, []).append(stretch)
    return found


def _added(loads: Sequence[int], stretches: Iterable[ParameterRange]) -> list[int]:
    """Bytes per rank with the stretches on top; linear in stretches and ranks, not in their product."""
    total = list(loads)
    for ranks, group in _grouped(stretches).items():
        even, one_less_from = 0, [0] * (len(ranks) + 1)
        for stretch in group:
            share, extra = divmod(stretch.end - stretch.first, len(ranks))
            even += (share + 1) * stretch.parameter_bytes
            one_less_from[extra] += stretch.parameter_bytes
        for index, rank in enumerate(ranks):
            even -= one_less_from[index]
            total[rank] += even
    return total


def _greedy(units: Sequence[ParameterRange], begun: Sequence[int]) -> list[ParameterRange]:
    """Whole units, larger ones first, each to the rank with the fewest bytes, of which `begun` are there already."""
    ranks = units[0].ranks
    heap = [(load, rank) for load, rank in zip(begun, ranks, strict=True)]
    heapq.heapify(heap)
    placed: list[ParameterRange] = []
    for unit in sorted(units, key=_larger_first):
        load, rank = heap[0]
        heapq.heapreplace(heap, (load + unit.total_bytes, rank))
        placed.append(replace(unit, ranks=range(rank, rank + 1)))
    return placed


def _larger_first(unit: ParameterRange) -> tuple[int, int, int, int, int]:
    operator = unit.operator
    return -unit.total_bytes, operator.layer, operator.kind.value, operator.expert, unit.first


def _highest(placed: Iterable[ParameterRange], ranks: range, loads: Sequence[int]) -> int:
    total = _added(loads, placed)
    return max(total[rank] for rank in ranks)
