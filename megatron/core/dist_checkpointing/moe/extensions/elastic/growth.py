"""Nodes that wait to join a job in the stock loop: training ends for them behind an iteration, and starts again.

All ranks vote behind each iteration of which a snapshot is due, see `standby.joining`. The loop then leaves as it does
for `--exit-interval`, memory is kept, and the launcher starts all ranks again in the larger layout. Snapshots of `full`
are a whole state: where none begins, since earlier ones are still under way, training continues to the next. Those of
other strategies are not, so the loop saves a checkpoint before it leaves.
"""

from __future__ import annotations

import contextlib
import logging
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from ...config import MoECheckpointConfig
from ...errors import NewProcessesNeeded, PeerSilent, Terminated, format_error
from ...standby.joining import Joining, joining_here
from ...standby.slot import own_slot

log = logging.getLogger(__name__)

MAKE_WAY_S = 60.0
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.0001, 0.01


class Growth:
    """Asks behind each iteration; does nothing under a launcher that says nothing.

    Args:
        config: The settings.
        args: Of Megatron-LM.
        joining: What the launcher says of nodes that wait; what the environment names if not given.
    """

    def __init__(self, config: MoECheckpointConfig, args: Any, joining: Joining | None = None) -> None:
        self._joining = joining or joining_here()
        self._interval, self._args = int(config.interval), args
        self._is_whole = config.strategy == "full"
        self.makes_way = False

    def ends_training(self, iteration: int, *, begins: bool) -> bool:
        """Whether training ends here for nodes that wait; a collective, before the loop asks whether it saves.

        Args:
            iteration: After which training stands.
            begins: Whether a snapshot of that state will.

        Raises:
            PeerSilent: A rank does not vote.
        """
        if self._joining is None or iteration % self._interval or iteration >= self._args.train_iters:
            return False
        is_lost = self._is_whole and not begins
        vote = torch.tensor([int(self._joining.is_asked), int(is_lost)], device=torch.cuda.current_device())
        self._agree(vote)
        self.makes_way = vote.tolist() == [1, 0]
        if self.makes_way and torch.distributed.get_rank() == 0:
            log.info("elastic: pausing at iteration %d, nodes are waiting to join", iteration)
        if self.makes_way and not self._is_whole:
            self._args.exit_interval = iteration  # the loop saves, if it saves at all
        return self.makes_way

    @contextlib.contextmanager
    def ending(self, iteration: int, *, begins: bool) -> Iterator[bool]:
        """A block in which the loop decides whether it saves and ends, with what `ends_training` returns.

        Args:
            iteration: After which training stands.
            begins: Whether a snapshot of that state will.
        """
        # Processes that survive a fault in this very save keep their arguments, and others begin with the user's.
        interval = self._args.exit_interval
        try:
            yield self.ends_training(iteration, begins=begins)
        finally:
            self._args.exit_interval = interval

    def make_way(self, is_told_to_end: Callable[[], bool]) -> None:
        """Where training ended for nodes: wait for the launcher, which starts all ranks again.

        Args:
            is_told_to_end: Whether SIGTERM has come before.

        Raises:
            Terminated: It has, or the launcher calls this rank off.
            NewProcessesNeeded: The launcher did nothing in time, or cannot be told.
        """
        if self._joining is None or not self.makes_way:
            return
        with _noting_sigterm() as noted:
            try:
                self._joining.ready()
            except OSError as error:
                raise NewProcessesNeeded(f"the launcher does not learn of the end: {format_error(error)}") from error
            until_s = time.monotonic() + MAKE_WAY_S
            while time.monotonic() < until_s:
                is_signal = bool(noted) or is_told_to_end()
                if is_signal or own_slot().is_called_off:
                    by = "SIGTERM" if is_signal else "the launcher"
                    raise Terminated(f"told to end by {by}; nodes have joined, and the job is started again with them")
                time.sleep(_LONGEST_PAUSE_S)
        raise NewProcessesNeeded(
            f"training ended for nodes that joined, and was not started again within {MAKE_WAY_S:g} s"
        )

    def _agree(self, vote: torch.Tensor) -> None:
        """The most of all ranks' votes."""
        timeout_s = 60.0 * self._args.distributed_timeout_minutes
        work = torch.distributed.all_reduce(vote, op=torch.distributed.ReduceOp.MAX, async_op=True)
        # NCCL's own wait lasts for as long as its kernel, which waits for a lost rank for ever.
        until_s, pause_s = time.monotonic() + timeout_s, _FIRST_PAUSE_S
        while not work.is_completed():
            if time.monotonic() > until_s:
                raise PeerSilent(
                    f"a rank did not say within {timeout_s:g} s (--distributed-timeout-minutes) whether nodes wait to"
                    " join"
                )
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
        work.wait()  # raises what went wrong


@contextlib.contextmanager
def _noting_sigterm() -> Iterator[list[int]]:
    """In this block SIGTERM enters the list; Megatron-LM's own handler notes it for iterations that do not come."""
    noted: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _frame: noted.append(number))
    try:
        yield noted
    finally:
        signal.signal(signal.SIGTERM, before or signal.SIG_DFL)
