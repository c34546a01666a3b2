"""Communicators of NCCL after a peer was lost: kernels that spin, and an abort that may wait for those of others."""

from __future__ import annotations

import threading
import time
from weakref import WeakSet

from megatron.pretrain.testing.async_device.device import AsyncDevice
from megatron.pretrain.testing.async_device.streams import QueuedWork

_LOOK_S = 0.005


class Communicator:
    """A process group of NCCL, as far as it can hang.

    Its collectives never end, as their peer is gone, until it is aborted. `abort` waits for the device, and so for
    kernels of other communicators that still spin (NVIDIA/nccl#1013).

    Args:
        device: On which it works.
        others: The communicators of the device, which this one adds itself to.
        destroyed: Gets the name of the thread that drops the last reference: torch's destructor joins threads there
            that may sleep for minutes.
    """

    def __init__(self, device: AsyncDevice, others: WeakSet[Communicator], destroyed: list[str]) -> None:
        self._device, self._others, self._destroyed = device, others, destroyed
        self._stream = device.Stream()
        self._kernels: list[QueuedWork] = []
        self.is_asked = self.is_aborted = False
        others.add(self)

    def __del__(self) -> None:
        self._destroyed.append(threading.current_thread().name)

    def collective(self) -> None:
        """Launch one; the current stream waits for it, as that of whoever waits for the work."""
        current = self._device.current_stream()
        self._stream.wait_stream(current)
        work = self._device.give(lambda: None, "collective", stream=self._stream)
        work.is_held = lambda: not self.is_asked
        self._kernels.append(work)
        current.wait_stream(self._stream)

    def abort(self) -> None:
        """Let its own kernels end, and return when none of any other communicator spins on the device."""
        self.is_asked = True
        while any(one.spins for one in self._others):
            time.sleep(_LOOK_S)
        self.is_aborted = True

    @property
    def spins(self) -> bool:
        """Whether a kernel of it waits for a peer."""
        return not self.is_asked and any(not work.done for work in self._kernels)
