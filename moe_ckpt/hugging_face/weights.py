"""How a tensor of Megatron and those of Hugging Face that hold the same numbers are made from each other."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

Shape = tuple[int, ...]


class Form(Protocol):
    """How one tensor of Megatron is cut into several, and put together from them: numbers move, none changes."""

    def split(self, joined: torch.Tensor, shapes: Sequence[Shape]) -> list[torch.Tensor]:
        """The tensors of Hugging Face.

        Args:
            joined: Megatron's tensor.
            shapes: Shapes of the tensors to cut it into, in order.
        """

    def join(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """Megatron's tensor."""

    def fits(self, joined: Shape, shapes: Sequence[Shape]) -> bool:
        """Whether a tensor can be cut so.

        Args:
            joined: Shape of Megatron's tensor.
            shapes: Shapes of the tensors to cut it into, in order.
        """


@dataclass(frozen=True)
class Rows:
    """Parts follow each other along the first axis: gate and gated in Megatron's `linear_fc1`, or one part."""

    def split(self, joined: torch.Tensor, shapes: Sequence[Shape]) -> list[torch.Tensor]:
        """As `Form.split`."""
        return list(joined.split([shape[0] for shape in shapes]))

    def join(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        return parts[0] if len(parts) == 1 else torch.cat(list(parts))

    def fits(self, joined: Shape, shapes: Sequence[Shape]) -> bool:
        """As `Form.fits`."""
        return joined == (sum(shape[0] for shape in shapes), *shapes[0][1:])


@dataclass(frozen=True)
class GroupedHeads:
    """Queries, keys and values: Megatron keeps those of one group of heads together, Hugging Face has three tensors.

    groups: Of heads that share their keys and values; as many as heads without grouped-query attention.
    """

    groups: int

    def split(self, joined: torch.Tensor, shapes: Sequence[Shape]) -> list[torch.Tensor]:
        """As `Form.split`."""
        sizes = [shape[0] // self.groups for shape in shapes]
        grouped = joined.reshape(self.groups, sum(sizes), *joined.shape[1:])
        return [part.reshape(shape) for part, shape in zip(grouped.split(sizes, dim=1), shapes, strict=True)]

    def join(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        width = parts[0].shape[1:]  # none for a bias
        return torch.cat([part.reshape(self.groups, -1, *width) for part in parts], dim=1).reshape(-1, *width)

    def fits(self, joined: Shape, shapes: Sequence[Shape]) -> bool:
        """As `Form.fits`."""
        return joined == (sum(shape[0] for shape in shapes), *shapes[0][1:])


@dataclass(frozen=True)
class Vocabulary:
    """One row for each token; Megatron's tensor may have more rows, which pad the vocabulary and mean nothing."""

    def split(self, joined: torch.Tensor, shapes: Sequence[Shape]) -> list[torch.Tensor]:
        """As `Form.split`; Megatron's padding is left out."""
        return [joined[: shapes[0][0]]]

    def join(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        return parts[0]

    def fits(self, joined: Shape, shapes: Sequence[Shape]) -> bool:
        """As `Form.fits`; Megatron's tensor may have more rows, as padding."""
        return joined[0] >= shapes[0][0] and joined[1:] == shapes[0][1:]


@dataclass(frozen=True)
class ExpertsOfLayer:
    """All experts of a layer are one tensor, whose matrices are transposed to Megatron's; or one of their biases.

    gated: Rows of gate and up projection alternate; in Megatron's `linear_fc1` one follows the other.
    """

    gated: bool = False

    def split(self, joined: torch.Tensor, shapes: Sequence[Shape]) -> list[torch.Tensor]:
        """As `Form.split`; there is one."""
        if self.gated:
            joined = joined.unflatten(1, (2, -1)).transpose(1, 2).flatten(1, 2)
        return [joined.transpose(1, -1)]

    def join(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        joined = parts[0].transpose(1, -1)
        if self.gated:
            joined = joined.unflatten(1, (-1, 2)).transpose(1, 2).flatten(1, 2)
        return joined.contiguous()

    def fits(self, joined: Shape, shapes: Sequence[Shape]) -> bool:
        """As `Form.fits`."""
        return joined == (shapes[0][0], *reversed(shapes[0][1:]))


@dataclass(frozen=True)
class Weight:
    """One tensor of Megatron, and the tensors of Hugging Face with the same numbers.

    names: Of Megatron: below `decoder.layers` for one with a `layer`, else in full. Several where modules of
        Megatron-Core and of Transformer Engine save the same tensor under different names.
    parts: Names and shapes of Hugging Face.
    ahead: Number, from 0, of the layer that predicts further tokens (`--mtp-num-layers`) that has it; names are below
        `mtp.layers.N` then.
    is_copy: Hugging Face has the same numbers twice: another weight has them too, and a folder may lack these.
    """

    names: tuple[str, ...]
    parts: tuple[tuple[str, Shape], ...]
    form: Form = field(default_factory=Rows)
    layer: int | None = None
    expert: int | None = None
    ahead: int | None = None
    is_copy: bool = False

    @property
    def shapes(self) -> list[Shape]:
        """Of the tensors of Hugging Face."""
        return [shape for _, shape in self.parts]

    def places(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Where a checkpoint may have it: name of a tensor, and the indices along its first axes.

        Megatron stacks tensors of equal layers, and of experts, unless it is told to give each its own.
        """
        for name in self.names:
            layers: list[tuple[str, tuple[int, ...]]] = [("", ())]
            if self.ahead is not None:
                layers = [(f"mtp.layers.{self.ahead}.", ())]  # never stacked
            elif self.layer is not None:
                layers = [("decoder.layers.", (self.layer,)), (f"decoder.layers.{self.layer}.", ())]
            for prefix, index in layers:
                if self.expert is None:
                    yield prefix + name, index
                else:
                    yield prefix + name, (*index, self.expert)
                    yield prefix + name.replace(".experts.experts.", f".experts.experts.{self.expert}."), index
