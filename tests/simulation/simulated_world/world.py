"""Simulated ranks in one process: real threads of which exactly one runs at a time, chosen by a seed.

A thread continues until its next event, which is each call of a port. There another one may be chosen, so that a run is
repeated by its seed. Time is virtual: it passes a little at each event, and jumps when all threads wait.

What the code under test does with real locks is not seen here: a lock held across an event is found as a stall.
Sets of strings are ordered by PYTHONHASHSEED: for the same trace in another process it must be the same too.
"""

from __future__ import annotations

import os
import random
import sys
import threading
import traceback
from collections import Counter
from collections.abc import Callable, Mapping
from typing import NamedTuple

from megatron.core.dist_checkpointing.moe.errors import MoECheckpointError

NOBODY = -1
"""The rank of threads that belong to no rank, such as the one that starts and ends the others."""

_STALLED_S = 60.0
_TOLD_EVENTS = 25


class Killed(BaseException):
    """Ends the threads of a killed rank, at the port call where they are or that they make next."""


class Deadlock(MoECheckpointError):
    """The simulation cannot continue, or does not end; says what each thread waits for."""


class Event(NamedTuple):
    """What a rank was about to do. number: counts the events of the rank, from 1 on, also across its restarts."""

    number: int
    now_s: float
    rank: int
    thread: str
    text: str

    def __str__(self) -> str:
        return f"{self.now_s:12.6f} s  rank {self.rank} event {self.number}  {self.thread}: {self.text}"


class Thread:
    """One simulated thread. `ended` when its work is over; `error` is what the work raised, if it did."""

    def __init__(self, rank: int, name: str) -> None:
        self.rank, self.name = rank, name
        self.ended, self.killed = False, False
        self.error: BaseException | None = None
        self.go = threading.Lock()
        self.go.acquire()
        self.until: Callable[[], bool] | None = None
        self.deadline_s: float | None = None
        self.what = ""

    def may_run(self, now_s: float) -> bool:
        """Whether it waits for nothing any more."""
        if self.until is None or self.killed:
            return True
        return (self.deadline_s is not None and self.deadline_s <= now_s) or self.until()

    def __str__(self) -> str:
        limit = "" if self.deadline_s is None else f" until {self.deadline_s:.6f} s"
        return f"rank {self.rank}, {self.name}: {self.what or 'runs'}{limit}"


class World:
    """Runs simulated threads to their end.

    crash: the rank is killed at this event of its own, before anything of the event has happened. should_crash: the
    same for every event that it is true of; called with the rank and the event. event_s: time that an event takes.
    max_events: more of them mean that the run does not end.
    """

    def __init__(
        self,
        seed: int,
        *,
        crash: Mapping[int, int] | None = None,
        should_crash: Callable[[int, Event], bool] | None = None,
        event_s: float = 1e-6,
        max_events: int = 1_000_000,
    ) -> None:
        self.seed, self.random = seed, random.Random(seed)
        self.trace: list[Event] = []
        self._crash, self._should_crash = dict(crash or {}), should_crash
        self._event_s, self._max_events = event_s, max_events
        self._now_s = 0.0
        self._counts: Counter[int] = Counter()
        self._threads: list[Thread] = []
        self._current: Thread | None = None
        self._dead: set[int] = set()
        self._lives: Counter[int] = Counter()
        self.deaths = 0  # until it changes nobody was killed: a new life is no old one come back
        self._idle = threading.Event()
        self._failure: BaseException | None = None
        self._processor = _processor()

    def now_s(self) -> float:
        """Virtual seconds since the start of the world."""
        return self._now_s

    @property
    def thread(self) -> Thread | None:
        """The simulated thread that runs; None outside of `run`."""
        return self._current

    def events_of(self, rank: int) -> int:
        """How many events the rank has had."""
        return self._counts[rank]

    def is_dead(self, rank: int) -> bool:
        """Whether the rank was killed and not started again."""
        return rank in self._dead

    def life_of(self, rank: int) -> int:
        """How often the rank was started again after it was killed."""
        return self._lives[rank]

    def spawn(self, rank: int, name: str, work: Callable[[], object]) -> Thread:
        """Start a simulated thread; its work begins when it is chosen. Raises Killed on a thread of a killed rank."""
        self._require_alive()
        if rank in self._dead:
            raise Deadlock(f"rank {rank} was killed: call revive({rank}) before it starts anything")
        thread = Thread(rank, name)
        self._threads.append(thread)
        threading.Thread(target=self._work, args=(thread, work), daemon=True, name=f"{rank} {name}").start()
        return thread

    def event(self, text: str) -> None:
        """Let others run, then note that this thread does something now; every port calls it before it acts.

        Outside of `run` nothing happens. Raises Killed when the rank was killed, or is to be killed here.
        """
        me = self._current
        if me is None:
            return
        self._now_s += self._event_s
        self._require_alive()
        self._switch(me)
        self._require_alive()
        self._note(me, text)

    def wait(self, what: str, until: Callable[[], bool], timeout_s: float | None = None) -> bool:
        """Let others run until `until()` is true, or the time is over: then False. `until` must change nothing.

        what: for reports, such as "waits for rank 3". Raises Killed, and Deadlock outside of `run`.
        """
        me = self._current
        if me is None:
            if not until():
                raise Deadlock(f"nobody runs while the test itself {what}")
            return True
        self._require_alive()
        me.until, me.what = until, what
        me.deadline_s = None if timeout_s is None else self._now_s + max(0.0, timeout_s)
        try:
            self._switch(me)
            self._require_alive()
            return until()
        finally:
            me.until, me.deadline_s, me.what = None, None, ""

    def sleep(self, seconds: float) -> None:
        """Let virtual time pass."""
        if self._current is None:
            self._now_s += seconds
        else:
            self.wait("sleeps", _never, seconds)

    def kill(self, rank: int) -> None:
        """End all threads of a rank at once; the calling one by raising Killed, if it is one of them."""
        self._dead.add(rank)
        self.deaths += 1
        for thread in self._threads:
            thread.killed = thread.killed or thread.rank == rank
        self._require_alive()

    def revive(self, rank: int) -> None:
        """Let a killed rank begin a new life. Raises Deadlock while threads of the old one have not ended."""
        left = [thread.name for thread in self._threads if thread.rank == rank]
        if rank in self._dead and left:
            raise Deadlock(f"rank {rank} cannot be revived while {', '.join(left)} has not ended")
        if rank in self._dead:
            self._dead.discard(rank)
            self._lives[rank] += 1

    def run(self) -> None:
        """Run until all threads have ended. May be called again after more were spawned.

        Raises what the work of a thread raised first, Killed excepted, after killing all others; Deadlock. A note on
        the error says which seed repeats it.
        """
        self._idle.clear()
        if not self._threads:
            return
        self._give(self._chosen())
        self._watch()
        if self._failure is not None:
            failure, self._failure = self._failure, None
            failure.add_note(f"repeat with seed {self.seed}; the last events were:\n{self.story()}")
            raise failure

    def story(self, last: int = _TOLD_EVENTS) -> str:
        """The last events, one per line."""
        return "\n".join(map(str, self.trace[-last:]))

    def _note(self, me: Thread, text: str) -> None:
        self._counts[me.rank] += 1
        event = Event(self._counts[me.rank], self._now_s, me.rank, me.name, text)
        self.trace.append(event)
        if len(self.trace) > self._max_events:
            self._fail(Deadlock(f"no end after {self._max_events} events: {self._situation()}"))
            raise Killed
        due = self._crash.get(me.rank) == event.number
        if due or (self._should_crash is not None and self._should_crash(me.rank, event)):
            self.kill(me.rank)

    def _require_alive(self) -> None:
        if self._current is not None and self._current.killed:
            raise Killed(f"rank {self._current.rank} was killed")

    def _work(self, thread: Thread, work: Callable[[], object]) -> None:
        if self._processor is not None:
            os.sched_setaffinity(0, {self._processor})  # handing over to another processor takes ten times as long
        thread.go.acquire()
        try:
            self._require_alive()
            work()
        except Killed:
            pass
        except BaseException as error:
            thread.error = error
            self._fail(error)
        thread.ended = True
        self._threads.remove(thread)
        if self._threads:
            self._give(self._chosen())
        else:
            self._current = None
            self._idle.set()

    def _switch(self, me: Thread) -> None:
        chosen = self._chosen()
        if chosen is not me:
            self._give(chosen)
            me.go.acquire()

    def _give(self, chosen: Thread) -> None:
        self._current = chosen
        chosen.go.release()

    def _chosen(self) -> Thread:
        """The thread that continues; when all wait, time jumps to the first that does so no longer."""
        ready = [thread for thread in self._threads if thread.may_run(self._now_s)]
        if not ready:
            deadlines = [thread.deadline_s for thread in self._threads if thread.deadline_s is not None]
            if deadlines:
                self._now_s = max(self._now_s, min(deadlines))
            else:
                self._fail(Deadlock(f"all threads wait for each other: {self._situation()}"))
            ready = [thread for thread in self._threads if thread.may_run(self._now_s)]
        return ready[int(self.random.random() * len(ready))]

    def _situation(self) -> str:
        return "; ".join(map(str, self._threads))

    def _fail(self, error: BaseException) -> None:
        if self._failure is None:
            self._failure = error
        for thread in self._threads:
            thread.killed = True

    def _watch(self) -> None:
        """Wait for the end; raises Deadlock when a thread does not come to its next event in real time."""
        seen = -1
        while not self._idle.wait(_STALLED_S):
            if len(self.trace) == seen:
                frames, me = sys._current_frames(), self._current
                name = f"{me.rank} {me.name}" if me else ""
                at = [frames[one.ident] for one in threading.enumerate() if one.name == name and one.ident in frames]
                stack = "".join(traceback.format_stack(at[0])) if at else "unknown"
                raise Deadlock(f"seed {self.seed}: {me} has not come to an event for {_STALLED_S:g} s:\n{stack}")
            seen = len(self.trace)


def _processor() -> int | None:
    """One of the processors for all threads of a world; each worker of pytest-xdist takes another."""
    if not hasattr(os, "sched_getaffinity"):
        return None
    mine, worker = sorted(os.sched_getaffinity(0)), os.environ.get("PYTEST_XDIST_WORKER", "gw0")
    return mine[int(worker.removeprefix("gw")) % len(mine)]


def _never() -> bool:
    return False
