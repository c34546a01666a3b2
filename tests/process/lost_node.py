"""`pretrain_gpt_moe.py` where an injected fault takes the whole node along: agent, ranks, and what is in its memory."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import pretrain_gpt_moe
from megatron.core.dist_checkpointing.moe.runtime import faults


def lose_node() -> None:
    """What a power cut does."""
    agent, me = os.getppid(), os.getpid()
    children = Path(f"/proc/{agent}/task/{agent}/children").read_text().split()
    os.kill(agent, signal.SIGKILL)
    for child in map(int, children):
        if child != me:
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
    shutil.rmtree(Path(os.environ["MEMORY"]) / os.environ["MOE_CKPT_NODE"])
    os.kill(me, signal.SIGKILL)


if __name__ == "__main__":
    faults.FaultInjector.__init__.__defaults__ = (lose_node,)
    sys.exit(pretrain_gpt_moe.main(sys.argv[1:]))
