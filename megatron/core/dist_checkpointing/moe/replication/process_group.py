"""Bytes and small numbers between ranks over gloo, apart from the process groups of training.

c10d's own groups cannot be used: a group whose peer died is broken for good, and collectives of training must never
wait for replication. So this talks to `ProcessGroupGloo` itself. After any failure all connections are dropped at once,
which other ranks notice as closed sockets, and `renew` builds a new gloo group under a number on which all ranks have
agreed (`Meeting`), so that no message of the old connections can be taken for one of the new.
"""

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

if TYPE_CHECKING:
    from typing_extensions import Buffer

    from ..ports import Json

_FIRST_PAUSE_S = 0.001
_LONGEST_PAUSE_S = 0.1

CHUNK_BYTES = 64 << 20
"""Longer messages travel in chunks of this size, each of which must arrive within the timeout."""
_CONNECT_AT_LEAST_S = 1.0
_MAX_TAG = 2**31 - 1


class Meeting:
    """Numbers the connections of a job: all ranks that `meet` leave with the same number, larger than before.

    A rank asks for the number after its last one and marks itself there. Whoever waits at a number and sees that the
    next one was asked for goes on to it, so that ranks which notice a failure at different times, or gave up once
    already, come together at the largest. The store is polled, never waited on: a wait would keep other users of the
    same connection from it.
    """

    def __init__(self, store: Store, rank: int, world_size: int) -> None:
        self._store, self._rank, self._world_size = store, rank, world_size
        self._number = 0

    def meet(self, timeout_s: float) -> int:
        """Wait until all ranks are here. Raises PeerLost naming those that did not come; they may be met later."""
        deadline, pause_s = time.monotonic() + timeout_s, _FIRST_PAUSE_S
        self._enter()
        while True:
            # Asked for first: where the next number is wanted, somebody gave up this one, however many are here.
            if self._store.check([f"{self._number + 1}/wanted"]):
                self._leave()
                self._enter()
            elif self._store.check([f"{self._number}/all"]):
                return self._number
            elif time.monotonic() > deadline:
                missing = self._missing()
                self._leave()
                raise PeerLost(
                    f"rank {self._rank} waited {timeout_s:g} s for all {self._world_size} ranks to connect anew:"
                    f" {missing}"
                )
            else:
                time.sleep(pause_s)
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    def _enter(self) -> None:
        self._number += 1
        self._store.set(f"{self._number}/wanted", "")
        self._store.set(self._mark(self._rank), "")
        # Counted by one atomic call, so that exactly one rank, the last, finds all there: who left is counted off.
        if self._store.add(f"{self._number}/count", 1) == self._world_size:
            self._store.set(f"{self._number}/all", "")

    def _leave(self) -> None:
        self._store.add(f"{self._number}/count", -1)

    def _mark(self, rank: int) -> str:
        return f"{self._number}/here/{rank}"

    def _missing(self) -> str:
        """Who never came to this number; marks stay when their ranks leave."""
        ranks = [str(rank) for rank in range(self._world_size) if not self._store.check([self._mark(rank)])]
        if not ranks:
            return "the last ones came when others had given up; try again"
        return f"rank{'s' * (len(ranks) > 1)} {', '.join(ranks)} did not come"


class _Transfer:
    """One message, in chunks. It alone keeps the buffer alive: gloo has no more than its address.

    Whatever goes wrong is raised by `wait`, whose frame refers to no buffer: a kept traceback pins none.
    """

    def __init__(self, transport: ProcessGroupTransport, what: str, is_void: bool) -> None:
        self._transport, self._what, self._is_void = transport, what, is_void
        self._works: deque[Any] = deque()
        self._tensors: deque[torch.Tensor] = deque()
        self._error: RuntimeError | None = None

    def begin(
        self, post: Callable[[list[torch.Tensor], int, int], Any], memory: torch.Tensor, other: int, tags: Iterator[int]
    ) -> None:
        """Hand all chunks of a message to gloo with `post`, ProcessGroupGloo.send or .recv."""
        # All are posted at once, so that the connection never idles between two. An empty message has none.
        self._tensors.extend(memory.split(CHUNK_BYTES) if memory.numel() else ())
        try:
            for tensor in self._tensors:
                self._works.append(post([tensor], other, next(tags) & _MAX_TAG))
        except RuntimeError as error:
            self._error = error.with_traceback(None)

    def wait(self) -> None:
        """As `ports.Transfer.wait`; the timeout is that of a chunk."""
        if self._is_void:
            self._transport.refuse(self._what)
        try:
            while self._works:
                # Dropped only once it is through: a work that is freed earlier cancels its message.
                self._works[0].wait(self._transport.timeout)
                self._works.popleft()
                self._tensors.popleft()
            if self._error is not None:
                raise self._error
        except RuntimeError as error:  # gloo's only error: a timeout, or a closed connection
            raise self._transport.broken(self._what, error) from None

    def void(self) -> None:
        """Give up what is under way and let go of the buffer: gloo forgets its address before it is freed."""
        self._is_void = self._is_void or bool(self._tensors)  # what was through before stays so
        # This order: a work refers to the address of its tensor's memory until it is destroyed.
        self._works.clear()
        self._tensors.clear()


class ProcessGroupTransport:
    """A `ports.Transport` over gloo with connections, threads and tags of its own.

    It uses no collective of other groups and can be made, used and renewed on any thread while others train. store: a
    c10d store that all ranks reach; the transport talks to it over a connection of its own. name: the same on all
    ranks, different for each transport and for each start of the job (a torchrun restart keeps the store). timeout_s:
    longest wait for another rank, twice that for it to come to a renewal; in longer messages, for each CHUNK_BYTES.
    It must be longer than ranks are ever apart. interface: of the network; empty: the one of the host's name. Memory is
    that of the host; read-only memory can be sent.

    Making one is a renewal. Raises PeerLost when not all ranks come in time.
    """

    def __init__(
        self, store: Store, rank: int, world_size: int, name: str, timeout_s: float, *, interface: str = ""
    ) -> None:
        self.rank, self.world_size, self._timeout_s = rank, world_size, timeout_s
        self._interface = interface
        self.timeout = timedelta(seconds=timeout_s)
        # A clone has a connection of its own: on a shared one each call waits for those of other threads.
        own = store.clone()
        own.set_timeout(self.timeout)
        self._store = PrefixStore(name, own)
        self._meeting = Meeting(self._store, rank, world_size)
        self._group: ProcessGroupGloo | None = None
        self._why = "the transport was closed"
        # Weak: a transfer that its user drops must let go of the buffer, not live on until the next renewal.
        self._under_way: weakref.WeakSet[_Transfer] = weakref.WeakSet()
        self.renew()

    def send(self, to: int, data: Buffer) -> _Transfer:
        """As `ports.Transport.send`. Dropping the transfer without `wait` cancels it and breaks the connection."""
        return self._transfer("send {} bytes to rank {}", to, data, is_send=True)

    def receive(self, source: int, into: memoryview) -> _Transfer:
        """As `ports.Transport.receive`. Dropping the transfer without `wait` cancels it and breaks the connection."""
        if into.readonly:
            raise UsageError(f"rank {self.rank} cannot receive from rank {source} into read-only memory")
        return self._transfer("receive {} bytes from rank {}", source, into, is_send=False)

    def least(self, values: Sequence[int]) -> tuple[int, ...]:
        return self._reduced(values, ReduceOp.MIN, "find the least")

    def total(self, values: Sequence[int]) -> tuple[int, ...]:
        return self._reduced(values, ReduceOp.SUM, "add up")

    def gather(self, value: Json) -> list[Json]:
        """As `ports.Transport.gather`. Raises UsageError for what strict JSON cannot say."""
        try:
            data = json.dumps(value, allow_nan=False, separators=(",", ":")).encode()
        except (TypeError, ValueError) as error:
            raise UsageError(f"a value to gather is no JSON value: {error}") from error
        # allgather takes equal sizes only: first the sizes, then all values padded to the longest.
        sizes = [int(size) for size in self._gathered(torch.tensor([len(data)]), "gather sizes")]
        padded = torch.zeros(max(sizes), dtype=torch.uint8)
        padded[: len(data)] = _as_tensor(data)
        rows = self._gathered(padded, "gather values")
        return [json.loads(row.numpy()[:size].tobytes()) for row, size in zip(rows, sizes, strict=True)]

    def renew(self) -> None:
        """As `ports.Transport.renew`; all that was under way is void.

        Waits up to twice the timeout and a second: another rank may notice the failure only at its own timeout.
        """
        # First of all: a rank that still waits for this one must see the old connection close, not its own timeout.
        self._drop("the transport is being renewed")
        patience_s = 2 * self._timeout_s
        deadline = time.monotonic() + patience_s
        try:
            number = self._meeting.meet(patience_s)
            # All are there by now, perhaps at the last moment: what is left must still suffice to connect.
            left_s = max(deadline - time.monotonic(), _CONNECT_AT_LEAST_S)
            # A prefix of its own: gloo would find the addresses of the old connections under the old one.
            place = PrefixStore(str(number), self._store)
            group = ProcessGroupGloo(place, self.rank, self.world_size, self._options(left_s))
        except PeerLost as error:
            self._drop(str(error))
            raise
        except RuntimeError as error:
            raise self.broken(f"connect to all {self.world_size} ranks", error) from None
        # Tags count from 0 again on all ranks, for all have just connected.
        ranks = range(self.world_size)
        self._group, self._sent, self._received = group, [count() for _ in ranks], [count() for _ in ranks]

    def close(self) -> None:
        """As `ports.Transport.close`; lets go of all buffers. Can be called again."""
        self._drop("the transport was closed")

    def refuse(self, what: str) -> NoReturn:
        """For transfers too: nothing can be done until the next renewal."""
        raise PeerLost(f"rank {self.rank} cannot {what} before connections are renewed: {self._why}")

    def broken(self, what: str, error: RuntimeError) -> PeerLost:
        """The error to raise after gloo failed; all transfers are void and the other ranks see closed connections."""
        sentence = f"rank {self.rank} failed to {what} (timeout {self._timeout_s:g} s): {_reason(error)}"
        self._drop(sentence)
        return PeerLost(sentence)

    def _options(self, timeout_s: float) -> Any:
        options = ProcessGroupGloo._Options()
        options._timeout = timedelta(seconds=timeout_s)
        device = ProcessGroupGloo.create_device(interface=self._interface) if self._interface else None
        options._devices = [device or ProcessGroupGloo.create_default_device()]
        return options

    def _drop(self, why: str) -> None:
        # The last reference to the group goes: gloo closes its sockets, which is how other ranks notice at once.
        self._why, self._group = why, None
        for transfer in list(self._under_way):  # a copy: others may be dropped while this goes on
            transfer.void()
        self._under_way.clear()

    def _transfer(self, what: str, other: int, data: Buffer, *, is_send: bool) -> _Transfer:
        """A message that has begun; void from the start when connections are to be renewed first."""
        memory = _as_tensor(data)
        what = what.format(memory.numel(), other)
        if other == self.rank or not 0 <= other < self.world_size:
            raise UsageError(f"rank {self.rank} cannot {what} in a world of {self.world_size} ranks")
        transfer = _Transfer(self, what, is_void=self._group is None)
        if self._group is not None:
            self._under_way.add(transfer)
            # gloo matches messages by tag: both sides count the chunks of each direction, so that several messages may
            # be under way between two ranks.
            post, tags = (self._group.send, self._sent) if is_send else (self._group.recv, self._received)
            transfer.begin(post, memory, other, tags[other])
        return transfer

    def _connected(self, what: str) -> ProcessGroupGloo:
        if self._group is None:
            self.refuse(what)
        return self._group

    def _reduced(self, values: Sequence[int], operation: Any, what: str) -> tuple[int, ...]:
        what = f"{what} of {len(values)} numbers with all {self.world_size} ranks"
        group = self._connected(what)
        # The connection is asked for even with no values, so that a call between failure and renewal never succeeds.
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
        what = f"{what} with all {self.world_size} ranks"
        group, options = self._connected(what), AllgatherOptions()
        options.timeout = self.timeout
        rows = list(torch.empty(self.world_size, own.numel(), dtype=own.dtype))
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
