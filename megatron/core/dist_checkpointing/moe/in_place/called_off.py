"""Work that waits for other ranks inside of torch, and is left there once training begins anew."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable

import torch

from ..errors import PeerLost
from ..seats.seat import Seat

POLL_S = 0.02
GRACE_S = 1.0
"""How long the work may take to fail by itself once connections are closed."""


class CalledOff(PeerLost):
    """Training begins anew while this rank waited for others."""


def unless_called_off(work: Callable[[], object], seat: Seat) -> None:
    """Do work that waits for other ranks: on a thread of its own where this process keeps its seat, else right here.

    A rank that dies while all connect leaves the others in calls of torch and gloo (2.13) that wait for it to dial;
    there is no connection yet whose end would wake them, so they last for as long as the timeout of collectives. The
    launcher knows better: `seat` is called off. Then the thread is left behind, with an exception that strikes it
    should it ever come back to Python.

    Raises CalledOff, and what the work raises.
    """
    if not seat.keeps:
        work()
        return
    device = torch.cuda.current_device() if torch.cuda.is_initialized() else None
    errors: list[BaseException] = []

    def run() -> None:
        try:
            if device is not None:
                torch.cuda.set_device(device)
            work()
        except BaseException as error:  # raised by whoever waits for it
            errors.append(error)

    thread = threading.Thread(target=run, name="moe-ckpt-connect", daemon=True)
    thread.start()
    while thread.is_alive() and not seat.is_called_off:
        thread.join(POLL_S)
    thread.join(GRACE_S)
    if errors:
        raise errors[0]
    if thread.is_alive():
        _raise_in(thread, CalledOff)
        raise CalledOff("training begins anew while this rank connected to others")


def _raise_in(thread: threading.Thread, kind: type[BaseException]) -> None:
    """Have this raised in another thread as soon as it runs Python again."""
    assert thread.ident is not None
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), ctypes.py_object(kind))
