"""`standby_stock_job.py` in which rank 1 gets SIGKILL once while tokens are dispatched, in iteration 5.

Peers wait for it there, behind the first step of a shared expert that overlaps. The file `killed` in the folder $SLOTS
says that it was."""

from __future__ import annotations

import os
import runpy
import signal
import sys
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parents[1]))


def kill_in_dispatch() -> None:
    """Rank 1, after as many dispatches as four iterations have, once others have come to theirs."""
    from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher

    dispatch, done = MoEAlltoAllTokenDispatcher.token_dispatch, Path(os.environ["SLOTS"]) / "killed"
    calls = 0

    def counted(self: Any, *tokens: Any, **named: Any) -> Any:
        nonlocal calls
        calls += 1
        if os.environ["RANK"] == "1" and calls == int(os.environ["DISPATCHES"]) and not done.exists():
            done.touch()
            time.sleep(1)
            os.kill(os.getpid(), signal.SIGKILL)
        return dispatch(self, *tokens, **named)

    MoEAlltoAllTokenDispatcher.token_dispatch = counted


if __name__ == "__main__":
    if os.sched_getscheduler(0) == os.SCHED_IDLE:  # as the job does, but before the imports here
        os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
    kill_in_dispatch()
    runpy.run_path(str(HERE / "standby_stock_job.py"), run_name="__main__")
