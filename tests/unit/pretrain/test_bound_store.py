"""Stores that listen on one address: nobody reaches them at another one of the same machine."""

from __future__ import annotations

import socket
from datetime import timedelta

import pytest
from torch.distributed import TCPStore

from megatron.pretrain.bound_store import bound_store, is_address, is_loopback


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_a_store_is_reached_at_its_address_and_at_no_other(host: str) -> None:
    store = bound_store(host)
    client = TCPStore("127.0.0.1", store.port, is_master=False, timeout=timedelta(seconds=10))
    client.set("key", "value")
    assert store.get("key") == b"value"
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", store.port), timeout=10)
    everywhere = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    socket.create_connection(("127.0.0.2", everywhere.port), timeout=10).close()  # as torch's own are


def test_an_address_of_another_machine_and_a_taken_port_are_errors() -> None:
    with pytest.raises(OSError, match="Cannot assign requested address"):
        bound_store("192.0.2.1")
    store = bound_store("127.0.0.1")
    with pytest.raises(OSError, match="Address already in use"):
        bound_store("127.0.0.1", store.port)


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
