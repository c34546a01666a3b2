"""Threads that may call CUDA."""

from __future__ import annotations

import contextlib
import ctypes
import threading
from collections.abc import Callable

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
    if torch.version.cuda is None:
        return
    with contextlib.suppress(OSError):  # linked into torch
        runtime = ctypes.CDLL(f"libcudart.so.{torch.version.cuda.partition('.')[0]}")  # the one that torch has loaded
        runtime.cudaThreadExchangeStreamCaptureMode(ctypes.byref(ctypes.c_int(_THREAD_LOCAL)))
