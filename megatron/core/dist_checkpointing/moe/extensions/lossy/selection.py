"""Selective expert checkpointing: as many experts as the links carry during one iteration, those at risk first."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from ...errors import UsageError
from ...policy.checks import budget_bytes, positive, whole
from ...types import OperatorId, OperatorSize, SnapshotPlan, full_plan


def total_experts(available_bytes: int, non_expert_bytes: int, expert_bytes: int, experts: int) -> int:
    """S_total of MOETION Alg. 1: how many experts a budget holds, 0 to all.

    The paper divides the whole budget by the cost of an expert, although non-experts are saved in full each time, so
    that its snapshots overrun the budget by them. Here they are subtracted first; with `non_expert_bytes` 0 this is the
    paper's form.

    Args:
        available_bytes: The budget of one snapshot.
        non_expert_bytes: Bytes that non-experts take of it.
        expert_bytes: Bytes of one expert.
        experts: How many experts there are.

    Raises:
        UsageError: Negative values, and an expert of 0 bytes.
    """
    whole("available_bytes", available_bytes, 0)
    whole("non_expert_bytes", non_expert_bytes, 0)
    left_bytes = max(0, available_bytes - non_expert_bytes)
    return min(left_bytes // whole("expert_bytes", expert_bytes, 1), whole("experts", experts, 0))


def allocate(risk_per_layer: Mapping[int, int], total: int, experts_per_layer: Mapping[int, int]) -> dict[int, int]:
    """S[l] of MOETION 4.3, Alg. 1: experts to save per layer, in proportion to the tokens at risk; the sum is `total`.

    The paper rounds down and leaves open how the sum is mended: what is left goes to the largest remainders (ties: the
    lower layer), no layer gets more than it has, the overflow goes to the other layers in the same proportion, and
    where no risk is left, evenly. Integers only: all ranks agree.

    Args:
        risk_per_layer: Tokens at risk by MoE layer; a layer without an entry has none.
        total: S_total, experts to save in all layers.
        experts_per_layer: How many experts each layer has.

    Raises:
        UsageError: Negative values, a risk in a layer without experts, and a total above all experts.
    """
    for layer, experts in experts_per_layer.items():
        whole(f"experts_per_layer of layer {layer}", experts, 0)
    for layer, risk in risk_per_layer.items():
        whole(f"risk_per_layer of layer {layer}", risk, 0)
        if layer not in experts_per_layer:
            raise UsageError(f"risk_per_layer names layer {layer}, which has no experts: {sorted(experts_per_layer)}")
    available = sum(experts_per_layer.values())
    if whole("total", total, 0) > available:
        raise UsageError(f"total is {total}, but must be from 0 to the {available} experts there are")
    return _apportion(risk_per_layer, total, experts_per_layer)


def select(unsaved_tokens: Mapping[OperatorId, int], allocation: Mapping[int, int]) -> tuple[OperatorId, ...]:
    """The experts that MOETION Alg. 1 saves, ascending: of each layer l the S[l] with the most tokens since last saved.

    Ties go to the lower OperatorId.

    Args:
        unsaved_tokens: Tokens of each candidate since it was last saved.
        allocation: S[l], experts to save by layer.

    Raises:
        UsageError: An operator that is no expert, negative tokens, and an S[l] that is negative or above the candidates
            of its layer.
    """
    for operator, tokens in unsaved_tokens.items():
        whole(f"tokens of {_expert(operator)}", tokens, 0)
    candidates = _by_layer(unsaved_tokens)
    chosen: list[OperatorId] = []
    for layer, count in sorted(allocation.items()):
        there = candidates.get(layer, [])
        if whole(f"allocation of layer {layer}", count, 0) > len(there):
            raise UsageError(f"allocation of layer {layer} is {count}, but must be from 0 to its {len(there)} experts")
        chosen += sorted(there, key=lambda operator: (-unsaved_tokens[operator], operator.expert))[:count]
    return tuple(sorted(chosen, key=_order))


def within_budget(
    unsaved_tokens: Mapping[OperatorId, int], available_bytes: int, expert_bytes: int
) -> tuple[OperatorId, ...]:
    """MOETION Alg. 1 for one budget: the experts among the keys of `unsaved_tokens` that are saved, ascending.

    At least one expert is saved where there is any: with none the tokens of all of them would be at risk for ever, and
    one is what the paper calls the least (MOETION 4.1).

    Args:
        unsaved_tokens: Tokens of each candidate since it was last saved.
        available_bytes: Bytes of the budget, less the share of non-experts.
        expert_bytes: Bytes of one expert.

    Raises:
        UsageError: Negative tokens and experts of 0 bytes.
    """
    if not unsaved_tokens:
        return ()
    total = max(1, total_experts(max(0, available_bytes), 0, expert_bytes, len(unsaved_tokens)))
    candidates = _by_layer(unsaved_tokens)
    risk = {layer: sum(unsaved_tokens[operator] for operator in there) for layer, there in candidates.items()}
    return select(unsaved_tokens, allocate(risk, total, {layer: len(there) for layer, there in candidates.items()}))


@dataclass(frozen=True)
class Budgets:
    """What a rank's links carry: to its host's memory, to its peers, and how long an iteration takes (MOETION 4.2).

    Raises UsageError for values that are not finite or not greater than 0.
    """

    local_bytes_per_s: float
    remote_bytes_per_s: float
    iteration_time_s: float

    def __post_init__(self) -> None:
        for name in ("local_bytes_per_s", "remote_bytes_per_s", "iteration_time_s"):
            positive(name, getattr(self, name))

    @property
    def local_bytes(self) -> int:
        """B_local."""
        return budget_bytes(self.local_bytes_per_s, self.iteration_time_s)

    @property
    def remote_bytes(self) -> int:
        """B_remote."""
        return budget_bytes(self.remote_bytes_per_s, self.iteration_time_s)


@dataclass(frozen=True)
class Selection:
    """One snapshot of a lane: all non-experts and the chosen experts, in full.

    `experts_per_layer` is S[l]. `excess_bytes` is what the budget does not cover: 0, unless the non-experts alone are
    larger than it.
    """

    plan: SnapshotPlan
    experts_per_layer: Mapping[int, int]
    snapshot_bytes: int
    excess_bytes: int


@dataclass(frozen=True)
class SelectivePlan:
    """What a rank copies to its host in an iteration, and what of that it sends to its peers.

    `stall_s` is how long training waits for the copy, `lag_s` how long sending outlasts the iteration; both are 0 when
    the plan fits the budgets.
    """

    local: Selection
    remote: Selection
    stall_s: float
    lag_s: float

    @property
    def fits(self) -> bool:
        """Whether both snapshots are within their budgets."""
        return not (self.local.excess_bytes or self.remote.excess_bytes)


def selective_plan(
    iteration: int,
    sizes: Mapping[OperatorId, OperatorSize],
    unsaved_local: Mapping[OperatorId, int],
    unsaved_remote: Mapping[OperatorId, int],
    budgets: Budgets,
) -> SelectivePlan:
    """MOETION Alg. 1 for one rank.

    Operators that the rank does not own are ignored. Non-experts are saved in full each time. The paper selects for
    both budgets independently; here what is sent is chosen among what is copied, by its own ranking, because no other
    state of this iteration is there to be sent. Experts of unequal size count as the largest. A budget that holds no
    expert gives S[l] = 0: their unsaved tokens then grow, which the caller must watch.

    Args:
        iteration: The iteration whose state is saved.
        sizes: Bytes of the rank's shards of operators.
        unsaved_local: Tokens of each expert since it was last copied to the host; none where an expert is missing.
        unsaved_remote: Tokens of each expert since it was last sent to peers; none where an expert is missing.
        budgets: What the rank's links carry during an iteration.

    Raises:
        UsageError: Negative tokens and experts of 0 bytes.
    """
    experts = [operator for operator in sizes if operator.is_expert]
    local, copied = _selection(iteration, sizes, {op: unsaved_local.get(op, 0) for op in experts}, budgets.local_bytes)
    remote, _ = _selection(iteration, sizes, {op: unsaved_remote.get(op, 0) for op in copied}, budgets.remote_bytes)
    stall_s = local.excess_bytes / budgets.local_bytes_per_s
    return SelectivePlan(local, remote, stall_s, remote.excess_bytes / budgets.remote_bytes_per_s)


def _selection(
    iteration: int, sizes: Mapping[OperatorId, OperatorSize], unsaved: Mapping[OperatorId, int], available_bytes: int
) -> tuple[Selection, tuple[OperatorId, ...]]:
    non_experts = [operator for operator in sizes if not operator.is_expert]
    non_expert_bytes = sum(sizes[operator].full_bytes for operator in non_experts)
    total = 0
    if unsaved:
        largest = max(sizes[operator].full_bytes for operator in unsaved)
        total = total_experts(available_bytes, non_expert_bytes, largest, len(unsaved))
    candidates = _by_layer(unsaved)
    risk = {layer: sum(unsaved[operator] for operator in there) for layer, there in candidates.items()}
    allocation = allocate(risk, total, {layer: len(there) for layer, there in candidates.items()})
    chosen = select(unsaved, allocation)
    plan = full_plan(iteration, sorted((*non_experts, *chosen), key=_order))
    snapshot_bytes = non_expert_bytes + sum(sizes[operator].full_bytes for operator in chosen)
    return Selection(plan, allocation, snapshot_bytes, max(0, snapshot_bytes - available_bytes)), chosen


@dataclass(frozen=True)
class CapacityBoost:
    """Tokens that each expert may process in one iteration, and the lost tokens that remain to be made up for."""

    capacity: Mapping[OperatorId, int] = field(repr=False)
    debt: Mapping[OperatorId, int]


def capacity_boost(
    lost_tokens: Mapping[OperatorId, int],
    capacity: Mapping[OperatorId, int],
    routed_tokens: Mapping[OperatorId, int],
    boost_percent: int = 10,
) -> CapacityBoost:
    """MOETION 6: experts that lost tokens process up to 10 % more, in room that others of their layer leave unused.

    The sum of capacities of a layer does not change. The paper leaves open when a lost token is made up for: here one
    by each token processed beyond the base capacity, so that an expert with room to spare gets no boost, which would
    only add padding, and keeps its debt. The boost rounds up, so that it is never nothing; what the others leave is
    shared in proportion. `debt` of the result has only experts that still owe: the next `lost_tokens`.

    Args:
        lost_tokens: Tokens that each expert still owes.
        capacity: Base capacity of each expert, in tokens.
        routed_tokens: Tokens that the gate sends each expert in this iteration, before any is dropped.
        boost_percent: How far capacity may be exceeded, in percent.

    Raises:
        UsageError: Negative values, operators that are no experts or have no capacity, and a boost below 1 %.
    """
    whole("boost_percent", boost_percent, 1)
    for name, counts in (("capacity", capacity), ("lost_tokens", lost_tokens), ("routed_tokens", routed_tokens)):
        for operator, count in counts.items():
            whole(f"{name} of {_expert(operator)}", count, 0)
            if operator not in capacity:
                raise UsageError(f"{name} names {operator}, which has no base capacity: give it one")
    boosted, debt = dict(capacity), dict(lost_tokens)
    for layer in _by_layer(capacity).values():
        beyond = {operator: routed_tokens.get(operator, 0) - capacity[operator] for operator in layer}
        unused = {operator: max(0, -count) for operator, count in beyond.items()}
        wanted = {
            operator: min(debt.get(operator, 0), -(-capacity[operator] * boost_percent // 100), max(0, count))
            for operator, count in beyond.items()
        }
        granted = min(sum(unused.values()), sum(wanted.values()))
        for operator, tokens in _apportion(wanted, granted, wanted).items():
            boosted[operator] += tokens
            if tokens:
                debt[operator] -= tokens
        for operator, tokens in _apportion(unused, granted, unused).items():
            boosted[operator] -= tokens
    return CapacityBoost(boosted, {operator: tokens for operator, tokens in debt.items() if tokens})


def _apportion[ExpertKey: (int, OperatorId)](
    weights: Mapping[ExpertKey, int], total: int, limits: Mapping[ExpertKey, int]
) -> dict[ExpertKey, int]:
    """Shares of `total` in proportion to weights, none above its limit; exact. `total` is at most the sum of limits."""
    shares = dict.fromkeys(sorted(limits), 0)
    unfilled = list(shares)
    while unfilled:
        weight = {key: weights.get(key, 0) for key in unfilled}
        whole_weight = sum(weight.values())
        if not whole_weight:
            weight, whole_weight = dict.fromkeys(unfilled, 1), len(unfilled)
        full = {key for key in unfilled if weight[key] * total >= limits[key] * whole_weight}
        if not full:
            quotas = {key: divmod(weight[key] * total, whole_weight) for key in unfilled}
            shares.update((key, quota) for key, (quota, _) in quotas.items())
            left = total - sum(quota for quota, _ in quotas.values())
            for key in sorted(unfilled, key=lambda key: -quotas[key][1])[:left]:
                shares[key] += 1
            break
        shares.update((key, limits[key]) for key in full)
        total -= sum(limits[key] for key in full)
        unfilled = [key for key in unfilled if key not in full]
    return shares


def _by_layer(experts: Iterable[OperatorId]) -> dict[int, list[OperatorId]]:
    layers: dict[int, list[OperatorId]] = {}
    for operator in experts:
        layers.setdefault(operator.layer, []).append(operator)
    return layers


def _expert(operator: OperatorId) -> OperatorId:
    if not operator.is_expert:
        raise UsageError(f"{operator} is no routed expert: tokens are counted for experts only")
    return operator


def _order(operator: OperatorId) -> tuple[int, int, int]:
    return operator.layer, operator.kind.value, operator.expert
