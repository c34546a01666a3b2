"""The watcher beside a main thread that stands in a call: its order, its patience, and what it leaves alone."""

from __future__ import annotations

import ctypes
import errno
import gc
import itertools
import os
import signal
import socket
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any

import pytest
from torch.distributed import HashStore

from megatron.core.dist_checkpointing.moe.errors import PeerLost
from megatron.core.dist_checkpointing.moe.policy.parking import Cause
from megatron.core.dist_checkpointing.moe.runtime import watcher as watchers
from megatron.core.dist_checkpointing.moe.runtime.faults import SignalBytes
from megatron.core.dist_checkpointing.moe.runtime.peer_links import PeerLinks, stop_waiting
from megatron.core.dist_checkpointing.moe.runtime.status import is_silence
from megatron.core.dist_checkpointing.moe.runtime.watcher import (
    Interrupted,
    MainThread,
    Stalled,
    TerminationRequested,
    Watcher,
    stood_down,
    waiting_for_no_rank,
    watched_start,
)

PATIENCE_S, LONG_S = 0.2, 20.0


def linked(ranks: int) -> list[PeerLinks]:
    """The links of all ranks, as made by a process each."""
    store, found = HashStore(), dict[int, PeerLinks]()

    def connect(rank: int) -> None:
        found[rank] = PeerLinks(store, rank, ranks, "127.0.0.1", LONG_S)

    threads = [threading.Thread(target=connect, args=(rank,)) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [found[rank] for rank in range(ranks)]


class Call:
    """A call of C that ends when `release` is called, as that of a main thread behind a kernel that is aborted."""

    def __init__(self) -> None:
        self._here, self._there = socket.socketpair()

    def enter(self) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        try:
            ctypes.CDLL(None).recv(self._here.fileno(), ctypes.create_string_buffer(1), 1, 0)
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
        for _ in range(1000):  # an error that was raised meanwhile arrives before this ends
            pass

    def release(self) -> None:
        self._there.shutdown(socket.SHUT_RDWR)


class Step:
    """A session whose step is in its protected part for a while."""

    def __init__(self, protected_s: float = 0.0) -> None:
        self.ends_s, self.forced = time.monotonic() + protected_s, False

    def interrupt(self, *, force: bool) -> bool:
        self.forced = self.forced or force
        return force or time.monotonic() >= self.ends_s


@contextmanager
def watched(
    session: Step,
    links: PeerLinks,
    hang_up: Callable[[], object],
    *,
    is_told: bool = True,
    stall_s: Callable[[], float] | None = None,
    patience_s: float = PATIENCE_S,
    finish_s: Callable[[int], float] = lambda lost: 0.0,
    phase: Callable[[], object] = lambda: 1,
) -> Iterator[Watcher]:
    watcher = Watcher(
        0, session, links, lambda: is_told, patience_s, hang_up=hang_up, stall_s=stall_s, phase=phase,
        finish_s=finish_s,
    )  # fmt: skip
    watcher.start()
    try:
        yield watcher
    finally:
        watcher.stop(is_good=True)


@pytest.fixture
def handler() -> Iterator[list[int]]:
    """Python handles SIGTERM, when it gets to it."""
    seen: list[int] = []

    def noting(number: int, _frame: FrameType | None) -> None:
        seen.append(number)

    before = signal.signal(signal.SIGTERM, noting)
    yield seen
    signal.signal(signal.SIGTERM, before)


def test_a_call_that_waits_for_a_lost_peer_ends_with_an_error() -> None:
    (own, other), call = linked(2), Call()
    with watched(Step(), own, call.release) as watcher:
        other.forget()
        with pytest.raises(Interrupted):
            call.enter()
        assert watcher.interrupted is Cause.PEER_LOST


def test_what_fails_because_the_launcher_called_the_rank_off_is_no_error_of_its_own() -> None:
    (own, _), call = linked(2), Call()
    with watched(Step(), own, call.release) as watcher:
        assert stood_down(watcher) is None
    with watched(Step(), linked(2)[0], call.release) as watcher:
        watcher.hang_up()
        assert stood_down(watcher) is Cause.PEER_LOST


def test_other_peers_hear_of_it_before_anything_is_aborted() -> None:
    (own, other, third), call = linked(3), Call()
    link = next(link for link, rank in third.sockets.items() if rank == 0)
    link.settimeout(LONG_S)
    heard: list[bytes] = []

    def hang_up() -> None:
        heard.append(link.recv(1))
        call.release()

    with watched(Step(), own, hang_up):
        other.forget()
        with pytest.raises(Interrupted):
            call.enter()
    assert heard == [b""]
    third.forget()


def test_nothing_is_given_up_while_the_step_is_in_its_protected_part() -> None:
    (own, other), call, step = linked(2), Call(), Step(protected_s=1.0)
    ended_s: list[float] = []

    def hang_up() -> None:
        ended_s.append(time.monotonic())
        call.release()

    with watched(step, own, hang_up):
        other.forget()
        with pytest.raises(Interrupted):
            call.enter()
    assert ended_s[0] >= step.ends_s
    assert not step.forced


def test_a_step_that_does_not_end_is_cut_off_without_an_error_in_its_middle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watchers, "PROTECTED_S", 0.3)
    (own, other), call, step = linked(2), Call(), Step(protected_s=LONG_S)
    with watched(step, own, call.release):
        other.forget()
        call.enter()
    assert step.forced


def test_a_main_thread_that_moves_is_left_to_hear_of_the_loss_by_itself() -> None:
    (own, other), given_up = linked(2), []
    patience_s = 2.0  # more than a busy machine may keep this thread from its turn
    with watched(Step(), own, lambda: given_up.append(True), patience_s=patience_s) as watcher:
        other.forget()
        until_s = time.monotonic() + 2 * patience_s
        while time.monotonic() < until_s:
            sum(range(20000))
            max(range(20000))
        watcher.stand_down()
    assert not given_up


def test_a_main_thread_that_needs_none_of_the_lost_ranks_finishes_its_iteration() -> None:
    (own, other, third), call = linked(3), Call()
    with watched(Step(), own, call.release, finish_s=lambda lost: LONG_S if lost == 1 else 0.0) as watcher:
        other.forget()
        threading.Timer(5 * PATIENCE_S, call.release).start()
        call.enter()
        watcher.stand_down()
    assert watcher.interrupted is None
    third.forget()


@pytest.mark.parametrize("time_s", [LONG_S, 3 * PATIENCE_S], ids=["of its own stages", "too late"])
def test_a_replay_is_interrupted_that_loses_a_rank_which_it_needs_or_takes_too_long(time_s: float) -> None:
    (own, other, third), call, begun_s = linked(3), Call(), time.monotonic()
    with watched(Step(), own, call.release, finish_s=lambda lost: time_s if lost == 1 else 0.0) as watcher:
        other.forget()
        if time_s == LONG_S:
            threading.Timer(2 * PATIENCE_S, third.forget).start()
        with pytest.raises(Interrupted):
            call.enter()
        assert watcher.interrupted is Cause.PEER_LOST
    assert 2 * PATIENCE_S < time.monotonic() - begun_s < LONG_S
    third.forget()


def test_sigterm_ends_a_replay_that_would_finish_its_iteration(handler: list[int]) -> None:
    (own, other), call = linked(2), Call()
    with watched(Step(), own, call.release, finish_s=lambda lost: LONG_S) as watcher:
        other.forget()
        threading.Timer(2 * PATIENCE_S, os.kill, [os.getpid(), signal.SIGTERM]).start()
        with pytest.raises(TerminationRequested):
            call.enter()
        assert watcher.interrupted is Cause.TOLD_TO_END


def test_a_main_thread_that_leaves_meanwhile_is_not_interrupted() -> None:
    own, other = linked(2)
    given_up: list[bool] = []
    with watched(Step(), own, lambda: given_up.append(True)) as watcher:
        other.forget()
        watcher.stand_down()
        time.sleep(2 * PATIENCE_S)
    assert not given_up
    assert watcher.interrupted is None


def test_a_peer_that_says_goodbye_is_not_lost() -> None:
    (own, other), given_up = linked(2), []
    with watched(Step(), own, lambda: given_up.append(True)):
        other.end()
        threading.Event().wait(3 * PATIENCE_S)
    assert not given_up


def test_sigterm_ends_a_call_that_no_handler_can_interrupt(handler: list[int]) -> None:
    (own, other), call = linked(2), Call()
    with watched(Step(), own, call.release) as watcher:
        os.kill(os.getpid(), signal.SIGTERM)
        with pytest.raises(TerminationRequested):
            call.enter()
        assert watcher.interrupted is Cause.TOLD_TO_END
    assert handler == [signal.SIGTERM]
    other.end()


def test_sigterm_is_left_to_whoever_handles_it_otherwise(handler: list[int]) -> None:
    (own, other), given_up = linked(2), []
    with watched(Step(), own, lambda: given_up.append(True), is_told=False):
        os.kill(os.getpid(), signal.SIGTERM)
        threading.Event().wait(3 * PATIENCE_S)
    assert not given_up
    other.end()


def test_a_call_that_takes_longer_than_a_collective_may_is_ended_though_nobody_is_lost() -> None:
    (own, other), call = linked(2), Call()
    with watched(Step(), own, call.release, stall_s=lambda: 0.4), pytest.raises(Interrupted):
        call.enter()
    other.end()


def test_a_limit_of_collectives_that_changes_while_one_waits_is_the_limit_from_then_on() -> None:
    (own, other), call, limits_s = linked(2), Call(), itertools.chain([0.4], itertools.repeat(60.0))
    with watched(Step(), own, call.release, stall_s=lambda: next(limits_s)) as watcher:
        threading.Timer(1.5, call.release).start()
        call.enter()
    assert watcher.interrupted is None
    other.end()


def test_iterations_that_each_wait_at_the_same_instruction_are_no_stall() -> None:
    (own, other), call, iterations = linked(2), Call(), itertools.count()
    with watched(Step(), own, call.release, stall_s=lambda: 0.4, phase=lambda: next(iterations)) as watcher:
        threading.Timer(1.5, call.release).start()
        call.enter()
    assert watcher.interrupted is None
    other.end()


def test_a_save_may_take_longer_than_a_collective() -> None:
    (own, other), call = linked(2), Call()
    with watched(Step(), own, call.release, stall_s=lambda: 0.4) as watcher, waiting_for_no_rank():
        threading.Timer(1.5, call.release).start()
        call.enter()
    assert watcher.interrupted is None
    other.end()


def test_a_node_that_was_suspended_meanwhile_took_no_longer_for_a_collective(monkeypatch: pytest.MonkeyPatch) -> None:
    (own, other), call, suspended_s = linked(2), Call(), [0.0]
    monkeypatch.setattr(watchers, "time", SimpleNamespace(monotonic=lambda: time.monotonic() + sum(suspended_s)))
    timers = [threading.Timer(0.8, suspended_s.append, [100.0]), threading.Timer(1.6, call.release)]
    with watched(Step(), own, call.release, stall_s=lambda: 2.0) as watcher:
        for timer in timers:
            timer.start()
        call.enter()
    assert watcher.interrupted is None
    other.end()


def test_a_launcher_that_begins_again_closes_connections_behind_the_step_that_is_under_way(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (own, other), closed, step = linked(2), list[bool](), Step(protected_s=0.3)
    monkeypatch.setattr(watchers, "close_connections", lambda: closed.append(True))
    with watched(step, own, lambda: closed.append(time.monotonic() >= step.ends_s)):
        watchers.hang_up()
    assert (closed, step.forced) == ([True], False)
    watchers.hang_up()
    assert len(closed) == 2, "nobody watches"
    other.end()


def test_whoever_was_told_of_signals_before_still_is(handler: list[int]) -> None:
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    before = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    try:
        signals = SignalBytes()
        signals.install()
        os.kill(os.getpid(), signal.SIGTERM)
        assert signal.SIGTERM in signals.read()
        assert os.read(reading, 9) == bytes([signal.SIGTERM])
        signals.uninstall()
        assert signal.set_wakeup_fd(writing, warn_on_full_buffer=False) == writing
    finally:
        signal.set_wakeup_fd(before)
        os.close(reading)
        os.close(writing)


def test_a_descriptor_whose_number_went_to_another_file_gets_no_bytes_and_is_left_alone(
    handler: list[int], tmp_path: Path
) -> None:
    """Seen on a GPU, where it kept trained jobs from ending with 0."""
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    before = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    signals = SignalBytes()
    signals.install()
    with (tmp_path / "checkpoint").open("wb") as other:
        os.dup2(other.fileno(), writing)
        os.kill(os.getpid(), signal.SIGTERM)
        assert signal.SIGTERM in signals.read()
        signals.uninstall()
    assert signal.set_wakeup_fd(before) == -1
    os.close(reading)
    os.close(writing)
    assert (tmp_path / "checkpoint").read_bytes() == b""


def test_signals_of_a_forked_helper_are_not_taken_for_those_of_its_trainer(handler: list[int]) -> None:
    signals = SignalBytes()
    signals.install()
    try:
        child = os.fork()
        if child == 0:
            os.kill(os.getpid(), signal.SIGTERM)
            signal.raise_signal(signal.SIGKILL)
        os.waitpid(child, 0)
        assert signal.SIGTERM not in signals.read()  # the death of the child may be there, where others ask for it
    finally:
        signals.uninstall()


def test_a_forked_helper_does_not_hide_the_death_of_its_trainer() -> None:
    own, other = linked(2)
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(writing)
        os.read(reading, 1)
        signal.raise_signal(signal.SIGKILL)
    try:
        other.forget()
        for connection in list(own.sockets):
            connection.settimeout(LONG_S)
            assert connection.recv(1) == b""
    finally:
        os.close(reading)
        os.close(writing)
        os.waitpid(child, 0)
        own.forget()


@pytest.mark.parametrize("ranks", [1, 2, 3, 5, 8])
def test_links_grow_with_the_logarithm_of_the_ranks_and_lead_to_all_of_them(ranks: int) -> None:
    links = linked(ranks)
    for one in links:
        assert len(one.sockets) <= 2 * (ranks - 1).bit_length()
    heard, told = {0}, [0]
    while told:  # each rank that hears of a loss hangs up in turn
        rank = told.pop()
        new = set(links[rank].sockets.values()) - heard
        heard |= new
        told += sorted(new)
    assert heard == set(range(ranks))
    for one in links:
        one.end()


def test_a_rank_that_does_not_come_is_named_with_its_address() -> None:
    store = HashStore()
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))  # bound, but it does not listen
        where = f"127.0.0.1:{nobody.getsockname()[1]}"
        store.set("peer-links/1", where)
        with pytest.raises(PeerLost, match=f"rank 0 could not reach rank 1 at {where} .*--moe-ckpt-interface"):
            PeerLinks(store, 0, 2, "127.0.0.1", 1.0)


def test_a_rank_that_may_open_no_more_files_is_not_told_to_look_for_another_interface(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*_unused: Any, **_options: Any) -> socket.socket:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    store = HashStore()
    store.set("peer-links/1", f"127.0.0.1:1 {bytes(16).hex()}")
    monkeypatch.setattr(socket, "create_connection", refuse)
    with pytest.raises(PeerLost, match=r"Too many open files\): raise the limit of open files \(ulimit -n\)"):
        PeerLinks(store, 0, 2, "127.0.0.1", 1.0)


def test_a_rank_that_waits_for_one_that_never_calls_is_let_go_when_connections_are_closed() -> None:
    store, begun_s = HashStore(), time.monotonic()
    with socket.create_server(("127.0.0.1", 0)) as silent:
        store.set("peer-links/1", f"127.0.0.1:{silent.getsockname()[1]} {bytes(16).hex()}")
        threading.Thread(target=lambda: (silent.accept(), stop_waiting())).start()  # it listens itself when it calls
        with pytest.raises(PeerLost, match=r"waited 20 s at 127\.0\.0\.1 for rank 1 to connect"):
            PeerLinks(store, 0, 2, "127.0.0.1", LONG_S)
    assert time.monotonic() - begun_s < LONG_S / 2


def test_a_stranger_who_calls_first_takes_no_ranks_place() -> None:
    store, found = HashStore(), dict[int, PeerLinks]()
    threads = []

    def connect(rank: int) -> None:
        found[rank] = PeerLinks(store, rank, 2, "127.0.0.1", LONG_S)

    threads.append(threading.Thread(target=connect, args=(0,)))
    threads[0].start()
    store.wait(["peer-links/0"])
    host, _, port = store.get("peer-links/0").decode().partition(" ")[0].rpartition(":")
    with socket.create_connection((host, int(port))) as scanner, socket.create_connection((host, int(port))) as liar:
        scanner.shutdown(socket.SHUT_WR)
        liar.sendall(bytes(24))
        threads.append(threading.Thread(target=connect, args=(1,)))
        threads[1].start()
        for thread in threads:
            thread.join()
        assert liar.recv(1) == b""  # hung up on
    assert sorted(found) == [0, 1]
    for one in found.values():
        one.end()


class Kept:
    """Something that a caller has."""


@pytest.mark.parametrize("ask", [lambda thread: thread.place, lambda thread: thread.where], ids=["place", "where"])
def test_a_thread_that_asks_where_it_is_keeps_nothing_of_its_callers(ask: Callable[[MainThread], object]) -> None:
    def caller() -> weakref.ref[Kept]:
        kept = Kept()
        assert ask(MainThread())
        return weakref.ref(kept)

    gc.disable()  # circles stay
    try:
        assert caller()() is None
    finally:
        gc.enable()


def test_before_a_session_watches_a_wait_that_takes_too_long_ends_as_a_silence() -> None:
    call = Call()
    with pytest.raises(Stalled) as raised, watched_start(0, 0.4, call.release):
        call.enter()
    assert is_silence(raised.value)


def test_a_start_that_moves_is_left_alone() -> None:
    hung_up: list[int] = []
    places = [eval("lambda: time.sleep(0.2)") for _ in range(8)]  # code of its own for each
    with watched_start(0, 1.0, lambda: hung_up.append(1)):
        for place in places:
            place()
    assert not hung_up
