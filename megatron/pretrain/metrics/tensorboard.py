"""`--tensorboard-dir`: curves of all numbers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron.pretrain.metrics.iteration import IterationReport, checkpoint_scalars, loop_scalars, recovery_scalars
from megatron.pretrain.metrics.settings import MetricsSettings
from megatron.pretrain.metrics.sink import MetricsSink


class TensorBoard(MetricsSink):
    """writer: a SummaryWriter. owns: else it is the loop's, which has its own curves of what the loop does."""

    flag = "--tensorboard-dir"

    def __init__(self, writer: Any, *, owns: bool) -> None:
        self.writer, self._owns = writer, owns

    @classmethod
    def opened(cls, settings: MetricsSettings) -> TensorBoard | None:
        """See `MetricsSink`."""
        if settings.tensorboard is not None:
            return cls(settings.tensorboard, owns=False)
        if settings.tensorboard_dir is None:
            return None
        from torch.utils.tensorboard import SummaryWriter

        return cls(SummaryWriter(settings.tensorboard_dir), owns=True)

    def iteration(self, report: IterationReport) -> None:
        """See `MetricsSink`."""
        self._add(checkpoint_scalars(report) | (loop_scalars(report) if self._owns else {}), report.iteration)

    def recovered(self, timeline: Mapping[str, Any], iteration: int) -> None:
        """See `MetricsSink`."""
        self._add(recovery_scalars(timeline), iteration)

    def evaluated(self, split: str, iteration: int, loss: float) -> None:
        """See `MetricsSink`."""
        self._add({f"lm loss {split}": loss}, iteration)

    def close(self) -> None:
        """See `MetricsSink`."""
        if self._owns:
            self.writer.close()

    def _add(self, values: Mapping[str, float], iteration: int) -> None:
        for name, value in values.items():
            self.writer.add_scalar(name, value, iteration)
