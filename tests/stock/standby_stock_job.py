"""`benchmarks/standby_job.py` in the stock loop; what each iteration came to is recorded in the folder $RECORDS."""

from __future__ import annotations

import os
import runpy
from collections.abc import Callable, Sequence
from pathlib import Path

from megatron.pretrain import stock_loop
from megatron.pretrain.initialize import use_cpu

ROOT = Path(__file__).parents[2]


def run_recorded(argv: Sequence[str], own: Callable[[Sequence[str]], int] = stock_loop.run_stock) -> int:
    """That of the driver."""
    use_cpu(stock_loop=True)
    from stock_recording import recording

    with recording(os.environ["RECORDS"]):
        return own(argv)


if __name__ == "__main__":
    stock_loop.run_stock = run_recorded
    runpy.run_path(str(ROOT / "benchmarks" / "standby_job.py"), run_name="__main__")
