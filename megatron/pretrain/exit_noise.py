"""How a process of a job ends, by itself or at Ctrl-C, and what it does without readers: no traceback, no noise.

Imports nothing that takes time: Ctrl-C may come while the rest is imported.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import io
import os
import signal
import sys
from typing import TYPE_CHECKING, BinaryIO, NoReturn, cast

if TYPE_CHECKING:
    from collections.abc import Buffer, Callable

OF_LAUNCHERS = frozenset({"LOCAL_RANK", "MOE_CKPT_SEAT"})
"""Environment variables of a rank, and of a standby."""

_GONE = (errno.EPIPE, errno.EIO)
"""What writing into a pipe without a reader, or to a terminal that was closed, fails with."""


def end_at_once_when_interrupted() -> None:
    """Ctrl-C, which all processes of a terminal get, ends this one without a word, as a kill does.

    For processes with a launcher, which says that the job was stopped; what is sealed in memory and storage stays.
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # not where it is ignored, as in the background
        signal.signal(signal.SIGINT, signal.SIG_DFL)


def outlive_readers() -> None:
    """From here on nothing that is printed or logged can fail because nobody reads it any more; that is said once."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if isinstance(stream, io.TextIOWrapper):  # not where it is closed, or a test looks at it
            stream.flush()
            raw = _Lasting(stream.fileno(), "w", closefd=False)
            lasting = io.TextIOWrapper(
                cast("BinaryIO", raw if stream.write_through else io.BufferedWriter(raw)),
                encoding=stream.encoding,
                errors=stream.errors,
                line_buffering=stream.line_buffering,
                write_through=stream.write_through,
            )
            setattr(sys, name, lasting)


def end_with(program: Callable[[], int]) -> NoReturn:
    """Run a launcher, and end this process with its exit code.

    Not through destructors: a thread of torch's that still runs would end a node that leaves with SIGABRT.
    """
    try:
        code = program()
    except Exception:
        sys.excepthook(*sys.exc_info())
        code = 1
    _end_at_once(code)


def end_failed_rank(code: int) -> NoReturn:
    """Run the exit handlers of this process, and end it with this exit code without freeing anything.

    Python would look through all that torch and Megatron-LM have imported for a second or more, and a launcher starts
    no rank again before all have ended.
    """
    atexit._run_exitfuncs()
    _end_at_once(code)


def _end_at_once(code: int) -> NoReturn:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError, OSError, ValueError):  # no stream, a full disk, closed
            stream.flush()
    os._exit(code)


class _Lasting(io.FileIO):
    """Output that goes nowhere once it has no reader."""

    def write(self, data: Buffer, /) -> int:
        try:
            return super().write(data)
        except OSError as error:
            if error.errno not in _GONE:
                raise
            # The descriptor itself, so that libraries and children which write to it by its number are quiet, too.
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self.fileno(), inheritable=True)
            os.close(nowhere)
            if self.fileno() != 2:
                who = f"rank {os.environ['RANK']}: " if "RANK" in os.environ else ""
                with contextlib.suppress(OSError):
                    os.write(2, f"{who}nobody reads standard output any more: the job continues without it\n".encode())
            return memoryview(data).nbytes
