"""Which experts the links of a job have time for: the ranks that own the same experts decide together."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ...strategies.base import Job
from ...types import OperatorId, OperatorSize
from .link_budgets import LinkBudgets
from .selection import within_budget
from .state import Experts

Tokens = Mapping[OperatorId, int]


@dataclass(frozen=True)
class ExpertLane:
    """The ranks that own a part of the same experts; sizes: of the largest shard of each, and of all else together."""

    expert_bytes: Mapping[OperatorId, int] = field(repr=False)
    non_expert_bytes: int


def lanes_of(job: Job) -> tuple[ExpertLane, ...]:
    """Of all ranks whose sizes are known, in the order of their first ranks."""
    found: dict[frozenset[OperatorId], list[Mapping[OperatorId, OperatorSize]]] = {}
    for _, sizes in sorted(job.sizes.items()):
        experts = frozenset(operator for operator in sizes if operator.is_expert)
        if experts:
            found.setdefault(experts, []).append(sizes)
    return tuple(
        ExpertLane(
            {one: max(1, *(sizes[one].full_bytes for sizes in ranks)) for one in sorted(experts)},
            max(sum(size.full_bytes for op, size in sizes.items() if not op.is_expert) for sizes in ranks),
        )
        for experts, ranks in found.items()
    )


def selected(
    lanes: tuple[ExpertLane, ...], budgets: LinkBudgets, unsaved: Tokens, unsent: Tokens
) -> tuple[Experts, Experts]:
    """The experts that a snapshot has, and those of them that peers are sent, each lane by its own budget.

    Args:
        lanes: The lanes of the job.
        budgets: What links carry during an iteration.
        unsaved: Tokens of each expert since it was last copied.
        unsent: Tokens of each expert since it was last sent.
    """
    pairs = [_of_lane(lane, budgets, unsaved, unsent) for lane in lanes]
    return frozenset[OperatorId]().union(*(one for one, _ in pairs)), frozenset[OperatorId]().union(
        *(one for _, one in pairs)
    )


def _of_lane(lane: ExpertLane, budgets: LinkBudgets, unsaved: Tokens, unsent: Tokens) -> tuple[Experts, Experts]:
    def chosen(tokens: Tokens, among: Experts, budget_bytes: int) -> Experts:
        candidates = {operator: tokens[operator] for operator in sorted(among)}
        largest = max(lane.expert_bytes[operator] for operator in candidates)
        return frozenset(within_budget(candidates, budget_bytes - lane.non_expert_bytes, largest))

    copied = chosen(unsaved, frozenset(lane.expert_bytes), budgets.local_bytes)
    return copied, chosen(unsent, copied, budgets.remote_bytes)
