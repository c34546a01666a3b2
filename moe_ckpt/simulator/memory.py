"""Host memory of checkpoints and boundary logs, all nodes together (MoEvement 5.6, Table 6)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from megatron.core.dist_checkpointing.moe.policy.rollback import kept, sent_bytes, tensor_shape
from megatron.core.dist_checkpointing.moe.policy.window import Lane
from megatron.core.dist_checkpointing.moe.types import Part, Window

from .inputs import TrainingJob
from .shards import sharing_ranks


@dataclass(frozen=True)
class MemoryUse:
    """Bytes of host memory of the whole job, each state once: r replicas on peers take r times what checkpoints take.

    gemini_bytes: two dense checkpoints, one complete and one under way. sparse_bytes: X of MoEvement Table 6, the same
    and the WEIGHTS that the snapshots of one window have beside it. log_bytes: Y, the logs that one rank keeps.
    """

    gemini_bytes: int
    sparse_bytes: int
    log_bytes: int

    @property
    def total_bytes(self) -> int:
        """X + Y."""
        return self.sparse_bytes + self.log_bytes


def memory_of(job: TrainingJob, windows: Window | Mapping[Lane, Window]) -> MemoryUse:
    """The memory that checkpoints and logs of a job take.

    Published for Gemini are 26 bytes per parameter in all rows: two checkpoints of 12 (master weights and moments), and
    the 2 of the compute weights once. X adds, for each operator, its WEIGHTS in the snapshots before its anchor; the
    published sizes fit those of one window. The published Y (1.9, 4.2, 21.1 GB) is of the size of what one rank keeps,
    within a factor of 5 and in no fixed proportion: all ranks of a pipeline stage send the same, so the job's logs are
    larger by far, and the host memory of a real run has to have room for them.

    Args:
        job: The model, its layout, batch and precision.
        windows: One window for all ranks, or the window of each lane (`shards.owned_operators`).
    """
    full = job.precision.full_bytes
    weights = job.precision.bytes_per_parameter(Part.COMPUTE)
    parameters = job.shape.total_parameters
    gemini = parameters * (2 * full + weights)
    waiting = round(weights * waiting_parameters(job, windows))
    size = windows.size if isinstance(windows, Window) else max(window.size for window in windows.values())
    logs = [logs_of_stage(job, stage, logged_iterations(size)) for stage in range(job.topology.pp)]
    return MemoryUse(gemini, gemini + waiting, max(logs))


def waiting_parameters(job: TrainingJob, windows: Window | Mapping[Lane, Window]) -> float:
    """Parameters of which the snapshots of a window have WEIGHTS, counted once for each snapshot, of all ranks.

    Args:
        job: The model and its layout.
        windows: One window for all ranks, or the window of each lane (`shards.owned_operators`).
    """
    parameters = job.shape.parameters
    if isinstance(windows, Window):
        return sum(step * parameters[one] for step, group in enumerate(windows.groups) for one in group)
    ranks = job.topology.world_size / len(windows)
    return ranks * sum(
        step * parameters[one] / sharing_ranks(one, job.topology)
        for window in windows.values()
        for step, group in enumerate(window.groups)
        for one in group
    )


def logged_iterations(window_size: int) -> int:
    """Iterations of which a rank keeps logs at most: those after the oldest state that a replay may start from.

    That is the first snapshot of the last complete window, while the next one is about to be complete.
    """
    newest = 2 * window_size - 1
    return len(kept(range(newest + 1), 0, newest, newest + 1))


def logs_of_stage(job: TrainingJob, stage: int, iterations: int) -> int:
    """Bytes of boundary logs on one rank of a pipeline stage.

    Args:
        job: The model, its layout, batch and precision.
        stage: Number of the pipeline stage.
        iterations: Number of iterations of which logs are kept.
    """
    topology = job.topology
    samples = -(-job.global_batch // (job.microbatches * topology.dp))
    shape = tensor_shape(topology, job.seq_length, samples, job.shape.hidden_size, sequence_parallel=topology.tp > 1)
    element = max(2, job.precision.compute_bytes)
    return iterations * sent_bytes(topology, stage, job.microbatches, shape, element)
