"""Loads a checkpoint with some of the experts: each expert from the checkpoint that holds its newest copy."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron.core.dist_checkpointing.dict_utils import dict_list_map_outplace, nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelLoadStrategyWrapper
from megatron.core.dist_checkpointing.strategies.torch import TorchDistLoadShardedStrategy
from moe_ckpt.dense.chain import Chain, read_chain, says_partial

from ...dense_saves.writing import raise_on_all_ranks
from ...errors import UsageError
from .shards import Shard, entry_of, under_own_name, with_all_axes

log = logging.getLogger(__name__)

_STRICTNESS = "assume_ok_unexpected"


def merging(folder: Path, strategy: Any, strict: Any) -> Any:
    """Core's load strategy, or one in its place that reads each expert where its newest copy is.

    Args:
        folder: Of the checkpoint, whose chain was found to be whole.
        strategy: That core is about to load with.
        strict: Core's `strict`.

    Raises:
        UsageError: Core would compare names of this checkpoint alone, and take those of experts for unexpected ones.
    """
    chain = read_chain(folder)
    if chain is None or chain.is_complete:
        return strategy
    if getattr(strict, "value", strict) != _STRICTNESS:
        raise UsageError(
            f"--dist-ckpt-strictness {getattr(strict, 'value', strict)} does not go with {folder}, which was saved with"
            f" --save-experts: use {_STRICTNESS}, with which an expert that is missing is an error, too"
        )
    for line in chain.staleness():
        log.info("%s", line)
    if isinstance(strategy, FullyParallelLoadStrategyWrapper):
        strategy.base_strategy = _MergingLoadStrategy(strategy.base_strategy, chain, folder.parent)
        return strategy
    return _MergingLoadStrategy(strategy, chain, folder.parent)


def with_stale_experts(lost_tokens: Sequence[int], folder: Path) -> list[int] | None:
    """Lost tokens by MoE layer, with those whose updates are in no expert of this checkpoint; None: not counted.

    Args:
        lost_tokens: Before.
        folder: Of the checkpoint.
    """
    chain = read_chain(folder)
    unsaved = [] if chain is None else [sum(chain.unsaved[layer]) for layer in sorted(chain.unsaved)]
    return [a + b for a, b in zip(lost_tokens, unsaved, strict=True)] if len(unsaved) == len(lost_tokens) else None


class _MergingLoadStrategy(TorchDistLoadShardedStrategy):
    """Core's `torch_dist` strategy, asked once for each checkpoint of the chain."""

    def __init__(self, strategy: Any, chain: Chain, root: Path) -> None:
        super().__init__()
        self.__dict__.update(vars(strategy))
        self._chain = chain
        self._folders = {iteration: root / f"iter_{iteration:07d}" for iteration in sorted(chain.iterations)}
        self._partial = frozenset(iteration for iteration, folder in self._folders.items() if says_partial(folder))

    def load(self, sharded_state_dict: dict[str, Any], *place: Any) -> dict[str, Any]:
        """Load from all iterations, in the same order on every rank.

        place: the folder that core was asked for, and the name of who reads, which is handed on.

        Raises RankFailure on every rank for an expert that the chain does not name, and what core's strategy raises,
        among it a KeyError inside of a CheckpointException for a tensor that an iteration does not hold.
        """
        asked: dict[int, dict[str, Shard]] = {iteration: {} for iteration in self._folders}
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
            loaded |= super().load(shards, self._folders[iteration], *place[1:])

        def of(shard: Shard) -> Any:
            value = loaded[names[id(shard)]]
            return value.reshape(shard.local_shape) if isinstance(shard, ShardedTensor) else value

        result: dict[str, Any] = dict_list_map_outplace(of, sharded_state_dict)
        return result

    def _wanted(self, shard: Shard) -> tuple[int, Shard]:
        entry, chain = entry_of(shard), self._chain
        if entry is None:
            return chain.iteration, shard
        holder = chain.source(entry.operator, entry.common)
        return holder, under_own_name(shard) if holder in self._partial else with_all_axes(shard)
