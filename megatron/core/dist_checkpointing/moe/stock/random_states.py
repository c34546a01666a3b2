"""The random states of a rank, put back where the start of the stock loop draws from them in between."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import numpy
import torch

from megatron.core import tensor_parallel


@dataclass(frozen=True)
class RandomStates:
    """Those of python, numpy, torch, the device, and Megatron-Core's tracker, as they were at one moment."""

    python: Any
    numpy: Any
    torch: torch.Tensor
    device: torch.Tensor
    tracked: dict[str, Any]

    @classmethod
    def now(cls) -> RandomStates:
        """As they are."""
        tracked = tensor_parallel.get_cuda_rng_tracker().get_states()
        copies = {name: state.clone() if torch.is_tensor(state) else state for name, state in tracked.items()}
        device = torch.cuda.get_rng_state().clone()
        return cls(random.getstate(), numpy.random.get_state(), torch.get_rng_state(), device, copies)

    def restore(self) -> None:
        """Make them so again."""
        random.setstate(self.python)
        numpy.random.set_state(self.numpy)
        torch.set_rng_state(self.torch)
        torch.cuda.set_rng_state(self.device)
        tensor_parallel.get_cuda_rng_tracker().set_states(self.tracked)
