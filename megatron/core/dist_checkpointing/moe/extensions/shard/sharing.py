"""Which data-parallel rank stores which part of the state that all of them hold, and how a restore joins the parts.

Without the distributed optimizer every data-parallel rank holds all master weights and moments of its operators. With
`--moe-ckpt-shard equal` or `adaptive` each stores only a portion (MoC, section 4); after a fault it restores that, and
an all-reduce gives it the portions of its peers. Where snapshots select experts, `adaptive` shares the other operators
out again in each of them, to the ranks that store least of the experts (MoC 4.3): `Sharing.left_out` says which of
them a rank leaves to its peers, and what a rank restored tells whose they were.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from operator import attrgetter

import torch

from megatron.core import parallel_state
from megatron.core.optimizer import MegatronOptimizer

from ...errors import UnreadableCheckpoint, UsageError
from ...megatron_state.module_tree import model_shape
from ...megatron_state.operators import GlobalName, StateTensor
from ...megatron_state.quantization import is_scale
from ...megatron_state.restore import LiveRestorer, level_step_counts, recast_compute_weights, settle_gathers
from ...types import FP32, ModelShape, OperatorId, Part, SnapshotPlan, Topology, full_plan
from .assignment import ShardAssignment, shard_checkpoint

_SUMMED_AS = {4: torch.int32, 8: torch.int64}
"""Integers that collectives of gloo and NCCL add up, by the size of what they stand for; else single bytes."""


@dataclass(frozen=True, eq=False)
class Portion:
    """What one rank stores of a tensor: elements in `own`, ascending; None where every holder stores all of it.

    varies: whether it is one rank that stores all of it, another one from snapshot to snapshot.
    """

    tensor: StateTensor
    own: tuple[range, ...] | None = None
    varies: bool = False

    @property
    def stored(self) -> tuple[StateTensor, ...]:
        """As state of their own, whose keys tell the ranges; views into the same storage."""
        if self.own is None or self.varies:
            return (self.tensor,)
        whole, first = self.tensor, self.tensor.shard.start
        return tuple(
            replace(
                whole,
                shard=replace(whole.shard, start=first + part.start, end=first + part.stop),
                tensor=whole.tensor[part.start : part.stop],
            )
            for part in self.own
        )


class Sharing:
    """What one rank stores of the tensors that its data-parallel peers hold alike.

    Args:
        strategy: `equal` or `adaptive`.
        tensors: All state of this rank.
        rank: This rank.
        selects: Whether snapshots hold some experts and not others.

    Raises UsageError as `assign` does.
    """

    def __init__(
        self,
        strategy: str,
        chunks: Sequence[torch.nn.Module],
        tensors: Sequence[StateTensor],
        topology: Topology,
        rank: int,
        *,
        selects: bool,
    ) -> None:
        self._strategy, self._topology, self._rank = strategy, topology, rank
        self._shape = model_shape(chunks)
        portions = share_out(tensors, assign(strategy, chunks, tensors, topology), topology, rank)
        if selects and strategy == "adaptive":
            portions = tuple(
                replace(one, varies=one.own is not None and not one.tensor.operator.is_expert) for one in portions
            )
        self.portions = portions
        self._newest: tuple[SnapshotPlan, frozenset[OperatorId]] | None = None
        self._varying = frozenset(one.tensor.operator for one in portions if one.varies)

    @property
    def varying(self) -> frozenset[str]:
        """Keys of what this rank stores in some snapshots and leaves to its peers in others."""
        return frozenset(one.tensor.key for one in self.portions if one.varies)

    def left_out(self, snapshot: SnapshotPlan) -> frozenset[OperatorId]:
        """Operators whose master weights and moments peers store in this snapshot, and this rank does not."""
        if not self._varying:
            return frozenset()
        if self._newest is None or self._newest[0] is not snapshot:  # asked for each piece of it
            self._newest = snapshot, self._varying - self._stored_of(snapshot)
        return self._newest[1]

    def _stored_of(self, snapshot: SnapshotPlan) -> frozenset[OperatorId]:
        parts = {operator: part & Part.MASTER_AND_MOMENTS for operator, part in snapshot.parts.items()}
        assignment = shard_checkpoint(self._strategy, self._shape, self._topology, FP32, parts, optimizer_sharded=False)
        return frozenset(stretch.operator for stretch in assignment.shards(self._rank))


def assign(
    strategy: str, chunks: Sequence[torch.nn.Module], tensors: Sequence[StateTensor], topology: Topology
) -> ShardAssignment:
    """Who stores which master weights and moments, of all operators; the same for every snapshot, and on all ranks.

    Args:
        strategy: `equal` or `adaptive`, see `extensions/shard/assignment.py`.
        chunks: The model chunks of this rank.
        tensors: All state of this rank.
        topology: The layout of the job.

    Raises:
        UsageError: The live parameters are not those that the policy counts.
    """
    shape = model_shape(chunks)
    _check_counts(shape, tensors, topology, torch.distributed.get_rank())
    # Master weights and moments take the same bytes with and without compute weights of their own.
    parts = full_plan(0, shape.operators, Part.MASTER_AND_MOMENTS).parts
    return shard_checkpoint(strategy, shape, topology, FP32, parts, optimizer_sharded=False)


def share_out(
    tensors: Sequence[StateTensor], assignment: ShardAssignment, topology: Topology, rank: int
) -> tuple[Portion, ...]:
    """What a rank stores of each of its tensors.

    An operator's parameters are numbered through its tensors in their order, the same for master weights and each
    moment. Step counts, compute weights and buffers are stored by every holder, and so is what the assignment does not
    know: what tensor parallelism replicates, and the second copy of tied embeddings.

    Args:
        tensors: The tensors, in an order that must be the same on data-parallel peers.
        assignment: Who stores which parameters.
        topology: The rank layout.
        rank: The rank.

    Returns:
        One portion per tensor, in their order.
    """
    ranges = _own_ranges(assignment, topology, rank)
    shareable = {state.key for state in tensors if state.operator in ranges and _is_shareable(state, topology)}
    first_number = _numbered([state for state in tensors if state.field == "master" and state.key in shareable])
    return tuple(
        Portion(state, _cut(ranges[state.operator], first_number[state.shard.of], state.tensor.numel()))
        if state.key in shareable
        else Portion(state)
        for state in tensors
    )


@torch.no_grad()
def join(portions: Sequence[Portion], group_of: Callable[[OperatorId], torch.distributed.ProcessGroup]) -> None:
    """Fill in what the other ranks stored, to the last bit; a collective over the groups of the tensors.

    Args:
        portions: What this rank has stored of each tensor.
        group_of: The ranks that share an operator.
    """
    for portion in portions:
        if portion.own is None:
            continue
        # All but the own portion becomes zero, and the bits are added up as integers: exactly one rank has other bits
        # than zeros at each place, and a sum of integers with zeros keeps them, those of -0.0 and NaN too.
        tensor, ends = portion.tensor.tensor, [0, *(end for part in portion.own for end in (part.start, part.stop))]
        for start, end in list(pairwise([*ends, tensor.numel()]))[::2]:
            tensor[start:end].zero_()
        bits = tensor.view(_SUMMED_AS.get(tensor.element_size(), torch.uint8))
        torch.distributed.all_reduce(bits, group=group_of(portion.tensor.operator))


@torch.no_grad()
def join_restored(
    tensors: Sequence[StateTensor],
    restored: Callable[[str], bool],
    group_of: Callable[[OperatorId], torch.distributed.ProcessGroup],
) -> None:
    """Take each of these tensors from the first rank of its group that has restored it, to the last bit.

    A collective over the groups of all of them.

    Args:
        tensors: The tensors, the same on all ranks of a group.
        restored: Whether this rank has restored the tensor with a key.
        group_of: The ranks that share an operator.

    Raises:
        UnreadableCheckpoint: On all ranks of a group: none of them has restored a tensor.
    """
    for state in tensors:
        group = group_of(state.operator)
        own, none = torch.distributed.get_rank(group), torch.distributed.get_world_size(group)
        first = torch.tensor([own if restored(state.key) else none], device=state.tensor.device)
        torch.distributed.all_reduce(first, op=torch.distributed.ReduceOp.MIN, group=group)
        if int(first) == none:
            raise UnreadableCheckpoint(f"no data-parallel rank has restored {state.key} from any snapshot")
        source = torch.distributed.get_global_rank(group, int(first))
        torch.distributed.broadcast(state.tensor.view(torch.uint8), source, group=group)


def joining_restorer(
    chunks: Sequence[torch.nn.Module], optimizer: MegatronOptimizer, portions: Sequence[Portion]
) -> LiveRestorer:
    """As `live_restorer`, where each rank restores what it stores and gets the rest from its data-parallel peers."""
    tensors = [portion.tensor for portion in portions]
    varying = [portion.tensor for portion in portions if portion.varies]

    def finish(_recast: bool) -> None:
        join([portion for portion in portions if not portion.varies], _data_parallel_group)
        join_restored(varying, restorer.has_restored, _data_parallel_group)
        level_step_counts(tensors)
        recast_compute_weights(chunks, optimizer)

    restorer = LiveRestorer(
        [part for portion in portions for part in portion.stored],
        finish,
        settle=lambda: settle_gathers(chunks),
        derived=[
            *(parameter for chunk in chunks for parameter in chunk.parameters()),
            *(state.tensor for state in tensors),
        ],
        shared=frozenset(state.key for state in varying),
    )
    return restorer


def _data_parallel_group(operator: OperatorId) -> torch.distributed.ProcessGroup:
    """The ranks that hold the same master weights and moments of an operator as this one."""
    if operator.is_expert:
        return parallel_state.get_expert_data_parallel_group()
    return parallel_state.get_data_parallel_group(with_context_parallel=True)


def _check_counts(shape: ModelShape, tensors: Sequence[StateTensor], topology: Topology, rank: int) -> None:
    live: Counter[OperatorId] = Counter()
    for state in tensors:
        if state.field == "master":
            live[state.operator] += state.tensor.numel() * state.shard.tp_size
    here = topology.coordinates(rank)
    for operator in shape.operators_of_stages(topology)[here.pp]:
        elsewhere = operator.is_expert and shape.expert_rank(operator.expert, topology) != here.ep
        if not elsewhere and live[operator] != shape.parameters[operator]:
            raise UsageError(
                f"the state of this model cannot be shared out: {operator} has {live[operator]} parameters on rank"
                f" {rank}, where {shape.parameters[operator]} were expected; use --moe-ckpt-shard none"
            )


def _is_shareable(tensor: StateTensor, topology: Topology) -> bool:
    """Whether the assignment counts these elements: master weights and moments, cut over all tensor-parallel ranks."""
    partitions = topology.expert_tp if tensor.operator.is_expert else topology.tp
    in_full = tensor.field in ("step", "buffer") or is_scale(tensor.field)
    counted = bool(tensor.part & Part.MASTER_AND_MOMENTS) and not in_full
    return counted and tensor.shard.tp_size == partitions


def _own_ranges(assignment: ShardAssignment, topology: Topology, rank: int) -> Mapping[OperatorId, list[range]]:
    """Of each operator that `rank` and its data-parallel peers share out, the numbers of the parameters it stores.

    Numbers count from the first parameter of this rank's tensor-parallel partition.
    """
    peers = {
        False: frozenset(topology.data_parallel_peers(rank)),
        True: frozenset(topology.expert_data_parallel_peers(rank)),
    }
    first: dict[OperatorId, int] = {}
    for stretch in assignment.stretches:
        if peers[stretch.operator.is_expert].issuperset(stretch.ranks):
            first[stretch.operator] = min(stretch.first, first.get(stretch.operator, stretch.first))
    ranges: dict[OperatorId, list[range]] = {operator: [] for operator in first}
    for own in sorted(assignment.shards(rank), key=attrgetter("first")):
        begin = first[own.operator]
        ranges[own.operator].append(range(own.first - begin, own.end - begin))
    return ranges


def _numbered(masters: Sequence[StateTensor]) -> Mapping[GlobalName, int]:
    """The number of the first element of each tensor among the parameters of its operator."""
    numbers: dict[GlobalName, int] = {}
    counted: Counter[OperatorId] = Counter()
    for master in masters:
        numbers[master.shard.of] = counted[master.operator]
        counted[master.operator] += master.tensor.numel()
    return numbers


def _cut(ranges: Sequence[range], first: int, numel: int) -> tuple[range, ...]:
    """What of numbers `first` to `first + numel` is in the ranges, counted from `first`."""
    parts = (range(max(0, own.start - first), min(numel, own.stop - first)) for own in ranges)
    return tuple(part for part in parts if part)
