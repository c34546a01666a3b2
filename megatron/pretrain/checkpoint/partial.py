"""Checkpoints with some of the experts (`--save-experts`): which ones, written how, and loaded from where."""

from __future__ import annotations

import dataclasses
import logging
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeAlias

import torch.distributed as dist

from megatron.core import parallel_state
from megatron.core.dist_checkpointing.dict_utils import (
    dict_list_map_outplace,
    extract_matching_values,
    nested_values,
)
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor
from megatron.core.dist_checkpointing.moe.dense_saves.directory import CheckpointDirectory
from megatron.core.dist_checkpointing.moe.errors import UnreadableCheckpoint
from megatron.core.dist_checkpointing.strategies.torch import TorchDistLoadShardedStrategy
from megatron.pretrain.agreement import on_rank_zero, raise_on_all_ranks
from megatron.pretrain.checkpoint.state import Lineage, summed
from megatron.pretrain.config import PretrainConfig
from moe_ckpt.dense.chain import Chain, ExpertEntry, expert_entry, object_entry, read_chain, says_partial
from moe_ckpt.dense.merged import MergedCheckpoint
from moe_ckpt.dense.partial_saves import PartialSaves

log = logging.getLogger(__name__)

Shard: TypeAlias = Any
"""A `ShardedTensor` or a `ShardedObject` of Megatron-Core."""


@dataclasses.dataclass(frozen=True)
class _LiveExperts:
    """What the model has: MoE layers by pipeline stage, experts per layer, and how their tensors are stacked; and the
    tokens that all ranks counted, by layer and expert."""

    stages: tuple[tuple[int, ...], ...]
    num_experts: int
    stacked_layers: int | None
    tokens: Mapping[int, tuple[int, ...]]


def content_of(config: PretrainConfig) -> str:
    """What is saved of the state, and the layout that the rotation of experts follows; compared between iterations."""
    optimizer, layout = config.optimizer, config.parallel
    precision = "bf16" if optimizer.bf16 else "fp16" if optimizer.fp16 else "fp32"
    state = "no optimizer"
    if config.checkpoint.save_optim:
        state = "distributed optimizer" if layout.use_distributed_optimizer else "replicated optimizer"
    sizes = f"PP {layout.pipeline_model_parallel_size}, EP {layout.expert_model_parallel_size}"
    return f"{precision}, {state}, {sizes}"


def next_chain(
    config: PretrainConfig,
    directory: CheckpointDirectory,
    sharded: dict[str, Any],
    lineage: Lineage,
    iteration: int,
    counted: Mapping[int, tuple[int, ...]],
) -> Chain:
    """What the checkpoint of `iteration` will hold, the same on every rank; a collective over all ranks.

    sharded: the preprocessed state dict of this rank. It is complete unless it can go on from `lineage.chain`, whose
    iterations must all be in `directory` still.
    counted: tokens that this rank's routers sent to each expert since the last call. `lineage` keeps those of all
    ranks until a checkpoint is there.
    """
    experts = _live_experts(sharded, counted)
    lineage.count(experts.tokens)
    saves = _partial_saves(config, experts)
    return on_rank_zero(lambda: _decided(saves, directory, lineage, iteration))


def _partial_saves(config: PretrainConfig, experts: _LiveExperts) -> PartialSaves:
    flags = config.checkpoint
    assert flags.save_experts is not None
    return PartialSaves(
        experts.stages,
        experts.num_experts,
        experts.stacked_layers,
        config.parallel.expert_model_parallel_size,
        content_of(config),
        flags.save_experts,
        flags.save_experts_selection,
        flags.save_experts_scope,
    )


def _decided(saves: PartialSaves, directory: CheckpointDirectory, lineage: Lineage, iteration: int) -> Chain:
    mark, previous = secrets.token_hex(8), lineage.chain
    obstacle = None if previous is None else _obstacle(directory, previous, iteration)
    if obstacle:
        log.warning("the checkpoint of iteration %d is written with all experts: %s", iteration, obstacle)
    if previous is None or obstacle or not saves.continues(previous):
        return saves.complete(iteration, mark)
    return saves.following(previous, iteration, mark, lineage.counted)


def _obstacle(directory: CheckpointDirectory, previous: Chain, iteration: int) -> str | None:
    """Why `iteration` cannot leave experts to the iterations of `previous`."""
    if iteration <= previous.iteration:
        return f"it would replace iteration {previous.iteration}, which holds some of them"
    for needed, mark in sorted(previous.marks.items()):
        try:
            found = read_chain(directory.folder(needed))
        except UnreadableCheckpoint as error:
            return str(error)
        if found is None or found.marks.get(needed) != mark:
            return f"{directory.folder(needed)}, which holds some of them, is missing or was replaced"
    return None


def _live_experts(sharded: dict[str, Any], counted: Mapping[int, tuple[int, ...]]) -> _LiveExperts:
    found = [(entry, shard) for shard in nested_values(sharded) if (entry := _entry(shard)) is not None]
    layers = sorted({entry.operator.layer for entry, _ in found})
    shapes = {
        (shard.global_shape[entry.axes - 1], shard.global_shape[0] if entry.axes == 2 else None)
        for entry, shard in found
    }
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, (parallel_state.get_pipeline_model_parallel_rank(), layers, shapes, dict(counted)))
    stages: dict[int, set[int]] = {}
    tokens: dict[int, tuple[int, ...]] = {}
    for stage, of_rank, _, of_routers in gathered:
        stages.setdefault(stage, set()).update(of_rank)
        tokens = summed(tokens, of_routers)
    ((num_experts, stacked_layers),) = {shape for _, _, of_rank, _ in gathered for shape in of_rank}
    by_stage = tuple(tuple(sorted(stages[stage])) for stage in sorted(stages))
    return _LiveExperts(by_stage, num_experts, stacked_layers, tokens)


def _entry(shard: Shard) -> ExpertEntry | None:
    read = object_entry if isinstance(shard, ShardedObject) else expert_entry
    return read(shard.key, shard.global_offset)


def selected_shards(sharded: dict[str, Any], chain: Chain) -> dict[str, Any]:
    """The part of a preprocessed state dict that the iteration of `chain` holds, under the names that it has there."""
    if chain.is_complete:
        return sharded

    def is_left_out(shard: Shard) -> bool:
        entry = _entry(shard)
        return entry is not None and chain.source(entry.operator, entry.common) != chain.iteration

    _, kept = extract_matching_values(sharded, is_left_out)
    selected: dict[str, Any] = dict_list_map_outplace(_under_own_name, kept)
    return selected


def _under_own_name(shard: Shard) -> Shard:
    """The same data as an entry of a single expert, where it was a piece of an entry of all of them."""
    entry = _entry(shard)
    if entry is None:
        return shard
    if isinstance(shard, ShardedObject):
        return dataclasses.replace(shard, key=entry.own_name, global_shape=(1,), global_offset=(0,))
    fragments = shard.axis_fragmentations
    return dataclasses.replace(
        shard,
        key=entry.own_name,
        global_shape=entry.within_expert(shard.global_shape),
        global_offset=entry.within_expert(shard.global_offset),
        axis_fragmentations=None if fragments is None else entry.within_expert(fragments),
        prepend_axis_num=shard.prepend_axis_num - entry.axes,
    )


def _with_all_axes(shard: Shard) -> Shard:
    """The same piece with the axes that count layers and experts in its own shape.

    Where these are left out, core (checked: 0.16.1) assumes that all pieces that are not asked for here are on another
    rank, and a job of one rank has none.
    """
    if isinstance(shard, ShardedObject):
        return shard
    shape = (*(1 for _ in range(shard.prepend_axis_num)), *shard.local_shape)
    data = None if shard.data is None else shard.data.detach().view(shape)
    return dataclasses.replace(shard, data=data, local_shape=shape, prepend_axis_num=0)


@dataclasses.dataclass(frozen=True)
class Sources:
    """Where a partial iteration is loaded from: its chain, the folder of each iteration, and which are partial."""

    chain: Chain
    folders: Mapping[int, Path]
    partial: frozenset[int]

    @classmethod
    def of(cls, merged: MergedCheckpoint) -> Sources:
        """Of a checkpoint that was found to be whole."""
        folders = {iteration: part.directory for iteration, part in merged.parts.items()}
        partial = frozenset(iteration for iteration, folder in folders.items() if says_partial(folder))
        return cls(merged.chain, folders, partial)


class MergingLoadStrategy(TorchDistLoadShardedStrategy):
    """Core's `torch_dist` strategy that reads each expert from the iteration with its newest copy."""

    def __init__(self, sources: Sources) -> None:
        super().__init__()
        self._sources = sources

    def load(self, sharded_state_dict: dict[str, Any], *place: Any) -> dict[str, Any]:
        """Load from all iterations, in the same order on every rank: each of them is a collective.

        place: the folder that core was asked for, and from 0.17 on the name of who reads, which is handed on.

        Raises RankFailure on every rank for an expert that the chain does not name, and what core's strategy raises,
        among it a KeyError inside of a CheckpointException for a tensor that an iteration does not hold.
        """
        asked: dict[int, dict[str, Shard]] = {iteration: {} for iteration in sorted(self._sources.folders)}
        names: dict[int, str] = {}
        unnamed: str | None = None
        for index, shard in enumerate(nested_values(sharded_state_dict)):
            names[id(shard)] = str(index)
            try:
                iteration, wanted = self._wanted(shard)
            except KeyError as error:
                unnamed = error.args[0]
            else:
                asked[iteration][str(index)] = wanted
        raise_on_all_ranks(unnamed)
        loaded: dict[str, Any] = {}
        for iteration, shards in asked.items():
            loaded |= super().load(shards, self._sources.folders[iteration], *place[1:])

        def of(shard: Shard) -> Any:
            value = loaded[names[id(shard)]]
            return value.reshape(shard.local_shape) if isinstance(shard, ShardedTensor) else value

        result: dict[str, Any] = dict_list_map_outplace(of, sharded_state_dict)
        return result

    def _wanted(self, shard: Shard) -> tuple[int, Shard]:
        entry, chain = _entry(shard), self._sources.chain
        if entry is None:
            return chain.iteration, shard
        holder = chain.source(entry.operator, entry.common)
        return holder, _under_own_name(shard) if holder in self._sources.partial else _with_all_axes(shard)


def report_staleness(chain: Chain) -> None:
    """Say for each MoE layer how old its experts are, if any is older than the rest."""
    for line in chain.staleness():
        log.info("%s", line)
