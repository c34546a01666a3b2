"""No checkpoints: the pace of training without them, and the price of a fault without them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ..behaviour import Behaviour, Nodes, RecoveryCost
from .links import SystemSetting

NEVER = 10**12
"""An interval longer than any training."""
EULER = 0.5772156649015329


def longest_stretch(faults: float) -> float:
    """Mean of the longest stretch without a fault, of a run with so many expected faults, in means between them: what
    such a run has trained at its end. It is the mean of the harmonic number of a Poisson variable."""
    if faults > 30:
        return EULER + math.log(faults)
    chance, harmonic, mean = math.exp(-faults), 0.0, 0.0
    for count in range(1, 200):
        chance, harmonic = chance * faults / count, harmonic + 1 / count
        mean += chance * harmonic
    return mean


@dataclass(frozen=True)
class NoCheckpoints:
    """A fault sends training back to its first iteration."""

    name: str = "none"

    def behaviour(
        self, setting: SystemSetting, mtbf_s: float, *, popularity: Sequence[float] | None = None
    ) -> Behaviour:
        """See `CheckpointSystem`. A fault undoes all since the start, so the longer a run is planned the more."""
        run_s = setting.constants.planned_s
        lost_s = run_s / longest_stretch(run_s / mtbf_s) - mtbf_s
        expected_s = setting.restart(0.0, 0, lost_s).total_s

        def recover(iteration: int, nodes: Nodes, down: Nodes) -> RecoveryCost:
            return setting.rewind(iteration, NEVER, 0, 0.0)

        return Behaviour(self.name, setting.iteration_s, NEVER, 1, 0.0, expected_s, recover)
