"""Hooks that watch how much memory a job takes on its node, and how much its ranks have allocated."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
import json
import os
import sys
import threading
from collections.abc import Collection, Iterator
from pathlib import Path
from unittest import mock

PAUSE_S = 0.005


def taken(memory: Path, area: str = "*") -> int:
    """Bytes of all segments of a memory dir."""
    found = 0
    with contextlib.suppress(OSError):  # what goes away while it is looked at
        for path in memory.glob(f"*/*/{area}-*/segment-*.bin"):
            found += path.stat().st_size
    return found


@contextlib.contextmanager
def watched(memory: str, folder: str) -> Iterator[None]:
    """Write down the most bytes that all processes of the node took together, and this one's for logs and parking."""
    most, mine, stop = 0, 0, threading.Event()

    def watch() -> None:
        nonlocal most, mine
        while not stop.wait(PAUSE_S):
            most = max(most, taken(Path(memory)))
            mine = max(mine, taken(Path(memory), "standby"))

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
        note = {"most": most, "standby": mine / int(os.environ["WORLD_SIZE"])}
        (Path(folder) / f"rank-{os.environ['RANK']}.json").write_text(json.dumps(note))


class Heap(ctypes.Structure):
    """`struct mallinfo2` of glibc: `uordblks` bytes are given out of arenas, `hblkhd` are maps of their own."""

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost".split()
    )


def allocated() -> dict[str, int]:
    """What this process has allocated: bytes of the heap of C, and objects of Python, whose arenas are none of that."""
    gc.unfreeze()  # else caches of modules are not among the objects
    gc.collect()
    for one in gc.get_objects():  # what a cache holds that has a bound is no growth
        if isinstance(one, functools._lru_cache_wrapper) and one.cache_parameters()["maxsize"] is not None:
            one.cache_clear()
    ask = ctypes.CDLL(None).mallinfo2
    ask.restype = Heap
    found = ask()
    return {"bytes": found.uordblks + found.hblkhd, "objects": sys.getallocatedblocks()}


@contextlib.contextmanager
def counted(folder: str, iterations: Collection[int], leak_bytes: int = 0) -> Iterator[None]:
    """Write down what each rank has allocated after these iterations; leak_bytes: keep so many more in each one."""
    from megatron.core.dist_checkpointing.moe import MoECheckpointManager

    reported, found, kept = MoECheckpointManager.reported, [], []

    def counting(self: MoECheckpointManager) -> None:
        reported(self)
        if leak_bytes:
            kept.append(bytearray(leak_bytes))
        if self.iteration in iterations:
            found.append(allocated())

    with mock.patch.object(MoECheckpointManager, "reported", counting):
        yield
    (Path(folder) / f"rank-{os.environ['RANK']}.json").write_text(json.dumps(found))
