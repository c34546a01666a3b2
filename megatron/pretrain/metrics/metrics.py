"""Hands the numbers of each iteration to the log and to all sinks that were asked for."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from typing import Any

from megatron.core.dist_checkpointing.moe.boot_clock import since_boot_s
from megatron.pretrain.metrics.iteration import IterationReport, RunFacts
from megatron.pretrain.metrics.settings import MetricsSettings
from megatron.pretrain.metrics.sinks import SINKS, MetricsSink

log = logging.getLogger(__name__)


class Metrics:
    """Writes reports on the last rank, which knows the loss; elsewhere it does nothing.

    Of a sink that fails later one line says so, and training continues. A file that cannot be written, as on a full
    disk, is tried again; any other trouble leaves the sink out.

    Raises:
        InvalidInput: A sink needs a package that is not installed.
        OSError: A file cannot be opened.
    """

    def __init__(self, *, is_last_rank: bool, settings: MetricsSettings) -> None:
        self._facts: RunFacts | None = None
        self._sinks: list[MetricsSink] = []
        self._complained: set[MetricsSink] = set()
        for kind in SINKS if is_last_rank else ():
            sink = kind.opened(settings)
            if sink is not None:
                self._sinks.append(sink)

    def began(self, facts: RunFacts) -> None:
        """Write what this attempt of the job is; before the first report."""
        self._facts = facts
        self._each(lambda sink: sink.began(facts))

    def record(self, report: IterationReport) -> None:
        """Write the report of an iteration."""
        if self._sinks:
            complete = report.of_run(self._facts, time.time(), since_boot_s())
            self._each(lambda sink: sink.iteration(complete))

    def recovered(self, timeline: Mapping[str, Any], iteration: int) -> None:
        """Write the timeline of a recovery.

        Args:
            timeline: Of `RecoveryTimeline.to_data`.
            iteration: The iteration after which training stands.
        """
        timeline = {**timeline, "at_s": time.time(), "since_boot_s": since_boot_s()}
        self._each(lambda sink: sink.recovered(timeline, iteration))

    def _each(self, action: Callable[[MetricsSink], None]) -> None:
        for sink in list(self._sinks):
            try:
                action(sink)
            except Exception as error:  # whatever a board runs into, training continues
                may_pass = isinstance(error, OSError)
                if sink not in self._complained:
                    why = getattr(error, "strerror", None) or " ".join(str(error).split()) or type(error).__name__
                    then = "tried again in each iteration" if may_pass else "disabled"
                    log.critical("metrics: cannot write %s: %s; %s", sink.flag, why, then)
                self._complained.add(sink)
                if not may_pass:
                    self._sinks.remove(sink)

    def close(self) -> None:
        """Flush and close what is open."""
        self._each(lambda sink: sink.close())
