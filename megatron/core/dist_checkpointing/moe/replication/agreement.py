"""Agreement of ranks on failures: what fails on one rank is raised on all, so that none waits in a collective alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, cast

from ..errors import MoECheckpointError, UsageError
from ..ports import Json


class Group(Protocol):
    """Ranks that gather values: a `Transport` between all ranks, or a part of them."""

    def gather(self, value: Json) -> list[Json]:
        """The values of all ranks of the group, in the order of ranks. Raises PeerLost."""


def raise_on_all_ranks[T](
    group: Group,
    work: Callable[[], T],
    errors: Sequence[type[MoECheckpointError]] = (UsageError,),
    ranks: Sequence[int] | None = None,
) -> T:
    """Run `work` on each rank; if it fails on one, all raise the same error, which names that rank. A collective.

    Args:
        group: The ranks that take part.
        work: Must not raise between collectives of its own: there other ranks would wait.
        errors: What is raised: the first of these types that the error is of, otherwise the last one.
        ranks: Global ranks of the group, ascending; None: the group is of all ranks.

    Returns:
        What `work` returned on this rank.

    Raises:
        PeerLost: A rank did not answer.
    """
    problem: list[Json] = [-1, ""]
    value: T | None = None
    try:
        value = work()
    except MoECheckpointError as error:
        kinds = (index for index, kind in enumerate(errors) if isinstance(error, kind))
        problem = [next(kinds, len(errors) - 1), str(error)]
    answers = [cast("tuple[int, str]", answer) for answer in group.gather(problem)]
    for rank, (index, why) in zip(ranks or range(len(answers)), answers, strict=True):
        if index >= 0:
            raise errors[index](f"rank {rank}: {why}")
    return cast("T", value)
