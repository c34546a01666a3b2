"""In what order bulk is staged, asked for and launched: nothing is launched that would have to wait on the device."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import nullcontext
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron.core.dist_checkpointing.moe.replication import staged
from megatron.core.dist_checkpointing.moe.replication.connections import ConnectionsClosed
from megatron.core.dist_checkpointing.moe.replication.staged import BulkWay, NcclPairs, Staging, of_training

CHUNK = 10
LONG_S = 30.0


class Recorded:
    """The process group, the buffers and the connection of one side; notes what is done with them, in order."""

    def __init__(self, other: socket.socket, events: list[str]) -> None:
        self.events, self._other, self._buffers = events, other, torch.zeros(2, CHUNK, dtype=torch.uint8)
        self._under_way, self.other_goes = 0, False

    def group(self, store: Any, rank: int, timeout_s: float) -> Recorded:
        self.events.append("connect")
        return self

    def finish(self, work: str, check: Any) -> None:
        check()
        self._under_way -= 1
        self.events.append(f"finish {work}")

    def launched(self, buffers: list[torch.Tensor], other: int, tag: int) -> str:
        self._under_way += 1
        assert self._under_way == 1, "on one communicator only one chunk is under way"
        self.events.append(f"launch {tag}")
        if self.other_goes:
            self._other.close()
        return str(tag)

    send = recv = launched

    def abort(self) -> None:
        self.events.append("abort")

    def buffer(self, at: int, nbytes: int) -> torch.Tensor:
        return self._buffers[at % 2, :nbytes]

    def copied(self, to: torch.Tensor, source: torch.Tensor) -> None:
        to.copy_(source)
        self.events.append("copy")

    def launching(self) -> Any:
        return nullcontext()


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    own, other = socket.socketpair()
    yield own, other
    own.close()
    other.close()


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staged, "CHUNK_BYTES", CHUNK)


def way(recorded: Recorded) -> BulkWay:
    return BulkWay(recorded, lambda: None, lambda: recorded, lambda: None, LONG_S)  # type: ignore[arg-type,return-value]


def test_a_chunk_is_sent_when_the_one_before_is_through_and_the_peer_has_asked_and_staged_while_that_one_is_under_way(
    ends: tuple[socket.socket, socket.socket],
) -> None:
    own, other = ends
    recorded = Recorded(other, [])
    sending = threading.Thread(target=way(recorded).send, args=(own, memoryview(bytes(25)), lambda: None))
    sending.start()
    seen = []
    for _ in range(3):  # it launches nothing before it is asked
        until_s = time.monotonic() + LONG_S
        while recorded.events.count("copy") == len(seen) and time.monotonic() < until_s:
            time.sleep(0.01)
        time.sleep(0.05)
        seen.append(recorded.events.count("copy") - sum(event.startswith("launch") for event in recorded.events))
        other.sendall(b"r")
    sending.join(LONG_S)
    assert seen == [1, 1, 1]
    assert recorded.events == [
        "copy", "connect", "launch 0",
        "copy", "finish 0", "launch 1",
        "copy", "finish 1", "launch 2",
        "finish 2",
    ]  # fmt: skip


def test_a_chunk_is_asked_for_when_there_is_a_buffer_and_copied_out_while_the_next_is_under_way(
    ends: tuple[socket.socket, socket.socket],
) -> None:
    own, other = ends
    recorded, moved = Recorded(other, []), []
    other.sendall(b"r")  # the sender is about to connect
    way(recorded).receive(own, memoryview(bytearray(25)), lambda: moved.append(1))
    assert recorded.events == [
        "connect", "launch 0", "finish 0",
        "launch 1", "copy", "finish 1",
        "launch 2", "copy", "finish 2",
        "copy",
    ]  # fmt: skip
    assert other.recv(10) == b"rrr"
    assert len(moved) == 3


def test_a_peer_that_goes_ends_the_wait_and_the_communicator_is_aborted(
    ends: tuple[socket.socket, socket.socket],
) -> None:
    own, other = ends
    recorded = Recorded(other, [])
    bulk = way(recorded)
    other.sendall(b"r")
    recorded.other_goes = True
    with pytest.raises(ConnectionError, match="its connection has closed"):
        bulk.receive(own, memoryview(bytearray(25)), lambda: None)
    bulk.close()
    assert recorded.events[-1] == "abort"


def test_nccl_is_asked_whether_it_is_done_and_never_made_to_wait_on_the_device() -> None:
    asked: list[int] = []

    def is_completed() -> bool:
        asked.append(1)
        return len(asked) > 3

    NcclPairs().finish(SimpleNamespace(is_completed=is_completed, exception=lambda: None), lambda: None)
    assert len(asked) == 4

    def ended() -> None:
        raise ConnectionsClosed("this rank hangs up")

    with pytest.raises(ConnectionsClosed, match="hangs up"):
        NcclPairs().finish(SimpleNamespace(is_completed=lambda: False), ended)


def test_a_transfer_of_nccl_that_has_failed_is_no_finished_one() -> None:
    """Work with an error counts as completed: bytes that never came would be copied out of the buffer."""
    failed = SimpleNamespace(is_completed=lambda: True, exception=lambda: RuntimeError("remote process exited"))
    with pytest.raises(RuntimeError, match="NCCL: remote process exited"):
        NcclPairs().finish(failed, lambda: None)


def test_communicators_of_nccl_are_of_two_ranks_and_take_few_multiprocessors(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[tuple[Any, ...]] = []

    class ProcessGroupNCCL:
        def __init__(self, *arguments: Any) -> None:
            made.append(arguments)

        class Options:
            def __init__(self) -> None:
                self.config = SimpleNamespace(max_ctas=32)

    monkeypatch.setattr(torch.distributed, "ProcessGroupNCCL", ProcessGroupNCCL, raising=False)
    NcclPairs().group("a store", 1, 7.0)  # type: ignore[arg-type]
    ((store, rank, ranks, options),) = made
    assert (store, rank, ranks) == ("a store", 1, 2)
    assert options.config.max_ctas <= 8
    assert vars(options)["_timeout"] == timedelta(seconds=7)


def test_buffers_on_a_gpu_are_copied_on_a_stream_of_their_own_and_the_host_waits_for_each_copy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    events: list[str] = []

    class Stream:
        def __init__(self, device: torch.device, priority: int) -> None:
            events.append(f"stream of priority {priority}")

        @staticmethod
        def priority_range() -> tuple[int, int]:
            return (0, -5)

    class Event:
        def __init__(self, blocking: bool) -> None:
            assert blocking

        def record(self, stream: Stream) -> None:
            events.append("record")

        def synchronize(self) -> None:
            events.append("synchronize")

    on_cpu = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *shape, dtype, device: on_cpu(*shape, dtype=dtype))
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    staging = Staging(torch.device("cuda", 0))
    staging.copied(staging.buffer(3, 4), torch.arange(4, dtype=torch.uint8))
    assert events == ["stream of priority 0", "record", "synchronize"]
    assert staging.buffer(1, 4).tolist() == [0, 1, 2, 3]
    assert staging.buffer(2, 4).data_ptr() != staging.buffer(1, 4).data_ptr()


@pytest.mark.parametrize(("training", "medium"), [("nccl", "nccl, staged on cuda:3"), ("cpu:gloo,cuda:nccl", "nccl")])
def test_bulk_goes_over_the_backend_of_training(training: str, medium: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "get_backend", lambda: training)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    transport = of_training(torch.distributed.HashStore(), 0, 1, "one", LONG_S, address="127.0.0.1")
    assert f"process groups of {medium}" in transport.medium
    transport.close()
