"""The model weights of a dense checkpoint, one tensor of a layer or of an expert at a time."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch

from megatron.core.dist_checkpointing.moe.errors import UnreadableCheckpoint, UsageError

from ..dense.components import MODEL, TENSOR_RULES, component_of
from ..dense.dcp_metadata import TensorInfo
from ..dense.dense import DenseCheckpoint
from .weights import Weight


@dataclass(frozen=True)
class SavedWeight:
    """Where a weight is in a checkpoint: a tensor and the indices along its first axes; and its shape there."""

    name: str
    index: tuple[int, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype


def places(checkpoint: DenseCheckpoint, weights: Iterable[Weight]) -> dict[Weight, SavedWeight]:
    """Where each weight is.

    Raises UsageError naming weights that are missing, of another shape, or that a checkpoint has and the model not.

    Args:
        checkpoint: The dense checkpoint that has to hold them.
        weights: All weights of the model.
    """
    found, missing, wrong = {}, [], []
    for weight in weights:
        place = _place(checkpoint.tensors, weight)
        if place is None:
            above = "" if weight.ahead is None else f"mtp.layers.{weight.ahead}."
            missing.append(above + weight.names[0] + (f" of layer {weight.layer}" if weight.layer is not None else ""))
        elif not weight.form.fits(place.shape, weight.shapes):
            wrong.append(f"{place.name} {place.shape} for {' and '.join(name for name, _ in weight.parts)}")
        else:
            found[weight] = place
    used = {name for weight in found for name, _ in weight.places()}
    extra = [name for name in checkpoint.tensors if _counts(name) and name not in used]
    second = [name for name in extra if name.endswith("self_attention.linear_q_proj.layer_norm_weight")]
    if second:
        raise UsageError(
            f"{checkpoint.directory} has {second[0]}, a second norm before the queries, as Megatron-Core 0.19 has"
            " without --q-lora-rank, and no model of Hugging Face; train such models with 0.17 or 0.18"
        )
    for problem, names in (("has no", missing), ("has another shape:", wrong), ("has, and no such model has,", extra)):
        if names and not (problem.endswith("has,") and (missing or wrong)):
            raise UsageError(f"{checkpoint.directory} {problem} {few(names)}")
    return found


def _counts(name: str) -> bool:
    """Whether a model computes with it: `qb_beta` is no weight, but chooses experts; so does `expert_bias`, of which
    the arguments tell."""
    return component_of(name, TENSOR_RULES) == MODEL or name.endswith(".router.qb_beta")


def few(names: list[str]) -> str:
    """The first names, and how many more there are."""
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _place(tensors: Mapping[str, TensorInfo], weight: Weight) -> SavedWeight | None:
    for name, index in weight.places():
        info = tensors.get(name)
        rows = len(index)
        if (
            info is not None
            and len(info.shape) >= rows
            and all(at < size for at, size in zip(index, info.shape, strict=False))
        ):
            return SavedWeight(name, index, tuple(info.shape[rows:]), info.dtype)
    return None


def read(checkpoint: DenseCheckpoint, place: SavedWeight) -> torch.Tensor:
    """One weight, on the CPU. Only pieces that have some of it are read. Raises UnreadableCheckpoint.

    Args:
        checkpoint: The dense checkpoint.
        place: Name, index, shape and dtype of the weight in it, from `places`.
    """
    result, rows = torch.empty(place.shape, dtype=place.dtype), len(place.index)
    filled = 0
    for chunk in checkpoint.tensors[place.name].chunks:
        local = [at - start for at, start in zip(place.index, chunk.offsets, strict=False)]
        if not all(0 <= at < size for at, size in zip(local, chunk.sizes, strict=False)):
            continue
        piece = checkpoint.read_piece(place.name, place.dtype, chunk)[tuple(local)]
        box = tuple(slice(a, a + n) for a, n in zip(chunk.offsets[rows:], chunk.sizes[rows:], strict=True))
        result[box] = piece
        filled += piece.numel()
    if filled != result.numel():
        raise UnreadableCheckpoint(
            f"{checkpoint.directory}: {place.name} {list(place.index)} has {filled} of {result.numel()} elements;"
            " take another iteration"
        )
    return result
