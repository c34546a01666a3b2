"""Hands the numbers of each iteration to the log and to all sinks that were asked for."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from typing import Any

from megatron.pretrain.metrics.iteration import IterationReport, RunFacts, loop_scalars
from megatron.pretrain.metrics.settings import MetricsSettings
from megatron.pretrain.metrics.sinks import SINKS, MetricsSink
from megatron.pretrain.metrics.tensorboard import TensorBoard

log = logging.getLogger(__name__)


class Metrics:
    """Writes reports on the last rank, which knows the loss; elsewhere it does nothing.

    Of a sink that fails later one line says so, and training goes on. A file that cannot be written, as on a full disk,
    is tried again; any other trouble leaves the sink out.

    Raises:
        InvalidInput: A sink needs a package that is not installed.
        OSError: A file cannot be opened.
    """

    def __init__(self, *, is_last_rank: bool, train_iters: int, settings: MetricsSettings) -> None:
        self._train_iters, self._is_last_rank = train_iters, is_last_rank
        self._facts: RunFacts | None = None
        self._sinks: list[MetricsSink] = []
        self._complained: set[MetricsSink] = set()
        for kind in SINKS if is_last_rank else ():
            sink = kind.opened(settings)
            if sink is not None:
                self._sinks.append(sink)

    @property
    def board(self) -> Any:
        """The TensorBoard writer, or None."""
        return next((sink.writer for sink in self._sinks if isinstance(sink, TensorBoard)), None)

    def began(self, facts: RunFacts) -> None:
        """Write what this attempt of the job is; before the first report."""
        self._facts = facts
        self._each(lambda sink: sink.began(facts))

    def record(self, report: IterationReport) -> None:
        """Write the report of an iteration."""
        if self._sinks:
            complete = report.of_run(self._facts, time.time())
            self._each(lambda sink: sink.iteration(complete))

    def recovered(self, timeline: Mapping[str, Any], iteration: int) -> None:
        """Write the timeline of a recovery, after which training stands behind `iteration`."""
        self._each(lambda sink: sink.recovered(timeline, iteration))

    def loaded(self, load: Mapping[str, Any]) -> None:
        """Write how fast a checkpoint was loaded."""
        self._each(lambda sink: sink.loaded(load))

    def _each(self, action: Callable[[MetricsSink], None]) -> None:
        for sink in list(self._sinks):
            try:
                action(sink)
            except Exception as error:  # whatever a board runs into, training goes on
                if sink not in self._complained:
                    why = getattr(error, "strerror", None) or " ".join(str(error).split()) or type(error).__name__
                    log.critical("%s cannot be written: %s; training goes on without it", sink.flag, why)
                self._complained.add(sink)
                if not isinstance(error, OSError):
                    self._sinks.remove(sink)

    def show(self, report: IterationReport, losses: dict[str, float]) -> None:
        """Log one line in Megatron's style; `losses` are further losses, such as auxiliary ones."""
        if self._is_last_rank:
            shown = {name: value for name, value in loop_scalars(report).items() if name != "samples"}
            parts = [f"{name}: {value:.6E}" for name, value in (shown | losses).items()]
            log.info(
                "iteration %8d/%8d | consumed samples: %12d | %s",
                report.iteration,
                self._train_iters,
                report.consumed_train_samples,
                " | ".join(parts),
            )

    def show_evaluation(self, split: str, iteration: int, loss: float | None) -> None:
        """Log the mean loss of an evaluation and hand it to the boards."""
        if loss is None or not self._is_last_rank:
            return
        log.info("%s split at iteration %d | lm loss: %.6E", split, iteration, loss)
        self._each(lambda sink: sink.evaluated(split, iteration, loss))

    def close(self) -> None:
        """Flush and close what is open."""
        self._each(lambda sink: sink.close())
