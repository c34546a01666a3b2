"""What goes beyond `full` and `sparse`: a folder each, one line here; a job imports what its flags ask for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from types import ModuleType

from ..config import MoECheckpointConfig
from .base import Additions, Extension, Share

EXTENSIONS: Mapping[str, Callable[[MoECheckpointConfig], bool]] = {
    "shard": lambda config: config.shard != "none",
    "gradient_replicas": lambda config: config.replicate == "gradients",
    "bubbles": lambda config: config.copy_placement == "bubbles",
    "persist_agent": lambda config: config.persist_agent_s is not None,
    "capacity_boost": lambda config: config.strategy == "selective" and config.capacity_boost > 0,
}
"""The folder of each, which has an `EXTENSION`, and whether a job asks for it."""


def load(name: str) -> ModuleType:
    """The package of an extension, or a module in it."""
    return import_module(f".{name}", __name__)


AGENT_LOCK = "persisting.lock"
"""In the slot of a process that has, or had, a persist agent."""


def wait_for_agent(slot: Path, limit_s: float | None) -> None:
    """Wait for the agent of an earlier attempt, also in a job that has none itself.

    Args:
        slot: Of this process, in memory.
        limit_s: How long an agent of this job may take; None where it has none.
    """
    if (slot / AGENT_LOCK).exists():
        load("persist_agent.agent").wait_for_agent(slot, limit_s)


def asked_for(config: MoECheckpointConfig) -> tuple[type[Extension], ...]:
    """Those that a job with these settings has, in the order of the table."""
    return tuple(load(name).EXTENSION for name, is_asked_for in EXTENSIONS.items() if is_asked_for(config))


__all__ = ["EXTENSIONS", "Additions", "Extension", "Share", "asked_for", "load", "wait_for_agent"]
