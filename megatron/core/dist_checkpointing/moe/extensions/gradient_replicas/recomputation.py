"""A replica that follows its owner's optimizer: the step in place of the state (MOETION 5.2, Alg. 3).

An owner sends the gradients and the settings of its step, and what else has changed; a peer that has the snapshot of
the iteration before takes the same step with the same function of torch, on its CPU and beside its own training. On
CPUs of one kind Adam gives the same bits for each element however tensors are cut and whatever the number of threads;
whether it did is seen from the owner's checksums.

    step = header length | header: JSON | gradients, float32, in the order of the header | all other records, in order

The header has the optimizer, the settings of its groups, and for each shard what the keys of its records begin with and
its group (null: it was not stepped). Records of these shards are made from those before; all others are in the step.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch

from ...errors import UnreadableCheckpoint
from ...ports import Manifest, MappedReader, Record, RecordedStep

OPTIMIZERS: Mapping[str, type[torch.optim.Adam]] = {"Adam": torch.optim.Adam, "AdamW": torch.optim.AdamW}
"""Whose steps can be repeated."""
MASTER = "master"
NOT_STEPPED = ("compute",)
"""Fields of a stepped shard that its step does not make."""

_LENGTH = struct.Struct("<Q")
_ALIGN_BYTES = 8


def made_by_step(key: str, prefixes: Collection[str]) -> bool:
    """Whether the record of a key is made by the step of a shard.

    Args:
        key: The key of the record.
        prefixes: What the keys of stepped shards begin with.
    """
    prefix, _, field = key.rpartition("/")
    return prefix in prefixes and field not in NOT_STEPPED


def encode(manifest: Manifest, raw: memoryview, step: RecordedStep, followed: Collection[str]) -> memoryview:
    """The step that leads to a snapshot from the one before.

    Args:
        manifest: The snapshot.
        raw: All of its bytes.
        step: The step that was recorded.
        followed: Prefixes of shards of which gradients are sent, as far as the snapshot has them.

    Returns:
        The header, gradients and all other records, one behind the other.
    """
    shards = [one for one in step.shards if one.prefix in followed and f"{one.prefix}/{MASTER}" in manifest.by_key]
    header = {
        "optimizer": step.optimizer,
        "groups": [dict(group) for group in step.groups],
        "shards": [[one.prefix, one.group] for one in shards],
    }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGN_BYTES)
    gradients = step.gradients.cast("B")
    prefixes = {one.prefix for one in shards}
    parts = [gradients[4 * one.first : 4 * (one.first + one.numel)] for one in shards if one.group is not None]
    parts += [raw[one.offset : one.offset + one.nbytes] for one in _others(manifest, prefixes)]
    return memoryview(b"".join((_LENGTH.pack(len(text)), text, *parts)))


def follow(step: bytearray, base: MappedReader, manifest: Manifest, into: memoryview) -> None:
    """Make a snapshot from the one before and the step between; nothing is verified here.

    Args:
        step: What `encode` gave.
        base: The snapshot before.
        manifest: The snapshot to make.
        into: Where its bytes go, as its layout has them.

    Raises:
        UnreadableCheckpoint: The step does not fit the snapshots.
    """
    try:
        _follow(memoryview(step), base, manifest, into)
    except (KeyError, TypeError, ValueError, RuntimeError, struct.error) as error:
        raise UnreadableCheckpoint(f"the step to the {manifest.snapshot} cannot be followed: {error}") from None


def _follow(step: memoryview, base: MappedReader, manifest: Manifest, into: memoryview) -> None:
    (length,) = _LENGTH.unpack_from(step)
    at = _LENGTH.size + length
    header = json.loads(bytes(step[_LENGTH.size : at]))
    groups: dict[str, int | None] = {prefix: group for prefix, group in header["shards"]}
    before, known = base.raw(), base.manifest.by_key
    tensors: dict[str, dict[str, torch.Tensor]] = {prefix: {} for prefix in groups}
    for record in manifest.records:
        if made_by_step(record.key, groups):
            old, (prefix, _, field) = known[record.key], record.key.rpartition("/")
            into[record.offset : record.offset + record.nbytes] = before[old.offset : old.offset + old.nbytes]
            if groups[prefix] is not None:
                tensors[prefix][field] = _tensor(into, record)
    gradients: dict[str, torch.Tensor] = {}
    for prefix, group in groups.items():
        if group is not None:
            master = tensors[prefix][MASTER]
            gradients[prefix] = torch.frombuffer(step, dtype=torch.float32, count=master.numel(), offset=at)
            at += gradients[prefix].nbytes
    for record in _others(manifest, groups):
        into[record.offset : record.offset + record.nbytes] = step[at : at + record.nbytes]
        at += record.nbytes
    if at != step.nbytes:
        raise ValueError(f"it has {step.nbytes} bytes in place of {at}")
    for index, settings in enumerate(header["groups"]):
        chosen = [prefix for prefix, group in groups.items() if group == index]
        if chosen:
            _take(OPTIMIZERS[header["optimizer"]], settings, [tensors[one] for one in chosen],
                  [gradients[one] for one in chosen])  # fmt: skip


@torch.no_grad()
def _take(
    kind: type[torch.optim.Adam],
    settings: Mapping[str, Any],
    tensors: Sequence[dict[str, torch.Tensor]],
    gradients: Sequence[torch.Tensor],
) -> None:
    """The step of one group, in place."""
    masters = [each.pop(MASTER) for each in tensors]
    adam = kind(masters)
    group = adam.param_groups[0]
    for name, value in settings.items():
        if name in adam.defaults:
            group[name] = tuple(value) if isinstance(value, list) else value
    for master, state, gradient in zip(masters, tensors, gradients, strict=True):
        master.grad = gradient
        adam.state[master] = {field: one.view(()) if field == "step" else one for field, one in state.items()}
    adam.step()
    # What refers to the memory of the snapshot goes now, not when circles in the optimizer are collected.
    adam.state.clear()
    for master in masters:
        master.grad = None
        master.set_(torch.empty(0))
    group["params"].clear()


def _others(manifest: Manifest, prefixes: Collection[str]) -> list[Record]:
    return [record for record in manifest.records if not made_by_step(record.key, prefixes)]


def _tensor(memory: memoryview, record: Record) -> torch.Tensor:
    if not record.nbytes:
        return torch.empty(0, dtype=getattr(torch, record.field.dtype))
    dtype = getattr(torch, record.field.dtype)
    return torch.frombuffer(memory, dtype=dtype, count=record.nbytes // dtype.itemsize, offset=record.offset)
