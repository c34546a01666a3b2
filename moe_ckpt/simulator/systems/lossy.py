"""What systems that leave experts out of snapshots have in common: how a run with them goes back."""

from __future__ import annotations

from ..behaviour import Nodes, RecoveryCost
from .links import Replicas, SystemSetting


class LossyBehaviour:
    """A run with a snapshot in each iteration; all ranks go back together to the newest one that has its replicas.

    A subclass says what a snapshot costs, what share of the experts it has, and in `_lost` how many iterations' worth
    of tokens a recovery loses.
    """

    window = 1
    interval = 1
    _LATENCY = 1

    def __init__(self, name: str, setting: SystemSetting, replicas: Replicas) -> None:
        self.name = name
        self._setting, self._replicas = setting, replicas
        self._lost_iterations = 0.0

    @property
    def iteration_s(self) -> float:
        """See `Behaviour`."""
        return self._setting.iteration_s

    @property
    def lost_tokens(self) -> float:
        """See `Behaviour`."""
        return self._lost_iterations * self._setting.job.tokens

    @property
    def expected_recovery_s(self) -> float:
        """See `Behaviour`."""
        lost_s = (self.interval / 2 + self._LATENCY) * self.iteration_s
        return self._setting.restart(self._setting.load_s, 0, lost_s).total_s

    def restarts(self, ongoing: Nodes, nodes: Nodes) -> bool:
        """See `Behaviour`: the whole job is in it."""
        return True

    def _rewind(self, iteration: int, nodes: Nodes, down: Nodes | None) -> RecoveryCost:
        """What a fault costs, but for tokens."""
        if self._replicas.survive(nodes if down is None else down):
            return self._setting.rewind(iteration, self.interval, self._LATENCY, self._setting.load_s)
        return self._setting.from_storage(iteration)
