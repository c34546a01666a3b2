"""Threads that call CUDA are on the device of their rank, and what torch does slowly is waited for by none of ours."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron.core.dist_checkpointing.moe.in_place import process_groups, process_restart
from megatron.core.dist_checkpointing.moe.in_place.process_groups import ProcessGroups
from megatron.core.dist_checkpointing.moe.runtime import peer_links
from megatron.core.dist_checkpointing.moe.runtime.watcher import Watcher
from megatron.core.dist_checkpointing.moe.snapshot.background import ThreadExecutor

LONG_S = 30.0
DEVICE = 3


@pytest.fixture
def devices(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Of each thread by its name, as far as it was set; that of this one is 3."""
    found: dict[str, int] = {}
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: DEVICE)
    monkeypatch.setattr(
        torch.cuda, "set_device", lambda device: found.update({threading.current_thread().name: device})
    )
    return found


def lane() -> None:
    executor = ThreadExecutor("control")
    executor.submit(lambda: None).result(LONG_S)
    executor.shutdown()


def watcher() -> None:
    links: Any = SimpleNamespace(sockets={}, end=lambda: None, forget=lambda: None)
    session: Any = SimpleNamespace(interrupt=lambda force: True)
    one = Watcher(0, session, links, lambda: False, LONG_S)
    one.start()
    one.stop(is_good=True)


@pytest.mark.parametrize(
    ("begin", "name"), [(lane, "moe-ckpt-control"), (watcher, "moe-ckpt-watcher")], ids=["lane", "watcher"]
)
def test_a_thread_is_on_the_device_of_whoever_made_it(
    begin: Callable[[], None], name: str, devices: dict[str, int]
) -> None:
    begin()
    assert devices[name] == DEVICE


def test_it_is_this_ranks_device_that_is_asked_whether_it_has_come_to_its_end(
    devices: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int | None] = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: asked.append(devices.get(threading.current_thread().name)))
    assert process_restart._device_answers()
    assert asked == [DEVICE]


class Group:
    """A communicator whose abort returns when those of all others are asked for, as their kernels spin until then."""

    def __init__(self, barrier: threading.Barrier) -> None:
        self.barrier = barrier

    def abort(self) -> None:
        self.barrier.wait(LONG_S)


def test_communicators_that_wait_for_each_other_are_all_aborted(monkeypatch: pytest.MonkeyPatch) -> None:
    barrier, forgotten = threading.Barrier(6), list[bool]()
    groups = {str(at): Group(barrier) for at in range(6)}
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_backend", lambda: "nccl")
    monkeypatch.setattr(peer_links, "named_groups", lambda: groups)
    monkeypatch.setattr(dist.distributed_c10d, "_abort_process_group", lambda: forgotten.append(True))
    begun_s = time.monotonic()
    peer_links._abort_communicators()
    assert forgotten == [True]
    assert not barrier.broken and time.monotonic() - begun_s < LONG_S
    assert peer_links.take_aborted_groups() == groups


class Slow:
    """An old group whose destructor joins threads that sleep."""

    def __init__(self, ended: list[str]) -> None:
        self.ended = ended

    def __del__(self) -> None:
        self.ended.append(threading.current_thread().name)


def test_nobody_waits_for_the_destructor_of_an_old_group(monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[str] = []
    monkeypatch.setattr(process_groups, "named_groups", dict)
    ProcessGroups({"0": Slow(ended)}).replace()  # type: ignore[dict-item]
    until_s = time.monotonic() + LONG_S
    while not ended and time.monotonic() < until_s:
        time.sleep(0.01)
    assert ended == ["moe-ckpt-old-groups"]
