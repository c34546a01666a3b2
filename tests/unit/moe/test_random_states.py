"""All generators that training draws from are taken and put back, the device's own as well."""

from __future__ import annotations

import ast
import random
from collections.abc import Callable
from contextlib import contextmanager, nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch

from megatron.core import tensor_parallel
from megatron.core.dist_checkpointing.moe.errors import UnreadableCheckpoint
from megatron.core.dist_checkpointing.moe.megatron_state import trainer_state
from megatron.pretrain.testing.te_on_cpu.wheel import place


class Loop(trainer_state.NoLoopState):
    """A loop that counts, and says more than older ones did."""

    def state_dict(self) -> dict[str, Any]:
        return {"count": 3, trainer_state.SAMPLES: 8, trainer_state.MODEL: {}}


@pytest.mark.parametrize(
    ("lacks", "refused"), [(trainer_state.SAMPLES, ""), (trainer_state.MODEL, ""), ("count", "count")]
)
def test_snapshots_of_older_releases_are_read_without_what_they_could_not_say(
    lacks: str, refused: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trainer_state, "random_states", dict)
    monkeypatch.setattr(trainer_state, "restore_random", lambda states: None)
    optimizer: Any = SimpleNamespace(param_groups=[])
    trainer = trainer_state.LiveTrainerState(optimizer, None, Loop(), ())
    saved = {name: value for name, value in trainer.scalars().items() if name != lacks}
    with pytest.raises(UnreadableCheckpoint, match=f"lacks trainer state: {refused}$") if refused else nullcontext():
        trainer.restore(saved, trainer.tensors())


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


class Graphed(torch.Generator):
    """As a device's: its state may be that of another generator, which then is drawn from."""

    def __init__(self) -> None:
        self.drawn_from: torch.Generator = self

    def clone_state(self) -> torch.Generator:
        return torch.Generator().set_state(self.drawn_from.get_state())

    def graphsafe_get_state(self) -> torch.Generator:
        return self.drawn_from

    def graphsafe_set_state(self, state: torch.Generator) -> None:
        self.drawn_from = state


def tracker_of_engine() -> Any:
    """Transformer Engine's own, from its source: importing that needs libraries of a GPU."""
    source = place() / "transformer_engine" / "pytorch" / "distributed.py"
    if not source.is_file():
        pytest.skip(f"no Transformer Engine in {source}")
    kinds = [node for node in ast.parse(source.read_text()).body if isinstance(node, ast.ClassDef)]
    only = ast.Module([kind for kind in kinds if kind.name == "CudaRNGStatesTracker"], [])
    names: dict[str, Any] = {"contextmanager": contextmanager, "torch": torch, "Dict": dict}
    names |= {"graph_safe_rng_available": lambda: True, "set_all_rng_states": lambda states: None}
    for name in ("_get_cuda_rng_state", "_set_cuda_rng_state"):
        names[name] = partial(getattr(tensor_parallel.random, name), graph_safe=True)
    exec(compile(only, str(source), "exec"), names)
    return names["CudaRNGStatesTracker"]()


@pytest.fixture(params=["megatron-core", "transformer engine"])
def graphed(request: pytest.FixtureRequest, device: Device, monkeypatch: pytest.MonkeyPatch) -> Callable[[], float]:
    """Draws from a tracker that CUDA graphs can be captured with, as dropout does."""
    own = Graphed()
    own.manual_seed(11)
    random = tensor_parallel.random
    monkeypatch.setattr(random, "_lazy_init", lambda: None)
    monkeypatch.setattr(random, "_lazy_call", lambda call: call())
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "default_generators", (own,))
    tracker: Any = random.CudaRNGStatesTracker(use_cudagraphable_rng=True)
    if request.param != "megatron-core":
        tracker = tracker_of_engine()
    tracker.add("experts", 9)
    monkeypatch.setattr(tensor_parallel, "get_cuda_rng_tracker", lambda: tracker)

    def draw() -> float:
        with tracker.fork("experts"):
            return float(torch.rand(1, generator=own.drawn_from))

    return draw


def test_generators_that_graphs_refer_to_stay_and_draw_what_they_drew_then(graphed: Callable[[], float]) -> None:
    graphed()
    taken = trainer_state.random_states()
    captured = tensor_parallel.get_cuda_rng_tracker().get_states()["experts"]
    assert isinstance(captured, torch.Generator)
    first = [graphed(), graphed()]
    assert len({*first, graphed()}) == 3
    trainer_state.restore_random(taken)
    assert tensor_parallel.get_cuda_rng_tracker().get_states()["experts"] is captured
    assert [graphed(), graphed()] == first


def test_states_of_a_tracker_without_graphs_come_back_in_one_with_and_the_other_way_around(device: Device) -> None:
    tracker = tensor_parallel.get_cuda_rng_tracker()
    taken = trainer_state.random_states()
    tracker.states_ = {"experts": torch.Generator()}
    trainer_state.restore_random(taken)
    assert trainer_state.random_states() == taken
    tracker.states_ = {"experts": torch.Generator().get_state()}
    trainer_state.restore_random(taken)
    assert trainer_state.random_states() == taken


def test_states_of_another_kind_of_device_are_named_and_leave_its_own_as_they_are(device: Device) -> None:
    taken = dict(trainer_state.random_states())
    assert trainer_state.of_another_device(taken) == ()
    elsewhere = taken | dict.fromkeys(("device", "tracker/experts"), memoryview(bytes(16)))
    assert trainer_state.of_another_device(elsewhere) == ("device", "tracker/experts")
    hosts = taken | {"torch": memoryview(bytes(16))}
    assert trainer_state.of_another_device(hosts) == (), "that of the host has no kinds: it was made by another torch"
