"""Ranks that are threads of one process: what each has goes to the others through memory."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import reduce
from typing import Any


class Together:
    """What ranks that are threads have in common."""

    def __init__(self, size: int) -> None:
        self.size, self.barrier, self.values = size, threading.Barrier(size, timeout=60), dict[int, Any]()

    def all(self, rank: int, value: Any) -> list[Any]:
        self.values[rank] = value
        self.barrier.wait()
        values = [self.values[one] for one in range(self.size)]
        self.barrier.wait()
        return values


@dataclass
class ThreadTransport:
    """Of one of them; `received` counts bytes."""

    rank: int
    together: Together
    received: int = 0

    @property
    def world_size(self) -> int:
        return self.together.size

    def least(self, values: Sequence[int]) -> tuple[int, ...]:
        return tuple(map(min, zip(*self.together.all(self.rank, tuple(values)), strict=True)))

    def total(self, values: Sequence[int]) -> tuple[int, ...]:
        return tuple(map(sum, zip(*self.together.all(self.rank, tuple(values)), strict=True)))

    def merge(self, value: bytes, combine: Callable[[bytes, bytes], bytes]) -> bytes:
        return reduce(combine, self.together.all(self.rank, value))

    def exchange(self, outgoing: Mapping[int, bytes]) -> list[tuple[int, bytes]]:
        sent = enumerate(self.together.all(self.rank, dict(outgoing)))
        return [(source, held[self.rank]) for source, held in sent if self.rank in held]


def on_ranks(*works: Callable[[Any], Any]) -> list[Any]:
    """What the work of each rank comes to on its transport: a value, or the error that it raises."""
    together = Together(len(works))

    def run(rank: int) -> Any:
        try:
            return works[rank](ThreadTransport(rank, together))
        except Exception as error:
            return error

    with ThreadPoolExecutor(len(works)) as threads:
        return list(threads.map(run, range(len(works))))
