"""Checkpoints of Mixture-of-Experts training at every iteration, in host memory, and exact recovery from them.

What a training loop needs has its name here; importing the package imports none of it, nor torch. The manager is not
imported where Python, torch or Megatron-Core is too old for it: `UnsupportedVersion` says what to do.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .versions import check_versions, found_versions

if TYPE_CHECKING:
    from .config import MoECheckpointConfig as MoECheckpointConfig
    from .manager import MoECheckpointManager as MoECheckpointManager
    from .megatron_state.trainer_state import LoopState as LoopState
    from .recovery.timeline import Milestone as Milestone
    from .recovery.timeline import Timestamps as Timestamps
    from .resharding.store import PreviousWindow as PreviousWindow
    from .runtime.peer_links import is_lost_peer as is_lost_peer
    from .runtime.peer_links import set_for_parking as set_for_parking
    from .runtime.process_info import ProcessInfo as ProcessInfo
    from .runtime.session import Loadable as Loadable
    from .snapshot.coordinator import ProtectionReport as ProtectionReport
    from .standby.slot import wait_for_rank as wait_for_rank
    from .types import StepJournal as StepJournal
    from .types import WaitReport as WaitReport

_MODULES = {
    "Loadable": "runtime.session",
    "LoopState": "megatron_state.trainer_state",
    "Milestone": "recovery.timeline",
    "MoECheckpointConfig": "config",
    "MoECheckpointManager": "manager",
    "PreviousWindow": "resharding.store",
    "ProcessInfo": "runtime.process_info",
    "ProtectionReport": "snapshot.coordinator",
    "StepJournal": "types",
    "Timestamps": "recovery.timeline",
    "WaitReport": "types",
    "is_lost_peer": "runtime.peer_links",
    "set_for_parking": "runtime.peer_links",
    "wait_for_rank": "standby.slot",
}

__all__ = sorted(_MODULES)


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name == "MoECheckpointManager":
        check_versions(found_versions())
    return getattr(import_module(f".{_MODULES[name]}", __name__), name)
