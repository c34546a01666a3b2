"""Collectives over a network that is played: one rank is real, what the others tell was made before."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import msgspec
import numpy as np

from megatron.core.dist_checkpointing.moe.replication.tcp import TcpTransport

LATENCY_S, BYTES_PER_S = 50e-6, 3e9
"""Of a message between two nodes, and of the network of one rank."""
FRAME_BYTES = 1032
"""Of the first message of a value, as `replication.tcp` sends it; what is longer takes a second one."""


@dataclass
class Traffic:
    """What one rank received and sent, and how long that takes where nobody is late."""

    messages: int = 0
    received_bytes: int = 0
    peers: set[int] = field(default_factory=set)
    seconds: float = 0.0

    def hears(self, other: int, nbytes: int) -> None:
        """A value comes from another rank."""
        self.messages += 1 + (nbytes > FRAME_BYTES)
        self.received_bytes += max(nbytes, FRAME_BYTES)
        self.peers.add(other)
        self.seconds += LATENCY_S + max(nbytes, FRAME_BYTES) / BYTES_PER_S

    def tells(self, other: int, nbytes: int) -> None:
        """A value goes to another rank."""
        self.messages += 1 + (nbytes > FRAME_BYTES)
        self.peers.add(other)


class PlayedTransport(TcpTransport):
    """The real transport of one rank, without sockets: what arrives was made before.

    Args:
        rank: The real one.
        world_size: How many ranks there are.
        collectives: In their order: values of runs of ranks, or what ranks exchange.
    """

    def __init__(
        self, rank: int, world_size: int, collectives: Sequence[Merged[Any] | Exchanged | PlayedNumbers]
    ) -> None:
        self.rank, self.world_size, self.timeout_s, self.traffic = rank, world_size, 60.0, Traffic()
        self.connections = cast("Any", self)
        self._collectives, self.now = iter(collectives), cast("Any", None)

    def merge(self, value: bytes, combine: Callable[[bytes, bytes], bytes]) -> bytes:
        self.now = next(self._collectives)
        return super().merge(value, combine)

    def exchange(self, outgoing: Mapping[int, bytes]) -> list[tuple[int, bytes]]:
        self.now = next(self._collectives)
        return super().exchange(outgoing)

    def least_and_total(self, values: Sequence[int], added: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        self.now = next(self._collectives)
        return super().least_and_total(values, added)

    def _begin_to_tell(self, to: int, value: bytes) -> list[Any]:
        self.traffic.tells(to, len(value))
        return []

    def _heard(self, source: int) -> bytes:
        came: bytes = self.now.heard(self.rank, source, self.world_size)
        self.traffic.hears(source, len(came))
        return came


class Merged[T]:
    """The values of runs of ranks, each made once."""

    def __init__(self, values: Sequence[T], combine: Callable[[T, T], T]) -> None:
        self._values, self._combine = values, combine
        self._known, self._sent = dict[tuple[int, int], T](), dict[tuple[int, int], bytes]()

    def of(self, first: int, end: int) -> T:
        """Of ranks first..end-1, combined as in the tree."""
        if end - first == 1:
            return self._values[first]
        if (first, end) not in self._known:
            half = 1 << ((end - first - 1).bit_length() - 1)
            self._known[first, end] = self._combine(self.of(first, first + half), self.of(first + half, end))
        return self._known[first, end]

    def heard(self, rank: int, source: int, size: int) -> bytes:
        """What a rank hears from one below it in the tree, or from the one above."""
        run = (source, min(size, 2 * source - rank)) if source > rank else (0, size)
        if run not in self._sent:
            self._sent[run] = msgspec.msgpack.encode(self.of(*run))
        return self._sent[run]


class MergedBytes(Merged[bytes]):
    """Values that travel as they are."""

    def heard(self, rank: int, source: int, size: int) -> bytes:
        """As `Merged.heard`."""
        return self.of(source, min(size, 2 * source - rank)) if source > rank else self.of(0, size)


class Exchanged:
    """What each rank has for others, as it travels; sent: by source, then by rank."""

    def __init__(self, sent: Mapping[int, Mapping[int, bytes]]) -> None:
        self.sent = sent
        self._passing: dict[int, dict[int, bytes]] = {}

    def to(self, rank: int) -> list[tuple[int, bytes]]:
        """What arrives in the end."""
        return sorted((source, held[rank]) for source, held in self.sent.items() if rank in held)

    def heard(self, rank: int, source: int, size: int) -> bytes:
        """What a rank hears from the one some ranks before it."""
        if rank not in self._passing:
            moved: dict[int, list[tuple[int, int, bytes]]] = {1 << at: [] for at in range((size - 1).bit_length())}
            for sender, held in self.sent.items():
                for to, data in held.items():
                    distance = (to - sender) % size
                    for step, came in moved.items():
                        # All lower bits of the way lie behind it then.
                        if distance & step and (sender + (distance & (2 * step - 1))) % size == rank:
                            came.append((to, sender, data))
            self._passing[rank] = {step: msgspec.msgpack.encode(came) for step, came in moved.items()}
        return self._passing[rank][(rank - source) % size]


class PlayedNumbers:
    """What ranks compare and add: as many numbers on each, whatever they are."""

    def __init__(self, compared: int, added: int) -> None:
        self._data = np.array([compared, *[0] * (compared + added)], np.int64).tobytes()

    def heard(self, rank: int, source: int, size: int) -> bytes:
        """As `Merged.heard`."""
        return self._data


class Stopped(Exception):
    """A rank has come to a collective that is not known yet."""


class CollectiveRecorder:
    """A transport on which a rank goes as far as collectives are known, and leaves what it has for the next one."""

    def __init__(self, rank: int, world_size: int, known: Sequence[Any]) -> None:
        self.rank, self.world_size, self._known = rank, world_size, iter(known)
        self.left: Any = None
        self.combine: Callable[[bytes, bytes], bytes] | None = None

    def merge(self, value: bytes, combine: Callable[[bytes, bytes], bytes]) -> bytes:
        """What all give, or the value is left, and what merges it."""
        for known in self._known:
            return cast("bytes", known)
        self.left, self.combine = value, combine
        raise Stopped

    def least(self, values: Sequence[int]) -> tuple[int, ...]:
        """The values of this rank, as if all had them, or how many they are is left."""
        for _ in self._known:
            return tuple(values)
        self.left = len(values)
        raise Stopped

    total = least

    def exchange(self, outgoing: Mapping[int, bytes]) -> list[tuple[int, bytes]]:
        """What comes here, or all that goes out is left."""
        for known in self._known:
            return cast("list[tuple[int, bytes]]", known[self.rank])
        self.left = dict(outgoing)
        raise Stopped


class Came:
    """What was exchanged, by the rank that it came to."""

    def __init__(self, exchanged: Any) -> None:
        self._by_rank: dict[int, list[tuple[int, bytes]]] = {}
        for source, held in exchanged.sent.items() if isinstance(exchanged, Exchanged) else ():
            for to, data in held.items():
                self._by_rank.setdefault(to, []).append((source, data))

    def __getitem__(self, rank: int) -> list[tuple[int, bytes]]:
        return self._by_rank.get(rank, [])


def following(
    ranks: int, work: Callable[[int, Any], Any], known: Sequence[Any]
) -> MergedBytes | Exchanged | PlayedNumbers | None:
    """The collective that follows those that are known, of all ranks; None behind the last one."""
    left: list[Any] = []
    for rank in range(ranks):
        transport = CollectiveRecorder(rank, ranks, known)
        try:
            work(rank, transport)
            return None
        except Stopped:
            left.append(transport.left)
        if isinstance(transport.left, int):
            return PlayedNumbers(transport.left, 0)
    return MergedBytes(left, transport.combine) if transport.combine else Exchanged(dict(enumerate(left)))
