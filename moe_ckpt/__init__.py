"""The `moe-ckpt` command and what it is made of: everything that people run beside training jobs."""

from __future__ import annotations

import signal
from types import FrameType

from .megatron_core import refuse_unsupported_versions


def main() -> None:
    """Runs `moe-ckpt`."""
    is_heard = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if is_heard:  # while the rest is imported, Ctrl-C just ends it
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    refuse_unsupported_versions()
    from .commands.main import main as run

    if is_heard:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, _end)
    run()


def _end(number: int, _frame: FrameType | None) -> None:
    """As Ctrl-C does, so that half-written folders are removed: Slurm sends SIGTERM at a job's limit."""
    signal.signal(number, signal.SIG_IGN)  # a second one would interrupt that
    raise SystemExit(128 + number)
