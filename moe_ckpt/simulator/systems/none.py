"""No checkpoints: the pace of training without them, and the price of a fault without them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..behaviour import Behaviour, Nodes, RecoveryCost
from .links import SystemSetting

NEVER = 10**12
"""An interval longer than any training."""


@dataclass(frozen=True)
class NoCheckpoints:
    """A fault sends training back to its first iteration."""

    name: str = "none"

    def behaviour(
        self, setting: SystemSetting, mtbf_s: float, *, popularity: Sequence[float] | None = None
    ) -> Behaviour:
        """See `CheckpointSystem`. A fault undoes all since the start: on average, all since the fault before."""
        expected_s = setting.restart(0.0, 0, mtbf_s).total_s

        def recover(iteration: int, nodes: Nodes, down: Nodes) -> RecoveryCost:
            return setting.rewind(iteration, NEVER, 0, 0.0)

        return Behaviour(self.name, setting.iteration_s, NEVER, 1, 0.0, expected_s, recover)
