"""Bytes and small numbers between ranks over TCP, apart from the process groups of training.

Ranks are connected only where something is sent (`connections`). Numbers and values of all ranks go up a binomial tree
and down again: rank r hears from r + 1, r + 2, r + 4, ... below its own lowest bit, so each talks to at most log2(N)
others, and on average to two. After any failure all connections end at once, which other ranks notice as closed
sockets, and `renew` listens again under a number on which all ranks have agreed (`ConnectionEpochs`), so that no
message of an old connection is taken for one of a new connection.
"""

from __future__ import annotations

import json
import struct
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, NoReturn

import msgspec
import numpy as np
from torch.distributed import PrefixStore, Store

from ..errors import PeerSilent, UsageError
from ..ports import PeerLost
from .agreement import FIRST_PAUSE_S, LONGEST_PAUSE_S, ConnectionEpochs, combined
from .connections import Connections, Message, MessageLane, Mover, receive_over, send_over

if TYPE_CHECKING:
    import socket
    from collections.abc import Buffer

    from ..ports import Json

MESSAGES = 0
"""What connections of this module are for."""

_SIZE = struct.Struct("<q")
_MOST_BYTES = 1 << 36
_FRAME_BYTES = 1024
"""Of a value of all ranks that go in one message with its size: mostly all of it. A message costs more than they do."""
_PARCELS = msgspec.msgpack.Encoder()
_PARCELS_READER = msgspec.msgpack.Decoder(list[tuple[int, int, bytes]])
"""Where it goes, where it comes from, and what it is."""
_LET_GO_S = 10.0


class _Transfer:
    """One message. Whatever goes wrong is raised by `wait`; dropping it before it is through breaks the connections."""

    def __init__(self, transport: TcpTransport, what: str, lane: MessageLane | None, memory: memoryview) -> None:
        self._transport, self._what, self._lane = transport, what, lane
        self._connections = transport.connections
        self._message = Message(memoryview(b"")) if lane is None else lane.post(memory)
        if lane is None and not memory and self._connections is not None:
            self._message.end(through=True)  # both sides know that there is nothing to move

    def wait(self) -> None:
        """As `ports.Transfer.wait`; the timeout is that of a chunk."""
        message, timeout_s, begun_s = self._message, self._transport.timeout_s, time.monotonic()
        left_s = timeout_s
        # Counted from when something moved last: a long message may take long, but must not stand still.
        while self._lane is not None and not message.ended.wait(max(0.0, left_s)):
            left_s = max(begun_s, self._lane.moved_s) + timeout_s - time.monotonic()
            if left_s <= 0:
                raise PeerSilent(str(self._transport.broken(self._what, "nothing moved")))
        if message.through:
            return
        # Renewed meanwhile: the new connections are whole, and must not be ended for a message of the old ones.
        if self._lane is None or self._connections is not self._transport.connections:
            self._transport.refuse(self._what)
        assert self._connections is not None
        raise self._transport.broken(self._what, self._connections.why)

    def __del__(self) -> None:
        message = self._message
        if self._lane is not None and self._connections is not None and not message.ended.is_set():
            self._connections.end(f"rank {self._transport.rank} gave up to {self._what}")
            message.ended.wait(_LET_GO_S)  # its memory may be used for something else now


class TcpTransport:
    """A `ports.Transport` over TCP with connections and threads of its own.

    It uses no collective of other groups and can be made, used and renewed on any thread while others train.

    Args:
        store: a c10d store that all ranks reach, over a connection on which nobody waits for a key, such as a `clone`:
            each call waits for those of other threads. The transport only asks for what is there.
        name: the same on all ranks, different for each transport and for each start of the job (a torchrun restart
            keeps the store).
        timeout_s: longest wait for another rank, twice that for it to come to a renewal; in longer messages, for each
            chunk. It must be longer than ranks are ever apart.
        address: of this rank's interface; other ranks must reach it there.

    Making one is a renewal. Raises PeerLost when not all ranks come in time. Memory is that of the host; read-only
    memory can be sent.
    """

    medium = "TCP"
    """What long messages go over, in words."""

    def __init__(
        self, store: Store, rank: int, world_size: int, name: str, timeout_s: float, *, address: str = "127.0.0.1"
    ) -> None:
        self.rank, self.world_size, self.timeout_s = rank, world_size, timeout_s
        self.address = address
        self._store = PrefixStore(name, store)
        self._meeting = ConnectionEpochs(self._store, rank, world_size)
        self.connections: Connections | None = None
        self._places, self._lanes = self._store, dict[tuple[int, int, bool], MessageLane]()
        self._why, self.number = "the transport was closed", 0
        self.renew()

    def send(self, to: int, data: Buffer) -> _Transfer:
        """As `ports.Transport.send`. Dropping the transfer without `wait` cancels it and breaks the connections."""
        return self._transfer("send {} bytes to rank {}", to, memoryview(data), is_send=True)

    def receive(self, source: int, into: memoryview) -> _Transfer:
        """As `ports.Transport.receive`. Dropping the transfer without `wait` cancels it, as in `send`."""
        if into.readonly:
            raise UsageError(f"rank {self.rank} cannot receive from rank {source} into read-only memory")
        return self._transfer("receive {} bytes from rank {}", source, into, is_send=False)

    def least(self, values: Sequence[int]) -> tuple[int, ...]:
        return self.least_and_total(values, ())[0]

    def total(self, values: Sequence[int]) -> tuple[int, ...]:
        return self.least_and_total((), values)[1]

    def least_and_total(self, values: Sequence[int], added: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """As `ports.Transport.least_and_total`."""
        end = 1 + len(values)

        def combine(own: bytes, others: bytes) -> bytes:
            numbers: np.ndarray = np.frombuffer(own, np.int64)
            more: np.ndarray = np.frombuffer(others, np.int64)
            if (len(numbers), numbers[0]) != (len(more), more[0]):
                raise ValueError(f"{len(numbers) - 1} and {len(more) - 1} numbers")
            # The first number is the same on both sides, so the minimum keeps it for the next step up the tree.
            return b"".join(
                [np.minimum(numbers[:end], more[:end]).tobytes(), np.add(numbers[end:], more[end:]).tobytes()]
            )

        own = np.array([len(values), *values, *added], np.int64)  # how many are compared: the same on all ranks
        data = self._combined(own.tobytes(), combine, f"compare and add {len(own) - 1} numbers with")
        numbers: tuple[int, ...] = tuple(np.frombuffer(data, np.int64).tolist())
        return numbers[1:end], numbers[end:]

    def gather(self, value: Json) -> list[Json]:
        """As `ports.Transport.gather`. Raises UsageError for what strict JSON cannot say."""
        try:
            data = json.dumps(value, allow_nan=False, separators=(",", ":")).encode()
        except (TypeError, ValueError) as error:
            raise UsageError(f"a value to gather is no JSON value: {error}") from error
        # The ranks below a node of the tree follow its own, so that values come together in the order of ranks.
        gathered = self._combined(data, lambda own, others: own + b"," + others, "gather values of")
        try:
            values: list[Json] = json.loads(b"[%b]" % gathered)
        except (ValueError, RecursionError) as error:
            raise self.broken("gather values", f"what came is no JSON: {error}") from None
        if len(values) != self.world_size:
            raise self.broken("gather values", f"{len(values)} came from {self.world_size} ranks")
        return values

    def merge(self, value: bytes, combine: Callable[[bytes, bytes], bytes]) -> bytes:
        """As `ports.Transport.merge`."""
        return self._combined(value, combine, "merge values of")

    def exchange(self, outgoing: Mapping[int, bytes]) -> list[tuple[int, bytes]]:
        """As `ports.Transport.exchange`.

        Nobody knows from whom something comes. So in each of log2(N) rounds a rank passes on what has to go 1, 2, 4,
        ... ranks further to the rank at that distance, and no rank is on more ways than another.
        """
        what, step = f"exchange values with all {self.world_size} ranks", 1
        if self.connections is None:
            self.refuse(what)
        parcels = [(to, self.rank, value) for to, value in outgoing.items()]
        try:
            while step < self.world_size:
                passed_on = [one for one in parcels if (one[0] - self.rank) % self.world_size & step]
                kept = [one for one in parcels if not (one[0] - self.rank) % self.world_size & step]
                # All send at the same time: whoever waited for the end of that before it receives could wait for ever.
                under_way = self._begin_to_tell((self.rank + step) % self.world_size, _PARCELS.encode(passed_on))
                came = _PARCELS_READER.decode(self._heard((self.rank - step) % self.world_size))
                for transfer in under_way:
                    transfer.wait()
                parcels, step = [*kept, *came], 2 * step
        except PeerLost as error:
            raise type(error)(f"rank {self.rank} could not {what}: {error}") from None
        except ValueError as error:
            raise self.broken(what, f"ranks call for different things: {error}") from None
        return sorted((source, value) for _, source, value in parcels)

    def renew(self) -> None:
        """As `ports.Transport.renew`; all that was under way is void.

        Waits up to twice the timeout: another rank may notice the failure only at its own timeout.
        """
        # First of all: a rank that still waits for this one must see the old connections close, not its own timeout.
        self._drop("the transport is being renewed")
        # It listens before all meet: whoever has met all may dial at once.
        try:
            connections = Connections(self.rank, self.address)
        except OSError as error:
            raise PeerLost(f"rank {self.rank} cannot listen at {self.address}: {error.strerror}") from None
        try:
            self.number = self._meeting.meet(2 * self.timeout_s)
            # A prefix of its own: the places of old connections are under the old one.
            self._places = PrefixStore(str(self.number), self._store)
            self._places.set(str(self.rank), connections.place)
        except (PeerLost, RuntimeError) as error:
            connections.end(str(error))
            self._why = str(error)
            raise error if isinstance(error, PeerLost) else PeerLost(str(error)) from None
        self.connections = connections
        # Threads refer to the connections, not to this object: dropped without `close` it still ends them.
        self._ending = weakref.finalize(self, connections.end, "the transport is gone")

    def close(self) -> None:
        """As `ports.Transport.close`; releases all buffers. Can be called again."""
        self._drop("the transport was closed")

    def refuse(self, what: str) -> NoReturn:
        """For transfers too: nothing can be done until the next renewal."""
        raise PeerLost(f"rank {self.rank} cannot {what} before connections are renewed: {self._why}")

    def broken(self, what: str, why: str) -> PeerLost:
        """End all connections after a failure: transfers are void, and the other ranks see closed connections.

        Args:
            what: This rank failed to do.
            why: It failed.

        Returns:
            The error to raise.
        """
        sentence = f"rank {self.rank} failed to {what} (timeout {self.timeout_s:g} s): {why}"
        self._drop(sentence)
        return PeerLost(sentence)

    def lane(self, other: int, nbytes: int, *, is_send: bool) -> MessageLane:
        """The lane that moves a message; the same on both sides.

        Args:
            other: The rank at the other end.
            nbytes: Of the message.
            is_send: Whether it goes to that rank, and not here.
        """
        move = send_over if is_send else receive_over
        return self._lanes.get((other, MESSAGES, is_send)) or self._lane(other, MESSAGES, move, is_send=is_send)

    def _lane(
        self, other: int, purpose: int, move: Mover, *, is_send: bool, close: Callable[[], None] = lambda: None
    ) -> MessageLane:
        assert self.connections is not None
        # Nothing that its thread keeps may refer to this transport, or that would never be collected.
        open_ = partial(_opened, self.connections, self._places, other, purpose, is_send, self.timeout_s)
        lane = self.connections.lane(open_, f"{'to' if is_send else 'from'} rank {other}", move, close)
        return self._lanes.setdefault((other, purpose, is_send), lane)

    def _drop(self, why: str) -> None:
        self._why, connections, self.connections = why, self.connections, None
        self._lanes.clear()
        if connections is not None:
            self._ending.detach()
            connections.end(why)
            # After this no thread refers to the memory of a message, so its owner may use it for something else.
            connections.join()

    def _transfer(self, what: str, other: int, data: memoryview, *, is_send: bool) -> _Transfer:
        """A message that has begun; void from the start when connections are to be renewed first."""
        what = what.format(data.nbytes, other)
        if not data.c_contiguous:
            raise UsageError(f"a message of {data.nbytes} bytes is not contiguous")
        if other == self.rank or not 0 <= other < self.world_size:
            raise UsageError(f"rank {self.rank} cannot {what} in a world of {self.world_size} ranks")
        # A view without elements cannot be cast; both sides know that there is nothing to move.
        memory = data.cast("B") if data.nbytes else memoryview(b"")
        is_moved = data.nbytes and self.connections is not None
        lane = self.lane(other, data.nbytes, is_send=is_send) if is_moved else None
        return _Transfer(self, what, lane, memory)

    def _combined(self, value: bytes, combine: Callable[[bytes, bytes], bytes], what: str) -> bytes:
        """The values of all ranks combined, on all of them; the second argument of `combine` is of higher ranks."""
        what = f"{what} all {self.world_size} ranks"
        if self.connections is None:
            self.refuse(what)
        try:
            return combined(self.rank, self.world_size, value, combine, self._tell, self._heard)
        except PeerLost as error:
            raise type(error)(f"rank {self.rank} could not {what}: {error}") from None
        except ValueError as error:
            raise self.broken(what, f"ranks call for different things: {error}") from None

    def _tell(self, to: int, value: bytes) -> None:
        for transfer in self._begin_to_tell(to, value):
            transfer.wait()

    def _begin_to_tell(self, to: int, value: bytes) -> list[_Transfer]:
        # Whoever receives a message has to know its size: a frame has a fixed one, and says that of the rest.
        frame, rest = value[:_FRAME_BYTES], value[_FRAME_BYTES:]
        frame = _SIZE.pack(len(value)) + frame.ljust(_FRAME_BYTES, b"\0")
        return [self.send(to, part) for part in (frame, rest)]

    def _heard(self, source: int) -> bytes:
        frame = bytearray(_SIZE.size + _FRAME_BYTES)
        self.receive(source, memoryview(frame)).wait()
        (nbytes,) = _SIZE.unpack_from(frame)
        if not 0 <= nbytes <= _MOST_BYTES:
            raise ValueError(f"rank {source} announces {nbytes} bytes")
        rest = bytearray(max(nbytes - _FRAME_BYTES, 0))
        self.receive(source, memoryview(rest)).wait()
        return bytes(frame[_SIZE.size : _SIZE.size + nbytes]) + rest


def _opened(
    connections: Connections, places: Store, other: int, purpose: int, is_send: bool, timeout_s: float
) -> socket.socket:
    """For a lane, on its thread: its connection. Raises OSError, RuntimeError."""
    # One store answers all ranks: who is dialled does not ask it, unless nobody does.
    place = partial(_told, connections, places, str(other), timeout_s)
    if is_send:
        return connections.dial(place(), other, purpose, timeout_s)
    return connections.arrival(place, other, purpose, timeout_s)


def _told(connections: Connections, places: Store, key: str, timeout_s: float) -> str:
    """What another rank sets once it has met all; asked for again and again, never waited for. Raises OSError."""
    until_s, pause_s = time.monotonic() + timeout_s, FIRST_PAUSE_S
    while not places.check([key]):
        connections.check()
        if time.monotonic() > until_s:
            raise TimeoutError(f"rank {key} did not say within {timeout_s:g} s where it listens")
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
    place: str = places.get(key).decode()
    return place
