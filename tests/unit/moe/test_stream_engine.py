"""Rates, chunks and page-locks of the CUDA copy engine; a fake device writes down what it is asked for.

Whether the bytes are right in whatever order a device runs is tested in `test_device_capture.py`, and on a GPU in
`tests/gpu`. Here CPU tensors are copied as soon as a copy is asked for.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import mmap
import re
import resource
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from megatron.core.dist_checkpointing.moe.errors import UsageError
from megatron.core.dist_checkpointing.moe.snapshot import page_locks, stream_engine
from megatron.core.dist_checkpointing.moe.snapshot.copy_engines import CopyJob, Span, Throttle, chunked
from megatron.core.dist_checkpointing.moe.snapshot.page_locks import PageLocks
from megatron.core.dist_checkpointing.moe.snapshot.stream_engine import StreamEngine
from megatron.core.dist_checkpointing.moe.storage.memory import MemoryStore
from megatron.core.dist_checkpointing.moe.storage.system import address_of

WAIT_S = 60.0


class Device:
    """Stands in for `torch.cuda`: one line of `calls` for each thing that it is asked."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.names = iter(("copy", "send"))
        self.events = iter(("ready", "begun", "measured", "copied", "reached"))
        self.priorities: list[int] = []
        self.training = FakeStream(self, "training")
        self.priorities.clear()
        self.of_thread = threading.local()
        self.is_ready, self.register_code, self.locked = True, 0, set[int]()
        self.has_reached = True  # training's stream, what it was given until the host waited
        self.registering, self.may_register = threading.Event(), threading.Event()
        self.may_register.set()

    @property
    def current(self) -> list[FakeStream]:
        """The streams that this thread has made current, the innermost last."""
        if not hasattr(self.of_thread, "streams"):
            self.of_thread.streams = [self.training]
        streams: list[FakeStream] = self.of_thread.streams
        return streams

    def taken(self) -> list[str]:
        """What was asked since the last call."""
        calls, self.calls = self.calls, []
        return calls

    @contextlib.contextmanager
    def stream(self, stream: FakeStream) -> Iterator[None]:
        self.current.append(stream)
        yield
        self.current.pop()

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
        self.registering.set()
        assert self.may_register.wait(WAIT_S)
        self.calls.append(f"register {nbytes}")
        if not self.register_code:
            self.locked.add(address)
        return self.register_code

    def cudaHostUnregister(self, address: int) -> None:
        self.locked.remove(address)
        self.calls.append("unregister")

    def synchronize(self) -> None:
        self.calls.append("host waits for the device")


class FakeStream:
    def __init__(self, device: Device, name: str, priority: int = 0) -> None:
        self.device, self.name = device, name
        device.priorities.append(priority)

    def wait_event(self, event: FakeEvent) -> None:
        self.device.calls.append(f"{self.name} waits for {event.name}")

    def wait_stream(self, other: FakeStream) -> None:
        self.device.calls.append(f"{self.name} waits for {other.name}")

    def synchronize(self) -> None:
        self.device.calls.append(f"host waits for {self.name}")


class FakeEvent:
    def __init__(self, device: Device, name: str) -> None:
        self.device, self.name = device, name

    def record(self) -> None:
        if self.name != "reached":  # in each wait
            self.device.calls.append(f"{self.name} on {self.device.current[-1].name}")

    def query(self) -> bool:
        return self.device.has_reached if self.name == "reached" else self.device.is_ready

    def elapsed_time(self, other: FakeEvent) -> float:
        return 2.0


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    fake, copy = Device(), torch.Tensor.copy_

    def copied(target: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
        assert non_blocking
        fake.calls.append(f"{source.numel()} bytes on {fake.current[-1].name}")
        return copy(target, source)

    monkeypatch.setattr("megatron.core.dist_checkpointing.moe.device._runtime", lambda version: None)
    monkeypatch.setattr(torch.cuda, "Stream", lambda priority: FakeStream(fake, next(fake.names), priority))
    monkeypatch.setattr(torch.cuda, "Event", lambda enable_timing=False: FakeEvent(fake, next(fake.events)))
    monkeypatch.setattr(torch.cuda, "stream", fake.stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: fake.current[-1])
    monkeypatch.setattr(torch.cuda, "cudart", lambda: fake)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "device", lambda index: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "set_device", lambda index: None)
    monkeypatch.setattr(torch.cuda, "synchronize", fake.synchronize)
    monkeypatch.setattr(torch.Tensor, "copy_", copied)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: None)
    return fake


@pytest.fixture
def locks(device: Device) -> Iterator[PageLocks]:
    made = PageLocks()
    yield made
    made.release()  # else they are unlocked when they are collected, in the middle of a later test


@pytest.fixture
def engine(locks: PageLocks) -> Iterator[StreamEngine]:
    made = StreamEngine(locks)
    yield made
    made.close()


def job(segment: memoryview, *sizes: int) -> CopyJob:
    ends = [sum(sizes[: at + 1]) for at in range(len(sizes))]
    return [Span(torch.full((n,), 1, dtype=torch.uint8), end - n) for n, end in zip(sizes, ends, strict=True)], segment


def segment(nbytes: int = 100) -> memoryview:
    return memoryview(bytearray(nbytes))


def test_one_round_is_under_way_at_a_time_and_tells_how_fast_the_link_is(device: Device, engine: StreamEngine) -> None:
    first, second = segment(), segment(200)
    engine.begin([job(first, 5, 6), job(second, 7), ([], second)])
    with pytest.raises(UsageError, match="under way"):
        engine.begin([])
    engine.wait(WAIT_S)
    assert engine.bandwidth_bytes_per_s == 18 / 0.002


def test_copies_run_on_streams_of_the_lowest_priority(device: Device, engine: StreamEngine) -> None:
    assert device.priorities == [0, 0]


def test_a_large_tensor_is_copied_in_chunks_which_lie_each_in_one_locked_piece(
    device: Device, engine: StreamEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(page_locks, "LOCK_BYTES", 100)
    monkeypatch.setattr(stream_engine, "chunked", lambda spans, _: chunked(spans, 40, 100))
    whole = segment(250)
    engine.begin([([Span(torch.full((190,), 1, dtype=torch.uint8), 50)], whole)])
    engine.wait(WAIT_S)
    copies = [call for call in device.taken() if "bytes on copy" in call or "register" in call]
    assert copies == [
        *("register 100", "40 bytes on copy", "10 bytes on copy"),
        *("register 100", "40 bytes on copy", "40 bytes on copy", "20 bytes on copy"),
        *("register 50", "40 bytes on copy"),
    ]
    assert bytes(whole) == bytes(50) + bytes([1]) * 190 + bytes(10)


def test_training_continues_while_pages_are_locked_and_copies_wait(device: Device, engine: StreamEngine) -> None:
    """Neither holds up `begin`, which the thread that trains calls."""
    device.may_register.clear()
    engine.begin([job(segment(), 5)], Throttle(0.001))
    assert device.taken()[:2] == ["ready on training", "copy waits for ready"]
    with pytest.raises(TimeoutError):
        engine.wait(0.01)
    device.may_register.set()
    engine.wait(WAIT_S)
    assert device.taken()[-1] == "copied on copy"


def test_copies_are_launched_at_their_rate_as_long_as_the_device_computes(
    device: Device, engine: StreamEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The host waits early where it is ahead of the device: nobody stands still then."""
    monkeypatch.setattr(stream_engine, "chunked", lambda spans, _: chunked(spans, 10))
    monkeypatch.setattr(stream_engine, "_MEASURED_BYTES", 20)
    device.has_reached = False
    engine.begin([job(segment(), 100)], Throttle(1.0))
    with pytest.raises(TimeoutError):
        engine.wait(0.1)
    assert device.calls.count("10 bytes on copy") <= 2, "the third chunk is due after 20 s"
    device.has_reached = True
    engine.wait(WAIT_S)
    assert device.calls.count("10 bytes on copy") == 10


def test_copies_are_launched_at_their_rate_until_somebody_waits_for_them(
    device: Device, engine: StreamEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream_engine, "chunked", lambda spans, _: chunked(spans, 10))
    monkeypatch.setattr(stream_engine, "_MEASURED_BYTES", 20)
    engine.begin([job(segment(), 100)], Throttle(1.0))
    deadline = time.monotonic() + WAIT_S
    while device.calls.count("10 bytes on copy") < 2 and time.monotonic() < deadline:
        time.sleep(0.001)
    time.sleep(0.05)
    assert device.calls.count("10 bytes on copy") == 2, "the third chunk is due after 20 s"
    assert device.calls[-1] == "measured on copy", "the link is measured where nothing is held back"
    engine.wait(WAIT_S)
    assert device.calls.count("10 bytes on copy") == 10
    assert engine.bandwidth_bytes_per_s == 20 / 0.002


def test_what_a_copy_raises_is_raised_by_wait_and_the_round_has_ended(device: Device, engine: StreamEngine) -> None:
    engine.begin([([Span(torch.ones(200, dtype=torch.uint8), 0)], segment(100))])
    with pytest.raises(RuntimeError):
        engine.wait(WAIT_S)
    engine.begin([job(segment(), 1)])
    engine.wait(WAIT_S)


def test_what_was_dropped_is_waited_for_before_anything_else_is_added(device: Device, engine: StreamEngine) -> None:
    engine.add(job(segment(), 4))
    device.taken()
    device.is_ready = False
    engine.drop()
    assert device.taken()[-1] == "copied on copy"
    with pytest.raises(TimeoutError):
        engine.wait(0)
    device.is_ready = True
    engine.wait(0)


def test_segments_are_locked_at_the_start_beside_training(
    device: Device, engine: StreamEngine, locks: PageLocks
) -> None:
    device.may_register.clear()
    engine.prepare([segment(), segment(200)])
    engine.now(job(segment(), 1))  # whatever is locked by then
    assert device.taken() == ["1 bytes on training"]
    device.may_register.set()
    locks.settle(WAIT_S)
    assert device.taken() == ["register 100", "register 200"]


def test_a_segment_is_page_locked_once_and_again_where_it_has_grown(device: Device, engine: StreamEngine) -> None:
    whole = segment()
    for part in (whole[:50], whole[:50], whole):
        engine.begin([job(part, 1)])
        engine.wait(WAIT_S)
    assert [call for call in device.taken() if "register" in call] == ["register 50", "unregister", "register 100"]
    engine.release([whole])
    assert device.taken() == ["host waits for the device", "unregister"]


def test_what_is_let_go_is_locked_again_when_it_is_used_again(device: Device, engine: StreamEngine) -> None:
    whole = segment()
    for _ in range(2):
        engine.begin([job(whole, 1)])
        engine.wait(WAIT_S)
        engine.release([whole])
    assert device.taken().count("register 100") == 2
    assert not device.locked


def test_a_resize_unlocks_what_goes_and_locks_what_comes(
    device: Device, engine: StreamEngine, locks: PageLocks, tmp_path: Path
) -> None:
    """Else the copies after it go to memory that is not locked, and the thread that trains waits for each of them."""
    page, store = mmap.PAGESIZE, MemoryStore(tmp_path, "job", 0, [mmap.PAGESIZE] * 2)
    store.lend(engine)
    locks.settle(WAIT_S)
    assert device.taken() == [f"register {page}"] * 2
    store.resize([page, 2 * page])
    locks.settle(WAIT_S)
    assert device.taken() == ["host waits for the device", "unregister", f"register {2 * page}"]
    engine.now(job(store.views()[1], 1))
    assert device.taken() == ["1 bytes on training"]
    store.close()


def test_a_store_in_place_of_one_of_this_process_finds_its_segments_locked(
    device: Device, engine: StreamEngine, locks: PageLocks, tmp_path: Path
) -> None:
    """A recovery in place would lock tens of GB again, for seconds in which nothing can be parked fast."""
    for keeps in (True, True, False):
        store = MemoryStore(tmp_path, "job", 0, [mmap.PAGESIZE] * 2)
        store.lend(engine)
        locks.settle(WAIT_S)
        engine.begin([job(store.views()[0], 1)])
        engine.wait(WAIT_S)
        store.close(keep_mapped=keeps)
    assert [call for call in device.taken() if "register" in call] == [f"register {mmap.PAGESIZE}"] * 2
    engine.close()
    assert len(device.locked) == 2
    store.remove()


def test_what_waits_to_be_locked_is_locked_though_other_memory_goes(
    device: Device, locks: PageLocks, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[Callable[[], object]] = []
    monkeypatch.setattr(
        page_locks, "device_thread", lambda run, name: threading.Thread(target=lambda: begun.append(run))
    )
    first, second, third = (segment(nbytes) for nbytes in (100, 200, 300))
    locks.begin([first, second, third])
    locks.settle(WAIT_S)
    locks.release([second])
    begun[0]()
    assert device.taken() == ["register 100", "register 300"]


def test_a_locked_piece_reaches_to_its_border_and_other_memory_nowhere(
    device: Device, locks: PageLocks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(page_locks, "LOCK_BYTES", 100)
    whole = segment(200)
    locks.lock(whole, 100)
    first = torch.frombuffer(whole, dtype=torch.uint8).data_ptr()
    assert [locks.reach(first + offset) for offset in (0, 99, 100, 130, 199, 200)] == [0, 0, 100, 70, 1, 0]


def test_what_is_locked_is_found_so_while_another_piece_is_locked(device: Device, locks: PageLocks) -> None:
    whole = segment()
    locks.lock(whole, 0)
    device.registering.clear()
    device.may_register.clear()
    locks.begin([segment(200)])
    assert device.registering.wait(WAIT_S)
    copying = threading.Thread(target=locks.lock, args=(whole, 50))
    copying.start()
    copying.join(WAIT_S)
    assert not copying.is_alive()
    device.may_register.set()
    locks.settle(WAIT_S)


def test_engines_of_one_process_share_what_is_locked(device: Device, engine: StreamEngine, locks: PageLocks) -> None:
    device.names, device.events = iter(("copy", "send")), iter(("ready", "begun", "measured", "copied", "reached"))
    other, whole = StreamEngine(locks, "other"), segment()
    for one in (engine, other):
        one.begin([job(whole, 1)])
        one.wait(WAIT_S)
    assert device.taken().count("register 100") == 1
    other.close()
    assert device.locked, "the engines that are left copy to it"


@pytest.mark.parametrize("is_parent", [True, False], ids=["", "but that of a forked child not its parent's"])
def test_a_mapping_that_goes_takes_its_lock_along(
    is_parent: bool, device: Device, locks: PageLocks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another one at its address has other pages, which are not locked; CUDA refuses to begin in a forked child."""
    memory = mmap.mmap(-1, mmap.PAGESIZE)
    locks.lock(memoryview(np.frombuffer(memory, np.uint8)), 0)
    assert device.locked
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: is_parent)
    del memory
    gc.collect()
    assert bool(device.locked) != is_parent
    locks.release()
    assert device.taken() == [f"register {mmap.PAGESIZE}", *["unregister"] * is_parent]


REFUSED = {
    2: r"limited to 65536 bytes: raise it \(ulimit -l unlimited",
    801: "give a --moe-ckpt-memory-dir on a tmpfs",
    999: "look the error up",
}


@pytest.mark.parametrize("code", REFUSED)
def test_a_refusal_to_page_lock_is_one_line_that_says_what_to_set_and_copies_continue(
    code: int,
    device: Device,
    engine: StreamEngine,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def reported(size: int, device: str) -> None:
        raise RuntimeError("CUDA reports the error of before")

    monkeypatch.setattr(torch, "ones", reported)
    monkeypatch.setattr(resource, "getrlimit", lambda which: (65536, 65536))
    device.register_code = code
    with caplog.at_level(logging.WARNING):
        for part in (segment(), segment()):
            engine.begin([job(part, 1)])
            engine.wait(WAIT_S)
    (line,) = caplog.messages
    assert f"CUDA error {code}" in line and re.search(REFUSED[code], line)
    calls = device.taken()
    assert calls.count("register 100") == 1 and calls.count("1 bytes on copy") == 2


def test_segments_that_come_after_a_refusal_are_locked_if_there_is_memory_again(
    device: Device, locks: PageLocks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(page_locks, "_say_refused", lambda code, nbytes: None)
    segments = [segment(100), segment(200)]
    for device.register_code, one in zip((2, 0), segments, strict=True):
        locks.begin([one])
        locks.settle(WAIT_S)
    assert [locks.reach(address_of(one)) for one in segments] == [0, 200]


def test_segments_are_unlocked_at_the_end(device: Device, engine: StreamEngine, locks: PageLocks) -> None:
    engine.begin([job(segment(), 1)])
    engine.wait(WAIT_S)
    device.taken()
    engine.close()
    locks.release()
    assert device.taken() == ["host waits for copy", "host waits for the device", "unregister"]
