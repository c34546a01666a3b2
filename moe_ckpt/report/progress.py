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
def progress(label: str, total_bytes: int, *, counted: bool = False) -> Iterator[Callable[[int], None]]:
    """A bar that the yielded function moves on by a number of bytes; it vanishes at the end.

    Silent where standard error is no terminal, and for work of less than PATIENCE_S seconds.

    Args:
        label: Text before the bar.
        total_bytes: Bytes of the whole work, or its count where `counted`.
        counted: Whether the numbers are a count instead of bytes.
    """
    if not sys.stderr.isatty():
        yield lambda nbytes: None
        return
    bar = _Bar(label, total_bytes, counted)
    try:
        yield bar.advance
    finally:
        bar.end()


@contextmanager
def steps(label: str, total: int) -> Iterator[Callable[[], None]]:
    """As `progress`, for work of so many steps: the yielded function is called after each."""
    with progress(label, total, counted=True) as advance:
        yield lambda: advance(1)


class _Bar:
    def __init__(self, label: str, total_bytes: int, counted: bool) -> None:
        self._label, self._total_bytes, self._counted = label, total_bytes, counted
        self._begun_s, self._done_bytes = time.monotonic(), 0
        self._shown: Progress | None = None

    def advance(self, nbytes: int) -> None:
        self._done_bytes += nbytes
        if self._shown is None and time.monotonic() - self._begun_s > PATIENCE_S:
            self._shown = _drawn(self._label, self._total_bytes, self._counted)
        if self._shown is not None:
            self._shown.update(self._shown.task_ids[0], completed=self._done_bytes)

    def end(self) -> None:
        if self._shown is not None:
            self._shown.stop()


def _drawn(label: str, total_bytes: int, counted: bool) -> Progress:
    # Most commands end before anything is drawn, and need not wait for rich.
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    sizes = (MofNCompleteColumn(),) if counted else (DownloadColumn(), TransferSpeedColumn())
    columns = (TextColumn("{task.description}"), BarColumn(), *sizes)
    bar = Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True), transient=True)
    bar.add_task(label, total=total_bytes)
    bar.start()
    return bar
