"""Threads that call CUDA are on the device of their rank."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron.core.dist_checkpointing.moe.device import own_stream
from megatron.core.dist_checkpointing.moe.runtime.watcher import Watcher
from megatron.core.dist_checkpointing.moe.snapshot.workers import ThreadExecutor

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


def test_a_thread_may_call_cuda_while_another_one_captures(
    devices: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    modes: list[tuple[str, int]] = []

    def exchange(mode: Any) -> None:
        modes.append((threading.current_thread().name, ctypes.cast(mode, ctypes.POINTER(ctypes.c_int)).contents.value))

    runtimes = {"libcudart.so.13": SimpleNamespace(cudaThreadExchangeStreamCaptureMode=exchange)}
    monkeypatch.setattr(torch.version, "cuda", "13.0, of captures")
    monkeypatch.setattr(ctypes, "CDLL", runtimes.__getitem__)
    lane()
    assert modes == [("moe-ckpt-control", 1)], "not cudaStreamCaptureModeThreadLocal"


@pytest.mark.parametrize(("code", "found"), [(0, [1001, 1002, 1001]), (2, ["torch's"] * 3)], ids=["made", "refused"])
@pytest.mark.usefixtures("devices")
def test_a_stream_of_our_own_is_made_once_and_not_taken_from_those_of_torch(
    code: int, found: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = list[tuple[int, int]]()

    def create(handle: Any, flags: ctypes.c_uint, priority: ctypes.c_int) -> int:
        asked.append((flags.value, priority.value))
        ctypes.cast(handle, ctypes.POINTER(ctypes.c_void_p)).contents.value = 1000 + len(asked)
        return code

    runtimes = {"libcudart.so.13": SimpleNamespace(cudaStreamCreateWithPriority=create)}
    monkeypatch.setattr(torch.version, "cuda", f"13.0, of streams, {code}")
    monkeypatch.setattr(ctypes, "CDLL", runtimes.__getitem__)
    monkeypatch.setattr("megatron.core.dist_checkpointing.moe.device._streams", {})
    monkeypatch.setattr(torch.cuda, "ExternalStream", lambda handle: handle)
    monkeypatch.setattr(torch.cuda, "Stream", lambda priority: "torch's")
    assert [own_stream(name) for name in ("copy", "send", "copy")] == found
    assert set(asked) == {(1, 0)}, "not cudaStreamNonBlocking, or not the lowest priority"


@pytest.mark.parametrize(
    ("begin", "name"), [(lane, "moe-ckpt-control"), (watcher, "moe-ckpt-watcher")], ids=["lane", "watcher"]
)
def test_a_thread_is_on_the_device_of_whoever_made_it(
    begin: Callable[[], None], name: str, devices: dict[str, int]
) -> None:
    begin()
    assert devices[name] == DEVICE
