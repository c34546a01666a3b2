"""What a strategy is told of a job that is planned; `simulator/driver.py` drives it."""

from __future__ import annotations

from megatron.core.dist_checkpointing.moe.config import MoECheckpointConfig
from megatron.core.dist_checkpointing.moe.strategies import Job

from ...simulator.driver import strategy_job
from .options import PlannedJob


def job_of(
    planned: PlannedJob, config: MoECheckpointConfig, *, iterations: int = 1, frozen_experts: bool = False
) -> Job:
    """What a strategy is told of the job."""
    shape, topology, precision = planned.shape, planned.topology, planned.precision
    return strategy_job(shape, topology, precision, config, iterations=iterations, frozen_experts=frozen_experts)
