"""`pretrain_gpt_moe.py` where an injected fault stops the rank, which does not end by itself: a hang.

With STOPS=RANK@START that rank stops in the first iteration after that restart as well.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import pretrain_gpt_moe
from megatron.core.dist_checkpointing.moe.runtime.faults import FaultInjector, Phase


def stop() -> None:
    """What a driver in an endless wait looks like from outside: no thread of the process runs any more."""
    os.kill(os.getpid(), signal.SIGSTOP)


def reached(injector: FaultInjector, iteration: int, phase: Phase, done: object = FaultInjector.reached) -> None:
    """That of the injector, which every iteration begins with."""
    if os.environ.get("STOPS") == f"{os.environ['RANK']}@{os.environ['TORCHELASTIC_RESTART_COUNT']}":
        stop()
    assert callable(done)
    done(injector, iteration, phase)


if __name__ == "__main__":
    FaultInjector.__init__.__defaults__ = (stop,)
    FaultInjector.reached = reached  # type: ignore[method-assign]
    sys.exit(pretrain_gpt_moe.main(sys.argv[1:]))
