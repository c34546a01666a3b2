"""Bulk over process groups of training's own backend, staged in memory of the device: NCCL between GPUs.

Long messages go in chunks: from host memory to a buffer on the device, from there to the peer's device, and into its
host memory. Everything else, short messages and what all ranks agree on, stays on TCP. Each direction between two ranks
has a process group of its own, of these two, and one thread on each side that uses it: on one communicator a send and a
receive that two ranks begin in different orders would wait for each other.

Training runs its own communicators on the same device meanwhile, so nothing is launched that has to wait:

- The receiver asks for each chunk over TCP when it has a buffer for it, and only then both sides launch: a kernel of
  NCCL waits for as long as the other launch takes, never for a peer that is busy or gone.
- A step is launched when the host has seen that the one before is over. A kernel or copy that waits for another on the
  device would, with CUDA_DEVICE_MAX_CONNECTIONS=1, hold up kernels of training behind it, for which the peer may wait.
- Copies run on a stream of the lowest priority; communicators take few of the device's multiprocessors.

The TCP connection of a direction tells when the peer has gone, which NCCL does not; then the communicator is aborted.
"""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from torch.distributed import PrefixStore, ProcessGroupGloo, Store

from ..storage.system import within_locks
from .connections import Connections, MessageLane, check_open
from .tcp import TcpTransport

if TYPE_CHECKING:
    from collections.abc import Buffer

BULK = 1
"""What connections of this module are for."""
CHUNK_BYTES = 16 << 20
"""Of each buffer on the device, of which a direction has two: one is filled while the other is emptied."""
LEAST_BYTES = 1 << 20
"""Messages that are shorter go over TCP."""
_READY = b"r"
_MOST_CTAS = 4
_SHORTEST_POLL_S, _LONGEST_POLL_S = 5e-5, 1e-3


class Pairs(Protocol):
    """A backend's process groups of two ranks: rank 0 sends, rank 1 receives."""

    def group(self, store: Store, rank: int, timeout_s: float) -> Any:
        """Connect with the other rank.

        Args:
            store: Which only these two use.
            rank: 0 on the side that sends, 1 on the one that receives.
            timeout_s: Longest wait for the other.

        Raises:
            RuntimeError: It did not come.
        """

    def finish(self, work: Any, check: Callable[[], None]) -> None:
        """Wait for a send or receive.

        Args:
            work: What the group gave for it.
            check: Raises where the peer has gone.

        Raises:
            RuntimeError: It failed.
        """


class GlooPairs:
    """On CPUs.

    Args:
        address: Of this rank's interface.
    """

    def __init__(self, address: str) -> None:
        self._address = address

    def group(self, store: Store, rank: int, timeout_s: float) -> Any:
        """As `Pairs.group`."""
        options = ProcessGroupGloo._Options()
        # One thread: a direction moves one chunk at a time.
        options._timeout, options._threads = timedelta(seconds=timeout_s), 1
        options._devices = [ProcessGroupGloo.create_device(hostname=self._address)]
        return ProcessGroupGloo(store, rank, 2, options)

    def finish(self, work: Any, check: Callable[[], None]) -> None:
        """As `Pairs.finish`."""
        work.wait()  # gloo hears of a lost peer by itself, and has no other way to ask


class NcclPairs:
    """On GPUs."""

    def group(self, store: Store, rank: int, timeout_s: float) -> Any:
        """As `Pairs.group`."""
        backend = torch.distributed.ProcessGroupNCCL
        options = backend.Options()
        options._timeout = timedelta(seconds=timeout_s)
        # Each of these blocks takes one multiprocessor from training's kernels for as long as a chunk is under way.
        options.config.max_ctas = _MOST_CTAS
        return backend(store, rank, 2, options)

    def finish(self, work: Any, check: Callable[[], None]) -> None:
        """As `Pairs.finish`."""
        # Not `wait`: that would have the stream wait on the device.
        pause_s = _SHORTEST_POLL_S
        while not work.is_completed():
            check()
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_POLL_S)
        if (error := work.exception()) is not None:  # which is completed as well
            raise RuntimeError(f"NCCL: {error}")


class Staging:
    """Two buffers on a device, and a stream for copies to and from them; no stream where the device is the CPU."""

    def __init__(self, device: torch.device) -> None:
        self._buffers = torch.empty(2, CHUNK_BYTES, dtype=torch.uint8, device=device)
        on_gpu = device.type == "cuda"
        # The range begins with the lowest priority: training's kernels go first.
        self._stream = torch.cuda.Stream(device, priority=torch.cuda.Stream.priority_range()[0]) if on_gpu else None

    def buffer(self, at: int, nbytes: int) -> torch.Tensor:
        """The first bytes of one of the two buffers.

        Args:
            at: The number of the chunk: even ones get the one, odd ones the other.
            nbytes: Of the chunk.

        Returns:
            A view of uint8 on the device.
        """
        return self._buffers[at % 2, :nbytes]

    def copied(self, to: torch.Tensor, source: torch.Tensor) -> None:
        """Copy, and return when it is over.

        Args:
            to: A part of a buffer, or host memory; flat uint8.
            source: The other of these, of the same size.
        """
        with self.launching():
            to.copy_(source, non_blocking=True)
            if self._stream is not None:
                # An event that blocks lets this thread sleep; else it would spin on a core that training wants.
                event = torch.cuda.Event(blocking=True)
                event.record(self._stream)
                event.synchronize()

    def launching(self) -> contextlib.AbstractContextManager[Any]:
        """A block for launches beside training's own stream."""
        return torch.cuda.stream(self._stream) if self._stream is not None else contextlib.nullcontext()


class BulkWay:
    """Long messages from one rank to another, on one side; used by the thread of its lane alone.

    Args:
        pairs: Makes the process group.
        store: Gives a store that only this pair uses, over a connection of its own.
        staging: Makes the buffers.
        check: Raises where the connections have ended.
    """

    def __init__(
        self,
        pairs: Pairs,
        store: Callable[[], Store],
        staging: Callable[[], Staging],
        check: Callable[[], None],
        timeout_s: float,
    ) -> None:
        self._pairs, self._store, self._make_staging, self._check = pairs, store, staging, check
        self._timeout_s = timeout_s
        self._group: Any = None
        self._staging: Staging | None = None
        self._chunks = 0

    def send(self, connection: socket.socket, memory: memoryview, moved: Callable[[], None]) -> None:
        """As `connections.Mover`, on the side that has the bytes."""
        under_way = None
        for at, part in self._parts(memory):
            buffer = self._buffer(at, len(part))
            # To one buffer, while the chunk in the other is under way.
            self._copied(part, buffer, is_out=False)
            # Over before the next is launched: nothing on the device may wait for something else there.
            if under_way is not None:
                self._finish(under_way, connection)
                moved()
            _hear(connection)
            if self._group is None:
                connection.sendall(_READY)
                self._connect(0)
            under_way = self.launch("send", 1, buffer, at)
        if under_way is not None:
            self._finish(under_way, connection)
            moved()

    def receive(self, connection: socket.socket, memory: memoryview, moved: Callable[[], None]) -> None:
        """As `connections.Mover`, on the side that gets them."""
        arrived: tuple[memoryview, torch.Tensor] | None = None
        for at, part in self._parts(memory):
            buffer = self._buffer(at, len(part))
            connection.sendall(_READY)
            if self._group is None:
                _hear(connection)
                self._connect(1)
            under_way = self.launch("recv", 0, buffer, at)
            # The chunk before goes to host memory while this one arrives in the other buffer.
            if arrived is not None:
                self._copied(*arrived, is_out=True)
            self._finish(under_way, connection)
            moved()
            arrived = part, buffer
        if arrived is not None:
            self._copied(*arrived, is_out=True)

    def close(self) -> None:
        """End the process group, whatever is under way on it."""
        group, self._group, self._staging = self._group, None, None
        if group is not None:
            with contextlib.suppress(Exception):  # one that is broken may raise; nobody needs to know
                group.abort()

    def _parts(self, memory: memoryview) -> Iterator[tuple[int, memoryview]]:
        # Chunks are numbered over all messages, alike on both sides.
        for begin in range(0, len(memory), CHUNK_BYTES):
            yield self._chunks, memory[begin : begin + CHUNK_BYTES]
            self._chunks += 1

    def _buffer(self, at: int, nbytes: int) -> torch.Tensor:
        self._staging = self._staging or self._make_staging()
        return self._staging.buffer(at, nbytes)

    def _copied(self, part: memoryview, buffer: torch.Tensor, *, is_out: bool) -> None:
        assert self._staging is not None
        for start, end in within_locks(part):
            pair = as_tensor(part[start:end]), buffer[start:end]
            self._staging.copied(*(pair if is_out else reversed(pair)))

    def _connect(self, own: int) -> None:
        """Make the process group; both sides have said that they do so now, for it cannot be interrupted."""
        self._group = self._pairs.group(self._store(), own, self._timeout_s)

    def launch(self, call: str, other: int, buffer: torch.Tensor, tag: int) -> Any:
        """Begin to send, or to receive, one chunk.

        Args:
            call: "send" or "recv".
            other: The rank of the other side within the pair.
            buffer: On the device.
            tag: The number of the chunk.

        Returns:
            What `Pairs.finish` waits for.
        """
        assert self._staging is not None
        with self._staging.launching():
            return getattr(self._group, call)([buffer], other, tag)

    def _finish(self, work: Any, connection: socket.socket) -> None:
        def check() -> None:
            self._check()
            check_open(connection)

        self._pairs.finish(work, check)


def _hear(connection: socket.socket) -> None:
    """Wait until the other side is ready. Raises OSError."""
    if not connection.recv(len(_READY)):
        raise ConnectionError("its connection has closed")


class StagedTransport(TcpTransport):
    """A `ports.Transport` whose long messages go over process groups. See the module.

    Args:
        store: As of `TcpTransport`, like all that follow up to `address`.
        rank: This rank.
        world_size: Number of ranks.
        name: The same on all ranks, and used once.
        timeout_s: Longest wait for another rank.
        address: Of this rank's interface.
        backend: gloo or nccl.
        device: Where messages are staged: the CPU for gloo, this rank's GPU for NCCL.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        world_size: int,
        name: str,
        timeout_s: float,
        *,
        address: str = "127.0.0.1",
        backend: str = "gloo",
        device: torch.device | str = "cpu",
    ) -> None:
        self._pairs: Pairs = NcclPairs() if backend == "nccl" else GlooPairs(address)
        self._device, self._root, self._name = torch.device(device), store, name
        self.medium = f"process groups of {backend}, staged on {self._device}"
        super().__init__(store, rank, world_size, name, timeout_s, address=address)

    def lane(self, other: int, nbytes: int, *, is_send: bool) -> MessageLane:
        """As `TcpTransport.lane`."""
        if nbytes < LEAST_BYTES:
            return super().lane(other, nbytes, is_send=is_send)
        return self._lanes.get((other, BULK, is_send)) or self._bulk_lane(other, is_send=is_send)

    def _bulk_lane(self, other: int, *, is_send: bool) -> MessageLane:
        connections, root, device = self.connections, self._root, self._device
        assert isinstance(connections, Connections)
        way = (self.rank, other) if is_send else (other, self.rank)
        # Both sides are in the same renewal, whose number is in this name.
        place = f"{self._name}-bulk-{self.number}-{way[0]}-{way[1]}"
        # The store is cloned: making a group waits for keys, and would hold up all others on one connection.
        direction = BulkWay(
            self._pairs,
            lambda: PrefixStore(place, root.clone()),
            lambda: Staging(device),
            connections.check,
            self.timeout_s,
        )
        move = direction.send if is_send else direction.receive
        return self._lane(other, BULK, move, is_send=is_send, close=direction.close)


def of_training(
    store: Store, rank: int, world_size: int, name: str, timeout_s: float, *, address: str
) -> StagedTransport:
    """A transport with the backend of training, staged where that wants it.

    Args:
        store: As of `TcpTransport`.
        rank: This rank.
        world_size: Number of ranks.
        name: As of `TcpTransport`.
        timeout_s: As of `TcpTransport`.
        address: Of this rank's interface.
    """
    if "nccl" not in torch.distributed.get_backend():
        return StagedTransport(store, rank, world_size, name, timeout_s, address=address)
    device = torch.device("cuda", torch.cuda.current_device())
    return StagedTransport(store, rank, world_size, name, timeout_s, address=address, backend="nccl", device=device)


class _Alias:
    """Memory under an array interface that calls it writable: torch warns about other memory, even when it only reads.

    Keeps the memory exported, so that its owner cannot unmap it.
    """

    def __init__(self, data: Buffer) -> None:
        self._kept: np.ndarray = np.frombuffer(data, np.uint8)
        self.__array_interface__ = {**self._kept.__array_interface__, "data": (self._kept.ctypes.data, False)}


def as_tensor(data: Buffer) -> torch.Tensor:
    """A view of contiguous bytes, at least one."""
    return torch.from_numpy(np.asarray(_Alias(data)))
