"""Transports of simulated ranks."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from megatron.core.dist_checkpointing.moe.errors import UsageError
from megatron.core.dist_checkpointing.moe.ports import Json, PeerLost

from .network import Collective, Connection, Message, Network

if TYPE_CHECKING:
    from collections.abc import Buffer

_INT64 = range(-(1 << 63), 1 << 63)


class FakeTransport:
    """A `ports.Transport` of one rank; those of the same name on all ranks belong together, and to no other.

    A message is under way until both sides have begun it, and its bytes are taken when it arrives: a buffer that
    changes before `wait` has returned arrives changed. With `is_connected` false it must be renewed before its use.
    """

    def __init__(
        self, network: Network, rank: int, name: str, timeout_s: float = 30.0, *, is_connected: bool = True
    ) -> None:
        self._network, self._world, self._rank, self._name = network, network.world, rank, name
        self._timeout_s = timeout_s
        self._channel = network.channel(name)
        self._connection: Connection | None = self._channel.connection if is_connected else None
        self._why = "it was never connected"
        self._collectives = 0
        self._under_way: list[Message] = []
        self._user = ""

    @property
    def rank(self) -> int:
        """As `ports.Transport.rank`."""
        return self._rank

    @property
    def world_size(self) -> int:
        """As `ports.Transport.world_size`."""
        return self._network.world_size

    @property
    def timeout_s(self) -> float:
        """Longest wait for another rank."""
        return self._timeout_s

    def send(self, to: int, data: Buffer) -> FakeTransfer:
        """As `ports.Transport.send`. Raises UsageError for a rank that there is not."""
        view = memoryview(data)
        view = view.cast("B") if view.nbytes else memoryview(b"")
        return self._begin(f"send {view.nbytes} bytes to rank {to}", to, view, is_sent=True)

    def receive(self, source: int, into: memoryview) -> FakeTransfer:
        """As `ports.Transport.receive`. Raises UsageError for read-only memory and for a rank that there is not."""
        if into.readonly:
            raise UsageError(f"rank {self._rank} cannot receive from rank {source} into read-only memory")
        view = into.cast("B") if into.nbytes else memoryview(bytearray())
        return self._begin(f"receive {into.nbytes} bytes from rank {source}", source, view, is_sent=False)

    def least(self, values: Sequence[int]) -> tuple[int, ...]:
        """As `ports.Transport.least`. Raises UsageError for numbers of other sizes."""
        return self._reduced("least", values, min)

    def total(self, values: Sequence[int]) -> tuple[int, ...]:
        """As `ports.Transport.total`. Raises UsageError for numbers of other sizes."""
        return self._reduced("total", values, sum)

    def least_and_total(self, values: Sequence[int], added: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """As `ports.Transport.least_and_total`. Raises UsageError for numbers of other sizes."""
        return self.least(values), self.total(added)

    def gather(self, value: Json) -> list[Json]:
        """As `ports.Transport.gather`. Raises UsageError for what strict JSON cannot say."""
        try:
            text = json.dumps(value, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise UsageError(f"a value to gather is no JSON value: {error}") from error
        return [json.loads(str(one)) for one in self._collected("gather", text)]

    def merge(self, value: bytes, combine: Callable[[bytes, bytes], bytes]) -> bytes:
        """As `ports.Transport.merge`; neighbours are combined as in a tree of two branches."""
        values = [bytes.fromhex(str(one)) for one in self._collected("merge", value.hex())]
        while len(values) > 1:
            pairs = [values[at : at + 2] for at in range(0, len(values), 2)]
            values = [combine(*pair) if len(pair) > 1 else pair[0] for pair in pairs]
        return values[0]

    def exchange(self, outgoing: Mapping[int, bytes]) -> list[tuple[int, bytes]]:
        """As `ports.Transport.exchange`."""
        rows = self._collected("exchange", json.dumps([[to, value.hex()] for to, value in outgoing.items()]))
        came = enumerate(json.loads(str(one)) for one in rows)
        return [(source, bytes.fromhex(value)) for source, sent in came for to, value in sent if to == self._rank]

    def renew(self) -> None:
        """As `ports.Transport.renew`."""
        what = "connect all ranks again"
        with self._used(what):
            self.drop("it is being connected again")
            self._channel.waiting[self._rank] = self._connect
            self._network.meet(self._channel)
            begun_s, wanted = self._world.now_s(), f"waits to {what} ({self._name})"
            if not self._world.wait(wanted, lambda: self._connection is not None, self._timeout_s):
                missing = [one for one in range(self.world_size) if not self._came(one, begun_s)]
                self._withdraw()
                raise PeerLost(f"rank {self._rank} waited {self._timeout_s:g} s to {what}; missing are {missing}")

    def close(self) -> None:
        """As `ports.Transport.close`."""
        self._world.event(f"{self._name}: close")
        self._withdraw()
        self.drop("it was closed")

    def drop(self, why: str) -> None:
        """For transfers too: give the connection up; the others see that it was closed."""
        if self._connection is not None:
            self._connection.left[self._rank] = why
        self._connection, self._why = None, why
        for message in self._under_way:
            message.give_up()
        self._under_way.clear()

    def lost(self, sentence: str) -> PeerLost:
        """For transfers too: the error after which only `renew` helps."""
        self.drop(sentence)
        return PeerLost(sentence)

    def is_current(self, connection: Connection | None) -> bool:
        """For transfers: whether they belong to the connection that there is."""
        return connection is not None and connection is self._connection

    def refused(self, what: str) -> PeerLost:
        """For transfers too: the error before `renew`."""
        return PeerLost(f"rank {self._rank} cannot {what} before connections are renewed: {self._why}")

    @contextmanager
    def _used(self, what: str) -> Iterator[None]:
        """One call, an event. Raises UsageError when another thread is inside one."""
        self._world.event(f"{self._name}: {what}")
        user = self._world.thread.name if self._world.thread else "the test"
        if self._user:
            raise UsageError(
                f"rank {self._rank}, transport {self._name}: {user} wants to {what} while {self._user} uses it"
            )
        self._user = user
        try:
            yield
        finally:
            self._user = ""

    def _came(self, other: int, since_s: float) -> bool:
        """Whether another rank came to the renewal for which this one has waited since then, and can be reached."""
        came = other in self._channel.waiting or self._channel.withdrew_s.get(other, -math.inf) >= since_s
        return came and self._network.reaches(self._rank, other)

    def _withdraw(self) -> None:
        if self._channel.waiting.pop(self._rank, None) is not None:
            self._channel.withdrew_s[self._rank] = self._world.now_s()

    def _connect(self, connection: Connection) -> None:
        self._connection, self._collectives = connection, 0

    def _begin(self, what: str, other: int, view: memoryview, *, is_sent: bool) -> FakeTransfer:
        if other == self._rank or not 0 <= other < self.world_size:
            raise UsageError(f"rank {self._rank} cannot {what} in a world of {self.world_size} ranks")
        with self._used(what):
            connection = self._connection
            if connection is None:
                return FakeTransfer(self, self._network, what, other, None, None)
            link = connection.link(self._rank, other) if is_sent else connection.link(other, self._rank)
            message = self._network.post(link, view, is_sent=is_sent)
            self._under_way = [one for one in self._under_way if not one.delivered] + [message]
            return FakeTransfer(self, self._network, what, other, connection, message)

    def _reduced(self, name: str, values: Sequence[int], reduce: Callable[[Sequence[int]], int]) -> tuple[int, ...]:
        numbers = [int(value) for value in values]
        if any(value not in _INT64 for value in numbers):
            raise UsageError(f"rank {self._rank}: {numbers} are not all integers of 64 bits")
        rows = self._collected(f"{name} of {len(numbers)} numbers", json.dumps(numbers))
        return tuple(reduce(column) for column in zip(*(json.loads(str(row)) for row in rows), strict=True))

    def _collected(self, what: str, value: str) -> list[object]:
        with self._used(what):
            connection = self._connection
            if connection is None:
                raise self.refused(what)
            here = self._network.join(connection, self._collectives, self._rank, what, value)
            self._collectives += 1
            self._await(what, connection, here)
            return [here.values[rank] for rank in range(self.world_size)]

    def _await(self, what: str, connection: Connection, here: Collective) -> None:
        """Wait until the values of all ranks are here. Raises PeerLost."""
        world, everyone = self._world, range(self.world_size)
        deadline_s = world.now_s() + self._timeout_s

        def state() -> tuple[str, float]:
            done_s = here.done_s.get(self._rank, math.inf)
            cut_off = not self._network.reaches_all(self._rank)
            # What all have sent arrives, also after one of them has closed the connection.
            broken = self._network.broken(None if here.done_s else connection, self._rank, everyone)
            return broken, math.inf if cut_off else done_s

        while True:
            seen = broken, done_s = state()
            now_s = world.now_s()
            if now_s >= done_s:
                return
            if broken or now_s >= deadline_s:
                missing = sorted(set(everyone) - set(here.values))
                reason = broken or f"no answer from ranks {missing or 'cut off'} after {self._timeout_s:g} s"
                raise self.lost(f"rank {self._rank}, {self._name}: {what} failed: {reason}")
            due_s = min(done_s, deadline_s) - now_s
            world.wait(f"waits for {what} ({self._name})", _changed(state, seen), due_s)


class FakeTransfer:
    """A `ports.Transfer`."""

    def __init__(
        self,
        transport: FakeTransport,
        network: Network,
        what: str,
        other: int,
        connection: Connection | None,
        message: Message | None,
    ) -> None:
        self._transport, self._network, self._what, self._other = transport, network, what, other
        self._connection, self._message = connection, message

    def wait(self) -> None:
        """As `ports.Transfer.wait`."""
        world, message, transport = self._network.world, self._message, self._transport
        world.event(f"wait to {self._what}")
        if message is None or not transport.is_current(self._connection):
            raise transport.refused(self._what)
        deadline_s = world.now_s() + transport.timeout_s

        def state() -> tuple[str, float]:
            if message.delivered:
                return "", 0.0
            if message.void:
                return f"rank {self._other} gave up", math.inf
            reached = message.arrives_s is not None and self._network.reaches(transport.rank, self._other)
            return self._broken(), message.arrives_s if message.arrives_s is not None and reached else math.inf

        while True:
            seen = broken, arrives_s = state()
            now_s = world.now_s()
            if now_s >= arrives_s:
                self._network.deliver(message)
                return
            if broken or now_s >= deadline_s:
                reason = broken or f"no answer after {transport.timeout_s:g} s"
                raise transport.lost(f"rank {transport.rank} failed to {self._what}: {reason}")
            world.wait(f"waits to {self._what}", _changed(state, seen), min(deadline_s, arrives_s) - now_s)

    def _broken(self) -> str:
        return self._network.broken(self._connection, self._transport.rank, [self._other])


def _changed(state: Callable[[], tuple[str, float]], seen: tuple[str, float]) -> Callable[[], bool]:
    return lambda: state() != seen
