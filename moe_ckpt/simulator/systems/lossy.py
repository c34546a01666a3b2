"""What systems that leave experts out of snapshots have in common: how a run with them goes back."""

from __future__ import annotations

from dataclasses import replace

from ..behaviour import Behaviour, Nodes, RecoveryCost
from ..driver import COPIED_AFTER
from .links import Replicas, SystemSetting


class LossyBehaviour(Behaviour):
    """A run with a snapshot in each iteration; all ranks go back together to the newest one that has its replicas.

    A subclass says in `strike`, by `_lose`, how many iterations' worth of tokens a recovery loses.
    """

    def __init__(
        self, name: str, setting: SystemSetting, replicas: Replicas, *, overhead_s: float, k_share: float
    ) -> None:
        def recover(iteration: int, nodes: Nodes, down: Nodes) -> RecoveryCost:
            if replicas.survive(down):
                return setting.rewind(iteration, 1, COPIED_AFTER, setting.load_s)
            return setting.from_storage(iteration)

        expected_s = setting.restart(setting.load_s, 0, (1 / 2 + COPIED_AFTER) * setting.iteration_s).total_s
        expected_s = replicas.expected_s(expected_s)
        super().__init__(name, setting.iteration_s, 1, 1, overhead_s, expected_s, recover, k_share=k_share)
        self._setting, self._replicas = setting, replicas
        self._lost_iterations = 0.0

    def _lose(self, recovery: RecoveryCost, iterations: float) -> RecoveryCost:
        """The recovery, with so many iterations' worth of tokens lost."""
        self._lost_iterations += iterations
        self.lost_tokens = self._lost_iterations * self._setting.job.tokens
        return replace(recovery, lost_tokens=iterations * self._setting.job.tokens)
