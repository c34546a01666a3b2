"""Scales of delayed scaling: what modules of Transformer Engine keep beside their weights.

Each module has, for forward and for backward passes, one scale and a history of largest values for every tensor that it
casts to eight bits. They differ between data-parallel ranks, and which operator they belong to cannot be said: a
grouped module mixes those of all its experts, and ranks take the largest value over all of them. So they are no state
of an operator but of the rank, in every snapshot, as random states are. One snapshot of a window would not do: the
largest value of a weight is noted when the optimizer casts it, which it does not do for a frozen one.

Checked against Transformer Engine 2.11.0 and 2.20.2. What follows from weights is not kept: `_fp8_workspaces` are made
again in the first microbatch of an iteration, `_transpose` when weights are gathered.
"""

from __future__ import annotations

import struct
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from megatron.core.fp4_utils import get_fp4_context
from megatron.core.fp8_utils import get_fp8_context
from megatron.core.utils import unwrap_model

from ..device import Arriving
from ..errors import UnreadableCheckpoint

QUANTIZATION = "quantization"
"""The name of all of it among the tensors of the trainer state."""

_ENTRIES = ("buffer_index_and_autocast_key", "global_fp8_buffer_pos_fwd_recompute")
"""Where modules note that they are in a table, and at which place."""
_PASSES, _KEPT = ("scaling_fwd", "scaling_bwd"), ("scale", "amax_history")


def has_quantization_state(chunks: Sequence[torch.nn.Module]) -> bool:
    """Whether modules may keep scales from iteration to iteration."""
    return keeps_scales(unwrap_model(list(chunks))[0].config)


def keeps_scales(config: Any) -> bool:
    """Whether modules of such a model may keep scales: with delayed scaling, which attention in eight bits uses under
    other recipes too, as Transformer Engine and `NVTE_DPA_FP8_RECIPE` choose."""
    if not (getattr(config, "fp8", None) or getattr(config, "fp4", None)):
        return False
    in_attention = config.fp8_dot_product_attention or config.fp8_multi_head_attention
    return bool(in_attention) or (bool(config.fp8) and config.fp8_recipe == "delayed")


def recipes_of_modules(config: Any) -> list[Mapping[str, Any]]:
    """What some modules quantize by in place of the model's own recipe (`--te-precision-config-file`), while they are
    trained or evaluated. config: core's configuration of the model."""
    named = getattr(getattr(config, "quant_recipe", None), "configs", None) or {}
    recipes = (own.get(f"{when}_recipe") for own in named.values() for when in ("training", "evaluation"))
    return [one for one in recipes if one and isinstance(one, Mapping)]


def multiplies_in_four_bits(config: Any) -> bool:
    """Whether modules do, or may: gradients are rounded then by numbers of the device's generator."""
    return bool(getattr(config, "fp4", None)) or any(
        one.get("fp4_quantization_recipe") for one in recipes_of_modules(config)
    )


def forget_reductions(chunks: Sequence[torch.nn.Module]) -> None:
    """Let Transformer Engine forget which largest values it reduces over which process groups, in tables of its own.

    Modules enter theirs in the first forward pass, as in a new process. Scales and histories stay what they are.
    """
    engine = sys.modules.get("transformer_engine.pytorch.quantization")
    if engine is None:
        return
    engine.FP8GlobalStateManager.reset()
    for module in (module for chunk in chunks for module in chunk.modules()):
        for entry in _ENTRIES:
            getattr(module, "fp8_meta", {}).pop(entry, None)


@torch.no_grad()
def allocate_quantization_state(chunks: Sequence[torch.nn.Module]) -> None:
    """Allocate what does not exist yet, as the first forward pass would; nothing else changes."""
    if not has_quantization_state(chunks):
        return
    config = unwrap_model(list(chunks))[0].config
    with get_fp8_context(config) if config.fp8 else get_fp4_context(config):
        for module in (module for chunk in chunks for module in chunk.modules()):
            if hasattr(module, "init_fp8_metadata"):
                module.init_fp8_metadata(num_gemms=getattr(module, "num_gemms", 1))


def quantization_tensors(chunks: Sequence[torch.nn.Module]) -> Mapping[str, torch.Tensor]:
    """Scales, fp32 (tensors,), and histories, fp32 (length, tensors), by chunk, module, pass, field: live storage."""
    return dict(_enumerated(chunks)) if has_quantization_state(chunks) else {}


def _enumerated(chunks: Sequence[torch.nn.Module]) -> Iterator[tuple[str, torch.Tensor]]:
    for index, chunk in enumerate(unwrap_model(list(chunks))):
        for name, module in chunk.named_modules():
            meta: Mapping[str, Any] = getattr(module, "fp8_meta", {})
            for direction in _PASSES:
                for field in _KEPT:
                    tensor = getattr(meta.get(direction), field, None)
                    if tensor is not None:
                        yield f"{index}.{name}.{direction}.{field}", tensor


def packed(tensors: Mapping[str, torch.Tensor]) -> Callable[[], memoryview]:
    """What gives all of them one behind the other, each with its size: one copy from the device, which it waits for."""
    sizes = struct.pack(f"<{len(tensors)}q", *(tensor.numel() for tensor in tensors.values()))
    values = Arriving(torch.cat([tensor.detach().reshape(-1) for tensor in tensors.values()]))
    return lambda: memoryview(sizes + bytes(values.wait().view(torch.uint8).numpy().tobytes()))


@torch.no_grad()
def unpack(tensors: Mapping[str, torch.Tensor], data: memoryview) -> None:
    """Write what `packed` gave into live storage.

    Args:
        tensors: The live tensors by name, of `quantization_tensors`.
        data: The bytes that `packed` gave for tensors of the same names and sizes.

    Raises:
        UnreadableCheckpoint: The modules are others.
    """
    for tensor, values in _pairs(tensors, data):
        tensor.copy_(values)


def difference(tensors: Mapping[str, torch.Tensor], data: memoryview) -> str:
    """The first that is not what `packed` gave, after an iteration that was run again; empty if there is none.

    The newest row of a history is left out: what frozen weights and evaluations add to it is not made again.

    Args:
        tensors: The live tensors by name, of `quantization_tensors`.
        data: The bytes that `packed` gave when the iteration ran first.

    Returns:
        The name of the tensor.

    Raises:
        UnreadableCheckpoint: The modules are others.
    """
    for (name, tensor), (_, values) in zip(tensors.items(), _pairs(tensors, data), strict=True):
        settled = slice(1, None) if name.endswith("amax_history") else slice(None)
        found, recorded = tensor[settled].cpu(), values[settled]
        if not torch.equal(found, recorded):
            return name
    return ""


def _pairs(tensors: Mapping[str, torch.Tensor], data: memoryview) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Each tensor with its values, of the same shape, on the host."""
    sizes = [tensor.numel() for tensor in tensors.values()]
    expected = struct.pack(f"<{len(sizes)}q", *sizes)
    if bytes(data[: len(expected)]) != expected or len(data) != len(expected) + 4 * sum(sizes):
        raise UnreadableCheckpoint(
            "the scales of eight-bit training in the snapshot are those of other modules or of another"
            " --fp8-amax-history-len"
        )
    values = torch.frombuffer(bytearray(data[len(expected) :]), dtype=torch.float32).split(sizes)
    return [(tensor, part.view(tensor.shape)) for tensor, part in zip(tensors.values(), values, strict=True)]


# Tensors of few bits and the scales beside them: what of both is stored, and under which field.
#
# Exact is only what is stored as it lies in memory: the payload, and the scale as its own record. A value that goes
# through single precision and back gets another scale in its last bit.
#
#     a value                                            records
#     tensor of any dtype without a scale                FIELD
#     tensor with a scale kept elsewhere                 FIELD (as it is), FIELD_scale
#     Float8Tensor of Transformer Engine                 FIELD (uint8, `_data`), FIELD_scale (fp32, `_scale_inv`)
#     weights with a scale for each block                none: they are the cast of their master weights
#
# Checked against Transformer Engine 2.11.0 and 2.20.2. What follows from the payload is not stored: `_transpose`.

_SCALE = "_scale"


def is_quantized(value: Any) -> bool:
    """Whether this is a Float8Tensor: its own storage is empty, payload and scale are attributes."""
    return hasattr(value, "_scale_inv") and hasattr(value, "_data")


_OF_BLOCKS = tuple(
    f"_{name}_{axis}" if name == "amax" else f"_{axis}_{name}"
    for axis in ("rowwise", "columnwise")
    for name in ("data", "scale_inv", "amax")
)


def is_in_blocks(value: Any) -> bool:
    """Whether these are weights with a scale for each block, cast by rows and by columns: MXFP8, blockwise, NVFP4."""
    return hasattr(value, "_rowwise_scale_inv")


def keeps_weights_in_blocks(config: Any) -> bool:
    """Whether a model has such weights: no snapshot has them, and each restore casts them."""
    in_blocks = config.fp8_param and config.fp8_recipe not in ("delayed", "tensorwise")
    return bool(in_blocks or getattr(config, "fp4_param", False))


def pieces_in_blocks(value: Any) -> list[tuple[str, torch.Tensor]]:
    """The tensors that such weights consist of, by the names of their attributes; all of them follow from masters."""
    return [(name, piece) for name in _OF_BLOCKS if (piece := getattr(value, name, None)) is not None]


def raw_fields(field: str, value: Any, scale: torch.Tensor | None = None) -> Iterator[tuple[str, torch.Tensor]]:
    """Names of the records of a value, each with the flat view into live storage that it is copied from and into.

    Args:
        field: The name of the value: `compute`, `master`, `exp_avg`, ...
        value: Any shape and dtype; a Float8Tensor stands for its payload and its scale.
        scale: Of one element, for a value that is no Float8Tensor and whose scale is kept elsewhere.
    """
    yield field, raw(value)
    if is_quantized(value):
        scale = value._scale_inv
    if scale is not None:
        yield field + _SCALE, scale.detach().view(-1)


def raw(value: Any) -> torch.Tensor:
    """The payload of a value, flat: of a Float8Tensor its bytes, else the tensor itself."""
    payload: torch.Tensor = value._data if is_quantized(value) else value
    return payload.detach().view(-1)


def is_scale(field: str) -> bool:
    """Whether the record of this field is a scale, as long as one element whatever it is the scale of."""
    return field.endswith(_SCALE)
