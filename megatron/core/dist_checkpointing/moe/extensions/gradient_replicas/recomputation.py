"""A replica that follows its owner's optimizer: the step in place of the state (MOETION 5.2, Alg. 3).

An owner sends the gradients and the settings of its step, and what else has changed; a peer that has the snapshot of
the iteration before takes the same step with the same function, beside its own training: of torch on its CPU, where
the owner trains on one, else with the same kernel on its GPU, one shard after the other, on a stream of its own. On
processors of one kind Adam gives the same bits for each element however tensors are cut and whatever the number of
threads; whether it did is seen from the owner's checksums.

    step = header length | header: JSON | gradients, in the order of the header | all other records, in order

The header has the optimizer, the settings of its groups, and for each shard what the keys of its records begin with,
its group (null: it was not stepped), the dtype of its gradient, and by what that is multiplied in fp32 (null: nothing).
Records of these shards are made from those before; all others are in the step.

Where core reduces gradients in bf16 (`--grad-reduce-in-bf16`), what an optimizer reads in fp32 is two bytes of content
times the factor of clipping: as many are sent, as MOETION does, and no bit is lost.
"""

from __future__ import annotations

import importlib
import json
import struct
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch

from ...device import own_stream
from ...errors import UnreadableCheckpoint
from ...megatron_state.optimizer_state import MASTER_OF_FUSED
from ...ports import Manifest, MappedReader, Record, RecordedStep, SteppedShard

FUSED_ADAM = "FusedAdam"
"""Of Transformer Engine, imported where steps of it come."""
OPTIMIZERS: Mapping[str, type[torch.optim.Adam]] = {"Adam": torch.optim.Adam, "AdamW": torch.optim.AdamW}
"""Of torch, whose steps can be repeated."""
MASTER = "master"
NOT_STEPPED = ("compute",)
"""Fields of a stepped shard that its step does not make."""

_LENGTH = struct.Struct("<Q")
_ALIGN_BYTES = 8


def aligned(nbytes: int) -> int:
    """The bytes that a gradient of so many takes in a step."""
    return nbytes + -nbytes % _ALIGN_BYTES


def gradient_bytes(shard: SteppedShard) -> int:
    """The bytes that the gradient of a shard takes in a step."""
    return aligned(shard.numel * getattr(torch, shard.dtype).itemsize)


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
    step.copied()
    factors = step.clipped_by()
    sent = {one.prefix: _sent(one, step.gradients, factors) for one in shards}
    header = {
        "optimizer": step.optimizer,
        "groups": [dict(group) for group in step.groups],
        "shards": [[one.prefix, one.group, *sent[one.prefix][:2]] for one in shards],
    }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGN_BYTES)
    prefixes = {one.prefix for one in shards}
    parts = [sent[one.prefix][2] for one in shards if one.group is not None]
    parts += [raw[one.offset : one.offset + one.nbytes] for one in _others(manifest, prefixes)]
    return memoryview(b"".join((_LENGTH.pack(len(text)), text, *parts)))


_BLOCK = 65536
"""Elements that are looked at together: they stay in the cache, and the first with more bits ends the look."""


def _sent(shard: SteppedShard, gradients: memoryview, factors: Sequence[float]) -> tuple[str, float | None, memoryview]:
    """How the gradient of a shard goes: its dtype, by what it is to be multiplied, and its bytes."""
    raw = gradients[shard.first : shard.first + gradient_bytes(shard)]
    if shard.group is not None and shard.dtype == "float32" and shard.numel:
        gradient = torch.frombuffer(raw, dtype=torch.float32, count=shard.numel)
        for factor in factors:
            if (before := reduced_in_bf16(gradient, factor)) is not None:
                content = before.view(torch.uint8)
                padded = torch.nn.functional.pad(content, (0, aligned(content.numel()) - content.numel()))
                return "bfloat16", factor, memoryview(padded.numpy())
    return shard.dtype, None, raw


def reduced_in_bf16(gradient: torch.Tensor, factor: float) -> torch.Tensor | None:
    """What a gradient was in bf16 before it was cast to fp32 and clipped; None where it was not to the bit.

    Args:
        gradient: In fp32, one-dimensional, on the CPU.
        factor: By what it was multiplied in fp32.
    """
    before = torch.empty_like(gradient, dtype=torch.bfloat16)
    for block, kept in zip(gradient.split(_BLOCK), before.split(_BLOCK), strict=True):
        kept.copy_(block / factor)
        if not torch.equal(_clipped(kept, factor).view(torch.int32), block.view(torch.int32)):
            return None
    return before


def _clipped(before: torch.Tensor, factor: float) -> torch.Tensor:
    return before.float().mul_(factor)


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
    except (ImportError, AttributeError, KeyError, TypeError, ValueError, RuntimeError, struct.error) as error:
        raise UnreadableCheckpoint(f"the step to the {manifest.snapshot} cannot be followed: {error}") from None


def _follow(step: memoryview, base: MappedReader, manifest: Manifest, into: memoryview) -> None:
    (length,) = _LENGTH.unpack_from(step)
    at = _LENGTH.size + length
    header = json.loads(bytes(step[_LENGTH.size : at]))
    groups: dict[str, int | None] = {prefix: group for prefix, group, *_ in header["shards"]}
    before, known = base.raw(), base.manifest.by_key
    tensors: dict[str, dict[str, torch.Tensor]] = {prefix: {} for prefix in groups}
    for record in manifest.records:
        if made_by_step(record.key, groups):
            old, (prefix, _, field) = known[record.key], record.key.rpartition("/")
            into[record.offset : record.offset + record.nbytes] = before[old.offset : old.offset + old.nbytes]
            if groups[prefix] is not None:
                tensors[prefix][field] = _tensor(into, record)
    gradients: dict[str, torch.Tensor] = {}
    for prefix, group, dtype, factor in header["shards"]:
        if group is not None:
            numel, read = tensors[prefix][MASTER].numel(), getattr(torch, dtype)
            empty = torch.empty(0, dtype=read)
            gradients[prefix] = torch.frombuffer(step, dtype=read, count=numel, offset=at) if numel else empty
            at += aligned(gradients[prefix].nbytes)
            if factor is not None:
                gradients[prefix] = _clipped(gradients[prefix], factor)
    for record in _others(manifest, groups):
        into[record.offset : record.offset + record.nbytes] = step[at : at + record.nbytes]
        at += record.nbytes
    if at != step.nbytes:
        raise ValueError(f"it has {step.nbytes} bytes in place of {at}")
    for index, settings in enumerate(header["groups"]):
        chosen = [prefix for prefix, group in groups.items() if group == index]
        stepped = [(tensors[one], gradients[one]) for one in chosen]
        if stepped and header["optimizer"] == FUSED_ADAM:
            _take_fused(settings, stepped)
        elif stepped:
            _take(OPTIMIZERS[header["optimizer"]], settings, stepped)


Stepped = Sequence[tuple[dict[str, torch.Tensor], torch.Tensor]]
"""Of each shard its masters and moments, in memory of the snapshot, and its gradient."""


@torch.no_grad()
def _take(kind: type[torch.optim.Adam], settings: Mapping[str, Any], stepped: Stepped) -> None:
    """The step of one group, in place."""
    masters = [state.pop(MASTER) for state, _ in stepped]
    adam = kind(masters)
    group = adam.param_groups[0]
    for name, value in settings.items():
        if name in adam.defaults:
            group[name] = tuple(value) if isinstance(value, list) else value
    for master, (state, gradient) in zip(masters, stepped, strict=True):
        master.grad = gradient
        adam.state[master] = {field: one.view(()) if field == "step" else one for field, one in state.items()}
    adam.step()
    # What refers to the memory of the snapshot goes now, not when circles in the optimizer are collected.
    adam.state.clear()
    for master in masters:
        master.grad = None
        master.set_(torch.empty(0))
    group["params"].clear()


@torch.no_grad()
def _take_fused(settings: Mapping[str, Any], stepped: Stepped) -> None:
    """As `_take`, with Transformer Engine's kernel on this rank's GPU: what it takes there is one shard at a time."""
    weights, decoupled = settings["weights"], settings["use_decoupled_grad"]
    fused = importlib.import_module("transformer_engine.pytorch.optimizers").FusedAdam(
        [torch.nn.Parameter(torch.empty(0, device="cuda"))],
        adam_w_mode=settings["adam_w_mode"], master_weights=weights is not None, use_decoupled_grad=decoupled,
    )  # fmt: skip
    (group,) = fused.param_groups
    # Not training's stream: neither waits for the other. What is copied from and to it waits in this thread. Always the
    # same one: the allocator keeps what was given up for the stream that had it.
    with torch.cuda.stream(own_stream("replica-step")):
        for state, gradient in stepped:
            on_device = {field: one.to("cuda", copy=True) for field, one in state.items()}
            master = on_device.pop(MASTER)
            # Where the kernel steps masters it casts them to weights, which go by themselves.
            cast = None if weights is None else torch.empty_like(master, dtype=getattr(torch, weights))
            parameter = torch.nn.Parameter(master if cast is None else cast)
            setattr(parameter, "decoupled_grad" if decoupled else "grad", gradient.to("cuda"))
            group["params"] = [parameter]
            fused.state[parameter] = on_device if cast is None else on_device | {MASTER_OF_FUSED: master}
            for name in (*fused.defaults, "step"):
                group[name] = tuple(settings[name]) if isinstance(settings[name], list) else settings[name]
            fused.step()
            for field, one in {**on_device, MASTER: master}.items():
                state[field].copy_(one)
            fused.state.clear()


def _others(manifest: Manifest, prefixes: Collection[str]) -> list[Record]:
    return [record for record in manifest.records if not made_by_step(record.key, prefixes)]


def _tensor(memory: memoryview, record: Record) -> torch.Tensor:
    if not record.nbytes:
        return torch.empty(0, dtype=getattr(torch, record.field.dtype))
    dtype = getattr(torch, record.field.dtype)
    return torch.frombuffer(memory, dtype=dtype, count=record.nbytes // dtype.itemsize, offset=record.offset)
