"""Seats: who takes which, and what launcher and worker say to each other."""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import os
import resource
import signal
import socket
import sys
from collections.abc import Iterator

import pytest

from megatron.core.dist_checkpointing.moe.seats.channel import DESCRIPTOR, VERSION, Channel
from megatron.core.dist_checkpointing.moe.seats.seat import Seat
from megatron.core.dist_checkpointing.moe.stock import flags
from megatron.pretrain.seats.process import SeatProcess, may_leave_idle_class
from megatron.pretrain.seats.run import parse_options

Ends = tuple[Channel, socket.socket]


@pytest.fixture
def ends() -> Iterator[Ends]:
    one, other = socket.socketpair()
    with one, other:
        yield Channel(one), other


@contextlib.contextmanager
def open_many() -> Iterator[None]:
    """Descriptors from 1024 on may be used."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    if before[1] < 1100:
        pytest.skip(f"at most {before[1]} open files are allowed here")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(before[0], 1100), before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_a_message_that_comes_in_pieces_is_one_message(ends: Ends) -> None:
    channel, other = ends
    other.sendall(b'{"seat": {"RA')
    assert channel.receive() == []
    other.sendall(b'NK": "3"}}\n{"ready": true}\n')
    assert channel.receive(1.0) == [{"seat": {"RANK": "3"}}, {"ready": True}]


def test_a_process_with_many_open_files_is_heard_too() -> None:
    one, other = socket.socketpair()
    with one, other, open_many(), socket.socket(fileno=fcntl.fcntl(one, fcntl.F_DUPFD, 1024)) as high:
        other.sendall(b'{"ready": true}\n')
        assert Channel(high).receive(1.0) == [{"ready": True}]


def test_what_was_said_before_the_other_end_was_gone_is_heard(ends: Ends) -> None:
    channel, other = ends
    other.sendall(b'{"ready": true}\n')
    other.close()
    assert channel.receive(1.0) == [{"ready": True}]
    with pytest.raises(ConnectionError):
        channel.receive(1.0)


def test_a_process_without_a_launcher_with_seats_has_its_rank_already(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(DESCRIPTOR, raising=False)
    seat = Seat.from_environment()
    seat.take(lambda: pytest.fail("there is nothing to wait for"))
    seat.training()
    assert seat.taken_s is None


def test_a_standby_warms_up_says_so_and_takes_the_rank_that_it_is_told(
    ends: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    channel, other = ends
    launcher = Channel(other)
    monkeypatch.delenv("RANK", raising=False)
    seat, done = Seat(channel), []

    def warm_up() -> None:
        done.append("warm")
        launcher.send({"seat": {"RANK": "3", "WORLD_SIZE": "4"}})

    with monkeypatch.context() as scratch:
        scratch.setattr(os, "environ", dict(os.environ))
        seat.take(warm_up)
        assert (os.environ["RANK"], os.environ["WORLD_SIZE"]) == ("3", "4")
    seat.training()
    seat.training()
    assert done == ["warm"]
    assert seat.taken_s is not None
    assert launcher.receive(1.0) == [{"version": VERSION}, {"ready": True}, {"training": True}]


def test_a_standby_whose_launcher_ends_ends_too(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    channel, other = ends
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(SystemExit) as ending:
        Seat(channel).take(other.close)
    assert not ending.value.code


def test_a_rank_whose_launcher_is_gone_trains_on(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    channel, other = ends
    monkeypatch.setenv("RANK", "0")
    other.close()
    seat = Seat(channel)
    seat.take()
    seat.training()
    assert seat.taken_s is None


def test_a_negative_number_of_standbys_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse_options(["--moe-ckpt-standbys", "-1", "train.py"])
    assert "--moe-ckpt-standbys -1" in capsys.readouterr().err


@pytest.mark.skipif(not may_leave_idle_class(), reason="this user's processes cannot leave the class for idle time")
def test_a_standby_runs_where_nothing_else_wants_to_until_it_has_a_seat() -> None:
    standby = SeatProcess([sys.executable, "-c", "input()"], os.environ, idle=True)
    try:
        assert os.sched_getscheduler(standby.pid) == os.SCHED_IDLE
        standby.sit({"RANK": "0"})
        assert os.sched_getscheduler(standby.pid) == os.SCHED_OTHER
    finally:
        standby.end(signal.SIGKILL)
        assert standby.wait(10.0)
    assert standby.exit_code == -signal.SIGKILL


def test_flags_of_the_stock_loop_are_read_once_the_process_has_its_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    taken = []
    monkeypatch.setattr(flags, "take_seat", lambda: taken.append("a seat"))
    flags.arguments(argparse.ArgumentParser())
    assert taken == ["a seat"]
