"""Stores that listen on one address: nobody reaches them at another one of the same machine."""

from __future__ import annotations

import socket
import subprocess
import sys
from datetime import timedelta

import pytest
from torch.distributed import TCPStore
from torch.distributed.elastic.rendezvous import RendezvousParameters
from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler

from megatron.pretrain.bound_store import bound_store, is_address, is_loopback
from megatron.pretrain.errors import TrainingFailure
from megatron.pretrain.rendezvous import BACKEND, register_backend


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_a_store_is_reached_at_its_address_and_at_no_other(host: str) -> None:
    store = bound_store(host)
    client = TCPStore("127.0.0.1", store.port, is_master=False, timeout=timedelta(seconds=60))
    client.set("key", "value")
    assert store.get("key") == b"value"
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", store.port), timeout=10)
    everywhere = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    socket.create_connection(("127.0.0.2", everywhere.port), timeout=10).close()  # as torch's own are


def test_an_address_of_another_machine_is_an_error() -> None:
    with pytest.raises(OSError, match="Cannot assign requested address"):
        bound_store("192.0.2.1")


def test_a_taken_port_is_named_in_one_line_with_what_to_do() -> None:
    store = bound_store("127.0.0.1")
    with pytest.raises(TrainingFailure) as refused:
        bound_store("127.0.0.1", store.port)
    said = str(refused.value)
    assert said.startswith(f"port {store.port} of 127.0.0.1 is taken: another process listens there;")
    assert "--rdzv-endpoint" in said
    assert "MASTER_PORT" in said
    assert "\n" not in said


def test_a_launcher_that_finds_its_port_taken_ends_with_that_line() -> None:
    store = bound_store("127.0.0.1")
    argv = ["--nproc-per-node", "1", "--rdzv-endpoint", f"127.0.0.1:{store.port}", "train.py"]
    command = [sys.executable, "-m", "megatron.pretrain.launch", *argv]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == TrainingFailure.exit_code, done.stderr
    assert done.stderr.splitlines()[-1].startswith(f"port {store.port} of 127.0.0.1 is taken")
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_a_node_alone_meets_itself_at_a_port_that_nobody_can_take_before(
    host: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A port that was drawn was another connection's by the time that the store was made."""
    monkeypatch.setenv("TORCH_ELASTIC_WORKER_IDENTICAL", "1")
    register_backend()
    handler = get_rendezvous_handler(RendezvousParameters(BACKEND, f"{host}:0", "job", 1, 1, "127.0.0.1"))
    assert handler.next_rendezvous().world_size == 1
    handler.shutdown()


@pytest.mark.parametrize(
    ("host", "address", "loopback"),
    [
        ("127.0.0.1", True, True),
        ("::1", True, True),
        ("localhost", False, True),
        ("10.0.0.1", True, False),
        ("node-1", False, False),
        ("", False, False),
    ],
)
def test_addresses_are_told_from_names(host: str, address: bool, loopback: bool) -> None:
    assert (is_address(host), is_loopback(host)) == (address, loopback)
