"""`pretrain_gpt_moe.py` where an injected fault takes the whole node along: agent, ranks, and what is in its memory.

With $NICE its ranks leave time on few cores to the agents, whose heartbeats others wait for. In the folder $READY, if
that is set, the first standby of each node leaves a file of its node's name once it can be copied.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

if "NICE" in os.environ:
    os.nice(int(os.environ["NICE"]))
sys.path.insert(0, str(Path(__file__).parents[2]))

import pretrain_gpt_moe
from megatron.core.dist_checkpointing.moe.runtime import faults


def warm_up(argv: Sequence[str], done: Callable[[Sequence[str]], None] = pretrain_gpt_moe.warm_up) -> None:
    """That of the driver."""
    done(argv)
    if "READY" in os.environ:
        (Path(os.environ["READY"]) / os.environ["MOE_CKPT_NODE"]).touch()


def lose_node() -> None:
    """What a power cut does."""
    agent, me = os.getppid(), os.getpid()
    children = Path(f"/proc/{agent}/task/{agent}/children").read_text().split()
    os.kill(agent, signal.SIGKILL)
    for child in map(int, children):
        if child != me:
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
    memory = Path(os.environ["MEMORY"]) / os.environ["MOE_CKPT_NODE"]
    while memory.exists():  # threads of this process still write there
        shutil.rmtree(memory, ignore_errors=True)
    os.kill(me, signal.SIGKILL)


if __name__ == "__main__":
    pretrain_gpt_moe.warm_up = warm_up
    faults.FaultInjector.__init__.__defaults__ = (lose_node,)
    pretrain_gpt_moe.command()
