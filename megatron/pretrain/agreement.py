"""Outcomes that all ranks share: what fails on one rank is raised on all of them, with the same words."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from megatron.core.dist_checkpointing.moe.dense_saves.agreement import (
    RankFailure,
    all_done,
    gathered,
    on_rank_zero,
    raise_on_all_ranks,
)
from megatron.pretrain.errors import InvalidInput

__all__ = ["RankFailure", "all_done", "on_rank_zero", "raise_invalid_input_on_all_ranks", "raise_on_all_ranks"]

T = TypeVar("T")


def raise_invalid_input_on_all_ranks(action: Callable[[], T]) -> T:
    """Run `action` on every rank; an InvalidInput on any becomes an InvalidInput on all. A collective over all ranks.

    `action` must not raise it between collectives of its own, where other ranks would wait.
    """
    problem, value = None, None
    try:
        value = action()
    except InvalidInput as error:
        problem = str(error)
    for text in gathered(problem).values():
        raise InvalidInput(text)
    return value  # type: ignore[return-value]
