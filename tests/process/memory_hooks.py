"""Hooks that watch how much memory a job takes on its node."""

from __future__ import annotations

import contextlib
import json
import os
import threading
from collections.abc import Iterator
from pathlib import Path

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
