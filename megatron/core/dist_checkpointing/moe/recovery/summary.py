"""What all ranks take and refuse by a plan of which each knows its own part: for people, and for strategies."""

from __future__ import annotations

from dataclasses import replace

import msgspec

from ..policy.availability import OperatorOrder
from ..types import MANY_NODES, Part, RecoveryPlan, RefusalReason, RefusedGroup, Taken, Tier
from ..types.recovery import joined_spans
from .findings import packed, unpacked

_NAMED_NODES = 16
"""So many nodes are named from which copies of one kind are taken; more are counted as many."""

_Group = tuple[int, int, int]
"""Tier, iteration and part."""


class Summary(msgspec.Struct, frozen=True, array_like=True):
    """What ranks take: by tier, iteration and part, and by node, operators and ranks; and what they refuse: by tier and
    reason how many copies, of which iterations and ranks."""

    taken: list[tuple[_Group, dict[int, tuple[bytes, str]]]]
    refused: list[tuple[tuple[int, str], tuple[int, frozenset[int], str]]]

    @classmethod
    def of(cls, plan: RecoveryPlan, order: OperatorOrder) -> Summary:
        """Of the ranks for which the plan was made.

        Args:
            plan: What is carried out.
            order: The numbers of all operators.
        """
        taken = [
            (
                (one.tier.value, one.iteration, one.part.value),
                {one.holder: (packed(order.bits(one.operators)), one.ranks)},
            )
            for one in plan.taken
        ]
        refused = [((one.tier.value, one.reason.name), (one.copies, one.iterations, one.ranks)) for one in plan.refused]
        return cls([], []) | cls(taken, refused)

    def __or__(self, other: Summary) -> Summary:
        taken: dict[_Group, dict[int, tuple[bytes, str]]] = {}
        for group, nodes in (*self.taken, *other.taken):
            held = taken.setdefault(group, {})
            for node, shares in nodes.items():
                held[node] = _both(held[node], shares) if node in held else shares
            if MANY_NODES in held or len(held) > _NAMED_NODES:
                every = list(held.values())
                both = every[0]
                for shares in every[1:]:
                    both = _both(both, shares)
                taken[group] = {MANY_NODES: both}
        refused = dict(self.refused)
        for key, (copies, iterations, ranks) in other.refused:
            before, known, named = refused.get(key, (0, frozenset[int](), ""))
            refused[key] = before + copies, known | iterations, joined_spans(named, ranks)
        return Summary(list(taken.items()), list(refused.items()))

    def added_to(self, plan: RecoveryPlan, order: OperatorOrder) -> RecoveryPlan:
        """The plan with what all ranks take and refuse.

        Args:
            plan: What is carried out.
            order: The numbers of all operators.
        """
        taken = tuple(
            Taken(Tier(tier), node, iteration, Part(part), order.named(unpacked(operators)), ranks)
            for (tier, iteration, part), nodes in self.taken
            for node, (operators, ranks) in nodes.items()
        )
        refused = tuple(RefusedGroup(Tier(tier), RefusalReason[why], *found) for (tier, why), found in self.refused)
        return replace(plan, all_taken=taken, all_refused=refused)


def _both(one: tuple[bytes, str], other: tuple[bytes, str]) -> tuple[bytes, str]:
    return packed(unpacked(one[0]) | unpacked(other[0])), joined_spans(one[1], other[1])
