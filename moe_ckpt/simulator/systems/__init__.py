"""Checkpoint systems, by name: what each would do in a training job, and what that costs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from ..behaviour import Behaviour
from .full import CheckFreq, Gemini, TorchDistSystem, full_interval
from .links import SystemSetting
from .none import NoCheckpoints
from .pec import Moc
from .selective import Moetion
from .sparse import MoEvement

__all__ = [
    "SYSTEMS",
    "CheckFreq",
    "CheckpointSystem",
    "Gemini",
    "MoEvement",
    "Moc",
    "Moetion",
    "NoCheckpoints",
    "TorchDistSystem",
    "full_interval",
]


class CheckpointSystem(Protocol):
    """A checkpoint system with its settings; what is None is chosen as the system itself would."""

    @property
    def name(self) -> str:
        """Its key in `SYSTEMS`."""
        ...

    def behaviour(
        self, setting: SystemSetting, mtbf_s: float, *, popularity: Sequence[float] | None = None
    ) -> Behaviour:
        """What the system does in a job.

        Raises UsageError for a job whose layers cannot fill its stages, and for lossy systems and no experts.

        Args:
            setting: The job on its cluster.
            mtbf_s: Mean time between failures of the whole job, in seconds.
            popularity: Share of the tokens by expert, the same in each layer, in any unit; None: all alike.
        """
        ...


SYSTEMS: dict[str, CheckpointSystem] = {
    system.name: system
    for system in (
        NoCheckpoints(),
        CheckFreq(),
        Gemini(shortest=True),
        TorchDistSystem(),
        TorchDistSystem(asynchronous=True),
        Moc(),
        Moetion(),
        MoEvement(),
    )
}
"""All systems with their own settings."""
