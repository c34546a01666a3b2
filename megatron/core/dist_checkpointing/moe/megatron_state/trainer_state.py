"""What training keeps beside weights and moments: counts, schedules, loss scale, random states."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import numpy
import torch

from megatron.core import tensor_parallel
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from ..errors import UnreadableCheckpoint, UsageError
from ..ports import Json
from .optimizer_state import members_by_layer
from .quantization import QUANTIZATION, difference, packed, quantization_tensors, unpack

log = logging.getLogger(__name__)

# States of all generators that training draws from, as bytes: of the host, of the device, of Megatron-Core's tracker.
#
# A generator of a GPU has a seed and an offset (16 bytes), one of a CPU a Mersenne twister (5056 bytes); neither can be
# made into the other. States of the host are the same everywhere. Under CUDA graphs the tracker has generators in place
# of their states, and the graphs refer to them: they stay, and are given other states.

DEVICE, TRACKED = "device", "tracker/"


def _tracked() -> dict[str, torch.Tensor | torch.Generator]:
    states: dict[str, torch.Tensor | torch.Generator] = tensor_parallel.get_cuda_rng_tracker().get_states()
    return states


def random_states() -> dict[str, memoryview]:
    """Those of python, numpy, torch, the device, and Megatron-Core's tracker, by name."""
    states = {"python": _python_bytes(), "numpy": _numpy_bytes(), "torch": _bytes_of(torch.get_rng_state())}
    states[DEVICE] = _bytes_of(torch.cuda.get_rng_state())
    for name, tracked in _tracked().items():
        states[f"{TRACKED}{name}"] = _bytes_of(tracked if isinstance(tracked, torch.Tensor) else tracked.get_state())
    return {name: memoryview(states[name]) for name in sorted(states)}


def restore_random(tensors: Mapping[str, memoryview]) -> None:
    """Make random states those that `random_states` gave."""
    _set_python(tensors["python"])
    _set_numpy(tensors["numpy"])
    torch.set_rng_state(_tensor_of(tensors["torch"]))
    torch.cuda.set_rng_state(_tensor_of(tensors[DEVICE]))
    tracked = _tracked()
    for name, own in tracked.items():
        state = _tensor_of(tensors[f"{TRACKED}{name}"])
        if isinstance(own, torch.Tensor):
            tracked[name] = state
        else:
            own.set_state(state)
    tensor_parallel.get_cuda_rng_tracker().set_states(tracked)


def of_another_device(tensors: Mapping[str, memoryview]) -> tuple[str, ...]:
    """Which of these random states no generator of this device has: that of the device, and those of the tracker."""
    own = random_states()
    names = (name for name in own if name == DEVICE or name.startswith(TRACKED))
    return tuple(name for name in names if name in tensors and tensors[name].nbytes != own[name].nbytes)


def _bytes_of(state: torch.Tensor) -> bytes:
    return bytes(state.cpu().numpy().tobytes())


def _tensor_of(data: memoryview) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


_PYTHON = numpy.dtype([("version", "<i8"), ("words", "<u8", 625), ("has_gauss", "<i8"), ("gauss", "<f8")])
_NUMPY = numpy.dtype([("words", "<u4", 624), ("position", "<i8"), ("has_gauss", "<i8"), ("gauss", "<f8")])


def _python_bytes() -> bytes:
    version, words, gauss = random.getstate()
    return bytes(numpy.array((version, words, gauss is not None, gauss or 0.0), _PYTHON).tobytes())


def _set_python(data: memoryview) -> None:
    states: numpy.ndarray = numpy.frombuffer(data, _PYTHON)
    (found,) = states
    words = tuple(int(word) for word in found["words"])
    random.setstate((int(found["version"]), words, float(found["gauss"]) if found["has_gauss"] else None))


def _numpy_bytes() -> bytes:
    kind, *values = numpy.random.get_state()
    assert kind == "MT19937", kind
    return bytes(numpy.array(tuple(values), _NUMPY).tobytes())


def _set_numpy(data: memoryview) -> None:
    states: numpy.ndarray = numpy.frombuffer(data, _NUMPY)
    (found,) = states
    numpy.random.set_state(
        ("MT19937", found["words"], int(found["position"]), int(found["has_gauss"]), float(found["gauss"]))
    )


ITERATION = "iteration"
_GROUP_FIELDS = ("lr", "weight_decay", "step")


MODEL, COMMAND = "model", "command"
"""What a loop may say of its model and command line: nothing is restored from it, and older snapshots lack it."""
SAMPLES = "iteration_samples"
"""On how many Megatron-LM's loop trained in the newest iteration."""
_OPTIONAL = (MODEL, COMMAND, SAMPLES)


class LoopState(Protocol):
    """What the training loop itself counts, such as consumed samples; whatever has these two methods will do.

    It has to be alike on all ranks: under another layout each rank takes that of one rank of the older layout.
    """

    def state_dict(self) -> dict[str, Json]:
        """All of it as JSON values, with the same keys each time; called between iterations, and once per snapshot."""

    def load_state_dict(self, values: dict[str, Any]) -> None:
        """Take back what `state_dict` gave after the iteration `values["iteration"]`."""


class NoLoopState:
    """The state of a loop that counts nothing but iterations."""

    def state_dict(self) -> dict[str, Json]:
        """Nothing."""
        return {}

    def load_state_dict(self, values: dict[str, Any]) -> None:
        """There is nothing to take back."""


class _WithScales(Mapping[str, memoryview]):
    """Random states, and the scales of eight-bit training: only who asks for those waits for the device."""

    def __init__(self, states: dict[str, memoryview], scales: Callable[[], memoryview]) -> None:
        self._states, self._scales = states, scales

    def __getitem__(self, name: str) -> memoryview:
        return self._scales() if name == QUANTIZATION else self._states[name]

    def __iter__(self) -> Iterator[str]:
        return iter([*self._states, QUANTIZATION])

    def __len__(self) -> int:
        return len(self._states) + 1


class LiveTrainerState:
    """The `ports.TrainerState` of live training; call it between iterations.

    `step` is among the fields of parameter groups only where a fused Adam counts there.

    Args:
        optimizer: Its parameter groups and loss scalers.
        scheduler: Its steps; None where nothing is scheduled.
        loop: What the training loop counts.
        chunks: The model chunks of this rank, for the scales that their modules keep.
        draws: What draws random numbers on the device in training; where it is not empty, states of another kind of
            device are refused.

    Attributes:
        iteration: The one after which training stands.
        of_another_device: Random states of the restored snapshot for which this device has no place, by name: those of
            a GPU on a CPU, or the other way around. The device's own stay as they were.
    """

    def __init__(
        self,
        optimizer: MegatronOptimizer,
        scheduler: OptimizerParamScheduler | None,
        loop: LoopState,
        chunks: Sequence[torch.nn.Module] = (),
        draws: str = "",
    ) -> None:
        self._optimizer, self._scheduler, self._loop, self._chunks = optimizer, scheduler, loop, chunks
        self.iteration, self._draws = 0, draws
        self.of_another_device: Mapping[str, bytes] = {}

    def scalars(self) -> dict[str, Json]:
        """As `ports.TrainerState.scalars`."""
        return self._loop.state_dict() | {ITERATION: self.iteration} | self._schedules()

    def _schedules(self) -> dict[str, Json]:
        return {
            "scheduler": _plain(self._scheduler.state_dict()) if self._scheduler is not None else {},
            **optimizer_scalars(self._optimizer),
        }

    def tensors(self) -> Mapping[str, memoryview]:
        """As `ports.TrainerState.tensors`."""
        scales = self._scales()
        return _WithScales(random_states(), packed(scales)) if scales else random_states()

    def difference(self, tensors: Mapping[str, memoryview]) -> str:
        """As `ports.TrainerState.difference`: the scales of eight-bit training."""
        scales = self._scales()
        return difference(scales, tensors[QUANTIZATION]) if scales and QUANTIZATION in tensors else ""

    def _scales(self) -> Mapping[str, torch.Tensor]:
        return quantization_tensors(self._chunks) if self._chunks else {}

    def restore(self, scalars: Mapping[str, Json], tensors: Mapping[str, memoryview]) -> None:
        """As `ports.TrainerState.restore`; nothing is changed when something is missing.

        Raises UsageError when the schedules of this job are others than those of the snapshot.
        """
        foreign = self._check(scalars, tensors)
        saved = dict[str, Any](scalars)
        _load_groups(self._optimizer, saved["param_groups"])
        self.restore_common(saved)
        if foreign and not self.of_another_device:
            log.warning(
                "random states not restored, saved on another device type: %s; everything else is exact",
                ", ".join(foreign),
            )
        self.of_another_device = {name: bytes(tensors[name]) for name in foreign}
        own = random_states() if foreign else {}
        restore_random({**tensors, **{name: own[name] for name in foreign}})
        if scales := self._scales():
            unpack(scales, tensors[QUANTIZATION])

    def restore_common(self, scalars: Mapping[str, Json]) -> None:
        """As `ports.TrainerState.restore_common`."""
        saved = dict[str, Any](scalars)
        self._loop.load_state_dict(saved)  # first: it knows the flags of then, which explain why schedules differ
        if self._scheduler is not None:
            load_scheduler(self._scheduler, saved["scheduler"])
        _load_scalers(self._optimizer, saved["grad_scalers"])
        self.iteration = int(saved[ITERATION])

    def misfit(self, scalars: Mapping[str, Json]) -> str:
        """As `ports.TrainerState.misfit`."""
        schedules = ((name, value) for name, value in self._schedules().items() if name in scalars)
        path = next(filter(None, (_other_shape(value, scalars[name], name) for name, value in schedules)), "")
        return path and (
            f"has another {path} than this job: it was made with other flags of the optimizer or the loss scale"
        )

    def _check(self, scalars: Mapping[str, Json], tensors: Mapping[str, memoryview]) -> tuple[str, ...]:
        """Which random states were made on another kind of device, where that can be accepted."""
        live = self.tensors()
        missing = sorted(
            [name for name in self.scalars() if name not in scalars and name not in _OPTIONAL]
            + [f"random/{name}" for name in live if name not in tensors]
        )
        if missing:
            raise UnreadableCheckpoint(f"the snapshot lacks trainer state: {', '.join(missing)}")
        if problem := self.misfit(scalars):
            raise UnreadableCheckpoint(f"the snapshot's trainer state {problem}")
        foreign = of_another_device(tensors)
        for name, view in live.items():
            if tensors[name].nbytes != view.nbytes and name not in foreign:
                raise UnreadableCheckpoint(
                    f"random state {name} has {tensors[name].nbytes} bytes, but this job's has {view.nbytes}: the"
                    " snapshot was made with another version of torch"
                )
        if foreign and self._draws:
            raise UnreadableCheckpoint(
                f"random states {', '.join(foreign)} were made on another kind of device, and training draws random"
                f" numbers there ({self._draws}): start on that kind of device, or give --moe-ckpt-reshard inexact to"
                " continue with other ones"
            )
        return foreign


def optimizer_scalars(optimizer: MegatronOptimizer) -> dict[str, Json]:
    """Step counts, learning rates and weight decay of its groups on this rank, and its loss scalers."""
    groups: list[Json] = [
        {name: _plain(group[name]) for name in _GROUP_FIELDS if name in group} for group in optimizer.param_groups
    ]
    return {
        "grad_scalers": [_plain(scaler.state_dict()) for scaler in _scalers(optimizer)],
        "param_groups": groups,
    }


def load_optimizer_scalars(optimizer: MegatronOptimizer, saved: Mapping[str, Any]) -> None:
    """Set all of it to what `optimizer_scalars` gave on this rank.

    Args:
        optimizer: The optimizer of this rank.
        saved: The value of `optimizer_scalars`.
    """
    _load_groups(optimizer, saved["param_groups"])
    _load_scalers(optimizer, saved["grad_scalers"])


def load_scheduler(scheduler: OptimizerParamScheduler, saved: dict[str, Any], source: str = "snapshot") -> None:
    """Set a scheduler to what its `state_dict` was.

    Where it keeps the saved rates, groups that were given those of the flags keep them, too: core (0.17 to 0.19) reads
    the rates of a group first.

    Args:
        scheduler: The live scheduler.
        saved: What its `state_dict` was.
        source: Where that lay, for the error.

    Raises:
        UsageError: Settings differ; then nothing is changed.
    """
    before, rates = scheduler.num_steps, {"max_lr": scheduler.max_lr, "min_lr": scheduler.min_lr}
    scheduler.num_steps = 0  # core adds what it loads to what was counted before
    try:
        type(scheduler).load_state_dict(scheduler, saved)
    except AssertionError as error:
        scheduler.num_steps = before
        raise UsageError(
            f"the schedules of this job are not those of the {source} ({error}); give the same --train-iters, "
            "--lr-decay-iters and learning rates, or --override-opt_param-scheduler to take the new ones, or "
            "--use-checkpoint-opt_param-scheduler to keep the old ones"
        ) from error
    for group in scheduler.optimizer.param_groups:
        group.update({name: getattr(scheduler, name) for name, was in rates.items() if group.get(name) == was})
    scheduler.step(0)


def _other_shape(own: Json, saved: Json, path: str) -> str:
    """Where `saved` is not built as `own` is; an empty string where it is."""
    if isinstance(own, dict):
        if not isinstance(saved, dict):
            return path
        # A fused Adam counts steps from its first one on: the live state may not have the count yet.
        if set(saved) - {"step"} != set(own) - {"step"}:
            return path
        return next(
            filter(None, (_other_shape(own[key], saved[key], f"{path}.{key}") for key in own if key in saved)), ""
        )
    if isinstance(own, list):
        if not isinstance(saved, list) or len(saved) != len(own):
            return path
        pairs = enumerate(zip(own, saved, strict=True))
        return next(filter(None, (_other_shape(one, two, f"{path}[{at}]") for at, (one, two) in pairs)), "")
    return ""


def _plain(value: Any) -> Any:
    """As JSON values; tensors of one element as their number, which a float takes exactly."""
    if isinstance(value, torch.Tensor):
        return value.item()
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    return value


def _scalers(optimizer: MegatronOptimizer) -> list[Any]:
    scalers = (getattr(member, "grad_scaler", None) for member, _ in members_by_layer(optimizer))
    return [scaler for scaler in scalers if scaler is not None]


def _load_scalers(optimizer: MegatronOptimizer, saved: list[Any]) -> None:
    # A stage may lack the part of the optimizer that has the experts, and its scaler.
    for scaler, values in zip(_scalers(optimizer), saved, strict=False):
        scaler.load_state_dict(_scaler_state(values))


def _scaler_state(values: Mapping[str, Any]) -> dict[str, Any]:
    if "scale" not in values:
        return dict(values)
    return dict(values) | {"scale": torch.tensor([values["scale"]], dtype=torch.float)}


def _load_groups(optimizer: MegatronOptimizer, saved: list[dict[str, Any]]) -> None:
    for group, values in zip(optimizer.param_groups, saved, strict=True):
        for name in _GROUP_FIELDS:
            if name not in values:
                group.pop(name, None)
            elif isinstance(group.get(name), torch.Tensor):
                group[name].fill_(values[name])
            else:
                group[name] = values[name]
