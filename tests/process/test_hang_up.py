"""A rank that leaves lets the others know at once, before it puts its state aside."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hang_up_hooks import BUSY_S, chained
from runs import Layout, flags
from world import ROOT, World

from megatron.core.dist_checkpointing.moe.errors import PeerLost, Terminated
from megatron.core.dist_checkpointing.moe.runtime.faults import Termination
from megatron.core.dist_checkpointing.moe.runtime.peer_links import is_lost_peer
from megatron.pretrain.errors import TrainingFailure

LAYOUT = Layout(pp=1, ep=1, ranks=3)


def chain(world: World, corpus: str, folder: Path, *, hangs_up: bool) -> list[dict[str, Any]]:
    """What each rank of the chain heard."""
    hook = partial(chained, str(folder), hangs_up)
    outcome = world.run(flags(corpus, LAYOUT, "--distributed-timeout-minutes", "1"), 3, [hook])
    assert set(outcome.codes) == {0}, outcome.said
    return [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(3)]


@pytest.mark.ci
def test_a_rank_that_hangs_up_is_heard_by_those_that_wait_for_it(world: World, corpus: str, tmp_path: Path) -> None:
    first, second, third = chain(world, corpus, tmp_path, hangs_up=True)
    assert first["closed"] > 0
    for rank in (second, third):
        assert rank["is_peer"], rank
    # Without the call it would wait for the end of the busy rank.
    assert third["waited_s"] < second["waited_s"] + BUSY_S / 4


@pytest.mark.full
def test_without_hanging_up_the_third_rank_waits_for_the_end_of_the_second(
    world: World, corpus: str, tmp_path: Path
) -> None:
    _, second, third = chain(world, corpus, tmp_path, hangs_up=False)
    assert third["waited_s"] > second["waited_s"] + BUSY_S / 2


@pytest.mark.ci
def test_only_connected_tcp_sockets_are_closed() -> None:
    """In a process of its own: a listener and a local pair continue, a connection does not."""
    code = """
import socket
from megatron.core.dist_checkpointing.moe.runtime.peer_links import close_connections
listener = socket.create_server(("127.0.0.1", 0))
caller = socket.create_connection(listener.getsockname())
called, _ = listener.accept()
one, two = socket.socketpair()
called.sendall(b"before")
assert close_connections() == 2
assert caller.recv(9) == b"before" and caller.recv(9) == b""
one.sendall(b"x")
assert two.recv(1) == b"x"
# Both ends of this process are closed, but whoever calls now is still answered.
again = socket.create_connection(listener.getsockname())
listener.accept()[0].sendall(b"y")
assert again.recv(1) == b"y"
"""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.ci
def test_the_memory_of_a_process_stays_its_own_while_it_hangs_up(tmp_path: Path) -> None:
    """In a process of its own: a lock on a file ends as soon as its holder closes any descriptor of it."""
    code = f"""
import pathlib, subprocess, sys
from megatron.core.dist_checkpointing.moe.runtime.peer_links import close_connections
from megatron.core.dist_checkpointing.moe.storage.ownership import Claim
claim = Claim(pathlib.Path({str(tmp_path)!r}), "run", 0)
assert close_connections() == 0
again = "import fcntl, sys; fcntl.lockf(open(sys.argv[1], 'r+'), fcntl.LOCK_EX | fcntl.LOCK_NB)"
path = str(claim.directory / "owner.json")
told = subprocess.run([sys.executable, "-c", again, path], capture_output=True, text=True)
assert "BlockingIOError" in told.stderr, told
"""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.ci
def test_connections_are_closed_though_no_descriptor_is_left() -> None:
    """In a process of its own: it opens as many files as it may, and keeps them."""
    code = """
import os, resource, socket
from megatron.core.dist_checkpointing.moe.runtime.peer_links import close_connections
listener = socket.create_server(("127.0.0.1", 0))
caller = socket.create_connection(listener.getsockname())
called, _ = listener.accept()
one, two = socket.socketpair()
resource.setrlimit(resource.RLIMIT_NOFILE, (128, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
opened = []
try:
    while True:
        opened.append(os.open(os.devnull, os.O_RDONLY))
except OSError:
    pass
assert close_connections() == 2
assert caller.recv(9) == b""
one.sendall(b"x")
assert two.recv(1) == b"x"
# All that was open still is, and is its owner's to close.
for kept in (listener, caller, called, one, two):
    kept.close()
for descriptor in opened:
    os.close(descriptor)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr


def test_an_error_is_the_loss_of_a_peer_where_a_connection_broke_or_it_came_from_there() -> None:
    lost = RuntimeError("[pair.cc:544] Connection closed by peer [127.0.0.1]:4711")
    assert is_lost_peer(lost)
    assert is_lost_peer(PeerLost("rank 3 did not answer"))
    told = TrainingFailure("leaving")
    told.__cause__ = PeerLost("rank 3 did not answer")
    assert is_lost_peer(told)
    assert not is_lost_peer(RuntimeError("CUDA error: an illegal memory access was encountered"))
    assert not is_lost_peer(TrainingFailure("the loss of iteration 3 is NaN"))
    assert not is_lost_peer(ValueError("Connection closed by peer"))


def test_sigterm_is_noted_and_told_when_it_is_asked_for() -> None:
    before = signal.getsignal(signal.SIGTERM)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    ending = Termination()
    try:
        ending.install()
        ending.check()
        os.kill(os.getpid(), signal.SIGTERM)
        assert ending.is_requested
        with pytest.raises(Terminated, match="SIGTERM"):
            ending.check()
        ending.uninstall()
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    finally:
        signal.signal(signal.SIGTERM, before)


def test_a_handler_that_is_there_already_is_left_alone() -> None:
    before, seen = signal.getsignal(signal.SIGTERM), []
    signal.signal(signal.SIGTERM, lambda number, frame: seen.append(number))
    ending = Termination()
    try:
        ending.install()
        os.kill(os.getpid(), signal.SIGTERM)
        assert seen == [signal.SIGTERM]
        assert not ending.is_requested
    finally:
        signal.signal(signal.SIGTERM, before)


def test_a_forked_helper_still_ends_with_the_signal() -> None:
    before = signal.getsignal(signal.SIGTERM)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    ending = Termination()
    try:
        ending.install()
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            os.write(writing, b"x")
            time.sleep(60)
            os._exit(0)
        os.read(reading, 1)  # a signal that comes while a process is forked may get lost
        os.kill(child, signal.SIGTERM)
        _, status = os.waitpid(child, 0)
        assert os.WTERMSIG(status) == signal.SIGTERM
    finally:
        signal.signal(signal.SIGTERM, before)
