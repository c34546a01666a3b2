"""How tensor parallelism cuts each tensor of the model, and whether each byte of training state has one operator."""

from __future__ import annotations

import bisect
import itertools
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.modules.dropout import _DropoutNd

from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer.grad_scaler import MegatronGradScaler
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.utils import unwrap_model

from ..errors import MoECheckpointError, UsageError
from ..policy.resharding import Grid
from ..types import Topology
from .megatron import names_of_parameters
from .operators import SINKS, GlobalName, StateTensor, is_constant, is_partitioned
from .quantization import multiplies_in_four_bits

# Of Mamba, gated delta-net and MLA with --mla-down-proj-fusion: a rank has its part of queries or gates, then of keys,
# and so on, of unequal sizes.
_FUSED = re.compile(r".*\.(?:in_proj|conv1d|linear_qkv_down_proj)[._](?:weight|bias)")
# First layers in which blocks of gates and of values alternate: a part of their names, and the settings that say so.
_INTERLEAVING = {
    ".experts.linear_fc1.": ("moe_mlp_glu_interleave_size",),
    ".shared_experts.linear_fc1.": ("moe_shared_expert_glu_interleave_size", "use_grouped_gemm_for_shared_expert"),
}


def tensor_grids(chunks: Sequence[torch.nn.Module], topology: Topology) -> Mapping[str, Grid]:
    """Of every parameter of which this rank has a share, the whole of it as a matrix; buffers are missing.

    Checked against Megatron-Core 0.19.2: column-parallel layers are cut along their first dimension, row-parallel ones
    along the second; a gated first layer keeps on each rank its part of the gates before its part of the values, or
    blocks of both that alternate.

    Args:
        chunks: The model chunks of this rank.
        topology: The rank layout.

    Returns:
        Matrices by the global name of the tensor.

    Raises:
        UsageError: A tensor is cut in another way.
    """
    in_halves = _in_halves(chunks)
    grids = {}
    for parameter, of in names_of_parameters(chunks, topology).items():
        axis = _axis(parameter, of)
        if axis is None:
            grids[of.name] = Grid(1, parameter.numel())
        else:
            ranks = topology.expert_tp if of.operator.is_expert else topology.tp
            grids[of.name] = _grid(of.name, tuple(parameter.shape), axis, ranks, in_halves.get(parameter, False))
    return grids


def random_draws(config: TransformerConfig) -> str:
    """What of the model draws random numbers while it is trained, by the names of settings; empty if nothing does."""
    in_four_bits = ["products in four bits"] * multiplies_in_four_bits(config)
    return ", ".join([*drawing_settings(config), *in_four_bits])


def draws_in(chunks: Sequence[torch.nn.Module]) -> str:
    """As `random_draws`, of all modules: a tower for images or sound has a configuration and layers of its own.

    Args:
        chunks: The model chunks of this rank.
    """
    modules = [module for model in unwrap_model(list(chunks)) for module in model.modules()]
    # Most modules have the very one of the model.
    configs = {id(config): config for module in modules if (config := getattr(module, "config", None)) is not None}
    found = dict.fromkeys(one for config in configs.values() for one in random_draws(config).split(", ") if one)
    of_settings = "dropout" in " ".join(found)  # layers of core are made of these
    for module in modules:
        own = {
            "dropout": module.p if isinstance(module, _DropoutNd) and not of_settings else 0.0,
            # Of core's RADIO, and of its audio.
            "pos_dropout": getattr(module, "pos_dropout", None),
            "has_cpe": getattr(module, "has_cpe", False) and not getattr(module, "force_cpe_eval_mode", False),
            "dither": getattr(module, "dither", None),
        }
        found |= {f"{name} {value}": None for name, value in own.items() if isinstance(value, int | float) and value}
    return ", ".join(found)


def drawing_settings(config: TransformerConfig) -> list[str]:
    """By which settings modules draw random numbers, with their values."""
    names = ("hidden_dropout", "attention_dropout", "moe_input_jitter_eps", "moe_router_force_load_balancing")
    drawing = [name for name in names if getattr(config, name, None)]
    if getattr(config, "moe_router_force_biased", None) is not None:  # draws with 0, too
        drawing.append("moe_router_force_biased")
    return [f"{name} {getattr(config, name)}" for name in drawing]


def _axis(parameter: torch.nn.Parameter, of: GlobalName) -> int | None:
    """The dimension that tensor ranks share; None where each of them has the whole."""
    if of.operator.is_expert:  # Transformer Engine's experts lack the attributes
        return 0 if "linear_fc1." in of.name else 1 if of.name.endswith("linear_fc2.weight") else None
    if not is_partitioned(parameter, of):
        return None
    axis: int = 0 if of.name.endswith(SINKS) else getattr(parameter, "partition_dim", 0)
    return axis


def _in_halves(chunks: Sequence[torch.nn.Module]) -> dict[torch.nn.Parameter, bool]:
    """Of the parameters of each first layer whether gates stand before values, as the module that has it says: a tower
    for images has a configuration of its own, which may have no gates where the language model has some."""
    models, found = unwrap_model(list(chunks)), dict[torch.nn.Parameter, bool]()
    for where, module in (each for model in models for each in model.named_modules()):
        layer: Any = getattr(module, "linear_fc1", None)
        config: Any = getattr(module, "config", None)
        if not isinstance(layer, torch.nn.Module):
            continue
        if not hasattr(config, "gated_linear_unit"):
            config = models[0].config
        # By the names that modules give them: of experts those in groups alone look at the setting.
        alternates = any(
            f".{where}.linear_fc1.".endswith(part) and all(getattr(config, setting, None) for setting in settings)
            for part, settings in _INTERLEAVING.items()
        )
        is_first = (
            isinstance(module, MLP) or where.endswith(("mlp", "mlp.shared_experts")) or ".experts." in f".{where}."
        )
        halved = bool(config.gated_linear_unit) and is_first and not alternates
        found |= {one: halved and name.startswith(("weight", "bias")) for name, one in layer.named_parameters()}
    return found


def _grid(name: str, shape: tuple[int, ...], axis: int, ranks: int, in_halves: bool) -> Grid:
    numel = ranks
    for size in shape:
        numel *= size
    if _FUSED.fullmatch(name):
        return Grid(1, numel, fused=True)
    if axis == 0:
        return Grid(2, numel // 2) if in_halves else Grid(1, numel)
    if axis == 1 and len(shape) == 2:
        return Grid(shape[0], shape[1] * ranks)
    raise UsageError(f"{name} of shape {shape} is cut along dimension {axis}, which cannot be laid out again")


# Whether views cover memory exactly once: arithmetic on address ranges.


class IncompleteState(MoECheckpointError):
    """Training state that no operator covers, or two do, or a view of memory that is no training state."""


@dataclass(frozen=True, slots=True)
class Extent:
    """Addresses `start` to `end` in bytes, and what is there."""

    start: int
    end: int
    name: str

    @property
    def nbytes(self) -> int:
        """Length in bytes."""
        return self.end - self.start

    def shared_with(self, other: Extent) -> Extent | None:
        """The part that `other` has too, under this name; None if there is none."""
        start, end = max(self.start, other.start), min(self.end, other.end)
        return Extent(start, end, self.name) if start < end else None


class Cover:
    """Memory that a set of extents covers, and how much of other extents is outside of it."""

    def __init__(self, extents: Iterable[Extent]) -> None:
        self._starts: list[int] = []
        self._ends: list[int] = []
        for extent in sorted(extents, key=_start):
            # Sorted by start: what touches the last range extends it, so ranges stay disjoint and ascending.
            if self._ends and extent.start <= self._ends[-1]:
                self._ends[-1] = max(self._ends[-1], extent.end)
            else:
                self._starts.append(extent.start)
                self._ends.append(extent.end)

    def missing_bytes(self, extent: Extent) -> int:
        """Bytes of `extent` that are not covered."""
        missing, position = 0, extent.start
        # From the first range that ends behind the start of the extent.
        for i in range(bisect.bisect_right(self._ends, extent.start), len(self._starts)):
            if self._starts[i] >= extent.end:
                break
            missing += max(0, self._starts[i] - position)
            position = self._ends[i]
        return missing + max(0, extent.end - position)


def check_cover(expected: Sequence[Extent], found: Sequence[Extent]) -> None:
    """Check that saved state covers all live state: every byte exactly once, and nothing else.

    Args:
        expected: All live training state; tensors may be in it more than once.
        found: The state that is saved.

    Raises:
        IncompleteState: Names the first byte range that is wrong and counts the others.
    """
    in_order = sorted((extent for extent in found if extent.nbytes), key=_start)
    # In order of addresses, any overlap of two shows between neighbours.
    for extent, following in itertools.pairwise(in_order):
        if following.start < extent.end:
            raise IncompleteState(f"state is covered twice: {extent.name} and {following.name} share memory")
    # Both ways: state that nobody saves, and views that were left behind by an optimizer that replaced its state.
    _raise_for(expected, Cover(found), "belongs to no operator and not to the trainer state")
    _raise_for(found, Cover(expected), "is no live training state; enumerate the state again after it was replaced")


def _raise_for(extents: Iterable[Extent], cover: Cover, trouble: str) -> None:
    wrong = [(extent, missing) for extent in extents if (missing := cover.missing_bytes(extent))]
    if wrong:
        first, missing = wrong[0]
        others = f" (and {len(wrong) - 1} more)" if len(wrong) > 1 else ""
        raise IncompleteState(f"{first.name}{others} {trouble}: {missing} of its {first.nbytes} bytes")


def _start(extent: Extent) -> tuple[int, int]:
    return extent.start, extent.end


# Does every byte of a live model's training state belong to one operator? Enumerated apart from what it judges: nothing
# below is shared with `megatron.py`. Parameters and buffers come from the modules, what a rank owns of them from the
# geometry of the parameter buffers, the rest from walking the optimizer's attributes.

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
    expected = [
        *_owned_extents(chunks, whole, _stepped_elsewhere(optimizer)),
        *_optimizer_extents(optimizer, names),
        *_module_extents(chunks),
    ]
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
    chunks: Sequence[torch.nn.Module], parameters: Sequence[tuple[str, torch.nn.Parameter]], elsewhere: Collection[int]
) -> Iterator[Extent]:
    """Buffers, and what of the parameters is this rank's to keep. elsewhere: by id, parameters that others step."""
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
        if shares := [share for bucket, share in buckets if whole.shared_with(bucket)]:
            yield from (part for share in shares if (part := whole.shared_with(share)))
        elif id(parameter) not in elsewhere:
            yield whole
    for chunk in unwrap_model(list(chunks)):
        for name, buffer in chunk.named_buffers():
            if not is_constant(name):
                yield _extent(buffer, f"buffer {name}")


def _stepped_elsewhere(optimizer: MegatronOptimizer) -> frozenset[int]:
    """By id, the whole parameters that another data-parallel rank steps, as a layer-wise chain has shared them out."""
    found, chains = set[int](), [optimizer]
    while chains:
        chain = chains.pop()
        chains += getattr(chain, "chained_optimizers", ())
        for lists, group in (("dp_cp_params_list", "dp_cp"), ("expt_dp_params_list", "expt_dp")):
            for rank, parameters in enumerate(getattr(chain, lists, None) or ()):
                found |= {id(one) for one in parameters if rank != getattr(chain, group).rank()}
    return frozenset(found)


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
