"""When a node should leave its job, and when a process of it hangs: what is decided, without anything being done."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from typing import NamedTuple

from megatron.core.dist_checkpointing.moe.standby.heartbeat import Activity, HeartbeatReading
from megatron.pretrain.errors import InvalidInput

GRACE = 0.5
"""How much longer than the timeout processes may stand that all run: what they wait for may be ended elsewhere."""
LEAST_GRACE_S = 10.0
"""And at least so long: another node sees after `SILENT_S` that a process does not run, looks once a second, and prints
stacks for one. Were these processes ended first, that node would restart with them, and be charged with nothing."""
FIRST = 2.0
"""How many times the timeout the first iteration after a recovery may take: in ranks that are new it also connects and
compiles, and the others wait for them."""
START = 10.0
"""How many times the timeout building, loading or recovering may take, up to the end of the first iteration of a job:
all state may come from slow storage."""
SILENT_S = 5.0
"""A process that trains says once a second that it runs; one that has not for so long, does not."""


class FailureCounter:
    """The failures of one node: `most` of them within `within_s` seconds are too many; `most` 0: never."""

    def __init__(self, most: int, within_s: float) -> None:
        self._most, self._within_s = most, within_s
        self._times_s: deque[float] = deque()

    def add(self, now_s: float) -> int:
        """Note a failure; how many there are now within the time."""
        self._times_s.append(now_s)
        while self._times_s[0] < now_s - self._within_s:
            self._times_s.popleft()
        return len(self._times_s)

    @property
    def are_out(self) -> bool:
        """Whether these are too many."""
        return 0 < self._most <= len(self._times_s)


def is_to_blame(exit_code: int, beat: HeartbeatReading | None, told_to_end: int) -> bool:
    """Whether a process that ended did so by a fault of its own, or of its node.

    One that ended by a signal that nobody but the system sends did; one that left with an error where it did not say
    that it had lost a peer; of one that says nothing at all it is not known. Invalid flags and inputs are no node's.

    Args:
        exit_code: Of the process; negative where a signal ended it.
        beat: What it said last; None: nothing.
        told_to_end: The signal by which the launcher ends processes.
    """
    if exit_code < 0:
        return exit_code != -told_to_end
    return exit_code not in (0, InvalidInput.exit_code) and beat is not None and beat.doing is not Activity.LOST_A_PEER


class HungRanks(NamedTuple):
    """pids: processes that stand still. to_kill: those that have to be ended now. silent: of these, those that do not
    even run, which is why the others stand. to_blame: of these, all but ranks that lost a peer and are slow to end."""

    pids: frozenset[int] = frozenset()
    to_kill: frozenset[int] = frozenset()
    silent: frozenset[int] = frozenset()
    to_blame: frozenset[int] = frozenset()


def judge(beats: Mapping[int, HeartbeatReading | None], now_s: float, hang_s: float) -> HungRanks:
    """Which processes of a node hang, by what each said last.

    A process that trains and has not moved for `hang_s` stands still, or for `FIRST` times that in the first iteration
    after a recovery, or `START` times that before it; but so do all that wait for it, on this node and on others. Those
    that do not even run, for `hang_s` whatever they were doing, are to blame, and ended at once. Where all run nothing
    tells who keeps the others waiting: they have half of `hang_s` more, and `LEAST_GRACE_S` at least, for another node
    to end its own, then all of them are ended.

    Args:
        beats: What each process said last, by its number; None: nothing.
        now_s: The time now, of the clock of beats.
        hang_s: Seconds without a trained iteration that are too long.
    """
    may_take_s = {Activity.TRAINING: hang_s, Activity.REJOINED: FIRST * hang_s, Activity.LOADING: START * hang_s}
    due = {pid: beat for pid, beat in beats.items() if beat is not None and beat.doing is not Activity.LEFT}
    over_s = {pid: now_s - beat.moved_s - may_take_s.get(beat.doing, math.inf) for pid, beat in due.items()}
    quiet_s = {pid: now_s - beat.alive_s for pid, beat in due.items()}
    stood = {pid for pid in due if over_s[pid] > 0 or quiet_s[pid] > hang_s}
    silent = frozenset(pid for pid in stood if quiet_s[pid] > min(SILENT_S, hang_s))
    late = frozenset(pid for pid in stood if over_s[pid] > max(GRACE * hang_s, LEAST_GRACE_S))
    to_blame = frozenset(pid for pid in silent if due[pid].doing is not Activity.LOST_A_PEER)
    return HungRanks(frozenset(stood), silent or late, silent, to_blame)
