"""A wait for other ranks that times out names those that do not answer, and what comes next."""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta

import pytest
from torch.distributed import HashStore, TCPStore

from megatron.core.dist_checkpointing.moe.errors import PeerLost, PeerSilent, UsageError
from megatron.core.dist_checkpointing.moe.replication.agreement import ConnectionEpochs, gathered_by_store
from megatron.core.dist_checkpointing.moe.replication.tcp import TcpTransport
from megatron.core.dist_checkpointing.moe.runtime import status
from megatron.core.dist_checkpointing.moe.runtime.peer_links import PeerLinks, is_lost_peer
from megatron.core.dist_checkpointing.moe.runtime.status import (
    RollCall,
    ThisStart,
    is_silence,
    next_step,
    report_silence,
)

RANKS = 5


@pytest.fixture
def store() -> TCPStore:
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=5))


@pytest.fixture
def start(store: TCPStore, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """This process as rank 0 of four in their second start, which does not close the connections of the tests."""
    told = {"RANK": "0", "WORLD_SIZE": "4", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port)}
    told |= {"TORCHELASTIC_RESTART_COUNT": "1", "TORCHELASTIC_MAX_RESTARTS": "3"}
    for name, value in told.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(status, "close_connections", lambda: 0)
    monkeypatch.setattr(status, "ANSWER_S", 0.2)
    status._REPORTED.clear()
    yield
    status._REPORTED.clear()


def silence(error: BaseException) -> BaseException:
    """The error as it is raised."""
    try:
        raise error
    except type(error) as raised:
        return raised


def on_ranks(ranks: int, work: object, silent: int) -> dict[int, BaseException]:
    """What the others get while one rank does nothing."""
    errors: dict[int, BaseException] = {}

    def run(rank: int) -> None:
        assert callable(work)
        try:
            work(rank)
        except PeerLost as error:
            errors[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(ranks) if rank != silent]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return errors


@pytest.mark.parametrize("silent", [0, 3])
def test_ranks_that_do_not_start_are_named_by_all_others(silent: int) -> None:
    store = HashStore()
    errors = on_ranks(RANKS, lambda rank: gathered_by_store(store, "start", rank, RANKS, rank, list, 0.5), silent)
    assert {str(silent_of(error)) for error in errors.values()} == {str((silent,))}
    assert len(errors) == RANKS - 1
    assert all(f"for rank {silent}, which did not start" in str(error) for error in errors.values())


@pytest.mark.parametrize("rank", [0, 1])
def test_ranks_whose_store_ends_as_they_start_have_lost_a_peer_whose_number_is_not_known(rank: int) -> None:
    kept = [TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)]
    own = TCPStore("127.0.0.1", kept[0].port, is_master=False, wait_for_workers=False)
    threading.Timer(0.3, kept.clear).start()
    with pytest.raises(PeerLost, match=f"rank {rank} lost the store") as raised:
        gathered_by_store(own, "start", rank, 2, rank, list, 30.0)
    assert not is_silence(raised.value)


def silent_of(error: BaseException) -> tuple[int, ...]:
    """Those that an error names: rank 0's words reach others without the numbers."""
    assert isinstance(error, PeerSilent)
    words = str(error).partition(" s for rank")[2].lstrip("s ").partition(", which")[0]
    assert not error.ranks or str(error.ranks[0]) == words
    return tuple(map(int, words.split(", ")))


def test_ranks_that_do_not_connect_again_are_named() -> None:
    store = HashStore()
    errors = on_ranks(RANKS, lambda rank: ConnectionEpochs(store, rank, RANKS).meet(0.5), 2)
    assert {error.ranks for error in errors.values() if isinstance(error, PeerSilent)} == {(2,)}


def test_a_rank_that_stops_before_it_links_is_named_by_those_that_it_should_have_called() -> None:
    store = HashStore()
    errors = on_ranks(4, lambda rank: PeerLinks(store, rank, 4, "127.0.0.1", 1.0), 3)
    assert errors.keys() == {0, 1, 2}
    assert all(isinstance(error, PeerSilent) for error in errors.values())
    assert "for ranks 2, 3 to connect" in str(errors[0])  # of which rank 2 waits for rank 3, too
    assert errors[2].ranks == (3,), errors[2]


@pytest.mark.parametrize(
    "call", [lambda transport: transport.gather(None), lambda transport: transport.exchange({1: b""})]
)
def test_a_silent_rank_is_told_from_one_whose_connection_ended(call: Callable[[TcpTransport], object]) -> None:
    store, errors = HashStore(), dict[int, BaseException]()

    def gather(rank: int) -> None:
        transport = TcpTransport(store, rank, 2, "control", 0.5)
        if rank:
            stopped.wait(20)
            transport.close()
            return
        try:
            call(transport)
        except PeerLost as error:
            errors[rank] = error
        stopped.set()

    stopped = threading.Event()
    on_ranks(2, gather, silent=-1)
    assert is_silence(errors[0]), errors


def test_what_torch_says_of_a_rank_that_never_comes_is_the_loss_of_a_peer_and_a_silence() -> None:
    never = RuntimeError("wait timeout after 600000ms, keys: /0//cpu//0/2")
    assert is_lost_peer(never)
    assert is_silence(never)
    assert is_silence(RuntimeError("Timed out waiting 600000ms for recv operation to complete"))
    for said in (
        "Connection closed by peer [127.0.0.1]:31",
        "Failed to recv, got 0 bytes. Connection was likely closed. Did the remote server shutdown or crash?",
        "Failed to send, sent 0 bytes. Connection was likely closed. Did the remote server shutdown or crash?",
    ):
        assert is_lost_peer(RuntimeError(said))
        assert not is_silence(RuntimeError(said))


def test_those_that_do_not_answer_are_named_in_one_line_with_where_since_when_and_what_follows(
    store: TCPStore, start: None, caplog: pytest.LogCaptureFixture
) -> None:
    call = RollCall(status.PrefixStore("moe-ckpt-silent-1", store), 4)
    call.answer(1)
    call.answer(3)
    with caplog.at_level(logging.ERROR):
        report_silence(silence(RuntimeError("Timed out waiting 600000ms for recv operation to complete")))
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.startswith("peer failure: no answer from rank 2: waited in silence"), line
    assert "no progress for " in line
    assert line.endswith("; next: the launcher kills what does not end and starts all ranks from the newest copies"
                         " (restart 2 of 3)"), line  # fmt: skip


def test_one_rank_reports_and_the_others_only_answer(
    store: TCPStore, start: None, caplog: pytest.LogCaptureFixture
) -> None:
    call = RollCall(status.PrefixStore("moe-ckpt-silent-1", store), 4)
    assert call.is_first()
    report_silence(PeerSilent("nothing moved"))
    for rank in (1, 2, 3):
        call.answer(rank)
    assert call.missing(0.0) == ()
    assert not caplog.records


@pytest.mark.parametrize("error", [UsageError("no"), ValueError("timeout"), KeyError("timed out")])
def test_an_error_of_its_own_is_no_answer(error: Exception, store: TCPStore, start: None) -> None:
    report_silence(error)
    call = RollCall(status.PrefixStore("moe-ckpt-silent-1", store), 2)
    call.answer(1)
    assert call.missing(0.0) == (0,)


def test_without_a_store_that_answers_known_names_are_still_said(
    start: None, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MASTER_PORT", "1")
    monkeypatch.setattr(status, "_STORE_S", 0.2)
    monkeypatch.setattr(status, "ANSWER_S", 10.0)
    with caplog.at_level(logging.ERROR):
        report_silence(PeerSilent("waited for rank 3", (3,)))
    assert ["no answer from rank 3" in record.getMessage() for record in caplog.records] == [True]


def test_a_store_that_is_gone_is_given_up_at_once_and_no_thread_is_cut_off_as_the_process_ends(
    start: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A survivor in place outlives the store of its start: torch would try to connect for ten seconds, and a process
    that ends meanwhile is aborted."""
    with socket.create_server(("127.0.0.1", 0)) as gone:
        monkeypatch.setenv("MASTER_PORT", str(gone.getsockname()[1]))
    asked: list[object] = []
    threads: list[threading.Thread] = []
    monkeypatch.setattr(status, "TCPStore", lambda *where, **options: asked.append(where))
    started = threading.Thread.start

    def noted(thread: threading.Thread) -> None:
        threads.append(thread)
        started(thread)

    monkeypatch.setattr(threading.Thread, "start", noted)
    report_silence(silence(PeerLost("rank 2 closed its connection")))
    (thread,) = threads
    thread.join(30.0)
    assert not thread.daemon
    assert not asked


def test_the_next_step_is_that_of_the_launcher() -> None:
    torchrun = {"TORCHELASTIC_RESTART_COUNT": "3", "TORCHELASTIC_MAX_RESTARTS": "3"}
    assert next_step(torchrun, keeps=False).startswith("the job ends, since all 3 restarts are used")
    assert "standbys" in next_step(torchrun, keeps=True)
    assert next_step({}, keeps=False).startswith("this rank exits")


@pytest.mark.parametrize("told", [{}, {"MASTER_ADDR": "a", "MASTER_PORT": "1", "RANK": "x", "WORLD_SIZE": "2"}])
def test_without_a_launcher_nobody_is_asked(told: dict[str, str]) -> None:
    assert ThisStart.of(told) is None
    alone = {"MASTER_ADDR": "a", "MASTER_PORT": "1", "RANK": "0", "WORLD_SIZE": "1"}
    assert ThisStart.of(alone) is None
