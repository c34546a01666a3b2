"""Nothing outlives its job: a rank ends with its launcher, and processes that it has started end with it.

The system is asked for the end of one process by another (`pidfd_open`). It would also send a signal by itself
(PR_SET_PDEATHSIG), but does so when the *thread* ends that made the process; that is used for forks of a main thread.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import threading
from functools import cache

LAUNCHED = "TORCHELASTIC_RUN_ID"
"""Environment variable of processes that torchrun has started, or a launcher made of it."""

_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None)


@cache
def end_with_launcher() -> None:
    """From here on this process ends at once when the launcher that started it does, if one did; so do its forks."""
    if LAUNCHED in os.environ:
        end_with_parent(f"rank {os.environ.get('RANK', '?')}: the launcher of this rank has ended, so it ends too")
        _end_forks_with_this_process()


def end_with_parent(last_words: str = "") -> None:
    """From here on this process is killed when the one that started it ends, and says so on standard error."""
    parent = os.getppid()
    with contextlib.suppress(OSError):  # it has ended already, or the system is too old
        life = os.pidfd_open(parent)
        threading.Thread(target=_watch, args=(parent, life, last_words), name="moe-ckpt-lifeline", daemon=True).start()


def _watch(parent: int, life: int, last_words: str) -> None:
    end = select.poll()
    end.register(life, select.POLLIN)
    if os.getppid() == parent:
        end.poll()
    if last_words:
        with contextlib.suppress(OSError):
            os.write(2, f"{last_words}\n".encode())
    os.kill(os.getpid(), signal.SIGKILL)


def _end_forks_with_this_process() -> None:
    by_main = False

    def note() -> None:
        nonlocal by_main
        by_main = threading.current_thread() is threading.main_thread()

    def end_with_main_thread() -> None:
        if by_main:
            _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)

    os.register_at_fork(before=note, after_in_child=end_with_main_thread)
