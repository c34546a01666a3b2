"""Flags that lay the model out over ranks."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.core.dist_checkpointing.moe.config import flag


@dataclass(frozen=True)
class ParallelConfig:
    """Device and parallel layout, with Megatron's names; sizes are numbers of ranks."""

    device: str = flag("cuda", "where to train; `cpu` needs no GPU", choices=("cuda", "cpu"))
    distributed_backend: str | None = flag(
        None, "collectives (default: nccl on cuda, gloo on cpu)", choices=("nccl", "gloo")
    )
    distributed_timeout_minutes: float = flag(10.0, "how long a collective may wait", minimum=0.1)
    tensor_model_parallel_size: int = flag(1, "tensor parallel size (TP)", minimum=1)
    sequence_parallel: bool = flag(False, "sequence parallelism; required with TP > 1 and experts")
    pipeline_model_parallel_size: int = flag(1, "pipeline parallel size (PP)", minimum=1)
    num_layers_per_virtual_pipeline_stage: int | None = flag(
        None, "layers per model chunk: interleaved schedule", minimum=1
    )
    num_virtual_stages_per_pipeline_rank: int | None = flag(None, "model chunks per pipeline rank (VPP)", minimum=1)
    context_parallel_size: int = flag(1, "context parallel size (CP); needs Transformer Engine", minimum=1)
    expert_model_parallel_size: int = flag(1, "expert parallel size (EP)", minimum=1)
    expert_tensor_parallel_size: int | None = flag(
        None, "tensor parallel size of experts (ETP; default: TP)", minimum=1
    )
    use_distributed_optimizer: bool = flag(False, "shard optimizer state over data-parallel ranks")
    overlap_grad_reduce: bool = flag(False, "overlap gradient reduction with the backward pass")
    overlap_param_gather: bool = flag(False, "overlap parameter gathering with the forward pass")
    overlap_p2p_comm: bool = flag(
        True, "no overlap of pipeline communication in the interleaved schedule", name="--no-overlap-p2p-communication"
    )
