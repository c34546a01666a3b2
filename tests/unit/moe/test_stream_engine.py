"""The order in which the CUDA copy engine asks for waits, copies and events; a fake device writes it down.

What the calls do on a device is tested in `tests/gpu`. Here CPU tensors are copied as soon as a copy is asked for.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator

import pytest
import torch

from megatron.core.dist_checkpointing.moe.errors import UsageError
from megatron.core.dist_checkpointing.moe.snapshot.copy_engines import CopyJob, Span
from megatron.core.dist_checkpointing.moe.snapshot.stream_engine import StreamEngine


class Device:
    """Stands in for `torch.cuda`: one line of `calls` for each thing that it is asked."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.names = iter(("copy", "send"))
        self.events = iter(("begun", "copied"))
        self.current = [FakeStream(self, "training")]
        self.is_ready, self.register_code = True, 0

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
        self.calls.append(f"register {nbytes}")
        return self.register_code

    def cudaHostUnregister(self, address: int) -> None:
        self.calls.append("unregister")


class FakeStream:
    def __init__(self, device: Device, name: str) -> None:
        self.device, self.name = device, name

    def wait_stream(self, other: FakeStream) -> None:
        self.device.calls.append(f"{self.name} waits for {other.name}")

    def synchronize(self) -> None:
        self.device.calls.append(f"host waits for {self.name}")


class FakeEvent:
    def __init__(self, device: Device, name: str) -> None:
        self.device, self.name = device, name

    def record(self) -> None:
        self.device.calls.append(f"{self.name} on {self.device.current[-1].name}")

    def query(self) -> bool:
        return self.device.is_ready

    def elapsed_time(self, other: FakeEvent) -> float:
        return 2.0


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    fake, copy = Device(), torch.Tensor.copy_

    def copied(target: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
        assert non_blocking
        fake.calls.append(f"{source.numel()} bytes on {fake.current[-1].name}")
        return copy(target, source)

    def recorded(tensor: torch.Tensor, stream: FakeStream) -> None:
        fake.calls.append(f"memory of {tensor.numel()} bytes kept for {stream.name}")

    monkeypatch.setattr(torch.cuda, "Stream", lambda: FakeStream(fake, next(fake.names)))
    monkeypatch.setattr(torch.cuda, "Event", lambda enable_timing: FakeEvent(fake, next(fake.events)))
    monkeypatch.setattr(torch.cuda, "stream", fake.stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: fake.current[-1])
    monkeypatch.setattr(torch.cuda, "cudart", lambda: fake)
    monkeypatch.setattr(torch.Tensor, "copy_", copied)
    monkeypatch.setattr(torch.Tensor, "record_stream", recorded)
    return fake


@pytest.fixture
def engine(device: Device) -> Iterator[StreamEngine]:
    made = StreamEngine()
    yield made
    made.close()


def job(segment: memoryview, *sizes: int) -> CopyJob:
    ends = [sum(sizes[: at + 1]) for at in range(len(sizes))]
    return [Span(torch.full((n,), 1, dtype=torch.uint8), end - n) for n, end in zip(sizes, ends, strict=True)], segment


def segment(nbytes: int = 100) -> memoryview:
    return memoryview(bytearray(nbytes))


def test_a_snapshot_waits_for_training_and_ends_with_one_event(device: Device, engine: StreamEngine) -> None:
    first, second = segment(), segment(200)
    engine.now(job(first, 3))
    assert device.taken() == ["register 100", "3 bytes on training"]
    engine.begin([job(first, 5, 6), job(second, 7), ([], second)])
    assert device.taken() == [
        "copy waits for training",  # `now`'s copies too, so that the last event stands for them
        "begun on copy",
        *("5 bytes on copy", "6 bytes on copy", "register 200", "7 bytes on copy"),
        "copied on copy",
    ]
    with pytest.raises(UsageError, match="under way"):
        engine.begin([])
    engine.wait(1.0)
    assert device.taken() == []
    assert engine.bandwidth_bytes_per_s == 18 / 0.002
    assert bytes(second[:8]) == b"\1\1\1\1\1\1\1\0"


def test_each_sent_tensor_waits_for_what_made_it_and_keeps_its_memory(device: Device, engine: StreamEngine) -> None:
    log = segment()
    for _ in range(2):
        engine.add(job(log, 4))
    of_each = ["send waits for training", "4 bytes on send", "memory of 4 bytes kept for send"]
    assert device.taken() == [*of_each[:1], "register 100", *of_each[1:], *of_each]
    engine.wait(1.0)
    assert device.taken() == ["copy waits for send", "begun on copy", "copied on copy"]
    engine.wait(1.0)
    assert device.taken() == []


def test_what_was_dropped_is_waited_for_before_anything_else_is_added(device: Device, engine: StreamEngine) -> None:
    engine.add(job(segment(), 4))
    device.taken()
    device.is_ready = False
    engine.drop()
    assert device.taken() == ["copy waits for send", "begun on copy", "copied on copy"]
    with pytest.raises(TimeoutError):
        engine.wait(0)
    device.is_ready = True
    engine.wait(0)


def test_a_segment_is_page_locked_once_and_anew_where_it_has_grown(device: Device, engine: StreamEngine) -> None:
    whole = segment()
    for part in (whole[:50], whole[:50], whole):
        engine.now(job(part, 1))
    locked_anew = ["host waits for copy", "host waits for training", "unregister", "register 100"]
    copied = "1 bytes on training"
    assert device.taken() == ["register 50", copied, copied, *locked_anew, copied]
    engine.release()
    assert device.taken() == locked_anew[:3]


def test_a_refusal_to_page_lock_is_logged_once_and_copies_go_on(
    device: Device, engine: StreamEngine, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def reported(size: int, device: str) -> None:
        raise RuntimeError("CUDA reports the error of before")

    monkeypatch.setattr(torch, "ones", reported)
    device.register_code = 2
    with caplog.at_level(logging.WARNING):
        for part in (segment(), segment()):
            engine.now(job(part, 1))
    assert [record.message for record in caplog.records if "CUDA error 2" in record.message] == caplog.messages
    assert len(caplog.messages) == 1
    assert device.taken() == ["register 100", "1 bytes on training", "1 bytes on training"]


def test_segments_are_unlocked_at_the_end(device: Device, engine: StreamEngine) -> None:
    engine.now(job(segment(), 1))
    device.taken()
    engine.close()
    assert device.taken() == ["host waits for copy", "unregister"]
