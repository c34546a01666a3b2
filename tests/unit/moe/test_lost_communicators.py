"""Kernels that wait for a lost peer: communicators are aborted and the device answers, or parking gives up in words."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from weakref import WeakSet

import pytest
import torch
import torch.distributed as dist
from device_training import NUMEL, piece
from no_trainer import NoTrainer

from megatron.core.dist_checkpointing.moe.boot_clock import SystemClock
from megatron.core.dist_checkpointing.moe.in_place import process_groups, process_restart
from megatron.core.dist_checkpointing.moe.in_place.process_groups import ProcessGroups
from megatron.core.dist_checkpointing.moe.local_recovery.park import Parked, Parker, ParkPorts
from megatron.core.dist_checkpointing.moe.local_recovery.step_guard import LiveBuffers
from megatron.core.dist_checkpointing.moe.policy.lineage import Identity
from megatron.core.dist_checkpointing.moe.policy.parking import Cause, StepPhase, decide
from megatron.core.dist_checkpointing.moe.ports import SnapshotId
from megatron.core.dist_checkpointing.moe.runtime import peer_links
from megatron.core.dist_checkpointing.moe.snapshot.capturer import LiveCapturer
from megatron.core.dist_checkpointing.moe.snapshot.stream_engine import StreamEngine
from megatron.core.dist_checkpointing.moe.storage.memory import MemoryStore
from megatron.core.dist_checkpointing.moe.types import PARKED, Part
from megatron.pretrain.testing.async_device import SCHEDULES, AsyncDevice, installed
from megatron.pretrain.testing.async_device.communicators import Communicator

COUNT, LONG_S = 6, 20.0


@pytest.fixture(params=SCHEDULES)
def device(request: pytest.FixtureRequest) -> Iterator[AsyncDevice]:
    with installed(request.param, 1) as device:
        yield device
        device.error = ""


@pytest.fixture
def groups(device: AsyncDevice, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Communicator]]:
    """Of c10d, each with a collective whose peer is gone."""
    all_of_device = WeakSet[Communicator]()
    made = [Communicator(device, all_of_device, []) for _ in range(COUNT)]
    for one in made:
        one.collective()
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_backend", lambda: "nccl")
    monkeypatch.setattr(dist.distributed_c10d, "_abort_process_group", lambda: None)
    monkeypatch.setattr(peer_links, "named_groups", lambda: {str(at): one for at, one in enumerate(made)})
    yield made
    peer_links.take_aborted_groups()
    for one in made:
        one.is_asked = True


def test_a_device_behind_a_lost_peer_answers_once_all_communicators_are_aborted(
    groups: list[Communicator], monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as impatient:
        impatient.setattr(process_restart, "_DEVICE_S", 0.1)
        assert not process_restart._device_answers()
    begun_s = time.monotonic()
    peer_links._abort_communicators()
    assert all(one.is_aborted for one in groups)
    assert process_restart._device_answers()
    assert time.monotonic() - begun_s < LONG_S


def test_communicators_that_are_aborted_one_after_the_other_are_seen_to_wait_for_each_other(
    groups: list[Communicator], monkeypatch: pytest.MonkeyPatch
) -> None:
    runs: list[Callable[[], object]] = []
    thread = threading.Thread(target=lambda: [run() for run in runs], daemon=True)

    def on_one_thread(run: Callable[[], object], name: str) -> SimpleNamespace:
        runs.append(run)
        return SimpleNamespace(start=lambda: None if thread.ident else thread.start(), join=thread.join)

    monkeypatch.setattr(peer_links, "device_thread", on_one_thread)
    monkeypatch.setattr(peer_links, "_ABORT_TIMEOUT_S", 0.2)
    monkeypatch.setattr(process_restart, "_DEVICE_S", 0.1)
    peer_links._abort_communicators()
    assert sum(one.is_asked for one in groups) == 1
    assert not process_restart._device_answers()


@pytest.mark.parametrize("is_beside", [True, False], ids=["as it is", "on training's thread"])
def test_who_drops_an_old_group_is_seen(is_beside: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch's destructor joins threads there that may sleep for minutes."""

    def here(run: Callable[[], object], name: str) -> SimpleNamespace:
        return SimpleNamespace(start=run)

    destroyed: list[str] = []
    monkeypatch.setattr(process_groups, "named_groups", dict)
    if not is_beside:
        monkeypatch.setattr(process_groups, "device_thread", here)
    with installed("lazy", 1) as device:
        ProcessGroups({"0": Communicator(device, WeakSet(), destroyed)}).replace()  # type: ignore[dict-item]
        until_s = time.monotonic() + LONG_S
        while not destroyed and time.monotonic() < until_s:
            time.sleep(0.01)
    assert destroyed == ["moe-ckpt-old-groups" if is_beside else "MainThread"]


@pytest.fixture
def park(device: AsyncDevice, tmp_path: Path) -> Iterator[Callable[[float], Parked]]:
    """Park the state after iteration 4, of a rank whose device has some work to do."""
    tensors = [
        piece("buffer", Part.MASTER, torch.arange(64.0).to("cuda")),
        piece("master", Part.MASTER, torch.arange(float(NUMEL)).to("cuda")),
    ]
    engine, trainer = StreamEngine(), NoTrainer()
    capturer = LiveCapturer(tensors, trainer, engine)  # type: ignore[arg-type]
    store = MemoryStore(tmp_path, "job", 0, [1], area="standby")
    identity = Identity("job", {"pp": 2}, capturer.operators, timeline=(("a", 0),))
    ports = {"store": store, "capturer": capturer, "trainer": trainer, "clock": SystemClock(), "rank": 0}
    parker = Parker(ParkPorts(facts=identity.facts, moving=LiveBuffers(tensors), **ports))  # type: ignore[arg-type]
    store.resize(parker.sizes())
    engine.prepare(store.views())
    engine._locks.settle(LONG_S)
    tensors[1].tensor.add_(1.0)
    parker.note(4)
    tensors[0].tensor.add_(1.0)  # by a pass of the next iteration

    def parked(timeout_s: float) -> Parked:
        found = parker.park(decide(StepPhase.PASSES, Cause.PEER_LOST, 4), {"journal": {}}, timeout_s)
        if found.iteration is not None:
            with store.open(SnapshotId(4, 0, PARKED)) as reader:
                bytes_of = [bytes(reader.read(one.key)) for one in tensors]
            host = [torch.arange(64.0), torch.arange(float(NUMEL)) + 1]
            assert bytes_of == [one.numpy().tobytes() for one in host]
        return found

    yield parked
    device.error = ""
    engine.close()
    store.close()


def test_state_is_parked_to_the_bit_once_the_communicators_are_aborted(
    park: Callable[[float], Parked], groups: list[Communicator]
) -> None:
    peer_links._abort_communicators()
    assert park(LONG_S).iteration == 4


def test_behind_a_kernel_that_nobody_aborts_parking_gives_up_in_time_and_in_words(
    park: Callable[[float], Parked], groups: list[Communicator]
) -> None:
    begun_s = time.monotonic()
    found = park(0.3)
    assert found.iteration is None
    assert re.search(r"waited 0[.\d]* s for the device to end", found.why), found.why
    assert time.monotonic() - begun_s < LONG_S
    for one in groups:
        one.is_asked = True
    assert park(LONG_S).iteration == 4


def test_after_an_illegal_address_parking_gives_up_in_words_and_the_device_does_not_answer(
    device: AsyncDevice, park: Callable[[float], Parked]
) -> None:
    def fail() -> None:
        raise RuntimeError("an illegal memory access was encountered")

    device.give(fail, "kernel")
    found = park(LONG_S)
    assert found.iteration is None
    assert "rank 0: the state was not parked: " in found.why
    assert "CUDA error: kernel: an illegal memory access was encountered" in found.why
    assert not process_restart._device_answers()
