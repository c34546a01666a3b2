"""What a rank tells people while its job runs: how protected it is, and for which ranks others have waited in vain.

Each rank writes its status beside its snapshots, for who looks on its node, and into the store at which all ranks have
met, for who looks from anywhere. Neither may slow or end training: both are done by a thread of their own, and what
fails is left out.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

from torch.distributed import PrefixStore, Store, TCPStore

from ..errors import PeerSilent, ranks_named
from ..ports import Json
from ..replication.agreement import not_listed
from ..snapshot.coordinator import ProtectionReport
from ..standby.heartbeat import own_heartbeat, place_of
from ..standby.slot import own_slot
from .peer_links import close_connections, is_blameless, is_lost_peer

STATUS_VERSION = 1
STATUS_FILE = "status.json"
"""In the folder of the rank's slot."""
STATUS_KEY = "moe-ckpt/status/{}"
"""In the store, with the rank's number."""
INTERVAL_S = 2.0
"""At most so often, whatever an iteration takes."""
PER_S, LONGEST_S = 1000, 20.0
"""How many ranks write into the store, one server, in a second; and the longest that one waits for that."""


class StatusBoard:
    """The status of one rank, from the first report to `close`.

    Args:
        folder: Of the rank's slot.
        store: At which all ranks have met, over a connection on which nobody waits; only a TCPStore is written to.
        facts: What does not change.
    """

    def __init__(self, folder: Path, store: Store, facts: Mapping[str, Json]) -> None:
        self._folder, self._store = folder, readable(store)
        where = None if self._store is None else f"{self._store.host}:{self._store.port}"
        self._facts: dict[str, Any] = {"version": STATUS_VERSION, **facts, "store": where}
        self._report: ProtectionReport | None = None
        self._due_s = 0.0
        self._news, self._closed, self._writing = threading.Event(), threading.Event(), threading.Lock()
        threading.Thread(target=self._run, name="moe-ckpt-status", daemon=True).start()

    def show(self, report: ProtectionReport) -> None:
        """The newest report of an iteration."""
        # One reference is set, so the thread reads the one report or the other: no lock is needed.
        self._report = report
        self._news.set()

    def close(self) -> None:
        """Nothing more is written: the folder may be removed."""
        with self._writing:
            self._closed.set()
        self._news.set()

    def _run(self) -> None:
        late: str | None = None  # that the store does not have yet
        while True:
            self._news.wait(None if late is None else max(0.0, self._due_s - time.monotonic()))
            if self._closed.is_set():
                return
            if self._news.is_set():
                self._news.clear()  # before the report is read: one that comes in between wakes this thread again
                assert self._report is not None
                late = json.dumps(self._facts | facts_of(self._report) | _memory_left(self._folder))
                # By one rename, so that nobody reads half of it. Not synced: it means nothing once the node is down.
                with self._writing, suppress(OSError):
                    if self._closed.is_set():
                        return
                    (aside := self._folder / f".{STATUS_FILE}.{os.getpid()}").write_text(late)
                    aside.replace(self._folder / STATUS_FILE)
            if late is not None and time.monotonic() >= self._due_s:
                with suppress(RuntimeError, OSError):
                    self._publish(late)
                late = None
            self._closed.wait(INTERVAL_S)  # not `sleep`: `close` ends it

    def _publish(self, text: str) -> None:
        if self._store is not None:
            self._due_s = time.monotonic() + min(self._facts.get("world_size", 1) / PER_S, LONGEST_S)
            self._store.set(STATUS_KEY.format(self._facts["rank"]), text)


def facts_of(report: ProtectionReport) -> dict[str, Any]:
    """What a report says of the moment, as JSON values."""
    persistent = report.persistent
    return {
        "at_s": time.time(),
        "iteration": report.iteration,
        "protection": report.protection.state.name.lower(),
        "protection_since": report.protection.since_iteration,
        "protected_iteration": report.protected_iteration,
        "persistence": None if persistent is None else persistent.state.name.lower(),
        "persistence_since": None if persistent is None else persistent.since_iteration,
        "persisted_iteration": report.persisted_iteration,
        "reason": report.reason,
        "memory": asdict(report.memory) if report.memory else None,
    }


def readable(store: Store) -> TCPStore | None:
    """The TCPStore at the bottom of this one, in which others can read; None where there is none."""
    # Whoever asks from outside of the job does not know the prefixes.
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return store if isinstance(store, TCPStore) else None


def _memory_left(folder: Path) -> dict[str, Json]:
    try:
        found = os.statvfs(folder)
    except OSError:
        return {}
    return {"memory_free_bytes": found.f_bavail * found.f_frsize, "memory_total_bytes": found.f_blocks * found.f_frsize}


# Names the ranks that others have waited for in vain, since when, and what comes next.
#
# A wait that ends by its timeout knows the rank at the other end of one connection, which may itself wait for a third
# one. So each rank that is about to leave because of others says so in the store of this start; ranks that say
# nothing are stopped, or in a call that does not return. The first rank whose wait timed out asks, and reports them
# in one line.

log = logging.getLogger(__name__)

ANSWER_S = 5.0
"""How long other ranks may take to say that they wait, too: their connections end as this rank closes its own."""
_STORE_S = 5.0
"""How long the store may take to answer; its node may be the one that is lost."""
_CONNECT_S = 2.0
"""How long its host may take to accept."""
_MARK_S = 0.5
"""How long a rank that only marks itself stays for that."""
_TRIES = 2
"""The launcher may have this process close all its connections meanwhile."""
_PAUSE_S = 0.05
_TIMED_OUT = ("imed out", "timeout")
_REPORTED = set[str]()
"""The starts in which this process has answered."""


class ThisStart(NamedTuple):
    """What the launcher has told this process: its rank, the number of ranks, and where all of them meet."""

    rank: int
    world_size: int
    host: str
    port: int
    number: int

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> ThisStart | None:
        """None where there are no other ranks, or no launcher."""
        names = "RANK", "WORLD_SIZE", "MASTER_PORT"
        if "MASTER_ADDR" not in environment or not all(environment.get(name, "").isdecimal() for name in names):
            return None
        rank, world_size, port = (int(environment[name]) for name in names)
        number = int(environment.get("TORCHELASTIC_RESTART_COUNT") or 0)
        return cls(rank, world_size, environment["MASTER_ADDR"], port, number) if world_size > 1 else None


class RollCall:
    """Which ranks of one start still answer.

    Args:
        store: Of this start, over a connection of this call.
        world_size: The number of ranks.
    """

    def __init__(self, store: Store, world_size: int) -> None:
        self._store, self._world_size = store, world_size

    def answer(self, rank: int) -> None:
        """This rank runs, and leaves because of others."""
        self._store.append("answers", f"{rank} ")

    def is_first(self) -> bool:
        """Whether nobody has asked before."""
        return int(self._store.add("asked", 1)) == 1

    def missing(self, answer_s: float) -> tuple[int, ...]:
        """The ranks that have not answered, for as long as some do not.

        Args:
            answer_s: The longest time in seconds.
        """
        until_s = time.monotonic() + answer_s
        while (silent := self._silent()) and time.monotonic() < until_s:
            time.sleep(_PAUSE_S)
        return silent

    def _silent(self) -> tuple[int, ...]:
        return not_listed(self._store.get("answers"), self._world_size)


def is_silence(error: BaseException | None) -> bool:
    """Whether a wait for other ranks ended by its timeout, and not by the end of a connection."""
    while error is not None:
        if isinstance(error, PeerSilent):
            return True
        if isinstance(error, RuntimeError) and any(text in str(error) for text in _TIMED_OUT):
            return True
        error = error.__cause__
    return False


def next_step(environment: Mapping[str, str], *, keeps: bool) -> str:
    """What follows when ranks are missing: the next rung of the ladder of recoveries.

    Args:
        environment: Of this process, as torchrun sets it.
        keeps: Whether this process outlives faults of others.
    """
    if keeps:
        return "the launcher replaces ranks that end or do not answer by standbys or new processes; the others stay"
    count, most = (environment.get(f"TORCHELASTIC_{name}", "") for name in ("RESTART_COUNT", "MAX_RESTARTS"))
    if not (count.isdecimal() and most.isdecimal()):
        return "this rank exits; start all ranks again, and they take the newest copies in memory or storage"
    if int(count) >= int(most):
        return f"the job ends, since all {most} restarts are used (--max-restarts); its copies stay"
    return (
        f"the launcher kills what does not end and starts all ranks from the newest copies (restart {int(count) + 1}"
        f" of {most})"
    )


def report_silence(error: BaseException) -> None:
    """This rank leaves because of others: let its launcher and them know, and name ranks that do not answer, if it was
    a wait that timed out. Once in each start; for other errors it only lets the launcher know who is not to blame.

    Args:
        error: What this rank leaves with.
    """
    if is_blameless(error):
        own_heartbeat().rest(lost_a_peer=True)
    if not is_lost_peer(error):
        return
    start = ThisStart.of(os.environ)
    if start is None or (name := f"{start.host}:{start.port}/{start.number}") in _REPORTED:
        return
    _REPORTED.add(name)
    asks, keeps = is_silence(error), own_slot().keeps
    if asks:
        close_connections()  # now, so that whoever waits for this rank answers as well
    # On a thread, for a host that is gone keeps a connection waiting. No daemon: a process that ends while one is in a
    # call of the store is aborted, however well its training went since.
    thread = threading.Thread(target=_reported, args=(start, error, asks, keeps), name="moe-ckpt-silent", daemon=False)
    thread.start()
    thread.join(ANSWER_S + 2 * _STORE_S if asks else 0.0 if keeps else _MARK_S)


def _reported(start: ThisStart, error: BaseException, asks: bool, keeps: bool) -> None:
    waited_s, named = own_heartbeat().stood_s, error.ranks if isinstance(error, PeerSilent) else ()
    missing = _to_report(start, named, asks)
    if missing is not None:
        log.error("%s", sentence(missing, waited_s, _place(error), next_step(os.environ, keeps=keeps)))


def _to_report(start: ThisStart, named: tuple[int, ...], asks: bool) -> tuple[int, ...] | None:
    """The ranks that this one has to report, after it has answered; None where it only answers, or another reports."""
    is_first = None
    for _ in range(_TRIES):
        with suppress(RuntimeError, OSError):
            call = _roll_call(start)
            call.answer(start.rank)
            if is_first is None:
                is_first = asks and call.is_first()
            return (named or call.missing(ANSWER_S)) if is_first else None
    reports = asks if is_first is None else is_first  # without the store each rank reports what it knows
    return named if reports and named else None


def _roll_call(start: ThisStart) -> RollCall:
    # A store that is gone refuses at once; torch would try again for seconds.
    socket.create_connection((start.host, start.port), _CONNECT_S).close()
    patience = timedelta(seconds=_STORE_S)
    store = TCPStore(start.host, start.port, is_master=False, wait_for_workers=False, timeout=patience)
    return RollCall(PrefixStore(f"moe-ckpt-silent-{start.number}", store), start.world_size)


def sentence(missing: tuple[int, ...], waited_s: float, place: str, then: str) -> str:
    """One line for people.

    Args:
        missing: The ranks that do not answer.
        waited_s: Seconds since the rank that reports made progress.
        place: Where it waited; may be empty.
        then: What comes next.
    """
    who = f"no answer from {ranks_named(missing)}" if missing else "all ranks answer, but wait in different calls"
    where = f" in {place}" if place else ""
    return f"peer failure: {who}: waited{where}, no progress for {waited_s:.0f} s; next: {then}"


def _place(error: BaseException) -> str:
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return place_of(trace.tb_frame) if trace is not None else ""
