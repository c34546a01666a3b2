"""When training ends before its last iteration: intervals, time limits and signals, agreed by all ranks."""

from __future__ import annotations

import os
import signal
import time
from types import FrameType

import torch

from megatron.pretrain.config.training import TrainingConfig
from megatron.pretrain.errors import Terminated


class StopConditions:
    """Megatron's `--exit-*` flags, polled at the end of each iteration."""

    def __init__(self, training: TrainingConfig) -> None:
        self._training = training
        self._started_at = time.monotonic()
        self._signalled = False
        if training.exit_signal_handler:
            signal.signal(signal.Signals[training.exit_signal], self._on_signal)

    def reason(self, iteration: int) -> str | None:
        """Why training should end after `iteration`, the same on every rank; a collective over all ranks."""
        training = self._training
        if training.exit_interval and iteration % training.exit_interval == 0:
            return f"--exit-interval {training.exit_interval}"
        limit_s = None if training.exit_duration_in_mins is None else 60 * training.exit_duration_in_mins
        if limit_s is None and not training.exit_signal_handler:
            return None
        late = limit_s is not None and time.monotonic() - self._started_at > limit_s
        votes = torch.tensor([int(self._signalled), int(late)], device=torch.cuda.current_device())
        torch.distributed.all_reduce(votes, op=torch.distributed.ReduceOp.MAX)
        if votes[0]:
            return f"signal {training.exit_signal}"
        return f"--exit-duration-in-mins {training.exit_duration_in_mins}" if votes[1] else None

    def _on_signal(self, _number: int, _frame: FrameType | None) -> None:
        self._signalled = True


class Termination:
    """SIGTERM, noted and acted on between the phases of a step, so that state can be put aside before the end.

    A launcher sends it to all ranks when one has failed, and kills those that are still there after a while.
    """

    def __init__(self) -> None:
        self._requested, self._process = False, 0

    def install(self) -> None:
        """Catch the signal from here on, unless a handler is there already, which has its own idea of the end.

        Called by the main thread.
        """
        if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            self._process = os.getpid()
            signal.signal(signal.SIGTERM, self._on_signal)

    def uninstall(self) -> None:
        """Let the signal end this process again; nothing happens where it was not caught."""
        if self._process == os.getpid() and signal.getsignal(signal.SIGTERM) == self._on_signal:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)

    @property
    def is_requested(self) -> bool:
        """Whether the signal has come."""
        return self._requested

    def check(self) -> None:
        """Raises Terminated when the signal has come."""
        if self._requested:
            raise Terminated("told to end by SIGTERM; leaving, so that the job can be restarted")

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        if os.getpid() == self._process:
            self._requested = True
        else:  # a forked helper, such as a reader of data, ends at once
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
