"""`full`: everything at an interval, the way of Gemini and CheckFreq; exact, and all ranks go back together."""

from __future__ import annotations

from dataclasses import replace

from ...types import SnapshotPlan, full_plan
from ..base import NO_BUFFERS, BufferSpec, Job, Strategy, constant_buffers


class Full(Strategy):
    """Snapshots the full state of all operators every `interval` iterations.

    Rooms: the triple buffers of MoC 5.2, and of each owner a protected and an arriving replica.
    """

    follows_steps = True

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        whole = full_plan(0, job.changing)
        self._whole = replace(whole, known=whole.operators)
        self._buffer_specs = (
            BufferSpec(self._whole, own=3, replica=2, trainer=True),
            *constant_buffers(job),
        )

    def plan(self, iteration: int) -> SnapshotPlan | None:
        if self._gave_up:
            return None
        due, self._interval_policy = self._interval_policy.due(iteration)
        if not due:
            return None
        return self._with_constants(replace(self._whole, iteration=iteration), last_iteration=iteration)

    def buffer_specs(self) -> tuple[BufferSpec, ...]:
        return NO_BUFFERS if self._gave_up else self._buffer_specs
