"""Which network ranks talk over, and what is said of one that cannot work."""

from __future__ import annotations

import logging
import os
import threading
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.distributed import HashStore

from megatron.core.dist_checkpointing.moe.config import MoECheckpointConfig
from megatron.core.dist_checkpointing.moe.errors import PeerLost, UsageError
from megatron.core.dist_checkpointing.moe.replication import interface
from megatron.core.dist_checkpointing.moe.replication.agreement import gathered_by_store
from megatron.core.dist_checkpointing.moe.replication.interface import (
    Endpoint,
    check_endpoints,
    of_local_rank,
    own_endpoint,
    use_for_gloo,
)
from megatron.core.dist_checkpointing.moe.replication.staged import StagedTransport
from megatron.core.dist_checkpointing.moe.runtime.opening import Transports, introduced
from megatron.core.dist_checkpointing.moe.runtime.process_info import ProcessInfo

HERE = Endpoint("", "10.0.0.1", "a", "machine-a", "lo, eth0")


@pytest.fixture(autouse=True)
def no_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)


def test_an_interface_that_does_not_exist_is_refused_with_those_that_do(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match=r"--moe-ckpt-interface eth77: this machine has no such interface, but .*lo"):
        own_endpoint("eth77")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth78")
    with pytest.raises(UsageError, match="GLOO_SOCKET_IFNAME eth78"):
        own_endpoint(None)


def test_the_flag_counts_before_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth78")
    assert (own_endpoint("lo").interface, own_endpoint("lo").address) == ("lo", "127.0.0.1")


def test_local_ranks_take_the_interfaces_of_a_list_in_order_and_from_its_start_again() -> None:
    assert [of_local_rank("ib0,ib1, ib2", rank) for rank in range(5)] == ["ib0", "ib1", "ib2", "ib0", "ib1"]
    assert of_local_rank("eth0", 3) == "eth0"
    for wrong in ("eth0,", ",", "eth0,,eth1"):
        with pytest.raises(UsageError, match=f"--moe-ckpt-interface {wrong}: a name is empty"):
            of_local_rank(wrong, 0)


def test_a_rank_is_reached_at_the_interface_of_its_local_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 0)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 1)
    config = MoECheckpointConfig(interface="lo,eth77", timeout_s=20.0)
    assert introduced(HashStore(), config, ProcessInfo(2, "node", "job")).address == "127.0.0.1"
    with pytest.raises(UsageError, match="rank 0: --moe-ckpt-interface eth77: this machine has no such interface"):
        introduced(HashStore(), config, ProcessInfo(1, "node", "job"))


def test_a_host_name_that_leads_nowhere_is_the_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interface.socket, "gethostname", lambda: "no-such-host.invalid")
    assert own_endpoint(None).is_loopback


def test_a_loopback_is_refused_in_a_job_of_several_machines_only() -> None:
    local = replace(HERE, address="127.0.1.1")
    check_endpoints([local, local])
    check_endpoints([HERE, replace(HERE, machine="machine-b", address="10.0.0.2")])
    with pytest.raises(
        UsageError, match=r"the host name a of rank 1 leads to 127.0.1.1, .* give --moe-ckpt-interface .*lo, eth0"
    ):
        check_endpoints([replace(HERE, machine="machine-b"), local])


@pytest.mark.parametrize(
    ("names", "machines", "said"),
    [
        (("lo", "eth77"), ("a", "a"), "rank 1: --moe-ckpt-interface eth77"),
        (("lo", "lo"), ("a", "b"), "rank 0 and rank 1 are on two machines that are both called node: give each a name"),
    ],
)
def test_a_wrong_interface_or_node_of_one_rank_is_heard_by_all(
    names: tuple[str, str], machines: tuple[str, str], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, heard = HashStore(), dict[int, str]()
    monkeypatch.setattr(interface, "boot_id", lambda: machines[ranks.own])
    monkeypatch.setattr(Endpoint, "is_loopback", False)
    ranks = threading.local()
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: ranks.own)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)

    def start(rank: int, name: str) -> None:
        ranks.own = rank
        try:
            introduced(store, MoECheckpointConfig(interface=name, timeout_s=20.0), ProcessInfo(rank, "node", "job"))
        except UsageError as error:
            heard[rank] = str(error)

    threads = [threading.Thread(target=start, args=one) for one in enumerate(names)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert heard[0] == heard[1]
    assert heard[0].startswith(said)


def test_ranks_that_do_not_start_are_named() -> None:
    with pytest.raises(PeerLost, match=r"rank 0 waited 0.2 s for ranks 1, 2, which did not start"):
        gathered_by_store(HashStore(), "values", 0, 3, "here", list, 0.2)


def test_gloo_groups_that_are_made_later_use_the_interface_of_the_flag(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        monkeypatch.setenv("GLOO_SOCKET_IFNAME", "")
        monkeypatch.delenv("GLOO_SOCKET_IFNAME")
        use_for_gloo("lo", 0)
        assert os.environ["GLOO_SOCKET_IFNAME"] == "lo"
        assert "gloo uses interface lo (--moe-ckpt-interface)" in caplog.text
        monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth78")
        use_for_gloo("lo", 0)
    assert os.environ["GLOO_SOCKET_IFNAME"] == "eth78"
    assert "gloo uses interface eth78 (GLOO_SOCKET_IFNAME was already set)" in caplog.text


def test_an_interface_that_one_machine_lacks_is_refused_on_all_ranks_before_gloo_looks_for_it() -> None:
    with pytest.raises(UsageError, match=r"^rank 1: it has none$"):
        use_for_gloo("lo", 0, lambda own: own or "rank 1: it has none")
    assert "GLOO_SOCKET_IFNAME" not in os.environ
    with pytest.raises(UsageError, match=r"^rank 3: --moe-ckpt-interface eth77: this machine has no such interface"):
        use_for_gloo("eth77", 3)


@pytest.mark.parametrize("transport", ["tcp", "process-group"])
def test_connections_are_made_at_the_address_of_the_interface_of_the_flag(
    transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Any] = []
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 0)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 1)
    monkeypatch.setattr(torch.distributed, "get_backend", lambda: "gloo")
    for at in ("127.0.0.1", "127.0.0.2"):
        found = Transports.connected(HashStore(), MoECheckpointConfig(transport=transport), at)
        ends = found.control, found.data, found.patient
        made += ends
        assert all(end.connections.place.startswith(f"{at} ") for end in ends)
        assert isinstance(found.data, StagedTransport) == isinstance(found.patient, StagedTransport)
        assert isinstance(found.data, StagedTransport) == (transport == "process-group")
    for end in made:
        end.close()
