"""Page-locked host memory: what a GPU can write to directly, beside its kernels.

To lock pages takes the driver 0.1 to 0.3 s for each GB, and it is done once. So segments are locked on a thread of its
own as soon as they are there, in pieces, since one call for hundreds of GB fails with some drivers. What is not locked
yet, or is refused, is copied through the driver's own buffers: slower, and the host waits for it.
"""

from __future__ import annotations

import logging
import mmap
import queue
import resource
import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import numpy as np
import torch

from .copy_engines import LOCK_BYTES

log = logging.getLogger(__name__)

_SETTLE_S = 60.0

_NO_MEMORY, _NOT_PERMITTED, _NOT_SUPPORTED = 2, 800, 801  # of cudaError


class PageLocks:
    """The page-locked pieces of segments, by their addresses; one for all copy engines of a process.

    `lock` may be called from any thread, the rest from the one that trains. A piece is forgotten when its mapping goes:
    another one at the same address has other pages.
    """

    def __init__(self) -> None:
        self._mutex = threading.Lock()
        self._locked: dict[int, int] = {}  # bytes by address
        self._watched: dict[int, weakref.finalize[..., Any]] = {}
        self._waiting: queue.SimpleQueue[memoryview | None] = queue.SimpleQueue()
        self._refused = self._stopped = False
        self._thread: threading.Thread | None = None
        self._end = weakref.finalize(self, _unlock, self._locked)
        self._end.atexit = False  # the process ends, and CUDA with it

    def begin(self, segments: Sequence[memoryview], device: int) -> None:
        """Lock segments on a thread, one piece after the other.

        Args:
            segments: Of the memory tier.
            device: The index of the GPU that copies to them.
        """
        for segment in segments:
            self._waiting.put(segment)
        if self._thread is None:
            self._stopped = False
            self._thread = threading.Thread(target=self._lock_all, args=(device,), name="page-lock", daemon=True)
            self._thread.start()

    def settle(self, timeout_s: float) -> None:
        """Wait until all of them are locked. Raises TimeoutError."""
        if self._thread is not None:
            self._waiting.put(None)
            self._thread.join(timeout_s)
            if self._thread.is_alive():
                raise TimeoutError(f"waited {timeout_s:g} s for pages to be locked")
            self._thread = None

    def _lock_all(self, device: int) -> None:
        with torch.cuda.device(device):
            while (segment := self._waiting.get()) is not None:
                for start in range(0, segment.nbytes, LOCK_BYTES):
                    if not self._stopped:
                        self.lock(segment, start)
                del segment  # while it waits for the next, this thread keeps no mapping alive

    def lock(self, segment: memoryview, offset: int) -> None:
        """Lock the piece of a segment that this offset lies in, unless it is; the caller waits for it.

        Args:
            segment: All of it: pieces are counted from its start.
            offset: In bytes.
        """
        start = offset - offset % LOCK_BYTES
        address = _address(segment) + start
        nbytes = min(LOCK_BYTES, segment.nbytes - start)
        # The thread that locks ahead and a copy may want one piece at once, and CUDA refuses to register it twice.
        with self._mutex:
            if self._refused or nbytes <= self._locked.get(address, 0):
                return
            cudart = torch.cuda.cudart()
            if address in self._locked:  # CUDA knows ranges by address: a longer one takes the place of the shorter
                cudart.cudaHostUnregister(address)
            code = int(cudart.cudaHostRegister(address, nbytes, 0))
            if code:
                self._refused = True
                _say_refused(code, nbytes)
                return
            self._locked[address] = nbytes
            self._watch(segment, address)

    def release(self) -> None:
        """Unlock everything, as some of it is about to be unmapped; copies that were launched end first.

        What was to be locked yet is not. What is copied to later is locked again.
        """
        # Before `settle`: the thread then passes over the pieces that it has not begun with.
        self._stopped = True
        self.settle(_SETTLE_S)
        if self._locked:
            torch.cuda.synchronize()
        with self._mutex:
            # Each of these speaks of what was locked until now: a piece that is locked again gets a new one.
            for watched in self._watched.values():
                watched.detach()
            self._watched.clear()
            _unlock(self._locked)

    def _watch(self, segment: memoryview, address: int) -> None:
        owner = _mapping_of(segment)
        if owner is not None and address not in self._watched:
            forget: Callable[[int], None] = partial(_forget, weakref.ref(self))
            self._watched[address] = weakref.finalize(owner, forget, address)
            self._watched[address].atexit = False

    def forget(self, address: int) -> None:
        """The mapping of a piece went away."""
        # No mutex: it is called wherever the last reference goes, perhaps by whoever holds it.
        self._watched.pop(address, None)
        if self._locked.pop(address, None) is not None:
            torch.cuda.cudart().cudaHostUnregister(address)


def _forget(locks: weakref.ref[PageLocks], address: int) -> None:
    if (found := locks()) is not None:
        found.forget(address)


def _unlock(locked: dict[int, int]) -> None:
    for address in [*locked]:
        torch.cuda.cudart().cudaHostUnregister(address)
    locked.clear()


def _address(segment: memoryview) -> int:
    return int(np.frombuffer(segment, np.uint8).ctypes.data)


def _mapping_of(segment: memoryview) -> mmap.mmap | None:
    """The mapping whose pages a segment has."""
    owner: Any = segment
    while isinstance(owner, memoryview | np.ndarray):
        owner = owner.obj if isinstance(owner, memoryview) else owner.base
    return owner if isinstance(owner, mmap.mmap) else None


def _say_refused(code: int, nbytes: int) -> None:
    # CUDA keeps the error, and the next launch of whatever kernel reports it: let that be a launch of ours.
    with suppress(RuntimeError):
        torch.ones(1, device="cuda")
    log.warning(
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
