"""Outcomes that all ranks share: what fails on one rank is raised on all of them, with the same words."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist


class RankFailure(Exception):
    """Something failed on at least one rank; the text names the ranks and the first reason."""


def on_rank_zero[T](action: Callable[[], T], errors: tuple[type[Exception], ...] = (OSError,)) -> T:
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
    value: T = outcome[0]
    return value


def raise_on_all_ranks(problem: str | None) -> None:
    """Raise RankFailure on every rank if `problem` is given on any; a collective over all ranks."""
    failed = gathered(problem)
    if failed:
        ranks = ", ".join(map(str, failed))
        raise RankFailure(f"{next(iter(failed.values()))} (on rank{'s' if len(failed) > 1 else ''} {ranks})")


def all_done(is_done: bool) -> bool:
    """Whether `is_done` holds on every rank; a short collective over all ranks.

    Asked again and again while work goes on beside it, so that no collective waits as long as the slowest rank takes.
    """
    unfinished = torch.tensor([int(not is_done)], device=torch.cuda.current_device())
    dist.all_reduce(unfinished, op=dist.ReduceOp.MAX)
    return not unfinished.item()


def agree(problem: str | None) -> None:
    """As `raise_on_all_ranks`, for what rarely fails: one number is reduced, and texts are gathered for a failure."""
    if not all_done(problem is None):
        raise_on_all_ranks(problem)


def gathered(problem: str | None) -> dict[int, str]:
    """The problems of all ranks, by rank; a collective."""
    problems: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(problems, problem)
    return {rank: text for rank, text in enumerate(problems) if text is not None}
