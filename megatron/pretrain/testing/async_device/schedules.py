"""In which order a device runs what it was given, among the orders that CUDA allows, drawn from a seed."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megatron.pretrain.testing.async_device.streams import Stream

SCHEDULES = ("random", "lazy", "starve-copies", "starve-training", "eager")
"""`lazy` runs hardly anything before it is waited for, `eager` everything at once. The two that starve prefer the
default stream or all others: a missing wait between two streams often shows only where one of them is far behind."""

_ALL = 1 << 30
_WORK = {
    "random": (0, 0, 1, 2, 5, 50),
    "lazy": (1,),
    "starve-copies": (0, 3, 50),
    "starve-training": (0, 3, 50),
    "eager": (_ALL,),
}
_MERCY = 0.1
"""How often one of the starved streams runs where no other has work: nothing waits for ever."""


class DrawnOrder:
    """One of `SCHEDULES`, with its random numbers.

    Args:
        name: Which.
        seed: The same seed and the same calls of the host give the same order.
    """

    def __init__(self, name: str, seed: int) -> None:
        self.name, self.random = name, random.Random(seed)
        self._starved: Stream | None = None
        self._has_mercy = False

    def amount(self) -> int:
        """How much work is run at this call of the host."""
        self._has_mercy, self._starved = self.random.random() < _MERCY, None
        return self.random.choice(_WORK[self.name])

    def choice(self, ready: Sequence[Stream], default: Stream) -> Stream | None:
        """Whose work is run next; None where the device does nothing now.

        Args:
            ready: Streams whose first work waits for nothing.
            default: The stream of training.
        """
        preferred: Sequence[Stream] = ready
        if self.name == "starve-copies":
            preferred = [stream for stream in ready if stream is default]
        elif self.name == "starve-training":
            preferred = [stream for stream in ready if stream is not default]
        if preferred:
            return self.random.choice(preferred)
        if self._has_mercy and self._starved is None:
            self._starved = self.random.choice(ready)
        return self._starved if self._starved in ready else None
