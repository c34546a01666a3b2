"""The training state of a rank as Megatron's sharded state dict, and back."""

from __future__ import annotations

import argparse
import dataclasses
import logging
import random
from collections.abc import Mapping, Sequence
from typing import Any

import numpy
import torch

from megatron.core import parallel_state, tensor_parallel
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.dist_checkpointing.moe.errors import UsageError
from megatron.core.dist_checkpointing.moe.megatron_state import raw_state
from megatron.core.dist_checkpointing.moe.megatron_state.compute_weights import gather_compute_weights
from megatron.core.dist_checkpointing.moe.megatron_state.random_states import DEVICE, TRACKED
from megatron.core.dist_checkpointing.moe.megatron_state.step_counts import separate_steps
from megatron.core.dist_checkpointing.moe.megatron_state.trainer_state import load_scheduler
from megatron.core.dist_checkpointing.utils import force_all_tensors_to_non_fp8
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.utils import unwrap_model
from megatron.pretrain.checkpoint.verified_reads import LoadReport
from megatron.pretrain.config import PretrainConfig
from megatron.pretrain.errors import InvalidInput
from moe_ckpt.dense.chain import Chain

log = logging.getLogger(__name__)

CHECKPOINT_VERSION = 3.0


@dataclasses.dataclass
class Progress:
    """How far training has come; all counts are of the whole job.

    evaluated_iteration: the last one of which the evaluation, if one was due, is over.
    """

    iteration: int = 0
    consumed_train_samples: int = 0
    consumed_valid_samples: int = 0
    evaluated_iteration: int = 0


@dataclasses.dataclass
class Lineage:
    """Where the copies of experts are that `--save` can go on from; None: the next checkpoint has to be complete.

    counted: by MoE layer and expert, tokens that all ranks routed to it since the checkpoint of `chain`.
    """

    chain: Chain | None = None
    counted: dict[int, tuple[int, ...]] = dataclasses.field(default_factory=dict)

    def count(self, tokens: Mapping[int, Sequence[int]]) -> None:
        """Add tokens of all ranks."""
        self.counted = summed(self.counted, tokens)

    def saved(self, chain: Chain | None) -> None:
        """The checkpoint of a chain is there."""
        self.chain, self.counted = chain, {}


def summed(first: Mapping[int, Sequence[int]], second: Mapping[int, Sequence[int]]) -> dict[int, tuple[int, ...]]:
    """The sums of the numbers of each layer; a layer that one of them lacks counts as zeros there."""
    return {
        layer: tuple(map(sum, zip(*(rows[layer] for rows in (first, second) if layer in rows), strict=True)))
        for layer in sorted({*first, *second})
    }


@dataclasses.dataclass(frozen=True)
class TrainingState:
    """Everything that a checkpoint holds: live objects, changed in place by training and by loading.

    loads: how fast checkpoints were loaded into it. random_states: what is saved in place of those of this device: of a
    GPU, where a CPU converts what a GPU trained.
    """

    config: PretrainConfig
    chunks: list[torch.nn.Module]
    optimizer: MegatronOptimizer
    scheduler: OptimizerParamScheduler
    progress: Progress
    lineage: Lineage = dataclasses.field(default_factory=Lineage)
    loads: list[LoadReport] = dataclasses.field(default_factory=list)
    random_states: Mapping[str, bytes] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Parts:
    """Which parts of the training state are saved or loaded besides the weights.

    `rng`: how the random states are sharded, see `random_shape`; None leaves them out.
    `iteration`: whether training goes on from the iteration that was loaded, or counts from 0.
    """

    optimizer: bool
    rng: tuple[int, ...] | None
    iteration: bool = True


def gather_parameters(state: TrainingState) -> None:
    """Make the compute weights of this step whole: with `--overlap-param-gather` the next forward would do it."""
    if state.config.parallel.overlap_param_gather:
        gather_compute_weights(state.chunks)


def saves_raw(config: PretrainConfig) -> bool:
    """Whether checkpoints of this job have the optimizer's state as it is."""
    return config.optimizer.use_precision_aware_optimizer or config.fp8.fp8_format is not None


def content_metadata(config: PretrainConfig) -> dict[str, Any]:
    """How the state dict is laid out; Megatron stores it in the checkpoint and follows it when loading."""
    metadata: dict[str, Any] = {"singleton_local_shards": False, "chained_optim_avoid_prefix": True}
    if config.parallel.use_distributed_optimizer:
        reshardable = config.checkpoint.dist_ckpt_optim_fully_reshardable
        metadata["distrib_optim_sharding_type"] = "fully_reshardable" if reshardable else "dp_reshardable"
        if reshardable:
            metadata["distrib_optim_fully_reshardable_mem_efficient"] = False
    if saves_raw(config):
        metadata["distrib_optim_sharding_type"] = raw_state.SHARDING
    return metadata


def sharded_state_dict(
    state: TrainingState, metadata: dict[str, Any], parts: Parts, *, is_loading: bool = False
) -> dict[str, Any]:
    """Megatron's sharded state dict of the live state, under the keys that stock Megatron uses."""
    metadata = metadata | {"dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True)}
    result: dict[str, Any] = {}
    if not is_loading:
        result |= _plain_values(state)
    chunks = unwrap_model(state.chunks)
    with raw_state.without_module_scales(chunks):
        for index, chunk in enumerate(chunks):
            result[_chunk_key(index, len(chunks))] = chunk.sharded_state_dict(metadata=metadata)
    force_all_tensors_to_non_fp8(result)
    if parts.optimizer:
        result["optimizer"] = (
            raw_state.raw_state_dict(state.chunks, state.optimizer, is_loading=is_loading)
            if saves_raw(state.config)
            else state.optimizer.sharded_state_dict(result, is_loading=is_loading, metadata=metadata)
        )
        result["opt_param_scheduler"] = state.scheduler.state_dict()
    if parts.rng:
        result["rng_state"] = _rng_shard(state.config, parts.rng, state.random_states)
    return result


@torch.no_grad()
def apply_state_dict(state: TrainingState, loaded: dict[str, Any], parts: Parts) -> None:
    """Write what `dist_checkpointing.load` returned into the live objects."""
    chunks = unwrap_model(state.chunks)
    for index, chunk in enumerate(chunks):
        chunk.load_state_dict(loaded[_chunk_key(index, len(chunks))])
    if parts.optimizer:
        if saves_raw(state.config):
            raw_state.load_raw_state_dict(state.chunks, state.optimizer, loaded["optimizer"])
        else:
            state.optimizer.load_state_dict(loaded["optimizer"])
            separate_steps(state.optimizer)
        try:
            load_scheduler(state.scheduler, loaded["opt_param_scheduler"], "checkpoint")
        except UsageError as error:
            raise InvalidInput(str(error)) from error
    else:
        # Master weights are still those of the initialization; take them from the loaded compute weights.
        state.optimizer.reload_model_params()
        raw_state.reload_masters_of(state.optimizer)
    if parts.rng:
        _restore_rng(loaded["rng_state"])
    if parts.iteration:
        recorded = loaded["args"]
        state.progress.iteration = loaded["iteration"]
        state.progress.evaluated_iteration = loaded["iteration"]  # checkpoints are taken after evaluations
        state.progress.consumed_train_samples = getattr(recorded, "consumed_train_samples", 0)
        state.progress.consumed_valid_samples = getattr(recorded, "consumed_valid_samples", 0)


def _plain_values(state: TrainingState) -> dict[str, Any]:
    progress = state.progress
    arguments = vars(state.config.flat) | {
        "iteration": progress.iteration,
        "consumed_train_samples": progress.consumed_train_samples,
        "consumed_valid_samples": progress.consumed_valid_samples,
    }
    return {
        "args": argparse.Namespace(**arguments),
        "checkpoint_version": CHECKPOINT_VERSION,
        "iteration": progress.iteration,
    }


def _chunk_key(index: int, chunks: int) -> str:
    return "model" if chunks == 1 else f"model{index}"


def random_shape() -> tuple[int, ...]:
    """How stock Megatron of this core shards random states: (PP, TP), with expert parallelism (PP, TP, DP)."""
    shape = (
        parallel_state.get_pipeline_model_parallel_world_size(),
        parallel_state.get_tensor_model_parallel_world_size(),
    )
    if parallel_state.get_expert_model_parallel_world_size() == 1:
        return shape
    return (*shape, parallel_state.get_data_parallel_world_size(with_context_parallel=True))


def _rng_shard(config: PretrainConfig, shape: tuple[int, ...], given: Mapping[str, bytes]) -> ShardedObject:
    data_rank = parallel_state.get_data_parallel_rank(with_context_parallel=True)
    place = (
        parallel_state.get_pipeline_model_parallel_rank(),
        parallel_state.get_tensor_model_parallel_rank(),
        data_rank,
    )
    replica_id = data_rank if len(shape) == 2 else 0
    return ShardedObject("rng_state", _random_states(config, given), shape, place[: len(shape)], replica_id=replica_id)


def _random_states(config: PretrainConfig, given: Mapping[str, bytes]) -> list[dict[str, Any]]:
    """This rank's, or with `--data-parallel-random-init` those of all data-parallel ranks, as stock Megatron does.

    given: those of another kind of device, which stand in place of this one's.
    """
    tracked = tensor_parallel.get_cuda_rng_tracker().get_states()
    own = {
        "random_rng_state": random.getstate(),
        "np_rng_state": numpy.random.get_state(),
        "torch_rng_state": torch.get_rng_state(),
        "cuda_rng_state": _given(given, DEVICE, torch.cuda.get_rng_state()),
        "rng_tracker_states": {name: _given(given, f"{TRACKED}{name}", value) for name, value in tracked.items()},
    }
    if not config.training.data_parallel_random_init:
        return [own]
    states: list[Any] = [None] * parallel_state.get_data_parallel_world_size()
    torch.distributed.all_gather_object(states, own, group=parallel_state.get_data_parallel_group())
    return states


def _given(states: Mapping[str, bytes], name: str, own: torch.Tensor) -> torch.Tensor:
    return torch.frombuffer(bytearray(states[name]), dtype=torch.uint8) if name in states else own


def _restore_rng(saved: list[dict[str, Any]]) -> None:
    index = parallel_state.get_data_parallel_rank() if len(saved) > 1 else 0
    states = saved[index]
    random.setstate(states["random_rng_state"])
    numpy.random.set_state(states["np_rng_state"])
    torch.set_rng_state(states["torch_rng_state"])
    if states["cuda_rng_state"].nbytes != torch.cuda.get_rng_state().nbytes:
        log.warning(
            "random states of the device were saved on another kind of device and are not loaded: dropout and other"
            " random choices will differ from the original run"
        )
        return
    torch.cuda.set_rng_state(states["cuda_rng_state"])
    tensor_parallel.get_cuda_rng_tracker().set_states(states["rng_tracker_states"])
