"""How tensor parallelism cuts each tensor of the model, for those who put it together from another layout's shares."""

from __future__ import annotations

import bisect
import itertools
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.utils import unwrap_model

from ..errors import MoECheckpointError, UsageError
from ..policy.resharding import Grid
from ..types import Topology
from .megatron import names_of_parameters
from .operators import GlobalName

_GATED = ("mlp.linear_fc1.weight", "mlp.linear_fc1.bias")
# Of Mamba and gated delta-net: a rank has its part of queries or gates, then of keys, and so on, of unequal sizes.
_FUSED = re.compile(r".*\.(?:in_proj|conv1d)[._](?:weight|bias)")
_GATED_SHARED = ("mlp.shared_experts.linear_fc1.weight", "mlp.shared_experts.linear_fc1.bias")


def tensor_grids(chunks: Sequence[torch.nn.Module], topology: Topology) -> Mapping[str, Grid]:
    """Of every parameter of which this rank has a share, the whole of it as a matrix; buffers are missing.

    Checked against Megatron-Core 0.19.2: column-parallel layers are cut along their first dimension, row-parallel ones
    along the second; a gated first layer keeps on each rank its part of the gates before its part of the values.

    Args:
        chunks: The model chunks of this rank.
        topology: The rank layout.

    Returns:
        Matrices by the global name of the tensor.

    Raises:
        UsageError: A tensor is cut in another way.
    """
    is_gated = bool(unwrap_model(list(chunks))[0].config.gated_linear_unit)
    grids = {}
    for parameter, of in names_of_parameters(chunks, topology).items():
        axis = _axis(parameter, of)
        if axis is None:
            grids[of.name] = Grid(1, parameter.numel())
        else:
            ranks = topology.expert_tp if of.operator.is_expert else topology.tp
            grids[of.name] = _grid(of.name, tuple(parameter.shape), axis, ranks, is_gated and _holds_gates(of))
    return grids


def random_draws(config: TransformerConfig) -> str:
    """What of the model draws random numbers while it is trained, by the names of settings; empty if nothing does."""
    names = ("hidden_dropout", "attention_dropout", "moe_input_jitter_eps", "moe_router_force_load_balancing")
    return ", ".join(f"{name} {getattr(config, name)}" for name in names if getattr(config, name, None))


def _axis(parameter: torch.nn.Parameter, of: GlobalName) -> int | None:
    """The dimension that tensor ranks share; None where each of them has the whole."""
    if of.operator.is_expert:  # Transformer Engine's experts lack the attributes
        return 0 if "linear_fc1." in of.name else 1 if of.name.endswith("linear_fc2.weight") else None
    if not getattr(parameter, "tensor_model_parallel", False):
        return None
    axis: int = getattr(parameter, "partition_dim", 0)
    return axis


def _holds_gates(of: GlobalName) -> bool:
    return of.name.endswith((*_GATED, *_GATED_SHARED)) or (of.operator.is_expert and "linear_fc1." in of.name)


def _grid(name: str, shape: tuple[int, ...], axis: int, ranks: int, is_gated: bool) -> Grid:
    numel = ranks
    for size in shape:
        numel *= size
    if _FUSED.fullmatch(name):
        return Grid(1, numel, fused=True)
    if axis == 0:
        return Grid(2, numel // 2) if is_gated else Grid(1, numel)
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
