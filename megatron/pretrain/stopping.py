"""When training ends before its last iteration: intervals, time limits and signals, agreed by all ranks."""

from __future__ import annotations

import signal
import time
from types import FrameType

import torch

from megatron.core.dist_checkpointing.moe.errors import PeerLost
from megatron.core.dist_checkpointing.moe.seats.joining import Joining
from megatron.pretrain.config.training import TrainingConfig
from megatron.pretrain.errors import TrainingFailure

MAKE_WAY_S = 60.0
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.0001, 0.01


class StopConditions:
    """Megatron's `--exit-*` flags, polled at the end of each iteration, and nodes that wait to join.

    joining: what the launcher says of these. interval: they are let in after iterations that are multiples of it.
    makes_way: whether training ended for them.
    """

    def __init__(
        self,
        training: TrainingConfig,
        distributed_timeout_minutes: float,
        joining: Joining | None = None,
        interval: int = 1,
    ) -> None:
        self._joining, self._interval, self.makes_way = joining, interval, False
        self._training, self._distributed_timeout_minutes = training, distributed_timeout_minutes
        self._started_at = time.monotonic()
        self._signalled = False
        if training.exit_signal_handler:
            before = signal.signal(signal.Signals[training.exit_signal], self._on_signal)
            # A process that lost a peer makes others of these: what it was told in between, or before, still holds.
            told = getattr(before, "__self__", None)
            self._signalled = isinstance(told, StopConditions) and told._signalled

    def reason(self, iteration: int) -> str | None:
        """Why training should end after `iteration`, the same on every rank; a collective over all ranks."""
        training = self._training
        if training.exit_interval and iteration % training.exit_interval == 0:
            return f"--exit-interval {training.exit_interval}"
        limit_s = None if training.exit_duration_in_mins is None else 60 * training.exit_duration_in_mins
        if limit_s is None and not training.exit_signal_handler and self._joining is None:
            return None
        late = limit_s is not None and time.monotonic() - self._started_at > limit_s
        asked = self._joining is not None and iteration % self._interval == 0 and self._joining.is_asked
        votes = torch.tensor([int(self._signalled), int(late), int(asked)], device=torch.cuda.current_device())
        self._vote(votes)
        if votes[0]:
            return f"signal {training.exit_signal}"
        if votes[2] and not votes[1]:
            self.makes_way = True
            return "nodes wait to join"
        return f"--exit-duration-in-mins {training.exit_duration_in_mins}" if votes[1] else None

    def make_way(self) -> None:
        """All is protected: wait for the launcher, which starts this rank anew with the others. Never returns."""
        assert self._joining is not None
        self._joining.ready()
        until_s = time.monotonic() + MAKE_WAY_S
        while time.monotonic() < until_s and not self._signalled:
            time.sleep(_LONGEST_PAUSE_S)
        raise TrainingFailure(f"training ended for nodes that joined, and was not started anew within {MAKE_WAY_S:g} s")

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
