"""Partial experts checkpointing: which experts a checkpoint holds, which parts of the others, and how many fit."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from ..errors import UsageError
from ..types import OperatorId, Part, SnapshotPlan, expert


@dataclass(frozen=True)
class PecScope:
    """Which components of the state of experts that are not selected are left out (MoC 6.3, "W", "O" and "WO").

    All other components of all operators are saved in full. Weights are those of all precisions: compute weights are
    the cast of master weights, so one without the other would leave nothing out.
    """

    name: str
    partial: Part


WEIGHTS = PecScope("weights", Part.COMPUTE | Part.MASTER)  # W
OPTIMIZER = PecScope("optimizer", Part.MOMENTS)  # O
BOTH = PecScope("both", Part.EVERYTHING)  # WO, what MoC eq. 6 counts
PEC_SCOPES = {scope.name: scope for scope in (WEIGHTS, OPTIMIZER, BOTH)}


def sequential_selection(
    moe_layers: Sequence[int], num_experts: int, k: int, position: int, *, ep: int = 1
) -> tuple[OperatorId, ...]:
    """K experts per MoE layer in rotation, interleaved over layers and expert-parallel ranks (MoC 3.2, Fig. 4).

    Each layer takes the next K of an order that visits the `ep` ranks in turn (expert e lives on rank e // (num_experts
    / ep)), beginning at an offset of its own. Because the cursor is a position and not the index of the checkpoint, any
    run of checkpoints whose K sum to N covers all experts of each layer, also while K changes: ceil(N / K) checkpoints
    of a constant K, from any position.

    The paper's figure fixes the offsets only for one expert per rank and K = 1: offset = layer modulo ep. Here the
    layers that do not fill another round of ranks spread evenly, so that for every K, position and number of layers the
    experts per rank differ by at most 1. With pipeline parallelism, call it for the MoE layers of each stage.

    Args:
        moe_layers: The MoE layers, of one pipeline stage.
        num_experts: N, experts per MoE layer.
        k: K, experts per layer to save.
        position: Where the rotation stands: 0 at first, then what `next_position` gives for the K of each checkpoint.
        ep: Expert-parallel ranks.

    Raises:
        UsageError: `k` outside of 1..num_experts, ep that does not divide num_experts, or a negative position.
    """
    per_rank = _experts_per_rank(num_experts, ep)
    _check_k("k", k, "num_experts", num_experts)
    if position < 0:
        raise UsageError(f"position is {position}, but must be at least 0")
    rounds, rest = divmod(len(moe_layers), ep)
    selected = []
    for index, layer in enumerate(moe_layers):
        offset = index % ep if index < rounds * ep else (index - rounds * ep) * ep // rest
        for step in range(k):
            slot, rank = divmod((position + offset + step) % num_experts, ep)
            selected.append(expert(layer, rank * per_rank + slot))
    return tuple(sorted(selected, key=_by_expert))


def next_position(position: int, k: int, num_experts: int) -> int:
    """Where the rotation of `sequential_selection` stands after a checkpoint of K experts per layer.

    Args:
        position: Where the rotation stood.
        k: K of the checkpoint.
        num_experts: N, experts per MoE layer.
    """
    return (position + k) % num_experts


def load_aware_selection(
    moe_layers: Sequence[int],
    unsaved_tokens: Sequence[Sequence[int]],
    k: int,
    ep: int = 1,
    *,
    ages: Sequence[Sequence[int]] | None = None,
    max_age: int | None = None,
) -> tuple[OperatorId, ...]:
    """The K experts per MoE layer with the most tokens since they were last saved (PEC Alg. 1).

    Layers are served from the last to the first, and each expert-parallel rank saves at most ceil(N_moe x K / ep)
    experts; equal experts go by id. The paper has one expert per rank; here rank r has the experts of block r. Two
    additions to the paper:
    - Where full ranks leave fewer than K experts in a layer, the paper saves fewer than K. Here K are always saved: the
      missing ones come from the ranks that exceed their capacity the least.
    - The paper lets an expert with few tokens wait for ever. With `ages` experts older than `max_age` go first, the
      oldest ahead, capacity or not. Every expert is then saved at an age of at most max_age + ceil(N / K).

    Args:
        moe_layers: The MoE layers, of one pipeline stage.
        unsaved_tokens: Tokens since the last save, per MoE layer and expert, identical on all ranks.
        k: K, experts per layer to save.
        ep: Expert-parallel ranks.
        ages: Checkpoints since each expert was last saved, per MoE layer and expert; None: not looked at.
        max_age: The age above which experts go first; None: 2 x ceil(N / K).

    Raises:
        UsageError: `k` outside of 1..N, ep that does not divide N, negative tokens or ages, or rows of wrong size.
    """
    num_experts = len(unsaved_tokens[0]) if unsaved_tokens else 0
    _check_k("k", k, "num_experts", num_experts)
    per_rank = _experts_per_rank(num_experts, ep)
    _check_rows("unsaved_tokens", unsaved_tokens, len(moe_layers), num_experts)
    if max_age is not None and max_age < 1:
        raise UsageError(f"max_age is {max_age}, but must be at least 1")
    overdue_after = 2 * -(-num_experts // k) if max_age is None else max_age
    age_rows: Sequence[Sequence[int]] = [[0] * num_experts] * len(moe_layers) if ages is None else ages
    _check_rows("ages", age_rows, len(moe_layers), num_experts)
    capacity = [-(-len(moe_layers) * k // ep)] * ep
    selected: list[OperatorId] = []
    for layer, tokens, layer_ages in reversed(list(zip(moe_layers, unsaved_tokens, age_rows, strict=True))):
        overdue = [max(0, age - overdue_after) for age in layer_ages]
        ranked = sorted((-late, -load, index) for index, (late, load) in enumerate(zip(overdue, tokens, strict=True)))
        order = [index for _, _, index in ranked]
        selected += [expert(layer, index) for index in _within_capacity(order, overdue, capacity, k, per_rank)]
    return tuple(sorted(selected, key=_by_expert))


def _within_capacity(
    order: Sequence[int], overdue: Sequence[int], capacity: list[int], k: int, per_rank: int
) -> list[int]:
    """K experts of one layer, as far as possible in this order; takes them off `capacity`."""
    chosen: list[int] = []
    refused: list[int] = []
    for index in order:
        if len(chosen) == k:
            break
        if overdue[index] or capacity[index // per_rank] > 0:
            capacity[index // per_rank] -= 1
            chosen.append(index)
        else:
            refused.append(index)
    while len(chosen) < k:
        least = max(refused, key=lambda index: capacity[index // per_rank])
        refused.remove(least)
        capacity[least // per_rank] -= 1
        chosen.append(least)
    return chosen


def persist_selection(
    moe_layers: Sequence[int],
    selected: Iterable[OperatorId],
    k_persist: int,
    ages: Sequence[Sequence[int]],
    ep: int = 1,
) -> tuple[OperatorId, ...]:
    """The K_persist experts per MoE layer, of those in the snapshot, that go to storage (MoC 5.1).

    The paper leaves the choice open; taking a fixed part of each rotating snapshot would persist the same experts for
    ever. Here those persisted longest ago go first; equal ones from the rank that has persisted least in this
    checkpoint, then by id. An expert passed over is passed over at most once for each other expert, so that it is
    persisted at the latest the ceil(N / K_persist)-th time that it is in a snapshot: with sequential selection all
    experts are persisted in any ceil(N / K_snapshot) x ceil(N / K_persist) checkpoints, and in ceil(N / K_snapshot) x
    ceil(K_snapshot / K_persist) where K_snapshot divides N. The bound counts persisted snapshots: persisting every n-th
    needs n without a common divisor with the ceil(N / K_snapshot) snapshots of a rotation.

    Args:
        moe_layers: The MoE layers, of one pipeline stage.
        selected: The experts in the snapshot, K_snapshot per layer.
        k_persist: K_persist, experts per layer to persist.
        ages: Checkpoints since each expert was last persisted, per MoE layer and expert.
        ep: Expert-parallel ranks.

    Raises:
        UsageError: `k_persist` outside of 1..K_snapshot of a layer, unknown experts, negative ages, or a wrong ep.
    """
    num_experts = len(ages[0]) if ages else 0
    per_rank = _experts_per_rank(num_experts, ep)
    _check_rows("ages", ages, len(moe_layers), num_experts)
    offered: dict[int, list[int]] = {layer: [] for layer in moe_layers}
    for operator in selected:
        if operator.layer not in offered or not operator.is_expert or not 0 <= operator.expert < num_experts:
            raise UsageError(f"selected has {operator}, but must be experts 0..{num_experts - 1} of {list(moe_layers)}")
        offered[operator.layer].append(operator.expert)
    load = [0] * ep
    persisted = []
    for layer, layer_ages in zip(moe_layers, ages, strict=True):
        rest = sorted(offered[layer])
        _check_k("k_persist", k_persist, f"k_snapshot of layer {layer}", len(rest))
        for _ in range(k_persist):
            _, _, chosen = min((-layer_ages[index], load[index // per_rank], index) for index in rest)
            rest.remove(chosen)
            load[chosen // per_rank] += 1
            persisted.append(expert(layer, chosen))
    return tuple(sorted(persisted, key=_by_expert))


def pec_plan(
    iteration: int,
    operators: Iterable[OperatorId],
    selected: Iterable[OperatorId],
    scope: PecScope,
    stored: Part = Part.MASTER_AND_MOMENTS,
) -> SnapshotPlan:
    """The plan of a partial checkpoint (MoC 3): `stored` of non-experts and selected experts, less of the others.

    Experts that are not selected keep the components that `scope` does not name, and are left out if there are none.

    Args:
        iteration: The iteration that the checkpoint is of.
        operators: All operators of the model.
        selected: The experts that are saved in full.
        scope: The components that experts which are not selected leave out.
        stored: What a full copy has; Part.EVERYTHING gives the bytes that the papers count.

    Raises:
        UsageError: Selected operators are not among the experts of `operators`.
    """
    chosen = frozenset(selected)
    all_operators = tuple(operators)
    unknown = chosen.difference(operator for operator in all_operators if operator.is_expert)
    if unknown:
        raise UsageError(f"selected has {min(unknown)}, but must only have experts of the model's operators")
    rest = stored & ~scope.partial
    parts = {
        operator: stored if operator in chosen or not operator.is_expert else rest
        for operator in all_operators
        if rest or operator in chosen or not operator.is_expert
    }
    return SnapshotPlan(iteration, parts)


def _by_expert(operator: OperatorId) -> tuple[int, int]:
    return operator.layer, operator.expert


def _experts_per_rank(num_experts: int, ep: int) -> int:
    if ep < 1 or num_experts % ep:
        raise UsageError(f"ep is {ep}, but must be at least 1 and divide num_experts = {num_experts}")
    return num_experts // ep


def _check_k(name: str, k: int, limit_name: str, limit: int) -> None:
    if not 1 <= k <= limit:
        raise UsageError(f"{name} is {k}, but must be from 1 to {limit_name} = {limit}")


def _check_rows(name: str, rows: Sequence[Sequence[int]], layers: int, num_experts: int) -> None:
    if len(rows) != layers or any(len(row) != num_experts for row in rows):
        raise UsageError(f"{name} must have {layers} layers of {num_experts} experts each, but has other sizes")
    lowest = min(min(row) for row in rows)
    if lowest < 0:
        raise UsageError(f"{name} has {lowest}, but must be at least 0")


# Which experts the next partial checkpoint takes, by the copies that there are; for snapshots and dense ones.

Stages = tuple[tuple[int, ...], ...]
"""The MoE layers of each pipeline stage."""

SELECTIONS = ("sequential", "load-aware")
"""Experts in turn (MoC 3.2), or those with the most tokens since they were last saved (PEC Alg. 1)."""


@lru_cache(maxsize=8)
def _turns(layers: tuple[int, ...], num_experts: int, ep: int) -> dict[OperatorId, int]:
    """At which position the rotation of `sequential_selection` takes each expert of a stage's layers."""
    return {
        operator: position
        for position in range(num_experts)
        for operator in sequential_selection(layers, num_experts, 1, position, ep=ep)
    }


def in_turn(
    stages: Stages, num_experts: int, k: int, last: Mapping[OperatorId, int], cursor: int, ep: int
) -> frozenset[OperatorId]:
    """K experts per layer that were saved longest ago, equal ones in turn from `cursor`: `sequential_selection`.

    After a checkpoint that failed its experts are still the oldest, and come first when their turn comes again.

    Args:
        stages: MoE layers of each pipeline stage.
        num_experts: N, experts per MoE layer.
        k: K, experts per layer to save.
        last: The iteration at which each expert was last saved.
        cursor: Where the rotation stands.
        ep: Expert-parallel ranks.
    """
    chosen: set[OperatorId] = set()
    for layers in filter(None, stages):
        turns = _turns(layers, num_experts, ep)
        for layer in layers:
            of_layer = [expert(layer, index) for index in range(num_experts)]
            of_layer.sort(key=lambda one: (last[one], (turns[one] - cursor) % num_experts))
            chosen.update(of_layer[:k])
    return frozenset(chosen)


def by_load(
    stages: Stages, num_experts: int, k: int, unsaved: Mapping[OperatorId, int], ages: Mapping[OperatorId, int], ep: int
) -> frozenset[OperatorId]:
    """K experts per layer with the most tokens since they were last saved, each stage by itself (PEC Alg. 1).

    Args:
        stages: MoE layers of each pipeline stage.
        num_experts: N, experts per MoE layer.
        k: K, experts per layer to save.
        unsaved: Tokens of each expert since it was last saved.
        ages: Checkpoints since each expert was last saved.
        ep: Expert-parallel ranks.
    """
    chosen: set[OperatorId] = set()
    for layers in filter(None, stages):
        rows = [
            [[of[expert(layer, index)] for index in range(num_experts)] for layer in layers] for of in (unsaved, ages)
        ]
        chosen.update(load_aware_selection(layers, rows[0], k, ep, ages=rows[1]))
    return frozenset(chosen)
