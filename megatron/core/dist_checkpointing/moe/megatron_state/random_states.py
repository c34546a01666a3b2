"""States of all generators that training draws from, as bytes: of the host, of the device, of Megatron-Core's tracker.

A generator of a GPU has a seed and an offset (16 bytes), one of a CPU a Mersenne twister (5056 bytes); neither can be
made into the other. States of the host are the same everywhere.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import numpy
import torch

from megatron.core import tensor_parallel

from ..errors import UsageError

DEVICE, TRACKED = "device", "tracker/"


def _tracked() -> dict[str, torch.Tensor]:
    states: dict[str, Any] = tensor_parallel.get_cuda_rng_tracker().get_states()
    for name, tracked in states.items():
        if not isinstance(tracked, torch.Tensor):
            raise UsageError(f"random state {name} is a generator, as CUDA graphs need it, and cannot be captured")
    return states


def random_states() -> dict[str, memoryview]:
    """Those of python, numpy, torch, the device, and Megatron-Core's tracker, by name."""
    states = {"python": _python_bytes(), "numpy": _numpy_bytes(), "torch": _bytes_of(torch.get_rng_state())}
    states[DEVICE] = _bytes_of(torch.cuda.get_rng_state())
    for name, tracked in _tracked().items():
        states[f"{TRACKED}{name}"] = _bytes_of(tracked)
    return {name: memoryview(states[name]) for name in sorted(states)}


def restore_random(tensors: Mapping[str, memoryview]) -> None:
    """Make random states those that `random_states` gave."""
    _set_python(tensors["python"])
    _set_numpy(tensors["numpy"])
    torch.set_rng_state(_tensor_of(tensors["torch"]))
    torch.cuda.set_rng_state(_tensor_of(tensors[DEVICE]))
    tracked = {name: _tensor_of(tensors[f"{TRACKED}{name}"]) for name in _tracked()}
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
