"""What torch has to be told about NCCL so that a rank which lost a peer can put its state aside.

By default torch's watchdog ends the process when a communicator fails or a collective takes too long, with no word to
Python. All of it is read when process groups are made, so it has to be set before.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, MutableMapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ..policy.determinism import NONDETERMINISTIC_OPTIONS, DeviceSettings

SETTINGS: Mapping[str, tuple[str, str]] = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": ("0", "torch's watchdog ends the process before its state is put aside"),
    "TORCH_NCCL_RETHROW_CUDA_ERRORS": ("0", "an error of an aborted kernel ends the process from a thread of torch"),
    # For each failed work torch's watchdog sleeps four times the wait for a dump (60 s), with the lock that every new
    # collective of the group needs; each rank's heartbeat monitor then sleeps 480 s, and destructors join both.
    "TORCH_NCCL_DUMP_ON_TIMEOUT": ("0", "torch's watchdog dumps and sleeps before the group can be used or dropped"),
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": ("1", "torch's watchdog sleeps 60 s for each failed collective"),
    "TORCH_NCCL_ENABLE_MONITORING": ("0", "torch's heartbeat monitor sleeps 480 s, and whoever drops the group waits"),
}
"""What has to be set, and what happens otherwise."""

_DEFAULT_TIMEOUT = timedelta(minutes=10)

_FROM_AGENT = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "1"}
"""What torchrun sets for workers where nobody else did; the same value of a user cannot be told from it."""


def set_for_parking(backend: str, environment: MutableMapping[str, str] | None = None) -> None:
    """Set what nobody has set otherwise; before process groups are made, and only for NCCL.

    Args:
        backend: Of the process groups.
        environment: Is changed; that of this process if not given.
    """
    if "nccl" not in backend:
        return
    environment = os.environ if environment is None else environment
    is_worker = "TORCHELASTIC_RUN_ID" in environment
    # Other values are somebody's wish and stay; `wrong_settings` says what they cost.
    for name, (value, _) in SETTINGS.items():
        if name not in environment or (is_worker and environment[name] == _FROM_AGENT.get(name)):
            environment[name] = value


def wrong_settings(environment: Mapping[str, str] | None = None, backend: str | None = None) -> Iterator[str]:
    """A sentence for each variable with which no rank parks under NCCL; none for other backends.

    Args:
        environment: Is read; that of this process if not given.
        backend: Of the process groups; that of the default group if not given.
    """
    if "nccl" not in (process_group_backend() if backend is None else backend):
        return
    environment = os.environ if environment is None else environment
    for name, (value, why) in SETTINGS.items():
        found = environment.get(name)
        if found != value:
            is_now = f"is {found}" if found is not None else "is not set"
            yield f"{name} {is_now}: when a peer is lost, {why}; set {name}={value} before process groups are made"


def process_group_backend() -> str:
    """Of the default group; empty where there is none."""
    return str(dist.get_backend()) if dist.is_initialized() else ""


def process_group_timeout_s(device: str = "cuda") -> float:
    """How long a collective of the default group may take, as whoever made it said, else as torch says."""
    options = getattr(dist.distributed_c10d._get_default_group()._get_backend(torch.device(device)), "options", None)
    timeout = getattr(options, "_timeout", None) or _DEFAULT_TIMEOUT
    return float(timeout.total_seconds())


# How this process computes, read from torch, from Megatron-Core's configuration and from the environment.


def device_of(chunk: torch.nn.Module) -> str:
    """Where a model chunk is: cuda or cpu."""
    return next((parameter.device.type for parameter in chunk.parameters()), "cpu")


def device_settings(chunk: torch.nn.Module, transformer: Any, ranks: int) -> DeviceSettings:
    """The settings of a job with this model.

    Args:
        chunk: A model chunk of this rank.
        transformer: The configuration that its modules share.
        ranks: Number of ranks.
    """
    # Algorithms that only warn are not deterministic.
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
