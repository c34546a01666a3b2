"""Which network ranks talk over, and what is said of one that cannot work."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.distributed import HashStore

from megatron.core.dist_checkpointing.moe.config import MoECheckpointConfig
from megatron.core.dist_checkpointing.moe.errors import PeerLost, UsageError
from megatron.core.dist_checkpointing.moe.replication import interface, process_group
from megatron.core.dist_checkpointing.moe.replication.interface import Endpoint, check_endpoints, own_endpoint
from megatron.core.dist_checkpointing.moe.replication.process_group import ProcessGroupTransport
from megatron.core.dist_checkpointing.moe.replication.store_gather import gathered_by_store
from megatron.core.dist_checkpointing.moe.runtime.opening import introduced
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


def test_a_wrong_interface_of_one_rank_is_heard_by_all(monkeypatch: pytest.MonkeyPatch) -> None:
    store, heard = HashStore(), dict[int, str]()
    ranks = threading.local()
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: ranks.own)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)

    def start(rank: int, name: str) -> None:
        ranks.own = rank
        try:
            introduced(store, MoECheckpointConfig(interface=name, timeout_s=20.0), ProcessInfo(rank, "node", "job"))
        except UsageError as error:
            heard[rank] = str(error)

    threads = [threading.Thread(target=start, args=one) for one in ((0, "lo"), (1, "eth77"))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert heard[0] == heard[1]
    assert heard[0].startswith("rank 1: --moe-ckpt-interface eth77")


def test_ranks_that_do_not_start_are_named() -> None:
    with pytest.raises(PeerLost, match=r"rank 0 waited 0.2 s for ranks 1, 2, which did not start"):
        gathered_by_store(HashStore(), "values", 0, 3, "here", 0.2)


def test_connections_are_made_on_the_interface_of_the_flag(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    create = process_group.ProcessGroupGloo.create_device

    def noting(interface: str) -> Any:
        asked.append(interface)
        return create(interface=interface)

    monkeypatch.setattr(process_group.ProcessGroupGloo, "create_device", noting)
    for name in ("lo", ""):
        ProcessGroupTransport(HashStore(), 0, 1, "one", 5.0, interface=name).close()
    assert asked == ["lo"]
