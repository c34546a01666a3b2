"""Lets a job train on a device that is as asynchronous as a GPU, and says what was seen of it."""

from __future__ import annotations

import contextlib
import json
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def asynchronous(schedule: str, seed: int, folder: str) -> Iterator[None]:
    """The device of this rank; a line for each attempt that ends by itself in a file of the folder.

    Args:
        schedule: Of `async_device.SCHEDULES`.
        seed: Of the order, another one on each rank.
        folder: Of the files, which exists.
    """
    from megatron.pretrain.testing import async_device, cpu_device

    rank = int(os.environ["RANK"])
    os.environ.update(NCCL_ALGO="Ring", CUBLAS_WORKSPACE_CONFIG=":4096:8")  # as replays ask for on GPUs
    with cpu_device.installed(), async_device.installed(schedule, seed + rank) as device:
        try:
            yield
        finally:
            facts = {
                "executed": device.executed,
                "copied": device.copied_to_host,
                "elsewhere": sorted(device.elsewhere),
                "blocking": Counter(one.thread for one in device.blocking),
                "after_free": device.after_free,
                "error": device.error,
            }
            with (Path(folder) / f"device-{rank}.jsonl").open("a") as file:
                file.write(json.dumps(facts) + "\n")
