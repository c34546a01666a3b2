"""Windows by count, as MoEvement's Algorithm 1 has them."""

from __future__ import annotations

from collections.abc import Sequence

from megatron.core.dist_checkpointing.moe.errors import UsageError
from megatron.core.dist_checkpointing.moe.policy.checks import whole
from megatron.core.dist_checkpointing.moe.policy.window import Schedule, Sizes, load_of, schedule_of
from megatron.core.dist_checkpointing.moe.types import OperatorId


def paper_window(sizes: Sizes, budget_bytes: int) -> tuple[int, int]:
    """W_Sparse and O_Active as FindWindowSize of MoEvement Alg. 1 (lines 7 to 18) finds them.

    S_Master + S_Optim and S_Compute, "per operator", are averages over all operators; they are compared exactly.
    The loop never tries fewer than 3 operators, so that 2 may be returned although they do not fit.
    Raises UsageError for a budget below 1 or no operators.

    Args:
        sizes: Bytes of each operator.
        budget_bytes: Bytes that one snapshot may have.
    """
    whole("budget_bytes", budget_bytes, 1)
    total, active = len(sizes), len(sizes)
    if not total:
        raise UsageError("sizes names no operators: a window needs at least 1")
    full = sum(size.full_bytes for size in sizes.values())
    weights = sum(size.weights_bytes for size in sizes.values())
    while active > 2 and full * active + weights * (total - active) > budget_bytes * total:
        active -= 1
    return -(-total // active), active


def paper_schedule(
    ordered: Sequence[OperatorId], sizes: Sizes, budget_bytes: int, first_iteration: int = 0
) -> Schedule:
    """GenerateSchedule of MoEvement Alg. 1 (lines 19 to 29): O_Active operators each, in their order, by count.

    The bytes are those that the snapshots really have, so that `fits` tells whether counting was good enough.
    Raises UsageError as `paper_window`, and for an operator that occurs twice or has no size.

    Args:
        ordered: The operators in the order in which they are saved.
        sizes: Bytes of each operator.
        budget_bytes: Bytes that one snapshot may have.
        first_iteration: Iteration of the window's first snapshot.
    """
    load = load_of(ordered, sizes)
    window, active = paper_window({operator: sizes[operator] for operator in ordered}, budget_bytes)
    groups = [range(step * active, min((step + 1) * active, len(ordered))) for step in range(window)]
    return schedule_of(ordered, load, groups, first_iteration, budget_bytes)
