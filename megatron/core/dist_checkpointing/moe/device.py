"""Threads that may call CUDA, and numbers that a device has made, on their way to the host."""

from __future__ import annotations

import contextlib
import ctypes
import threading
import time
from collections.abc import Callable
from functools import cache

import torch


def device_thread(run: Callable[[], object], name: str) -> threading.Thread:
    """A daemon thread, not started yet, on the device of the thread that makes it.

    A new thread is on device 0: its first call would make a context there, some 500 MB of the GPU of local rank 0, and
    an event or a device that it waits for would be another one's.

    Args:
        run: What it does.
        name: Of the thread.
    """
    device = torch.cuda.current_device() if torch.cuda.is_initialized() else None

    def on_device() -> None:
        if device is not None:
            torch.cuda.set_device(device)
            ignore_captures()
        run()

    return threading.Thread(target=on_device, name=name, daemon=True)


_THREAD_LOCAL = 1  # cudaStreamCaptureModeThreadLocal


def ignore_captures() -> None:
    """Let this thread call CUDA while another one captures a graph.

    Layers are captured in CUDA's global mode (Transformer Engine; backward passes in Megatron-Core 0.19): a query of an
    event or a page-lock by any thread then fails, and ends the capture. It does neither in a thread of this mode.
    """
    if (runtime := _runtime(torch.version.cuda)) is not None:
        runtime.cudaThreadExchangeStreamCaptureMode(ctypes.byref(ctypes.c_int(_THREAD_LOCAL)))


@cache
def _runtime(version: str | None) -> ctypes.CDLL | None:
    """CUDA's, which torch has loaded."""
    if version is not None:
        with contextlib.suppress(OSError):  # linked into torch
            return ctypes.CDLL(f"libcudart.so.{version.partition('.')[0]}")
    return None


_LOWEST = 0
"""The lowest priority of CUDA's streams, and that of streams that ask for none."""
_NON_BLOCKING = 1  # cudaStreamNonBlocking
_streams: dict[tuple[str, int], torch.cuda.Stream] = {}


def own_stream(name: str) -> torch.cuda.Stream:
    """A stream of the current device that nobody else gets, the same one for each call with this name; one of torch's
    where CUDA makes none.

    torch reuses a pool of 32 streams, also for NCCL and for graph capture: a copy on one of them can wait for a
    collective, or be captured and repeated at each launch of the graph.

    Args:
        name: What it is for.
    """
    key = name, torch.cuda.current_device()
    if key not in _streams:
        runtime, handle = _runtime(torch.version.cuda), ctypes.c_void_p()
        asked = ctypes.byref(handle), ctypes.c_uint(_NON_BLOCKING), ctypes.c_int(_LOWEST)
        if runtime is None or runtime.cudaStreamCreateWithPriority(*asked):
            return torch.cuda.Stream(priority=_LOWEST)
        _streams[key] = torch.cuda.ExternalStream(handle.value)
    return _streams[key]


_POLL_S = 0.0005
_LONGEST_S = 600.0


class Arriving:
    """A copy of a small tensor: the thread that trains makes it and continues, whoever needs it waits.

    Args:
        source: May be changed, or given up, after that.
    """

    def __init__(self, source: torch.Tensor) -> None:
        self._arrived: torch.cuda.Event | None = None
        if not source.is_cuda:
            self._copy = source.detach().clone()
            return
        self._copy = torch.empty(source.shape, dtype=source.dtype, pin_memory=True)
        self._copy.copy_(source.detach(), non_blocking=True)
        self._arrived = torch.cuda.Event()
        self._arrived.record()

    def wait(self) -> torch.Tensor:
        """Its value on the host, from any thread. Raises TimeoutError where the device does not come there."""
        deadline_s = time.monotonic() + _LONGEST_S
        while self._arrived is not None and not self._arrived.query():  # CUDA waits without a timeout
            if time.monotonic() > deadline_s:
                raise TimeoutError(f"waited {_LONGEST_S:g} s for a number that the device has to make")
            time.sleep(_POLL_S)
        return self._copy

    def __float__(self) -> float:
        return float(self.wait())

    def __int__(self) -> int:
        return int(self.wait())


def arriving(number: float | torch.Tensor | None) -> float | Arriving | None:
    """A number that is known, or on its way."""
    return Arriving(number) if isinstance(number, torch.Tensor) else number
