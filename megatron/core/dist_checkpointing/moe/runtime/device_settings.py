"""How this process computes, read from torch, from Megatron-Core's configuration and from the environment."""

from __future__ import annotations

import os
from typing import Any

import torch

from ..policy.determinism import NONDETERMINISTIC_OPTIONS, DeviceSettings


def device_of(chunk: torch.nn.Module) -> str:
    """Where a model chunk is: cuda or cpu."""
    return next((parameter.device.type for parameter in chunk.parameters()), "cpu")


def device_settings(chunk: torch.nn.Module, transformer: Any, ranks: int) -> DeviceSettings:
    """Those of a job with this model; transformer: the configuration that its modules share."""
    warns_only = torch.is_deterministic_algorithms_warn_only_enabled()
    return DeviceSettings(
        device_of(chunk),
        ranks,
        dict(os.environ),
        transformer_engine=getattr(transformer, "transformer_impl", "") == "transformer_engine",
        deterministic_mode=bool(getattr(transformer, "deterministic_mode", False)),
        deterministic_algorithms=torch.are_deterministic_algorithms_enabled() and not warns_only,
        fusions=tuple(name for name in NONDETERMINISTIC_OPTIONS if getattr(transformer, name, False)),
    )
