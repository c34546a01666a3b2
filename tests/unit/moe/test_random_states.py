"""All generators that training draws from are taken and put back, the device's own as well."""

from __future__ import annotations

import random

import numpy
import pytest
import torch

from megatron.core import tensor_parallel
from megatron.core.dist_checkpointing.moe.megatron_state import trainer_state


class Device:
    """A device with a generator apart from that of the CPU."""

    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(7)

    def draw(self) -> float:
        return float(torch.rand(1, generator=self.generator))


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    device = Device()
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda *_: device.generator.get_state())
    monkeypatch.setattr(torch.cuda, "set_rng_state", lambda state, *_: device.generator.set_state(state))
    tracker = tensor_parallel.random.CudaRNGStatesTracker()
    tracker.states_ = {"experts": torch.Generator().manual_seed(9).get_state()}
    monkeypatch.setattr(tensor_parallel, "get_cuda_rng_tracker", lambda: tracker)
    return device


def test_after_states_were_put_back_every_generator_draws_what_it_drew_then(device: Device) -> None:
    tracker = tensor_parallel.get_cuda_rng_tracker()
    taken = trainer_state.random_states()
    tracked = {name: state.clone() for name, state in tracker.get_states().items()}

    def drawn() -> list[float]:
        return [random.random(), float(numpy.random.rand()), float(torch.rand(1)), device.draw()]

    first = drawn()
    assert len({*first, *drawn()}) == 8
    tracker.states_ = {"experts": torch.Generator().manual_seed(10).get_state()}
    trainer_state.restore_random(taken)
    assert drawn() == first
    assert all(torch.equal(tracker.get_states()[name], state) for name, state in tracked.items())


def test_states_of_another_kind_of_device_are_named_and_leave_its_own_as_they_are(device: Device) -> None:
    taken = dict(trainer_state.random_states())
    assert trainer_state.of_another_device(taken) == ()
    elsewhere = taken | dict.fromkeys(("device", "tracker/experts"), memoryview(bytes(16)))
    assert trainer_state.of_another_device(elsewhere) == ("device", "tracker/experts")
    hosts = taken | {"torch": memoryview(bytes(16))}
    assert trainer_state.of_another_device(hosts) == (), "that of the host has no kinds: it was made by another torch"
