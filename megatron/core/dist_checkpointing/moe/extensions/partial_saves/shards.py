"""Shards of Megatron-Core as entries of single experts, and which of them a checkpoint holds."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from megatron.core.dist_checkpointing.dict_utils import (
    dict_list_map_inplace,
    dict_list_map_outplace,
    extract_matching_values,
    nested_values,
)
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor, apply_factories
from moe_ckpt.dense.chain import Chain, ExpertEntry, expert_entry, object_entry

type Shard = Any
"""A `ShardedTensor` or a `ShardedObject` of Megatron-Core."""


def built(generated: dict[str, Any]) -> dict[str, Any]:
    """A sharded state dict in which what a factory makes stands in the factory's place; the one given stays."""
    made: dict[str, Any] = dict_list_map_outplace(lambda value: value, generated)
    apply_factories(made)
    return made


def entries(generated: dict[str, Any] | list[dict[str, Any]]) -> Iterator[tuple[ExpertEntry, Shard]]:
    """The shards of single experts in sharded state dicts without factories."""
    for shard in nested_values(generated):
        entry = entry_of(shard)
        if entry is not None:
            yield entry, shard


def entry_of(value: Any) -> ExpertEntry | None:
    """Whose entry a value of a sharded state dict is; None if of no single expert."""
    if not isinstance(value, ShardedTensor | ShardedObject):
        return None
    read = object_entry if isinstance(value, ShardedObject) else expert_entry
    return read(value.key, value.global_offset)


def selected(generated: dict[str, Any], chain: Chain) -> dict[str, Any]:
    """The part of a sharded state dict that a checkpoint holds, under the names that it has there.

    Args:
        generated: The sharded state dict, without factories.
        chain: Which checkpoint holds which experts; its iteration is the one of this checkpoint.
    """
    if chain.is_complete:
        return generated

    def is_left_out(value: Any) -> bool:
        entry = entry_of(value)
        return entry is not None and chain.source(entry.operator, entry.common) != chain.iteration

    _, kept = extract_matching_values(generated, is_left_out)
    dict_list_map_inplace(under_own_name, kept)
    return dict(kept)


def under_own_name(value: Any) -> Any:
    """The same data as an entry of a single expert, where it was a piece of an entry of all of them."""
    entry = entry_of(value)
    if entry is None:
        return value
    if isinstance(value, ShardedObject):
        return replace(value, key=entry.own_name, global_shape=(1,), global_offset=(0,))
    fragments = value.axis_fragmentations
    return replace(
        value,
        key=entry.own_name,
        global_shape=entry.within_expert(value.global_shape),
        global_offset=entry.within_expert(value.global_offset),
        axis_fragmentations=None if fragments is None else entry.within_expert(fragments),
        prepend_axis_num=value.prepend_axis_num - entry.axes,
    )


def with_all_axes(shard: Shard) -> Shard:
    """The same piece with the axes that count layers and experts in its own shape.

    Where these are left out, core (checked: 0.17.1 to 0.19.2) assumes that all pieces that are not asked for here are
    on another rank, and a job of one rank has none.
    """
    if isinstance(shard, ShardedObject):
        return shard
    shape = (*(1 for _ in range(shard.prepend_axis_num)), *shard.local_shape)
    data = None if shard.data is None else shard.data.detach().view(shape)
    return replace(shard, data=data, local_shape=shape, prepend_axis_num=0)
