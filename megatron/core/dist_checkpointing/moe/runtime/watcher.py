"""A thread that gets the main thread out of a call that waits for a lost peer.

With gloo a collective fails where a peer is lost. With NCCL nothing fails: the main thread is inside a call of CUDA,
behind a kernel that waits for the peer, where no handler of a signal runs either. This thread hears of a lost peer by
its links (`peer_links`) and of SIGTERM by a descriptor (`SignalBytes`), and then

1. has patience: a main thread that still moves comes to a phase of the step, or to a failing collective, by itself,
   and may keep more of its state there; one that replays without the lost rank has time to finish its iteration;
2. waits while the optimizer's step is in its protected part (decision 019), which needs no peer and has to end;
3. forbids that another step begins, and has an error raised in the main thread as soon as that runs Python code: what
   the aborted kernels leave is garbage, and nothing may be decided by it;
4. lets its own peers know, and aborts all communicators, so that the call returns.

The main thread then leaves as for any error: it hangs up, parks, and ends. Each wait has a limit.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from types import CodeType
from typing import Any, NamedTuple, Protocol, cast

from ..device import device_thread
from ..errors import PeerLost, PeerSilent, Terminated
from ..policy.parking import Cause
from .faults import SignalBytes
from .peer_links import PeerLinks, close_connections

log = logging.getLogger(__name__)

PATIENCE_S = {"nccl": 1.0, "gloo": 10.0}
"""How long the main thread may stand in one place after a loss; gloo tells it by itself, if it gets to it."""
MOVING_PATIENCE = 10
"""How many times as long it may take if it moves."""
PROTECTED_S = 10.0
"""How long the protected part of a step may take."""
LEAVING_S = 10.0
"""How long the main thread may take to return once all is aborted, before this thread says where it still is."""
_TICK_S = 0.02


class Interrupted(PeerLost):
    """Raised in the main thread when a peer is lost."""

    def __init__(self, sentence: str = "peer failure: all connections closed; a line above names the rank"):
        super().__init__(sentence)


class Stalled(Interrupted, PeerSilent):
    """Raised in the main thread when it stood in one place for too long, though no connection has ended."""

    def __init__(self, sentence: str = "peer failure: the main thread waited too long in one place") -> None:
        PeerSilent.__init__(self, sentence)


class TerminationRequested(Terminated):
    """Raised in the main thread when SIGTERM came and it was in a call that did not return."""

    def __init__(self, sentence: str = "SIGTERM received while waiting for other ranks; exiting"):
        super().__init__(sentence)


class Interruptible(Protocol):
    """What is interrupted, a session."""

    def interrupt(self, *, force: bool) -> bool:
        """Forbid that a step begins. False, and nothing is done, while one is in its protected part, unless forced."""


class _Spot(NamedTuple):
    """Where a thread is in its code."""

    code: CodeType
    instruction: int
    line: int


class _News(NamedTuple):
    """Bad news. lost: the rank whose connection ended; None: it is of no rank."""

    lost: int | None
    why: str
    cause: Cause = Cause.PEER_LOST


class MainThread:
    """Where the thread that made this object is, as another thread sees it."""

    def __init__(self) -> None:
        self._ident = threading.get_ident()

    @property
    def place(self) -> tuple[int, int]:
        """Differs once the thread has moved."""
        spot = self._spot
        return (id(spot.code), spot.instruction) if spot is not None else (0, 0)

    @property
    def where(self) -> str:
        """For people."""
        spot = self._spot
        if spot is None:
            return "no Python code"
        return f"{spot.code.co_name} ({os.path.basename(spot.code.co_filename)}:{spot.line})"

    def throw(self, error: type[BaseException] | None) -> None:
        """Have an error raised in it when it next runs Python code; None takes that back."""
        # Noted in the state of that thread, and raised between two bytecodes: a call into C ends first.
        kind = ctypes.py_object(error) if error is not None else None
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(self._ident), kind)

    @property
    def _spot(self) -> _Spot | None:
        frame = sys._current_frames().get(self._ident)
        try:
            return _Spot(frame.f_code, frame.f_lasti, frame.f_lineno) if frame is not None else None
        finally:
            del frame  # else a thread that asks for its own place holds on to itself, and to all that its callers have


class Watcher:
    """Watches over one training process. Sequence: `start`, then `stand_down` before it leaves, and `stop`.

    Args:
        rank: This rank.
        session: Is interrupted.
        links: To other ranks.
        is_told_by_signal: Whether SIGTERM means that this process has to leave as it is. Where somebody else handles it
            that is their business; a lost peer ends training all the same.
        patience_s: How long the main thread may stay in one place after a loss.
        hang_up: Aborts communicators and closes connections.
        stall_s: How long it may stay in one place within an iteration though no peer is lost, asked for again at each
            look; None: for ever.
        phase: Of which iteration it is in; None between two.
        finish_s: How long it may continue without a rank that was lost, where it needs none such; 0 where it does.
    """

    def __init__(
        self,
        rank: int,
        session: Interruptible,
        links: PeerLinks,
        is_told_by_signal: Callable[[], bool],
        patience_s: float,
        *,
        hang_up: Callable[[], object] = close_connections,
        stall_s: Callable[[], float] | None = None,
        phase: Callable[[], object] = lambda: None,
        finish_s: Callable[[int], float] = lambda lost: 0.0,
    ) -> None:
        self._rank, self._session, self._patience_s = rank, session, patience_s
        self._links = links
        self._is_told, self._hang_up = is_told_by_signal, hang_up
        self._stall_s, self._phase, self._finish_s = stall_s, phase, finish_s
        self._main, self._signals = MainThread(), SignalBytes()
        # Held to interrupt the main thread, and to stand down: whoever has left is not interrupted any more.
        self._lock, self._left = threading.Lock(), threading.Event()
        # Wakes the thread from `poll`; closed in programs that this process starts.
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._look_s = None if stall_s is None else min(5.0, stall_s() / 4)
        self._place, self._since_s = (self._main.place, phase()), time.monotonic()
        self._looked_s = self._since_s
        self._thread = device_thread(self._run, "moe-ckpt-watcher")
        self.interrupted: Cause | None = None
        self.hung_up = False

    def start(self) -> None:
        """Watch from here on; called by the main thread."""
        self._signals.install()
        self._thread.start()
        _watching.append(self)

    def stand_down(self) -> None:
        """The main thread is about to leave: it is not interrupted from here on. Waits for what is being aborted.

        May raise what the main thread was to be interrupted with; called again, it does not.
        """
        with self._lock:
            self._left.set()
            # An error that was set and is not raised yet is taken back; after this block none is set.
            self._main.throw(None)
        with suppress(OSError):  # closed by `stop` before
            os.eventfd_write(self._wake, 1)
        if self._thread.ident is not None:  # it was started
            self._thread.join(LEAVING_S)

    def stop(self, *, is_good: bool) -> None:
        """Stop watching; in a good end other ranks are told that this one is not lost."""
        if self in _watching:
            _watching.remove(self)
        try:
            self.stand_down()
        except (Interrupted, TerminationRequested):  # too late to matter
            self.stand_down()
        # After the thread has ended, or was waited for: it polls these descriptors.
        self._signals.uninstall()
        self._links.end() if is_good else self._links.forget()
        os.close(self._wake)

    def hang_up(self) -> None:
        """Close connections for another thread, since training begins again, and not between a norm and its update."""
        until_s = time.monotonic() + PROTECTED_S
        while not self._session.interrupt(force=time.monotonic() > until_s) and not self._left.wait(_TICK_S):
            pass
        self.hung_up = not self._left.is_set()  # what fails on this rank from now on fails for that
        self._hang_up()

    def _run(self) -> None:
        while not self._left.is_set() and self.interrupted is None:
            news = self._listen(self._look_s)
            if news is not None:
                self._interrupt_when_stuck(news)
            elif self._stall_s is not None and self._stood_s() > (limit_s := self._stall_s()):
                self._interrupt(f"{limit_s:g} s passed", Cause.PEER_LOST, Stalled)

    def _listen(self, timeout_s: float | None) -> _News | None:
        """Wait for bad news; of several, what leaves the main thread least time."""
        poll = select.poll()
        readers = {link.fileno(): link for link in self._links.sockets}
        # RDHUP: the rank at the other end has hung up, though nothing is there to be read.
        for descriptor in (self._wake, self._signals.reader.fileno(), *readers):
            poll.register(descriptor, select.POLLIN | select.POLLRDHUP)
        ready = [descriptor for descriptor, _ in poll.poll(None if timeout_s is None else timeout_s * 1000)]
        ended = [readers[descriptor] for descriptor in ready if descriptor in readers]
        lost = [_News(rank, self._links.lost(link)) for link in ended for rank in [self._links.sockets[link]]]
        # Read in any case: bytes that stay would wake `poll` at once, again and again.
        if signal.SIGTERM in self._signals.read() and self._is_told():
            return _News(None, "told to end by SIGTERM", Cause.TOLD_TO_END)
        return min((news for news in lost if news.why), key=self._time_for, default=None)

    def _time_for(self, news: _News) -> float:
        """How long the main thread may still do what needs none of the ranks that were lost."""
        return 0.0 if news.lost is None else self._finish_s(news.lost)

    def _stood_s(self) -> float:
        """For how long the main thread has been seen in one place, if that is within an iteration."""
        # The phase, too: each iteration may wait at the same instruction, as with CUDA graphs of whole iterations.
        place, now_s = (self._main.place, self._phase()), time.monotonic()
        # This thread did not look for long: the whole node was suspended, and the main thread could not move either.
        was_stopped = self._look_s is not None and now_s - self._looked_s > 2 * self._look_s
        if place != self._place or was_stopped or _waits_for_no_rank.is_set() or place[1] is None:
            self._place, self._since_s = place, now_s
        self._looked_s = now_s
        return now_s - self._since_s

    def _interrupt_when_stuck(self, news: _News) -> None:
        """Give the main thread time to come to an end by itself."""
        log.info("rank %d: %s", self._rank, news.why)
        begun_s = time.monotonic()
        while time.monotonic() < begun_s + self._time_for(news):
            worse = self._listen(_TICK_S)
            if self._left.is_set():
                return
            if worse is not None:
                news = worse
                log.info("rank %d: %s", self._rank, news.why)
        until_s = time.monotonic() + MOVING_PATIENCE * self._patience_s
        place, since_s = self._main.place, time.monotonic()
        while time.monotonic() < min(until_s, since_s + self._patience_s):
            if self._left.wait(_TICK_S):
                return
            now = self._main.place
            if now != place:
                place, since_s = now, time.monotonic()
        self._interrupt(news.why, news.cause)

    def _interrupt(self, why: str, cause: Cause, lost: type[Interrupted] = Interrupted) -> None:
        where, until_s, is_forced = self._main.where, time.monotonic() + PROTECTED_S, False
        log.warning("rank %d: %s; the main thread is blocked in %s: closing all connections", self._rank, why, where)
        # Without the lock: the main thread may leave meanwhile, for which it takes the lock.
        while not self._session.interrupt(force=is_forced):
            is_forced = time.monotonic() > until_s
            if is_forced:
                log.warning("rank %d: optimizer step did not finish in %g s: aborted", self._rank, PROTECTED_S)
            elif self._left.wait(_TICK_S):
                return
        with self._lock:
            if self._left.is_set():
                return
            self.interrupted = cause
            # Set before anything is aborted: it is raised before Python code can use what aborted calls leave behind.
            # A step that was cut off continues to its end, in which it must not be interrupted elsewhere.
            if not is_forced:
                self._main.throw(TerminationRequested if cause is Cause.TOLD_TO_END else lost)
        # Links first, which takes no time: to abort communicators may take seconds, and other ranks wait.
        self._links.hang_up()
        self._hang_up()
        if not self._left.wait(LEAVING_S):
            where = self._main.where
            log.error("rank %d: the main thread is still blocked in %s after %g s", self._rank, where, LEAVING_S)


_watching: list[Watcher] = []
"""Those of this process, the newest last."""


def hang_up() -> None:
    """Close all connections of this process to other ranks, by whoever watches it."""
    newest = _watching[-1:]  # the main thread may take it out meanwhile
    newest[0].hang_up() if newest else close_connections()


_waits_for_no_rank = threading.Event()


@contextlib.contextmanager
def waiting_for_no_rank() -> Iterator[None]:
    """In this block the main thread may stand in one place for as long as it takes, such as to write a checkpoint."""
    _waits_for_no_rank.set()
    try:
        yield
    finally:
        _waits_for_no_rank.clear()


class _NoSession:
    """Nothing is protected yet."""

    def interrupt(self, *, force: bool) -> bool:
        return True


class _NoLinks:
    """No rank is linked yet: only a wait that takes too long tells of a lost one."""

    sockets: Mapping[Any, int] = {}

    def hang_up(self) -> None:
        """Nobody hears of it by links."""

    end = forget = hang_up


@contextlib.contextmanager
def watched_start(rank: int, stall_s: float, hang_up: Callable[[], object] = close_connections) -> Iterator[None]:
    """A block on the main thread, from where ranks are connected until a `Watcher` of their session begins.

    With NCCL nobody else ends a wait there: torch's watchdog is told to leave errors alone (`peer_links.SETTINGS`).

    Args:
        rank: This rank.
        stall_s: How long the main thread may stay in one place.
        hang_up: As of `Watcher`.
    """
    watcher = Watcher(
        rank,
        _NoSession(),
        cast("PeerLinks", _NoLinks()),
        lambda: False,
        0.0,
        hang_up=hang_up,
        stall_s=lambda: stall_s,
        phase=lambda: "start",
    )
    watcher.start()
    try:
        yield
    finally:
        watcher.stop(is_good=True)


def stood_down(watcher: Watcher | None) -> Cause | None:
    """Let a watcher stand down, if there is one; why it had interrupted, if so. Raises as `Watcher.stand_down`."""
    if watcher is None:
        return None
    watcher.stand_down()
    return Cause.PEER_LOST if watcher.interrupted is None and watcher.hung_up else watcher.interrupted
