"""`standby_stock_job.py` in which each rank logs the iteration $APART_AT once by the loop's own count of iterations.

After a local recovery to that iteration the ranks that did not replay log it, and wait there in a barrier that the
others never reach. A rank that has done so leaves its number in the folder $SLOTS.
"""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parents[1]))


def wait_apart() -> None:
    """Once on each rank, `training_log` is called as if nobody counted common iterations."""
    from megatron.core.dist_checkpointing.moe.stock.seams import Call

    replacing, at = Call.replacing, int(os.environ["APART_AT"])

    def replaced(self: Call, **values: Any) -> Call:
        done = Path(os.environ["SLOTS"]) / f"apart-{os.environ['RANK']}"
        if self["iteration"] != at or done.exists():
            return replacing(self, **values)
        done.touch()
        return self

    Call.replacing = replaced


if __name__ == "__main__":
    if os.sched_getscheduler(0) == os.SCHED_IDLE:  # as the job does, but before the imports here
        os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
    wait_apart()
    runpy.run_path(str(HERE / "standby_stock_job.py"), run_name="__main__")
