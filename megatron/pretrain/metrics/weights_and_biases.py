"""`--wandb-project`: curves of all numbers in Weights & Biases, in the run that Megatron-LM has opened."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron.pretrain.metrics.iteration import IterationReport, checkpoint_scalars, recovery_scalars
from megatron.pretrain.metrics.settings import MetricsSettings
from megatron.pretrain.metrics.sink import MetricsSink


class WeightsAndBiases(MetricsSink):
    """run: of wandb; Megatron-LM has its own curves in it of what the loop does, and closes it."""

    flag = "--wandb-project"

    def __init__(self, run: Any) -> None:
        self._run = run

    @classmethod
    def opened(cls, settings: MetricsSettings) -> WeightsAndBiases | None:
        """See `MetricsSink`."""
        return None if settings.wandb is None else cls(settings.wandb)

    def iteration(self, report: IterationReport) -> None:
        """See `MetricsSink`."""
        self._run.log(checkpoint_scalars(report), report.iteration)

    def recovered(self, timeline: Mapping[str, Any], iteration: int) -> None:
        """See `MetricsSink`."""
        # With the step that comes next: Megatron-LM may have logged a later one, and earlier ones are dropped.
        self._run.log(recovery_scalars(timeline), commit=False)
