"""`--tensorboard-dir`: curves of all numbers, by the writer that Megatron-LM has opened."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron.pretrain.metrics.iteration import IterationReport, checkpoint_scalars, recovery_scalars
from megatron.pretrain.metrics.settings import MetricsSettings
from megatron.pretrain.metrics.sink import MetricsSink


class TensorBoard(MetricsSink):
    """writer: a SummaryWriter; Megatron-LM has its own curves in it of what the loop does, and closes it."""

    flag = "--tensorboard-dir"

    def __init__(self, writer: Any) -> None:
        self._writer = writer

    @classmethod
    def opened(cls, settings: MetricsSettings) -> TensorBoard | None:
        """See `MetricsSink`."""
        return None if settings.tensorboard is None else cls(settings.tensorboard)

    def iteration(self, report: IterationReport) -> None:
        """See `MetricsSink`."""
        self._add(checkpoint_scalars(report), report.iteration)

    def recovered(self, timeline: Mapping[str, Any], iteration: int) -> None:
        """See `MetricsSink`."""
        self._add(recovery_scalars(timeline), iteration)

    def _add(self, values: Mapping[str, float], iteration: int) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, iteration)
