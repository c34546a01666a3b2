"""Partial experts checkpointing: which experts a checkpoint holds, which parts of the others, and how many fit."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ..errors import UsageError
from ..types import ModelShape, OperatorId, Part, Precision, SnapshotPlan, expert


@dataclass(frozen=True)
class PecScope:
    """Which components of the state of experts that are not selected are left out (MoC 6.3, "W", "O" and "WO").

    All other components of all operators are saved in full. What `partial` names but a checkpoint does not store
    anyway changes nothing: `weights` leaves nothing out of checkpoints that store Part.FULL.
    """

    name: str
    partial: Part


WEIGHTS = PecScope("weights", Part.COMPUTE)  # W
OPTIMIZER = PecScope("optimizer", Part.MOMENTS)  # O
BOTH = PecScope("both", Part.COMPUTE | Part.MOMENTS)  # WO: FP32 master weights are saved in full
ALL = PecScope("all", Part.EVERYTHING)  # what MoC eq. 6 counts
PEC_SCOPES = {scope.name: scope for scope in (WEIGHTS, OPTIMIZER, BOTH, ALL)}


def sequential_selection(
    moe_layers: Sequence[int], num_experts: int, k: int, position: int, *, ep: int = 1
) -> tuple[OperatorId, ...]:
    """K experts per MoE layer in rotation, interleaved over layers and expert-parallel ranks (MoC 3.2, Fig. 4).

    `position` is where the rotation stands: 0 at first, then what `next_position` gives for the K of each checkpoint.
    Each layer takes the next K of an order that visits the `ep` ranks in turn (expert e lives on rank
    e // (num_experts / ep)), beginning at an offset of its own. Because the cursor is a position and not the index of
    the checkpoint, any run of checkpoints whose K sum to N covers all experts of each layer, also while K changes:
    ceil(N / K) checkpoints of a constant K, from any position.

    The paper's figure fixes the offsets only for one expert per rank and K = 1: offset = layer modulo ep. Here the
    layers that do not fill another round of ranks spread evenly, so that for every K, position and number of layers the
    experts per rank differ by at most 1. With pipeline parallelism, call it for the MoE layers of each stage.
    Raises UsageError for k outside of 1..num_experts, ep that does not divide num_experts, or a negative position.
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
    """Where the rotation of `sequential_selection` stands after a checkpoint of K experts per layer."""
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

    unsaved_tokens: per MoE layer and expert, identical on all ranks. Layers are served from the last to the first, and
    each expert-parallel rank saves at most ceil(N_moe x K / ep) experts; equal experts go by id. The paper has one
    expert per rank; here rank r has the experts of block r. Two additions to the paper:
    - Where full ranks leave fewer than K experts in a layer, the paper saves fewer than K. Here K are always saved: the
      missing ones come from the ranks that exceed their capacity the least.
    - The paper lets an expert with few tokens wait for ever. With `ages` (checkpoints since each expert was last saved)
      experts older than `max_age`, by default 2 x ceil(N / K), go first, the oldest ahead, capacity or not. Every
      expert is then saved at an age of at most max_age + ceil(N / K).
    Raises UsageError for k outside of 1..N, ep that does not divide N, negative tokens or ages, or rows of wrong size.
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
    """The K_persist experts per MoE layer, of those in the snapshot, that go on to storage (MoC 5.1).

    ages: per MoE layer and expert, checkpoints since it was last persisted. The paper leaves the choice open; taking a
    fixed part of each rotating snapshot would persist the same experts for ever. Here those persisted longest ago go
    first; equal ones from the rank that has persisted least in this checkpoint, then by id. An expert passed over is
    passed over at most once for each other expert, so that it is persisted at the latest the ceil(N / K_persist)-th
    time that it is in a snapshot: with sequential selection all experts are persisted in any ceil(N / K_snapshot) x
    ceil(N / K_persist) checkpoints, and in ceil(N / K_snapshot) x ceil(K_snapshot / K_persist) where K_snapshot divides
    N. The bound counts persisted snapshots: persisting every n-th needs n without a common divisor with the
    ceil(N / K_snapshot) snapshots of a rotation.
    Raises UsageError for k_persist outside of 1..K_snapshot of a layer, unknown experts, negative ages, or a wrong ep.
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
    stored: Part = Part.FULL,
) -> SnapshotPlan:
    """The plan of a partial checkpoint (MoC 3): `stored` of non-experts and selected experts, less of the others.

    Experts that are not selected keep the components that `scope` does not name, and are left out if there are none.
    With stored=Part.EVERYTHING it holds the bytes that the papers count. Raises UsageError when selected operators are
    not among the experts of `operators`.
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


@dataclass(frozen=True)
class CheckpointBytes:
    """Bytes of one checkpoint: weights are compute weights, optimizer is master weights and moments (MoC Fig. 2)."""

    expert_weights_bytes: int
    non_expert_weights_bytes: int
    expert_optimizer_bytes: int
    non_expert_optimizer_bytes: int

    @property
    def total_bytes(self) -> int:
        """Bytes of the whole checkpoint."""
        return (
            self.expert_weights_bytes
            + self.non_expert_weights_bytes
            + self.expert_optimizer_bytes
            + self.non_expert_optimizer_bytes
        )


def checkpoint_bytes(
    shape: ModelShape, precision: Precision, k: int, scope: PecScope = ALL, stored: Part = Part.EVERYTHING
) -> CheckpointBytes:
    """Bytes of a checkpoint with K experts per MoE layer (MoC eq. 6; eq. 5 with K = N), by component.

    Eq. 6 is the scope `all`; the sizes of MoC Table 3 are those of `weights`, `optimizer` and `both`.
    Raises UsageError for k outside of 1..num_experts.
    """
    _check_k("k", k, "num_experts", shape.num_experts)
    experts = shape.expert_parameters
    others = shape.total_parameters - experts
    chosen = experts // shape.num_experts * k  # exact: all experts are of one size
    rest = stored & ~scope.partial

    def expert_bytes(component: Part) -> int:
        return chosen * precision.bytes_per_parameter(stored & component) + (
            experts - chosen
        ) * precision.bytes_per_parameter(rest & component)

    optimizer = Part.MASTER | Part.MOMENTS
    return CheckpointBytes(
        expert_bytes(Part.COMPUTE),
        others * precision.bytes_per_parameter(stored & Part.COMPUTE),
        expert_bytes(optimizer),
        others * precision.bytes_per_parameter(stored & optimizer),
    )


@dataclass(frozen=True)
class CheckpointTimes:
    """What adaptive choice goes by: how fast checkpoints are copied, and how long that may take.

    snapshot_bytes_per_s and persist_bytes_per_s are of one rank to the memory tier and to storage; fb_time_s is the
    forward and backward pass that a snapshot hides behind, interval_s the wanted time between checkpoints. All must be
    the same on all ranks. Raises UsageError for values that are not above 0.
    """

    snapshot_bytes_per_s: float
    fb_time_s: float
    persist_bytes_per_s: float
    interval_s: float

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not value > 0:
                raise UsageError(f"{name} is {value}, but must be above 0")


@dataclass(frozen=True)
class AdaptiveK:
    """K for both levels and what they cost: `stall_s` per checkpoint, and the shortest interval that storage allows."""

    k_snapshot: int
    k_persist: int
    stall_s: float
    least_interval_s: float
    fits: bool


def adaptive_k(snapshot_bytes: Sequence[int], persist_bytes: Sequence[int], times: CheckpointTimes) -> AdaptiveK:
    """K_snapshot and K_persist for this hardware (MoC 5.3).

    snapshot_bytes[k - 1] and persist_bytes[k - 1] are the bytes of the bottleneck rank with k = 1..N experts per layer.
    K_snapshot is the largest whose snapshot ends within the next forward and backward pass; K_persist the largest, up
    to K_snapshot, with which persisting ends within the wanted interval. (The paper wants K_persist small for the sake
    of the interval; with the interval given, more only lowers what a lost node costs.) Where not even K = 1 fits, K is
    the largest with the fewest bytes, which uses the spare capacity of ranks that are no bottleneck: `fits` is then
    False, and `stall_s` or `least_interval_s` says what that costs.
    Raises UsageError for empty tables, tables of different sizes, or negative bytes.
    """
    if not snapshot_bytes or len(persist_bytes) != len(snapshot_bytes):
        raise UsageError(
            f"persist_bytes has {len(persist_bytes)} entries and snapshot_bytes {len(snapshot_bytes)}, but both must"
            " have one for each K from 1 to the number of experts"
        )
    for name, table in (("snapshot_bytes", snapshot_bytes), ("persist_bytes", persist_bytes)):
        if min(table) < 0:
            raise UsageError(f"{name} has {min(table)}, but must be at least 0")
    k_snapshot = _largest_k(snapshot_bytes, times.snapshot_bytes_per_s * times.fb_time_s)
    k_persist = _largest_k(persist_bytes[:k_snapshot], times.persist_bytes_per_s * times.interval_s)
    stall_s = max(0.0, snapshot_bytes[k_snapshot - 1] / times.snapshot_bytes_per_s - times.fb_time_s)
    least_interval_s = persist_bytes[k_persist - 1] / times.persist_bytes_per_s
    return AdaptiveK(
        k_snapshot, k_persist, stall_s, least_interval_s, stall_s == 0 and least_interval_s <= times.interval_s
    )


def _largest_k(table: Sequence[int], budget_bytes: float) -> int:
    limit = max(budget_bytes, min(table))
    return max(k for k, size_bytes in enumerate(table, start=1) if size_bytes <= limit)


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
