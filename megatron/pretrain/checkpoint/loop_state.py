"""What the driver's loop counts, as snapshots keep it."""

from __future__ import annotations

import os
from typing import Any

from megatron.pretrain.checkpoint.state import Progress

_COUNTS = ("consumed_train_samples", "consumed_valid_samples", "evaluated_iteration")
_COMMAND = "command"
"""How the job was started, for a conversion that has to start it again; nothing is restored from it."""


class ProgressState:
    """The `LoopState` of the driver.

    Args:
        progress: Is stored, and set anew by a recovery.
        argv: The flags of this start.

    Attributes:
        recorded_flags: Those of the start that made what was restored last; None before, or where nobody wrote them
            down.
    """

    def __init__(self, progress: Progress, argv: tuple[str, ...]) -> None:
        self._progress = progress
        self._command = {"flags": list(argv), "folder": os.getcwd()}
        self.recorded_flags: tuple[str, ...] | None = None

    def state_dict(self) -> dict[str, Any]:
        """As `LoopState.state_dict`."""
        return {name: getattr(self._progress, name) for name in _COUNTS} | {_COMMAND: self._command}

    def load_state_dict(self, values: dict[str, Any]) -> None:
        """As `LoopState.load_state_dict`."""
        self._progress.iteration = values["iteration"]
        for name in _COUNTS:
            setattr(self._progress, name, values[name])
        if values.get(_COMMAND):
            self.recorded_flags = tuple(values[_COMMAND]["flags"])
