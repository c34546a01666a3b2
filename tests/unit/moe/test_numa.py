"""Segments are allocated by a thread that runs near the GPU; a folder stands for /sys."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron.core.dist_checkpointing.moe.runtime.live_state import LiveState
from megatron.core.dist_checkpointing.moe.storage.memory import MemoryStore
from megatron.core.dist_checkpointing.moe.storage.system import OperatingSystem, local_cpus, running_on

ADDRESS = "0000:3b:00.0"


@pytest.fixture
def sysfs(tmp_path: Path) -> Path:
    device = tmp_path / "sys/bus/pci/devices" / ADDRESS
    device.mkdir(parents=True)
    (device / "local_cpulist").write_text("0-2,5,7-8\n")
    return tmp_path / "sys"


def test_cores_near_a_device_are_those_that_the_system_names(sysfs: Path) -> None:
    assert local_cpus(ADDRESS, sysfs) == {0, 1, 2, 5, 7, 8}
    assert local_cpus("0000:3B:00.0", sysfs) == {0, 1, 2, 5, 7, 8}


@pytest.mark.parametrize("said", [None, "", "all\n"])
def test_where_the_system_does_not_tell_there_are_none(said: str | None, sysfs: Path) -> None:
    path = sysfs / "bus/pci/devices" / ADDRESS / "local_cpulist"
    path.unlink() if said is None else path.write_text(said)
    assert local_cpus(ADDRESS, sysfs) == frozenset()


def test_a_thread_runs_there_and_afterwards_where_it_did() -> None:
    before = os.sched_getaffinity(0)
    one = min(before)
    others: list[Any] = []
    with running_on(frozenset({one, 4096})):
        assert os.sched_getaffinity(0) == {one}
    assert os.sched_getaffinity(0) == before
    with running_on(frozenset({4096})):
        assert os.sched_getaffinity(0) == before, "cores that it may not use are none"
    thread = threading.Thread(target=lambda: others.append(os.sched_getaffinity(0)))
    with running_on(frozenset({one})):
        pass
    thread.start()
    thread.join(10)
    assert others == [before]


def test_segments_are_allocated_there_at_the_start_and_when_more_are_needed(tmp_path: Path) -> None:
    seen: list[set[int]] = []

    class Watching(OperatingSystem):
        def allocate(self, descriptor: int, nbytes: int) -> None:
            seen.append(os.sched_getaffinity(0))
            super().allocate(descriptor, nbytes)

    one = min(os.sched_getaffinity(0))
    store = MemoryStore(tmp_path, "job", 0, [4096], system=Watching(), cpus=frozenset({one}))
    store.resize([8192] * 2)
    store.close()
    assert seen == [{one}] * 6, "segments, and the room of each for manifests"


def test_the_device_of_the_state_says_where(sysfs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = SimpleNamespace(pci_domain_id=0, pci_bus_id=0x3B, pci_device_id=0)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: found)
    monkeypatch.setattr(local_cpus, "__defaults__", (sysfs,))
    cpus = LiveState.near_cpus.fget
    assert cpus is not None
    assert cpus(SimpleNamespace(on_device=True)) == {0, 1, 2, 5, 7, 8}
    assert cpus(SimpleNamespace(on_device=False)) == frozenset()
    del found.pci_bus_id
    assert cpus(SimpleNamespace(on_device=True)) == frozenset()
