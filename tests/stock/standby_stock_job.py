"""`standby_job.py`; what each iteration came to is recorded in the folder $RECORDS."""

from __future__ import annotations

import contextlib
import os
import runpy
from collections.abc import Sequence
from pathlib import Path

STANDBY_JOB = Path(__file__).parents[1] / "process" / "standby_job.py"


def record() -> None:
    """Have the driver record what it runs."""
    import pretrain_gpt_moe
    from megatron.pretrain.initialize import use_cpu

    run = pretrain_gpt_moe.run

    def run_recorded(argv: Sequence[str], _: pretrain_gpt_moe.Parts, **options: bool) -> int:
        use_cpu()  # before Megatron-LM is imported
        from hybrid_model import hybrid
        from stock_recording import recording

        model = hybrid() if "--hybrid-layer-pattern" in argv else contextlib.nullcontext()
        with model, recording(os.environ["RECORDS"]):
            return run(argv, pretrain_gpt_moe.parts(), **options)

    pretrain_gpt_moe.run = run_recorded


if __name__ == "__main__":
    if os.sched_getscheduler(0) == os.SCHED_IDLE:  # as the job does, but before the imports here
        os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
    record()
    runpy.run_path(str(STANDBY_JOB), run_name="__main__")
