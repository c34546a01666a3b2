"""Counts the iterations that all ranks train together, in place of those since a rank entered the loop's `train`.

After a local recovery the two differ: a rank that replayed has entered `train` some iterations before the first common
one, a rank that waited enters it there. What the loop does by its own count, and what has a collective of all ranks in
it, would then be reached by some ranks only: the line of the first iteration is logged behind a barrier, and process
groups get their timeout of after the start behind another one. `docs/internals/decisions/067-iterations-since-train.md`
has a table of all that depends on the entry.
"""

from __future__ import annotations

import inspect
from datetime import timedelta
from typing import Any


class CommonIterations:
    """Common iterations since this process was restored, or started.

    Args:
        loop: The module that has the loop.
    """

    def __init__(self, loop: Any) -> None:
        self._loop, self._begun = loop, 0

    def begin(self) -> None:
        """A common iteration begins. A collective of all ranks in the second one, if a timeout is to be set."""
        self._begun += 1
        seconds = self._loop.get_args().distributed_timeout_seconds_after_init
        if self._begun == 2 and seconds is not None:
            inspect.unwrap(self._loop.update_pg_timeout)(timedelta(seconds=seconds))

    @property
    def is_first(self) -> bool:
        """Whether the current iteration is the first common one; the same on all ranks."""
        return self._begun == 1
