"""Bytes and small numbers between ranks over gloo, apart from the process groups of training."""

from __future__ import annotations

import json
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from itertools import count
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
import torch
from torch.distributed import PrefixStore, ProcessGroupGloo, ReduceOp, Store
from torch.distributed.distributed_c10d import AllgatherOptions, AllreduceOptions

from ..errors import UsageError
from ..ports import PeerLost
from .meeting import Meeting

if TYPE_CHECKING:
    from typing_extensions import Buffer

    from ..ports import Json

PIECE_BYTES = 64 << 20
"""Longer messages travel in pieces of this size, each of which must arrive within the timeout."""

_CONNECT_AT_LEAST_S = 1.0
_MAX_TAG = 2**31 - 1


class _Transfer:
    """One message, in pieces. It alone keeps the buffer alive: gloo has no more than its address.

    Whatever goes wrong is raised by `wait`, whose frame refers to no buffer: a kept traceback pins none.
    """

    def __init__(self, transport: ProcessGroupTransport, what: str, is_void: bool) -> None:
        self._transport, self._what, self._is_void = transport, what, is_void
        self._works: deque[Any] = deque()
        self._tensors: deque[torch.Tensor] = deque()
        self._error: RuntimeError | None = None

    def begin(self, post: Callable[[list[torch.Tensor], int, int], Any], other: int, tags: Iterator[int]) -> None:
        """Hand all pieces to gloo with `post`, ProcessGroupGloo.send or .recv."""
        try:
            for tensor in self._tensors:
                self._works.append(post([tensor], other, next(tags) & _MAX_TAG))
        except RuntimeError as error:
            self._error = error.with_traceback(None)

    def take(self, memory: torch.Tensor) -> None:
        """Cut the message into pieces."""
        self._tensors.extend(memory.split(PIECE_BYTES) if memory.numel() else ())

    def wait(self) -> None:
        """As `ports.Transfer.wait`; the timeout is that of a piece."""
        if self._is_void:
            self._transport.refuse(self._what)
        try:
            while self._works:
                self._works[0].wait(self._transport.timeout)
                self._works.popleft()
                self._tensors.popleft()
            if self._error is not None:
                raise self._error
        except RuntimeError as error:
            raise self._transport.broken(self._what, error) from None

    def void(self) -> None:
        """Give up what is under way and let go of the buffer: gloo forgets its address before it is freed."""
        self._is_void = self._is_void or bool(self._tensors)
        self._works.clear()
        self._tensors.clear()


class ProcessGroupTransport:
    """A `ports.Transport` over gloo with connections, threads and tags of its own.

    It uses no collective of other groups and can be made, used and renewed on any thread while others train. store: a
    c10d store that all ranks reach; the transport talks to it over a connection of its own. name: the same on all
    ranks, different for each transport and for each start of the job (a torchrun restart keeps the store). timeout_s:
    longest wait for another rank, twice that for it to come to a renewal; in longer messages, for each PIECE_BYTES.
    It must be longer than ranks are ever apart. Memory is that of the host; read-only memory can be sent.

    Making one is a renewal. Raises PeerLost when not all ranks come in time.
    """

    def __init__(self, store: Store, rank: int, world_size: int, name: str, timeout_s: float) -> None:
        self._rank, self._world_size, self._timeout_s = rank, world_size, timeout_s
        self.timeout = timedelta(seconds=timeout_s)
        own = store.clone()
        own.set_timeout(self.timeout)
        self._store = PrefixStore(name, own)
        self._meeting = Meeting(self._store, rank, world_size)
        self._group: ProcessGroupGloo | None = None
        self._why = "the transport was closed"
        self._under_way: weakref.WeakSet[_Transfer] = weakref.WeakSet()
        self.renew()

    @property
    def rank(self) -> int:
        """As `ports.Transport.rank`."""
        return self._rank

    @property
    def world_size(self) -> int:
        """As `ports.Transport.world_size`."""
        return self._world_size

    def send(self, to: int, data: Buffer) -> _Transfer:
        """As `ports.Transport.send`. Dropping the transfer without `wait` cancels it and breaks the connection."""
        transfer = self._new_transfer("send {} bytes to rank {}", to, data)
        if self._group is not None:
            transfer.begin(self._group.send, to, self._sent[to])
        return transfer

    def receive(self, source: int, into: memoryview) -> _Transfer:
        """As `ports.Transport.receive`. Dropping the transfer without `wait` cancels it and breaks the connection."""
        if into.readonly:
            raise UsageError(f"rank {self._rank} cannot receive from rank {source} into read-only memory")
        transfer = self._new_transfer("receive {} bytes from rank {}", source, into)
        if self._group is not None:
            transfer.begin(self._group.recv, source, self._received[source])
        return transfer

    def least(self, values: Sequence[int]) -> tuple[int, ...]:
        """As `ports.Transport.least`."""
        return self._reduced(values, ReduceOp.MIN, "find the least")

    def total(self, values: Sequence[int]) -> tuple[int, ...]:
        """As `ports.Transport.total`."""
        return self._reduced(values, ReduceOp.SUM, "add up")

    def gather(self, value: Json) -> list[Json]:
        """As `ports.Transport.gather`. Raises UsageError for what strict JSON cannot say."""
        try:
            data = json.dumps(value, allow_nan=False, separators=(",", ":")).encode()
        except (TypeError, ValueError) as error:
            raise UsageError(f"a value to gather is no JSON value: {error}") from error
        sizes = [int(size) for size in self._gathered(torch.tensor([len(data)]), "gather sizes")]
        padded = torch.zeros(max(sizes), dtype=torch.uint8)
        padded[: len(data)] = _as_tensor(data)
        rows = self._gathered(padded, "gather values")
        return [json.loads(row.numpy()[:size].tobytes()) for row, size in zip(rows, sizes, strict=True)]

    def renew(self) -> None:
        """As `ports.Transport.renew`; all that was under way is void.

        Waits up to twice the timeout and a second: another rank may notice the failure only at its own timeout.
        """
        self._drop("the transport is being renewed")
        patience_s = 2 * self._timeout_s
        deadline = time.monotonic() + patience_s
        try:
            number = self._meeting.meet(patience_s)
            left_s = max(deadline - time.monotonic(), _CONNECT_AT_LEAST_S)
            place = PrefixStore(str(number), self._store)
            group = ProcessGroupGloo(place, self._rank, self._world_size, timedelta(seconds=left_s))
        except PeerLost as error:
            self._drop(str(error))
            raise
        except RuntimeError as error:
            raise self.broken(f"connect to all {self._world_size} ranks", error) from None
        ranks = range(self._world_size)
        self._group, self._sent, self._received = group, [count() for _ in ranks], [count() for _ in ranks]

    def close(self) -> None:
        """As `ports.Transport.close`; lets go of all buffers. Can be called again."""
        self._drop("the transport was closed")

    def refuse(self, what: str) -> NoReturn:
        """For transfers too: nothing can be done until the next renewal."""
        raise PeerLost(f"rank {self._rank} cannot {what} before connections are renewed: {self._why}")

    def broken(self, what: str, error: RuntimeError) -> PeerLost:
        """The error to raise after gloo failed; all transfers are void and the other ranks see closed connections."""
        sentence = f"rank {self._rank} failed to {what} (timeout {self._timeout_s:g} s): {_reason(error)}"
        self._drop(sentence)
        return PeerLost(sentence)

    def _drop(self, why: str) -> None:
        self._why, self._group = why, None
        for transfer in list(self._under_way):
            transfer.void()
        self._under_way.clear()

    def _new_transfer(self, what: str, other: int, data: Buffer) -> _Transfer:
        """A message that has not begun; void from the start when connections are to be renewed first."""
        memory = _as_tensor(data)
        what = what.format(memory.numel(), other)
        if other == self._rank or not 0 <= other < self._world_size:
            raise UsageError(f"rank {self._rank} cannot {what} in a world of {self._world_size} ranks")
        transfer = _Transfer(self, what, is_void=self._group is None)
        if self._group is not None:
            transfer.take(memory)
            self._under_way.add(transfer)
        return transfer

    def _connected(self, what: str) -> ProcessGroupGloo:
        if self._group is None:
            self.refuse(what)
        return self._group

    def _reduced(self, values: Sequence[int], operation: Any, what: str) -> tuple[int, ...]:
        what = f"{what} of {len(values)} numbers with all {self._world_size} ranks"
        group = self._connected(what)
        numbers, options = torch.tensor(values, dtype=torch.int64), AllreduceOptions()
        options.reduceOp, options.timeout = operation, self.timeout
        if not values:
            return ()
        try:
            group.allreduce([numbers], options).wait()
        except RuntimeError as error:
            raise self.broken(what, error) from None
        return tuple(numbers.tolist())

    def _gathered(self, own: torch.Tensor, what: str) -> list[torch.Tensor]:
        what = f"{what} with all {self._world_size} ranks"
        group, options = self._connected(what), AllgatherOptions()
        options.timeout = self.timeout
        rows = list(torch.empty(self._world_size, own.numel(), dtype=own.dtype))
        try:
            group.allgather([rows], [own], options).wait()
        except RuntimeError as error:
            raise self.broken(what, error) from None
        return rows


class _Alias:
    """Memory under an array interface that calls it writable: torch warns about other memory, even when it only reads.

    Keeps the memory exported, so that its owner cannot unmap it.
    """

    def __init__(self, data: Buffer) -> None:
        self._kept = np.frombuffer(data, np.uint8)
        self.__array_interface__ = {**self._kept.__array_interface__, "data": (self._kept.ctypes.data, False)}


def _as_tensor(data: Buffer) -> torch.Tensor:
    """A view of contiguous bytes. Raises UsageError for others."""
    view = memoryview(data)
    if not view.c_contiguous:
        raise UsageError(f"a message of {view.nbytes} bytes is not contiguous")
    return torch.from_numpy(np.asarray(_Alias(view))) if view.nbytes else torch.empty(0, dtype=torch.uint8)


def _reason(error: RuntimeError) -> str:
    """What gloo says, without its source file and its advice."""
    text = " ".join(str(error).split()).partition(". This is typically")[0]
    return text.partition("] ")[2] if text.startswith("[/") else text
