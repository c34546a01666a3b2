"""Page-locked host memory: what a GPU can write to directly, beside its kernels.

To lock pages takes the driver 0.1 to 0.3 s for each GB, and it is done once. So segments are locked on a thread of its
own as soon as they are there, in pieces, since one call for hundreds of GB fails with some drivers. What is not locked
yet, or is refused, is copied through the driver's own buffers: slower, and the host waits for it.
"""

from __future__ import annotations

import logging
import resource
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import torch

from ..device import device_thread
from ..storage.system import LOCK_BYTES, address_of, mapping_of

log = logging.getLogger(__name__)

_NO_MEMORY, _NOT_PERMITTED, _NOT_SUPPORTED = 2, 800, 801  # of cudaError


class PageLocks:
    """The page-locked pieces of segments, by their addresses; one for all copy engines of a process (`LOCKS`).

    `lock` may be called from any thread, the rest from the one that trains. A piece is forgotten when its mapping goes:
    another one at the same address has other pages.
    """

    def __init__(self) -> None:
        self._mutex = threading.Lock()
        self._locked: dict[int, int] = {}  # bytes by address
        self._watched: dict[int, weakref.finalize[..., Any]] = {}
        self._waiting: deque[tuple[memoryview, int]] = deque()  # pieces: a segment, and where in it
        self._refused = 0  # CUDA's error
        self._thread: threading.Thread | None = None
        self._end = weakref.finalize(self, _unlock_all, self._locked)
        self._end.atexit = False  # the process ends, and CUDA with it

    def begin(self, segments: Sequence[memoryview]) -> None:
        """Lock what is not locked of segments on a thread, one piece after the other."""
        self._waiting.extend((segment, start) for segment in segments for start in range(0, segment.nbytes, LOCK_BYTES))
        # Each call has a thread of its own: one that was begun before may just have found nothing more to do.
        self._thread = device_thread(self._lock_waiting, "page-lock")
        self._thread.start()

    def settle(self, timeout_s: float) -> None:
        """Wait until all of them are locked. Raises TimeoutError."""
        if self._thread is not None:
            self._thread.join(timeout_s)
            if self._thread.is_alive():
                raise TimeoutError(f"waited {timeout_s:g} s for pages to be locked")
            with self._mutex:  # an earlier thread may still be at the last piece
                pass

    def _lock_waiting(self) -> None:
        with self._mutex:
            if self._refused == _NO_MEMORY:  # which may have been short for a moment
                self._refused = 0
        while self._lock_next():
            pass  # between two pieces this thread keeps no mapping alive

    def _lock_next(self) -> bool:
        with self._mutex:  # `release` takes away what waits: what it has unlocked must not be locked after that
            if not self._waiting:
                return False
            self._lock(*self._waiting.popleft())
        return True

    def reach(self, address: int) -> int:
        """How many bytes from this address on lie in one locked piece; a copy goes over no border of pieces."""
        # A copy, made at once: other threads lock more meanwhile.
        for start, nbytes in list(self._locked.items()):
            if start <= address < start + nbytes:
                return start + nbytes - address
        return 0

    def lock(self, segment: memoryview, offset: int) -> None:
        """Lock the piece of a segment that this offset lies in, unless it is; the caller waits for it.

        Args:
            segment: All of it: pieces are counted from its start.
            offset: In bytes.
        """
        start = offset - offset % LOCK_BYTES
        # Nearly all pieces are locked when they are copied to: without the mutex, which registering holds for long.
        if not self._refused and _bytes_at(segment, start) > self._locked.get(address_of(segment) + start, 0):
            with self._mutex:
                self._lock(segment, start)

    def _lock(self, segment: memoryview, start: int) -> None:
        address, nbytes = address_of(segment) + start, _bytes_at(segment, start)
        # The thread that locks ahead and a copy may want one piece at once, and CUDA refuses to register it twice.
        if self._refused or nbytes <= self._locked.get(address, 0):
            return
        cudart = torch.cuda.cudart()
        if address in self._locked:  # CUDA knows ranges by address: a longer one takes the place of the shorter
            cudart.cudaHostUnregister(address)
        code = int(cudart.cudaHostRegister(address, nbytes, 0))
        if code:
            self._refused = code
            _say_refused(code, nbytes)
            return
        self._locked[address] = nbytes
        self._watch(segment, address)

    def release(self, segments: Sequence[memoryview] | None = None) -> None:
        """Unlock segments that are about to be unmapped; copies that were launched end first.

        Args:
            segments: Which; what was to be locked of them yet is not. None: all.
        """
        ranges = None if segments is None else [(address_of(one), address_of(one) + one.nbytes) for one in segments]

        def goes(address: int) -> bool:
            return ranges is None or any(start <= address < end for start, end in ranges)

        with self._mutex:
            stays = [(segment, start) for segment, start in self._waiting if not goes(address_of(segment))]
            self._waiting.clear()
            self._waiting.extend(stays)
            going = [address for address in self._locked if goes(address)]
        if going:
            torch.cuda.synchronize()
        with self._mutex:
            for address in going:
                # It speaks of what was locked until now: a piece that is locked again gets a new one.
                if (watched := self._watched.pop(address, None)) is not None:
                    watched.detach()
            _unlock(self._locked, going)

    def _watch(self, segment: memoryview, address: int) -> None:
        owner = mapping_of(segment)
        if owner is not None and address not in self._watched:
            forget: Callable[[int], None] = partial(_forget, weakref.ref(self))
            self._watched[address] = weakref.finalize(owner, forget, address)
            self._watched[address].atexit = False

    def forget(self, address: int) -> None:
        """The mapping of a piece went away."""
        # No mutex: it is called wherever the last reference goes, perhaps by whoever holds it.
        self._watched.pop(address, None)
        _unlock(self._locked, [address])


def _forget(locks: weakref.ref[PageLocks], address: int) -> None:
    if (found := locks()) is not None:
        found.forget(address)


def _unlock(locked: dict[int, int], addresses: Sequence[int]) -> None:
    for address in addresses:
        # A forked child, such as a reader of data, has the mappings, but no CUDA: the locks are its parent's.
        if locked.pop(address, None) is not None and torch.cuda.is_initialized():
            torch.cuda.cudart().cudaHostUnregister(address)


def _unlock_all(locked: dict[int, int]) -> None:
    _unlock(locked, [*locked])


def _bytes_at(segment: memoryview, start: int) -> int:
    return min(LOCK_BYTES, segment.nbytes - start)


def _say_refused(code: int, nbytes: int) -> None:
    # CUDA keeps the error, and the next launch of whatever kernel reports it: let that be a launch of ours.
    with suppress(RuntimeError):
        torch.ones(1, device="cuda")
    log.error(
        "cannot page-lock %d bytes of host memory (CUDA error %d): copies are slower and stall training; %s",
        nbytes,
        code,
        _what_to_do(code),
    )


def _what_to_do(code: int) -> str:
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if code == _NO_MEMORY and limit != resource.RLIM_INFINITY:
        return (
            f"locked memory is limited to {limit} bytes: raise it (ulimit -l unlimited, LimitMEMLOCK=infinity of the"
            " service, --ulimit memlock=-1 of Docker)"
        )
    if code == _NO_MEMORY:
        return "the node has no memory left to lock: lower --moe-ckpt-memory-limit"
    if code in (_NOT_SUPPORTED, _NOT_PERMITTED):
        return "the driver does not lock pages of this file system: give a --moe-ckpt-memory-dir on a tmpfs"
    return "look the error up in driver_types.h of CUDA, and see dmesg"


LOCKS = PageLocks()
"""Of this process, over all its sessions: one that begins in the place of another finds its segments locked."""
