"""Threads that may call CUDA."""

from __future__ import annotations

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
        run()

    return threading.Thread(target=on_device, name=name, daemon=True)
