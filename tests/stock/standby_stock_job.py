"""`benchmarks/standby_job.py` in the stock loop; what each iteration came to is recorded in the folder $RECORDS."""

from __future__ import annotations

import os
import runpy
from collections.abc import Sequence
from pathlib import Path

STANDBY_JOB = Path(__file__).parents[2] / "benchmarks" / "standby_job.py"


def record() -> None:
    """Have the driver record what it runs in the stock loop."""
    from megatron.pretrain import stock_loop
    from megatron.pretrain.initialize import use_cpu

    run = stock_loop.run_stock

    def run_recorded(argv: Sequence[str]) -> int:
        use_cpu(stock_loop=True)  # before Megatron-LM is imported
        from stock_recording import recording

        with recording(os.environ["RECORDS"]):
            return run(argv)

    stock_loop.run_stock = run_recorded


if __name__ == "__main__":
    if os.sched_getscheduler(0) == os.SCHED_IDLE:  # as the job does, but before the imports here
        os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
    record()
    runpy.run_path(str(STANDBY_JOB), run_name="__main__")
