"""`--metrics-jsonl`: all that is known, one JSON object per line; what `moe-ckpt report` reads."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron.pretrain.metrics.iteration import IterationReport, RunFacts
from megatron.pretrain.metrics.settings import MetricsSettings
from megatron.pretrain.metrics.sink import MetricsSink


class JsonLines(MetricsSink):
    """A file that each attempt of a job appends to."""

    flag = "--metrics-jsonl"

    def __init__(self, path: str) -> None:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        self._file = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)

    @classmethod
    def opened(cls, settings: MetricsSettings) -> JsonLines | None:
        """See `MetricsSink`."""
        return None if settings.jsonl is None else cls(settings.jsonl)

    def began(self, facts: RunFacts) -> None:
        """A line `{"run": {...}}`."""
        self._append({"run": dataclasses.asdict(facts)})

    def iteration(self, report: IterationReport) -> None:
        """A line of its fields."""
        self._append(dataclasses.asdict(report))

    def recovered(self, timeline: Mapping[str, Any], iteration: int) -> None:
        """As `MetricsSink.recovered`: a line `{"recovery": {...}}`."""
        self._append({"recovery": dict(timeline)})

    def close(self) -> None:
        """See `MetricsSink`."""
        os.close(self._file)

    def _append(self, data: dict[str, Any]) -> None:
        # One write per line: a killed process leaves whole lines, but for what a full disk cut off.
        line = (json.dumps(data) + "\n").encode()
        self._end_torn_line()
        if os.write(self._file, line) < len(line):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def _end_torn_line(self) -> None:
        """A line that was cut off, by a full disk or with an attempt before, costs that line only, not the next one."""
        size = os.fstat(self._file).st_size  # 0 where nothing can be read back
        if size and os.pread(self._file, 1, size - 1) != b"\n":
            os.write(self._file, b"\n")
