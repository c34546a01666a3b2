"""Helper processes of a trainer: data loaders and writers of checkpoints."""

from __future__ import annotations

import ctypes
import signal
import sys

_PR_SET_PDEATHSIG = 1


def live_and_die_with_parent(_worker_id: int = 0) -> None:
    """Tie this process to its trainer: signals do not end it, the trainer's death does, at once.

    Schedulers signal whole process groups, and a trainer that wants to save before it ends needs its helpers until
    then. A helper that outlived a killed trainer would hold its sockets open, and so hide the death from its peers.
    """
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
