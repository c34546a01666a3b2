"""A progress bar for work that takes a while, on standard error, so that output can be piped."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.progress import Progress

PATIENCE_S = 1.0
"""Work that takes less shows no bar."""


@contextmanager
def progress(label: str, total_bytes: int) -> Iterator[Callable[[int], None]]:
    """A bar that the yielded function moves on by a number of bytes; it vanishes at the end.

    Silent where standard error is no terminal, and for work of less than PATIENCE_S seconds.
    """
    if not sys.stderr.isatty():
        yield lambda nbytes: None
        return
    bar = _Bar(label, total_bytes)
    try:
        yield bar.advance
    finally:
        bar.end()


class _Bar:
    def __init__(self, label: str, total_bytes: int) -> None:
        self._label, self._total_bytes = label, total_bytes
        self._begun_s, self._done_bytes = time.monotonic(), 0
        self._shown: Progress | None = None

    def advance(self, nbytes: int) -> None:
        self._done_bytes += nbytes
        if self._shown is None and time.monotonic() - self._begun_s > PATIENCE_S:
            self._shown = _drawn(self._label, self._total_bytes)
        if self._shown is not None:
            self._shown.update(self._shown.task_ids[0], completed=self._done_bytes)

    def end(self) -> None:
        if self._shown is not None:
            self._shown.stop()


def _drawn(label: str, total_bytes: int) -> Progress:
    # Most commands end before anything is drawn, and need not wait for rich.
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    bar = Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True), transient=True)
    bar.add_task(label, total=total_bytes)
    bar.start()
    return bar
