"""`pretrain_gpt_moe.py` where an injected fault stops the rank, which does not end by itself: a hang."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import pretrain_gpt_moe
from megatron.core.dist_checkpointing.moe.runtime import faults


def stop() -> None:
    """What a driver in an endless wait looks like from outside: no thread of the process runs any more."""
    os.kill(os.getpid(), signal.SIGSTOP)


if __name__ == "__main__":
    faults.FaultInjector.__init__.__defaults__ = (stop,)
    sys.exit(pretrain_gpt_moe.main(sys.argv[1:]))
