"""When training ends before its last iteration: intervals, time limits and signals, agreed by all ranks."""

from __future__ import annotations

import signal
import time
from types import FrameType

import torch

from megatron.core.dist_checkpointing.moe.errors import PeerLost
from megatron.pretrain.config.training import TrainingConfig

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.0001, 0.01


class StopConditions:
    """Megatron's `--exit-*` flags, polled at the end of each iteration."""

    def __init__(self, training: TrainingConfig, distributed_timeout_minutes: float) -> None:
        self._training, self._distributed_timeout_minutes = training, distributed_timeout_minutes
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
        self._vote(votes)
        if votes[0]:
            return f"signal {training.exit_signal}"
        return f"--exit-duration-in-mins {training.exit_duration_in_mins}" if votes[1] else None

    def _vote(self, votes: torch.Tensor) -> None:
        """The most of each vote, of all ranks. Raises PeerLost when a rank does not answer in time."""
        timeout_s = 60.0 * self._distributed_timeout_minutes
        work = torch.distributed.all_reduce(votes, op=torch.distributed.ReduceOp.MAX, async_op=True)
        # NCCL's own wait would last for as long as the kernel does, and that waits for a lost rank for ever.
        deadline, pause_s = time.monotonic() + timeout_s, _FIRST_PAUSE_S
        while not work.is_completed():
            if time.monotonic() > deadline:
                raise PeerLost(
                    f"a rank did not say within {timeout_s:g} s (--distributed-timeout-minutes) whether training should"
                    " end"
                )
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
        work.wait()  # raises what went wrong

    def _on_signal(self, _number: int, _frame: FrameType | None) -> None:
        self._signalled = True
