"""How agents of nodes meet when one of them is lost at the worst moment."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import TCPStore
from torch.distributed.elastic.rendezvous import RendezvousParameters, rendezvous_handler_registry
from torch.distributed.elastic.rendezvous.api import RendezvousStoreInfo
from world import HANG_TIMEOUT_S, free_port

from megatron.pretrain.processes import NODE_LEAVES
from megatron.pretrain.rendezvous import BACKEND, NodesHandler, register_backend

RUN = [sys.executable, "-m", "megatron.pretrain.standby.run", "--nproc-per-node=1"]
READ_TIMEOUT_S = 2


class Lost(Exception):
    """What ends the thread that plays a node that is lost."""


@pytest.fixture
def port(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    monkeypatch.setenv("TORCH_ELASTIC_WORKER_IDENTICAL", "1")
    register_backend()
    number = free_port()
    store = TCPStore("localhost", number, is_master=True, wait_for_workers=False)
    yield number
    del store


class Cable:
    """Between nodes and the store at a port: what they say goes through while it is not cut."""

    def __init__(self, port: int) -> None:
        self._listener, self._there = socket.create_server(("localhost", 0)), port
        self.port: int = self._listener.getsockname()[1]
        self.is_whole = threading.Event()
        self.is_whole.set()
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            here, there = self._listener.accept()[0], socket.create_connection(("localhost", self._there))
            for one, other in ((here, there), (there, here)):
                threading.Thread(target=self._carry, args=(one, other), daemon=True).start()

    def _carry(self, one: socket.socket, other: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while said := one.recv(1 << 16):
                self.is_whole.wait()
                other.sendall(said)
            other.shutdown(socket.SHUT_RDWR)


def handler(port: int) -> NodesHandler:
    limits = {"is_host": False, "join_timeout": 100, "read_timeout": READ_TIMEOUT_S}
    parameters = RendezvousParameters(BACKEND, f"localhost:{port}", "meeting-test", 2, 2, **limits)
    found = rendezvous_handler_registry.create_handler(parameters)
    assert isinstance(found, NodesHandler)
    return found


def test_when_the_first_node_is_lost_before_it_tells_where_to_listen_the_others_meet_again(
    port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second, spare = handler(port), handler(port), handler(port)
    lost = threading.Event()
    build = RendezvousStoreInfo.build

    def told(rank: int, *rest: Any, **named: Any) -> RendezvousStoreInfo:
        if rank == 0 and not lost.is_set():
            lost.set()
            raise Lost
        return build(rank, *rest, **named)

    monkeypatch.setattr(RendezvousStoreInfo, "build", told)
    with ThreadPoolExecutor(3) as threads:
        doomed = threads.submit(first.next_rendezvous)
        survivor = threads.submit(second.next_rendezvous)
        with pytest.raises(Lost):
            doomed.result(HANG_TIMEOUT_S)
        first._stop_heartbeats()  # all that is left of a lost node
        replacement = threads.submit(spare.next_rendezvous)
        met = [found.result(HANG_TIMEOUT_S) for found in (survivor, replacement)]
    assert sorted(one.rank for one in met) == [0, 1]
    assert {one.world_size for one in met} == {2}
    for one in (second, spare):
        one._stop_heartbeats()


@pytest.mark.ci
@pytest.mark.parametrize("meets", [False, True], ids=["while it trains", "while nodes meet"])
def test_a_cut_that_is_longer_than_the_read_timeout_costs_no_job(port: int, meets: bool) -> None:
    cable = Cable(port)
    first, cut_off = handler(port), handler(cable.port)
    with ThreadPoolExecutor(2) as threads:
        for one in [threads.submit(found.next_rendezvous) for found in (first, cut_off)]:
            one.result(HANG_TIMEOUT_S)
        cable.is_whole.clear()
        cut_off._state_holder._cache_duration = 0  # type: ignore[attr-defined]  # or it answers from what it knows
        asked = threads.submit(cut_off.next_rendezvous if meets else cut_off.num_nodes_waiting)
        threading.Timer(2 * READ_TIMEOUT_S, cable.is_whole.set).start()
        if not meets:
            assert asked.result(HANG_TIMEOUT_S) == 0
            asked = threads.submit(cut_off.next_rendezvous)
        met = [threads.submit(first.next_rendezvous).result(HANG_TIMEOUT_S), asked.result(HANG_TIMEOUT_S)]
    assert sorted(one.rank for one in met) == [0, 1]
    for one in (first, cut_off):
        one.shutdown()


@pytest.mark.ci
@pytest.mark.parametrize("how", ["--master-port=%d", "--rdzv-backend=c10d --rdzv-endpoint=localhost:%d"])
def test_a_launcher_whose_port_is_taken_says_so_in_one_line(how: str) -> None:
    with socket.create_server(("", 0), backlog=8) as taken:
        there = (how % taken.getsockname()[1]).split()
        command = [*RUN, *there, __file__]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=HANG_TIMEOUT_S, check=False)
    assert ended.returncode == 1
    assert "Traceback" not in ended.stderr
    (line,) = (line for line in ended.stderr.splitlines() if line.startswith("moe-ckpt-run: error: no rendezvous at "))
    assert "address already in use" in line or "is taken: another process listens there" in line


@pytest.mark.ci
def test_nodes_that_wait_in_vain_for_another_are_ended_in_one_line() -> None:
    meeting = f"--nnodes=2 --rdzv-backend=c10d --rdzv-endpoint=localhost:{free_port()} --rdzv-conf=join_timeout=1"
    command = [*RUN, *meeting.split(), __file__]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=HANG_TIMEOUT_S, check=False)
    assert ended.returncode == 1
    assert "Traceback" not in ended.stderr
    assert "moe-ckpt-run: error: no rendezvous at localhost:" in ended.stderr
    assert ": too few nodes came in time" in ended.stderr


@pytest.mark.ci
def test_a_node_that_is_excluded_and_has_the_store_keeps_it_until_the_job_has_ended(tmp_path: Path) -> None:
    (tmp_path / "worker.py").write_text("import time; time.sleep(1)")
    meeting = f"--nnodes=2 --rdzv-backend=c10d --rdzv-endpoint=127.0.0.1:{free_port()} --rdzv-id=kept-store"
    with contextlib.ExitStack() as stack:

        def start(*options: str) -> subprocess.Popen[str]:
            command = [*RUN, *meeting.split(), *options, str(tmp_path / "worker.py")]
            node = stack.enter_context(subprocess.Popen(command, stderr=subprocess.PIPE, text=True))
            stack.callback(node.kill)
            return node

        sick = start("--moe-ckpt-health-check=false")
        assert sick.stderr is not None
        said = next((line for line in sick.stderr if "leaves the job" in line), "")
        assert "it has the rendezvous store, so it exits when the job ends" in said
        others = start(), start()
        ends = [node.communicate(timeout=HANG_TIMEOUT_S)[1] for node in others]
        assert [node.returncode for node in others] == [0, 0], ends
        sick.communicate(timeout=HANG_TIMEOUT_S)
        assert sick.returncode == NODE_LEAVES
