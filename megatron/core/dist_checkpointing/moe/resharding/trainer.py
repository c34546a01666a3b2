"""Trainer state that fits a rank of another layout: its parameter groups and loss scalers are others.

A pipeline stage without experts has fewer parameter groups, and fewer members of the optimizer, than one with them.
What they hold is the same on all ranks: learning rates and weight decay follow from the schedule, which is restored
after them, and step counts and loss scales are counted alike everywhere.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..errors import UnreadableCheckpoint

_SCALERS, _GROUPS, _STEP = "grad_scalers", "param_groups", "step"


def fitted(
    saved: Mapping[str, Any], everywhere: Sequence[Mapping[str, Any]], live: Mapping[str, Any]
) -> dict[str, Any]:
    """The trainer scalars `saved` by one rank, with as many groups and scalers as this rank has.

    Args:
        saved: What is taken but for these.
        everywhere: The same of all ranks of that layout.
        live: What this rank has before anything is restored.

    Raises:
        UnreadableCheckpoint: Ranks disagree about what is the same on all of them.
    """
    result = dict(saved)
    for name in live.keys() & {_SCALERS, _GROUPS}:
        if not all(isinstance(one, Mapping) and isinstance(one.get(name), list) for one in everywhere):
            raise UnreadableCheckpoint(f"a snapshot lacks trainer state: {name}")
    if _SCALERS in live:
        scalers = [scaler for one in everywhere for scaler in one[_SCALERS]]
        if any(scaler != scalers[0] for scaler in scalers):
            raise UnreadableCheckpoint("loss scales differ between ranks, and belong to ranks of one layout")
        result[_SCALERS] = scalers[:1] * len(live[_SCALERS])
    if _GROUPS in live:
        steps = {group[_STEP] for one in everywhere for group in one[_GROUPS] if _STEP in group}
        counted = {_STEP: max(steps)} if steps else {}
        result[_GROUPS] = [{**group, **counted} for group in live[_GROUPS]]
    return result
