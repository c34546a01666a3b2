"""Which experts a snapshot of `pec` takes, and which of them go to storage."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence

from ...policy.partial import Stages, persist_selection
from ...strategies.base import Job
from ...types import OperatorId, expert
from .pieces import moe_layers_of_stages
from .state import Experts


def overdue(stages: Stages, num_experts: int, ages: Mapping[OperatorId, int], limit: int, k: int) -> Experts:
    """Of each layer the oldest experts that have reached an age.

    Args:
        stages: MoE layers of each pipeline stage.
        num_experts: N, experts per MoE layer.
        ages: Snapshots or writes since each expert was last in one.
        limit: The age from which an expert counts.
        k: K, the most experts of a layer.
    """
    chosen: set[OperatorId] = set()
    for layer in (layer for layers in stages for layer in layers):
        late = [one for index in range(num_experts) if ages[one := expert(layer, index)] >= limit]
        chosen.update(sorted(late, key=lambda one: (-ages[one], one.expert))[:k])
    return frozenset(chosen)


def k_within(job: Job, budget_bytes: int) -> int:
    """The largest K with which no rank copies more than a budget: MoC 5.3 with the sizes of this job; 0 if there is
    none, or no rank's sizes are known.

    Args:
        job: The job, with the sizes of operators by rank.
        budget_bytes: Bytes that a rank may copy.
    """
    found, stages, ep = job.num_experts if job.sizes else 0, moe_layers_of_stages(job), job.topology.ep
    for rank, sizes in job.sizes.items():
        experts = [size.full_bytes for operator, size in sizes.items() if operator.is_expert]
        others = sum(size.full_bytes for operator, size in sizes.items() if not operator.is_expert)
        if experts:
            # A selection gives each expert-parallel rank its share of the experts of all of its layers, and at most one
            # more of them. Where a distributed optimizer deals its state out, one of its ranks may own all of these.
            room = (budget_bytes - others) // max(experts)
            if room < len(experts):
                shared = max(len(experts), len(stages[job.topology.stage(rank)]) * job.num_experts // ep)
                found = min(found, max(0, room - 1) * job.num_experts // shared)
    return found


def to_persist(
    layers: Sequence[int], num_experts: int, offered: Iterable[OperatorId], k: int, ages: Mapping[OperatorId, int]
) -> Experts:
    """Of the experts in a snapshot, K per layer that were persisted longest ago, or all of a layer that has fewer.

    Args:
        layers: The MoE layers.
        num_experts: N, experts per MoE layer.
        offered: The experts in the snapshot.
        k: K, experts per layer to persist.
        ages: Writes since each expert was last persisted.
    """
    found: dict[int, list[OperatorId]] = {layer: [] for layer in layers}
    for operator in offered:
        found[operator.layer].append(operator)
    sizes: dict[int, list[int]] = {}
    for layer, experts in found.items():
        sizes.setdefault(min(k, len(experts)), []).append(layer)
    chosen: set[OperatorId] = set()
    for size, some in sizes.items():
        if size:
            rows = [[ages[expert(layer, index)] for index in range(num_experts)] for layer in some]
            chosen.update(persist_selection(some, [one for layer in some for one in found[layer]], size, rows))
    return frozenset(chosen)


def age(iterations: Sequence[int], last: int) -> int:
    """How many snapshots or writes came after the last one of an expert.

    Args:
        iterations: Their iterations, ascending.
        last: The iteration of the expert's last one.
    """
    return len(iterations) - bisect_right(iterations, last)
