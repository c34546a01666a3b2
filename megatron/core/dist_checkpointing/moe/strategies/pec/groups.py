"""Experts in fixed groups, each stored as a piece of its own kind: a new copy always supersedes all of an old one."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from string import ascii_lowercase

from ...errors import UsageError
from ...policy.partial import sequential_selection
from ...types import OperatorId, OperatorKind, Part, Piece, SnapshotPlan
from ..base import Job

DENSE = "dense"
_KINDS = 26 + 26 * 26


@dataclass(frozen=True)
class RankGroups:
    """What the ranks at one (pipeline stage, expert-parallel rank) have of each group; `layers` counts MoE layers."""

    stage: int
    layers: int
    shares: tuple[tuple[OperatorId, ...], ...] = field(repr=False)


@dataclass(frozen=True)
class Groups:
    """The experts of all MoE layers in ceil(N / K0) groups with K0 experts of each layer; the last one may have fewer.

    Group g is what `sequential_selection` takes from position g x K0, for each pipeline stage: interleaved over layers
    and expert-parallel ranks, so that the experts of a group on the ranks of a stage differ by at most one.
    """

    k: int
    num_experts: int
    cells: tuple[RankGroups, ...]

    @classmethod
    def of(cls, job: Job, k: int) -> Groups:
        """Groups of `k` experts per layer. Raises UsageError for more groups than there are kinds of pieces."""
        count = -(-job.num_experts // k)
        if count > _KINDS:
            raise UsageError(
                f"--moe-ckpt-pec-k-snapshot {k} makes {count} groups of {job.num_experts} experts, but at most {_KINDS}"
                f" can be kept: raise it to {-(-job.num_experts // _KINDS)} or more"
            )
        cells: list[RankGroups] = []
        for stage, layers in enumerate(_moe_layers_of_stages(job)):
            ranks: list[list[tuple[OperatorId, ...]]] = [[] for _ in range(job.topology.ep)]
            for first in range(0, job.num_experts, k):
                size = min(k, job.num_experts - first)
                chosen = sequential_selection(layers, job.num_experts, size, first, ep=job.topology.ep)
                for rank, shares in enumerate(ranks):
                    block = range(rank * job.num_experts // job.topology.ep, (rank + 1) * job.num_experts)
                    block = block[: job.num_experts // job.topology.ep]
                    shares.append(tuple(operator for operator in chosen if operator.expert in block))
            cells += [RankGroups(stage, len(layers), tuple(shares)) for shares in ranks if layers]
        return cls(k, job.num_experts, tuple(cells))

    @property
    def count(self) -> int:
        """Number of groups."""
        return -(-self.num_experts // self.k)

    @cached_property
    def members(self) -> tuple[frozenset[OperatorId], ...]:
        """The experts of each group, of all layers."""
        return tuple(
            frozenset(operator for cell in self.cells for operator in cell.shares[group]) for group in range(self.count)
        )

    @cached_property
    def experts(self) -> frozenset[OperatorId]:
        """All experts."""
        return frozenset().union(*self.members)

    @cached_property
    def _group_of(self) -> dict[OperatorId, int]:
        return {operator: group for group, members in enumerate(self.members) for operator in members}

    def needed(self, k: int) -> int:
        """How many groups make K experts per layer."""
        return -(-k // self.k)

    def union(self, groups: Iterable[int]) -> frozenset[OperatorId]:
        """The experts of these groups."""
        return frozenset().union(*(self.members[group] for group in groups))

    def pieces(self, plan: SnapshotPlan) -> tuple[Piece, ...]:
        """`dense` with all that is not the full state of an expert, then the groups of which the plan has any."""
        rest: dict[OperatorId, Part] = {}
        found: dict[int, dict[OperatorId, Part]] = {}
        for operator, part in plan.parts.items():
            is_full = operator.is_expert and Part.MASTER_AND_MOMENTS in part
            (found.setdefault(self._group_of[operator], {}) if is_full else rest)[operator] = part
        return (
            Piece(DENSE, SnapshotPlan(plan.iteration, rest)),
            *(Piece(kind_of(group), SnapshotPlan(plan.iteration, found[group])) for group in sorted(found)),
        )


def kind_of(group: int) -> str:
    """`expertsa` to `expertsz`, then `expertsaa` to `expertszz`: kinds of pieces have letters only."""
    first, second = divmod(group, 26)
    return "experts" + (ascii_lowercase[first - 1] if first else "") + ascii_lowercase[second]


def _moe_layers_of_stages(job: Job) -> list[list[int]]:
    heads = [operator.layer for operator in job.operators if operator.kind is OperatorKind.HEAD]
    num_layers = heads[0] if heads else 1 + job.operators[-1].layer
    moe = set(job.moe_layers)
    return [[layer for layer in layers if layer in moe] for layers in job.topology.layers_of_stages(num_layers)]
