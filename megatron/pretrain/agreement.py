"""Outcomes that all ranks share: what fails on one rank fails on all of them, with the same words."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from megatron.pretrain.errors import UsageError

Value = TypeVar("Value")


class RankFailure(Exception):
    """Something failed on at least one rank; the text names the ranks and the first reason."""


def on_rank_zero(action: Callable[[], Value], errors: tuple[type[Exception], ...] = (OSError,)) -> Value:
    """Run `action` on rank 0 and return its value on every rank.

    If it raises one of `errors`, every rank raises an equal exception: the same type and arguments.
    """
    outcome: list[Any] = [None, None]
    if dist.get_rank() == 0:
        try:
            outcome[0] = action()
        except errors as error:
            outcome[1] = error
    dist.broadcast_object_list(outcome, src=0)
    if outcome[1] is not None:
        raise outcome[1]
    value: Value = outcome[0]
    return value


def raise_together(problem: str | None) -> None:
    """Raise RankFailure on every rank if `problem` is given on any; a collective over all ranks."""
    problems: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(problems, problem)
    failed = [rank for rank, text in enumerate(problems) if text is not None]
    if failed:
        raise RankFailure(f"{problems[failed[0]]} (on {_named(failed)})")


def all_done(is_done: bool) -> bool:
    """Whether `is_done` is said on every rank; a short collective over all ranks.

    Asked again and again while work goes on beside it, so that no collective waits as long as the slowest rank takes.
    """
    unfinished = torch.tensor([int(not is_done)], device=torch.cuda.current_device())
    dist.all_reduce(unfinished, op=dist.ReduceOp.MAX)
    return not unfinished.item()


def usage_errors_together(action: Callable[[], Value]) -> Value:
    """Run `action` on every rank; a UsageError on any becomes a UsageError on all. A collective over all ranks.

    `action` must not raise it between collectives of its own, where other ranks would wait.
    """
    problem, value = None, None
    try:
        value = action()
    except UsageError as error:
        problem = str(error)
    problems: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(problems, problem)
    for text in problems:
        if text is not None:
            raise UsageError(text)
    return value  # type: ignore[return-value]


def _named(ranks: list[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"
