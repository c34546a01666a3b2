"""What has to hold before a live training process can be protected, and what is set in it so that it can."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from megatron.core.utils import get_model_config

from . import features
from .config import MoECheckpointConfig
from .contradictions import contradictions, inelastic, must_repeat_itself, not_repeatable
from .errors import UsageError
from .runtime.nccl_settings import device_settings
from .runtime.process_info import ranks_of_node


def refuse_contradictions(config: MoECheckpointConfig, chunk: torch.nn.Module, transformer: Any) -> None:
    """Refuse settings that contradict each other, this job, or what any loop can do.

    Args:
        config: The settings.
        chunk: A model chunk of this rank.
        transformer: The configuration that its modules share.

    Raises:
        UsageError: Has all contradictions in one line.
    """
    settings = getattr(chunk, "ddp_config", None)
    found = contradictions(
        config,
        world_size=torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1,
        num_experts=getattr(transformer, "num_moe_experts", None) or 0,
        use_distributed_optimizer=bool(getattr(settings, "use_distributed_optimizer", False)),
        stages=getattr(transformer, "pipeline_model_parallel_size", None),
    )
    if sentences := "; ".join((*found, *features.refusals(features.Loop.API, config))):
        raise UsageError(sentences)


def refuse_sizes_that_do_not_fit(config: MoECheckpointConfig, transformer: Any, batch: int, microbatch: int) -> None:
    """Judge `--moe-ckpt-elastic` by the layout of this job.

    Args:
        config: The settings.
        transformer: Core's configuration of the model.
        batch: Samples of an iteration.
        microbatch: Samples of a microbatch.

    Raises:
        UsageError: The job cannot have all sizes that the range allows.
    """
    tp, pp = transformer.tensor_model_parallel_size, transformer.pipeline_model_parallel_size
    experts = (transformer.expert_tensor_parallel_size or tp) * transformer.expert_model_parallel_size
    found = inelastic(
        config,
        world_size=torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1,
        replica_ranks=tp * pp * transformer.context_parallel_size,
        node_ranks=ranks_of_node(),
        expert_ranks=experts * pp if transformer.num_moe_experts else 1,
        global_batch=batch,
        micro_batch=microbatch,
    )
    if sentences := "; ".join(found):
        raise UsageError(sentences)


def refuse_what_cannot_repeat_itself(config: MoECheckpointConfig, chunk: torch.nn.Module, transformer: Any) -> None:
    """Refuse a job whose iterations cannot be repeated to the bit, where its strategy has to repeat them.

    A collective then, since environments of nodes may differ.

    Args:
        config: The settings.
        chunk: A model chunk of this rank.
        transformer: The configuration that its modules share.

    Raises:
        UsageError: Says on which ranks, and what to set; on all ranks alike.
    """
    if not must_repeat_itself(config):
        return
    ranks = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
    own = list(not_repeatable(config, device_settings(chunk, transformer, ranks)))
    every: list[Any] = [own] * ranks
    if torch.distributed.is_initialized():
        torch.distributed.all_gather_object(every, own)
    for rank, lines in enumerate(every):
        if lines:
            advice = "or say with --moe-ckpt-replay-tolerance by how much losses may differ"
            raise UsageError("\n".join([*(f"rank {rank}: {line}" for line in lines), advice]))


def let_copies_run_beside_sends(chunks: Sequence[torch.nn.Module]) -> None:
    """Without this core's schedules wait for the whole device after each send, and so for copies of snapshots: none
    would run beside the passes of a pipeline. Read by core in each call, so it may be set after the model was built."""
    for chunk in chunks:
        get_model_config(chunk).batch_p2p_sync = False
