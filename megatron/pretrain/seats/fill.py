"""Who takes which seat."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeVar

Process = TypeVar("Process")


def fill(
    seats: Sequence[int], sitting: Mapping[int, Process], standbys: Sequence[Process]
) -> dict[int, Process | None]:
    """Who sits where from now on.

    Args:
        seats: Local ranks of a node that train.
        sitting: Who keeps a seat; a seat that is not among `seats` any more is given up.
        standbys: Who can take one, the best first.

    Returns:
        By local rank, in the order of `seats`; None: a new process has to be started.
    """
    waiting = iter(standbys)
    return {seat: sitting[seat] if seat in sitting else next(waiting, None) for seat in seats}


def order_of_standbys(standbys: Sequence[Process], is_ready: Mapping[int, bool]) -> list[Process]:
    """Those that are ready first, then those that were started first, since they are ready sooner than a new process.

    is_ready: by position in `standbys`.
    """
    return [one for _, one in sorted(enumerate(standbys), key=lambda entry: not is_ready[entry[0]])]
