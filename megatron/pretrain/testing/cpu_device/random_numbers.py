"""Random numbers of a device whose generator is torch's default one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


class DeviceGenerators:
    """`torch.cuda.default_generators` of a machine whose every device, however it is named, is the CPU."""

    def __len__(self) -> int:
        return 1

    def __getitem__(self, device: object) -> torch.Generator:
        return torch.default_generator


class TorchWithoutHostRng:
    """The `torch` module, but with a host random state that is empty and never changes."""

    _void_state = torch.empty(0, dtype=torch.uint8)

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def get_rng_state(self) -> torch.Tensor:
        """The empty state."""
        return self._void_state

    def set_rng_state(self, new_state: torch.Tensor) -> None:
        """Change nothing."""


def call_at_once(original: Any) -> Any:
    """For `torch.cuda._lazy_call`: call what would wait until CUDA is initialized."""

    def lazy_call(callback: Callable[[], object], **kwargs: object) -> None:
        callback()

    return lazy_call
