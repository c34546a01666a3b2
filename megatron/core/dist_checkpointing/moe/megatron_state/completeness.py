"""Does every byte of a live model's training state belong to one operator? Enumerated apart from what it judges.

Nothing here is shared with `megatron.py`, which enumerates the state: parameters and buffers come from the modules,
what a rank owns of them from the geometry of the parameter buffers, the rest from walking the optimizer's attributes.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer.grad_scaler import MegatronGradScaler
from megatron.core.utils import unwrap_model

from .operators import StateTensor, is_constant
from .partitions import Cover, Extent, IncompleteState, check_cover

_SCRATCH = frozenset({"found_inf", "dummy_overflow_buf", "scale_one", "scale"})
"""Tensors of Megatron's optimizers that each step overwrites or that never change, without leading underscores."""
_KEPT = ("state", "param_groups", "_scales")
"""What an inner optimizer keeps from step to step; `_scales` is that of Transformer Engine's, for state of few bits.
Other attributes are working memory, tables and constants, which differ between optimizers and their releases."""
_PAYLOADS = ("_data", "_scale_inv")
"""What a Float8Tensor consists of: its own storage is empty, all else of it follows from these."""
_IN_BLOCKS = "_rowwise_scale_inv"
"""What weights with a scale for each block have: nothing of them is state, all of it follows from their masters."""


def check_complete(
    chunks: Sequence[torch.nn.Module],
    optimizer: MegatronOptimizer,
    tensors: Sequence[StateTensor],
    scales: Mapping[str, torch.Tensor] | None = None,
) -> None:
    """Check that every byte of training state on this rank is in exactly one of `tensors` or is trainer state.

    Compared by address and length are parameters and buffers of the modules, with the distributed optimizer only this
    rank's share of each bucket; all that the inner optimizers train on and keep; and whatever else can be reached from
    the optimizer, where the loss scaler counts as trainer state.

    Args:
        chunks: The model chunks as they are trained, wrapped in DistributedDataParallel.
        optimizer: What steps them.
        tensors: What `state_tensors` found on this rank.
        scales: What `quantization_tensors` found, which is saved with the trainer state.

    Raises:
        IncompleteState: Names what is in none of the tensors, or in two, or is no live state.
    """
    whole = list(_parameters(chunks))
    names = _Names(whole)
    expected = [*_owned_extents(chunks, whole), *_optimizer_extents(optimizer, names), *_module_extents(chunks)]
    found = [_extent(tensor.tensor, tensor.key) for tensor in tensors]
    check_cover(expected, [*found, *(_extent(tensor, name) for name, tensor in (scales or {}).items())])
    # Other ranks' shares of compute weights are reachable too, and are no state of this rank, nor is what none reads.
    unread = (extent for member in _members(optimizer) for extent in _unread_scales(member.optimizer))
    known = Cover([*expected, *unread, *(extent for name, parameter in whole for extent in _extents(parameter, name))])
    for path, tensor in _reachable(optimizer, "optimizer", set()):
        attribute = path.rpartition(".")[2].lstrip("_")
        if ".grad_scaler." in path or attribute in _SCRATCH:
            continue
        if known.missing_bytes(_extent(tensor, path)):
            raise IncompleteState(
                f"{path}, {tensor.numel()} elements, belongs to no operator and not to the trainer state: this"
                " optimizer keeps state that is not known here"
            )


def _parameters(chunks: Sequence[torch.nn.Module]) -> Iterator[tuple[str, torch.nn.Parameter]]:
    for index, chunk in enumerate(unwrap_model(list(chunks))):
        for name, parameter in chunk.named_parameters():
            yield f"{name} of chunk {index}" if len(chunks) > 1 else name, parameter


def _extent(tensor: torch.Tensor, name: str) -> Extent:
    elements = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    start = tensor.data_ptr()
    return Extent(start, start + (elements * tensor.element_size() if tensor.numel() else 0), name)


def _extents(tensor: torch.Tensor, name: str) -> list[Extent]:
    return [_extent(piece, f"{name}{suffix}") for suffix, piece in _pieces(tensor)]


class _Names:
    """Names of parameters by the address of their compute or master weights."""

    def __init__(self, parameters: Sequence[tuple[str, torch.nn.Parameter]]) -> None:
        extents = [_extent(piece, name) for name, parameter in parameters for _, piece in _pieces(parameter)[:1]]
        masters = [(name, getattr(parameter, "main_param", None)) for name, parameter in parameters]
        extents += [_extent(master, name) for name, master in masters if master is not None]
        self._extents = sorted(extents, key=lambda extent: extent.start)
        self._starts = [extent.start for extent in self._extents]

    def of(self, tensor: torch.Tensor) -> str:
        """The parameter of which `tensor` is the master weights."""
        start = _extents(tensor, "")[0].start
        before = bisect.bisect_right(self._starts, start) - 1
        if before >= 0 and start < self._extents[before].end:
            return self._extents[before].name
        return f"an unknown parameter of shape {tuple(tensor.shape)}"


def _owned_extents(
    chunks: Sequence[torch.nn.Module], parameters: Sequence[tuple[str, torch.nn.Parameter]]
) -> Iterator[Extent]:
    """Buffers, and what of the parameters is this rank's to keep."""
    buckets: list[tuple[Extent, Extent]] = []
    for chunk in chunks:
        for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers):
            rank, ranks = buffer.data_parallel_group.rank(), buffer.data_parallel_group.size()
            # Each bucket is cut into as many equal shares as there are data-parallel ranks, whatever is in it.
            for data in (bucket.param_data for bucket in buffer.buckets if bucket.param_data is not None):
                share = data.numel() // ranks
                buckets.append((_extent(data, ""), _extent(data.view(-1)[rank * share : (rank + 1) * share], "")))
    for name, parameter in parameters:
        if hasattr(parameter, _IN_BLOCKS):
            continue
        whole, *rest = _extents(parameter, f"compute weights of {name}")
        yield from rest  # the scale of eight-bit weights, on each rank
        shares = [share for bucket, share in buckets if whole.shared_with(bucket)]
        yield from (part for share in shares if (part := whole.shared_with(share))) if shares else [whole]
    for chunk in unwrap_model(list(chunks)):
        for name, buffer in chunk.named_buffers():
            if not is_constant(name):
                yield _extent(buffer, f"buffer {name}")


def _module_extents(chunks: Sequence[torch.nn.Module]) -> Iterator[Extent]:
    """Tensors that layers of Transformer Engine keep for their scales, beside parameters and what is made of those."""
    for chunk in unwrap_model(list(chunks)):
        for name, module in chunk.named_modules():
            for key, kept in getattr(module, "fp8_meta", {}).items():
                for field, value in getattr(kept, "__dict__", {}).items():
                    if isinstance(value, torch.Tensor):
                        yield _extent(value, f"{key}.{field} of {name}")


def _optimizer_extents(optimizer: MegatronOptimizer, names: _Names) -> Iterator[Extent]:
    """All that the inner optimizers train on and keep."""
    for member in _members(optimizer):
        for group in member.optimizer.param_groups:
            for parameter in group["params"]:
                yield from _extents(parameter, f"master weights of {names.of(parameter)}")
        for parameter, kept in member.optimizer.state.items():
            for field, value in kept.items():
                if isinstance(value, torch.Tensor):
                    for suffix, piece in _pieces(value):
                        yield _extent(piece, f"{field}{suffix} of {names.of(parameter)}")
        for parameter, field, scale in _scales(member.optimizer, torch.float16):
            yield _extent(scale, f"scale of {field} of {names.of(parameter)}")


def _members(optimizer: MegatronOptimizer) -> list[Any]:
    found, members = list[Any](), [optimizer]
    while members:
        member = members.pop(0)
        chained = getattr(member, "chained_optimizers", None)
        members = [*(chained or ()), *members]
        found += [member] if chained is None and member.optimizer is not None else []
    return found


def _unread_scales(inner: Any) -> Iterator[Extent]:
    """Scales that Transformer Engine's `FusedAdam` writes down and never reads: of bf16, which has none, and of a
    Float8Tensor, which has its own."""
    for _, field, scale in (*_scales(inner, torch.bfloat16), *_scales(inner, torch.uint8)):
        yield _extent(scale, f"scale of {field}")


def _scales(inner: Any, dtype: torch.dtype) -> Iterator[tuple[torch.Tensor, str, torch.Tensor]]:
    """What `FusedAdam` keeps beside its state for fields of this dtype: of what parameter, the field, the scale."""
    for parameter, scales in getattr(inner, "_scales", {}).items():
        for field, scale in scales.items():
            value = inner.state.get(parameter, {}).get(field)
            if value is not None and (torch.uint8 if _is_float8(value) else value.dtype) is dtype:
                yield parameter, field, scale


def _is_float8(value: torch.Tensor) -> bool:
    return all(hasattr(value, name) for name in _PAYLOADS)


def _pieces(value: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
    """The tensors that a tensor consists of, with what is added to its name; none of weights that are derived."""
    if hasattr(value, _IN_BLOCKS):
        return []
    return [(f".{name}", getattr(value, name)) for name in _PAYLOADS] if _is_float8(value) else [("", value)]


def _reachable(value: Any, path: str, seen: set[int]) -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors in the attributes of optimizers and their scalers, to any depth; other objects are not entered."""
    if isinstance(value, torch.Tensor):
        yield from ((path + suffix, piece) for suffix, piece in _pieces(value))
        return
    if id(value) in seen:
        return
    seen.add(id(value))
    for child_path, child in _children(value, path):
        yield from _reachable(child, child_path, seen)


def _children(value: Any, path: str) -> list[tuple[str, Any]]:
    if isinstance(value, torch.optim.Optimizer):
        own = vars(value).items()
        return [(f"{path}.{name}", item) for name, item in own if name in _KEPT or _has_optimizer(item)]
    if isinstance(value, MegatronOptimizer | MegatronGradScaler):
        return [(f"{path}.{name}", item) for name, item in vars(value).items()]
    if isinstance(value, list | tuple):
        return [(f"{path}[{index}]", item) for index, item in enumerate(value)]
    if isinstance(value, Mapping):
        labels = (index if isinstance(key, torch.Tensor) else key for index, key in enumerate(value))
        return [(f"{path}.{label}", item) for label, item in zip(labels, value.values(), strict=True)]
    return []


def _has_optimizer(value: Any) -> bool:
    """Whether this is an optimizer inside another one, or several of them, whose state is just as much."""
    inside = value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else (value,)
    return any(isinstance(item, torch.optim.Optimizer) for item in inside)
