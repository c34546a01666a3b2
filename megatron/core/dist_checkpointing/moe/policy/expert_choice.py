"""Which experts the next partial checkpoint takes, by the copies that there are; for snapshots and dense ones."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache

from ..types import OperatorId, expert
from .partial import load_aware_selection, sequential_selection

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
    """K experts per layer with the most tokens since they were last saved, each stage by itself (PEC Alg. 1)."""
    chosen: set[OperatorId] = set()
    for layers in filter(None, stages):
        rows = [
            [[of[expert(layer, index)] for index in range(num_experts)] for layer in layers] for of in (unsaved, ages)
        ]
        chosen.update(load_aware_selection(layers, rows[0], k, ep, ages=rows[1]))
    return frozenset(chosen)
