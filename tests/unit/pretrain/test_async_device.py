"""A device that runs late what it was given, and hands out freed memory at once, as CUDA may."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch

from megatron.pretrain.testing.async_device import SCHEDULES, AsyncDevice, installed

SIZE = 1000


@pytest.fixture
def device() -> Iterator[AsyncDevice]:
    """One that runs hardly anything before it is waited for."""
    with installed("lazy", 0) as device:
        yield device


def busy() -> torch.Tensor:
    """What training's stream computes for a while."""
    value = torch.zeros(SIZE, device="cuda")
    for _ in range(50):
        value = value + 1
    return value


def test_the_host_sees_a_copy_only_once_it_has_waited_for_it(device: AsyncDevice) -> None:
    host = torch.zeros(SIZE, pin_memory=True)
    host.copy_(busy(), non_blocking=True)
    assert host[0] == 0
    torch.cuda.synchronize()
    assert host.tolist() == [50.0] * SIZE
    assert not device.blocking


def test_streams_run_in_their_own_order_and_wait_for_events(device: AsyncDevice) -> None:
    side, event, host = torch.cuda.Stream(), torch.cuda.Event(), torch.zeros(SIZE, pin_memory=True)
    value = busy()
    event.record()
    side.wait_event(event)
    with torch.cuda.stream(side):
        host.copy_(value, non_blocking=True)
    side.synchronize()
    assert host[0] == 50


def test_a_stream_that_waits_for_nothing_reads_what_is_not_there_yet(device: AsyncDevice) -> None:
    side, host, value = torch.cuda.Stream(), torch.zeros(SIZE, pin_memory=True), busy()
    with torch.cuda.stream(side):
        host.copy_(value, non_blocking=True)
    side.synchronize()
    assert host[0] != 50


@pytest.mark.parametrize("is_recorded", [False, True])
def test_freed_memory_is_the_next_kernels_unless_it_was_recorded(device: AsyncDevice, is_recorded: bool) -> None:
    side, host, value = torch.cuda.Stream(), torch.zeros(SIZE, pin_memory=True), busy()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        host.copy_(value, non_blocking=True)
    if is_recorded:
        value.record_stream(side)  # type: ignore[arg-type]
    del value
    kept = torch.zeros(SIZE, device="cuda")  # the allocation that gets it
    torch.cuda.current_stream().synchronize()
    side.synchronize()
    assert (host[0] == 50) == is_recorded
    assert device.after_free == ([] if is_recorded else ["copy"])
    assert kept.is_cuda


def test_copies_to_memory_that_is_not_locked_hold_up_their_thread_and_are_counted(device: AsyncDevice) -> None:
    host, value = torch.zeros(SIZE), busy()
    thread = threading.Thread(target=lambda: host.copy_(value, non_blocking=True), name="copies")
    thread.start()
    thread.join()
    assert host[0] == 50
    (copy,) = device.blocking
    assert (copy.thread, copy.nbytes, copy.to_host) == ("copies", 4 * SIZE, True)
    assert device.waited["copies"] > 10


def test_what_is_copied_to_the_device_is_read_before_the_call_returns(device: AsyncDevice) -> None:
    host, value = torch.ones(SIZE), busy()
    value.copy_(host, non_blocking=True)
    host.zero_()
    assert value.tolist() == [1.0] * SIZE


def test_a_copy_to_pages_that_were_unlocked_meanwhile_is_an_error_that_stays(device: AsyncDevice) -> None:
    host, value = torch.zeros(SIZE), busy()
    cudart = torch.cuda.cudart()
    cudart.cudaHostRegister(host.data_ptr(), 4 * SIZE, 0)
    host.copy_(value, non_blocking=True)
    cudart.cudaHostUnregister(host.data_ptr())
    for _ in range(2):
        with pytest.raises(RuntimeError, match="CUDA error: copy: an illegal memory access"):
            torch.cuda.synchronize()
    device.error = ""


@pytest.mark.parametrize("to_host", [True, False])
def test_a_copy_over_the_border_of_locked_pages_is_refused_as_by_cuda(device: AsyncDevice, to_host: bool) -> None:
    host, value, cudart = torch.zeros(SIZE), busy(), torch.cuda.cudart()
    start = host.data_ptr()

    def copy(first: int, end: int) -> None:
        pair = host[first:end], value[first:end]
        pair[not to_host].copy_(pair[to_host])

    for at in (400, 1200):  # of 4000 bytes; what lies before the first and behind the second is not locked
        cudart.cudaHostRegister(start + at, 800, 0)
    for first, end in ((0, 101), (99, 200), (200, 400), (100, 500), (499, SIZE), (0, SIZE)):
        with pytest.raises(RuntimeError, match="CUDA error: invalid argument"):
            copy(first, end)
    for first, end in ((0, 100), (100, 300), (300, 500), (500, SIZE)):
        copy(first, end)
    assert torch.equal(host, value.cpu())


def test_a_new_thread_is_on_device_0_and_its_calls_are_noted(device: AsyncDevice) -> None:
    event = torch.cuda.Event()
    event.record()
    here: list[int] = []

    def ask() -> None:
        here.append(torch.cuda.current_device())
        event.synchronize()
        torch.cuda.set_device(device.index)
        event.synchronize()

    thread = threading.Thread(target=ask, name="asks")
    thread.start()
    thread.join()
    assert here == [0]
    assert device.elsewhere == {("cudaEventSynchronize", "asks")}


def test_no_time_is_known_between_events_that_were_not_reached(device: AsyncDevice) -> None:
    first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    first.record()
    kept = busy()
    last.record()
    with pytest.raises(RuntimeError, match="not ready"):
        first.elapsed_time(last)
    last.synchronize()
    assert first.elapsed_time(last) > 0
    assert kept.is_cuda


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_training_computes_what_the_host_computes_to_the_bit(schedule: str) -> None:
    def losses(where: str) -> list[float]:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Dropout(0.1), torch.nn.Linear(16, 1)).to(where)
        optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
        found = []
        for step in range(3):
            optimizer.zero_grad()
            loss = model(torch.full((4, 8), float(step), device=where)).to(torch.bfloat16).pow(2).mean()
            loss.backward()
            optimizer.step()
            found.append(loss)
        return [float(loss) for loss in found]

    expected = losses("cpu")
    with installed(schedule, 1):
        assert losses("cuda") == expected


def test_the_same_seed_gives_the_same_order() -> None:
    def executed() -> list[int]:
        found = []
        with installed("random", 5) as device:
            for _ in range(3):
                busy()
                found.append(device.executed)
        return found

    assert executed() == executed()


def test_all_names_are_torchs_own_again_afterwards() -> None:
    names = ("Stream", "Event", "stream", "synchronize", "current_device", "cudart")
    before = [getattr(torch.cuda, name) for name in names], torch.Tensor.is_cuda, torch.Tensor.to, torch.empty
    with installed("eager", 0):
        assert torch.empty(1, device="cuda").is_cuda
    assert ([getattr(torch.cuda, name) for name in names], torch.Tensor.is_cuda, torch.Tensor.to, torch.empty) == before
    assert not torch.empty(1).is_cuda
