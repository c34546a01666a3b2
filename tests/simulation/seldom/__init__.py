"""A strategy in a folder of its own: everything after odd iterations. It knows nothing of who drives it."""

from __future__ import annotations

from collections.abc import Iterator

from megatron.core.dist_checkpointing.moe.config import MoECheckpointConfig
from megatron.core.dist_checkpointing.moe.strategies import BufferSpec, Strategy
from megatron.core.dist_checkpointing.moe.types import SnapshotPlan, full_plan


class Seldom(Strategy):
    settings = ("replay_",)

    @classmethod
    def contradictions(cls, config: MoECheckpointConfig, num_experts: int) -> Iterator[str]:
        if config.interval != 1:
            yield f"--moe-ckpt-interval {config.interval} does not go with seldom: leave it out"

    def plan(self, iteration: int) -> SnapshotPlan | None:
        return full_plan(iteration, self._job.operators) if iteration % 2 else None

    def buffer_specs(self) -> tuple[BufferSpec, ...]:
        return (BufferSpec(full_plan(0, self._job.operators), own=3, replica=2, trainer=True),)


class Nothing(Strategy):
    def plan(self, iteration: int) -> SnapshotPlan | None:
        return None

    def buffer_specs(self) -> tuple[BufferSpec, ...]:
        return (BufferSpec(SnapshotPlan(0, {}), own=1, replica=0, trainer=True),)
