"""A partial iteration together with the older ones that hold its other experts: found, checked, put together."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch

from megatron.core.dist_checkpointing.moe.errors import UnreadableCheckpoint, UsageError
from megatron.core.dist_checkpointing.moe.types import OperatorId, expert

from .chain import MANIFEST, Chain, ExpertEntry, expert_entry, object_entry, read_chain, says_partial
from .dcp_metadata import Chunk
from .dense import DenseCheckpoint, open_dense, resolve_iteration
from .names import REPLACED, published

_OBJECT = re.compile(r"(?P<key>.+)/shard_(?P<offsets>[\d.]+)_[\d.]+")


@dataclass(frozen=True)
class ExpertTensor:
    """A tensor of one expert: shape and pieces without the axes that count layers and experts.

    stored: its pieces as the index has them, with the same places in the files.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    chunks: tuple[Chunk, ...]
    stored: tuple[Chunk, ...] = field(repr=False)


@dataclass(frozen=True)
class Experts:
    """What one checkpoint holds of single experts, by common name: tensors, and other objects by their full name."""

    tensors: Mapping[OperatorId, Mapping[str, ExpertTensor]]
    objects: Mapping[OperatorId, Mapping[str, str]]
    names: frozenset[str]


@dataclass(frozen=True)
class MergedCheckpoint:
    """An iteration that can be loaded, whole: `parts` has each iteration that its chain names, opened and checked."""

    chain: Chain
    parts: Mapping[int, DenseCheckpoint]
    experts: Mapping[int, Experts] = field(repr=False)

    @property
    def newest(self) -> DenseCheckpoint:
        """The one that holds all that is no expert."""
        return self.parts[self.chain.iteration]

    def tensors_of(self, operator: OperatorId) -> Iterator[tuple[str, ExpertTensor, DenseCheckpoint]]:
        """Tensors of an expert by their common names, each with the iteration that it is loaded from."""
        for iteration in self._sources(operator):
            for common, tensor in self.experts[iteration].tensors.get(operator, {}).items():
                if self.chain.source(operator, common) == iteration:
                    yield common, tensor, self.parts[iteration]

    def objects_of(self, operator: OperatorId) -> Iterator[tuple[str, str, DenseCheckpoint]]:
        """Other objects of an expert, likewise: common name, full name, iteration."""
        for iteration in self._sources(operator):
            for common, name in self.experts[iteration].objects.get(operator, {}).items():
                if self.chain.source(operator, common) == iteration:
                    yield common, name, self.parts[iteration]

    def _sources(self, operator: OperatorId) -> list[int]:
        return sorted({self.chain.holder(operator), self.chain.iteration})

    def stacked_pieces(self, operator: OperatorId, tensor: ExpertTensor) -> Iterator[tuple[Chunk, Chunk]]:
        """The pieces of an expert's tensor where they lie in the stack of all experts, each with itself as stored.

        Args:
            operator: The expert.
            tensor: Its tensor, without the axes that count layers and experts.
        """
        lead = self.chain.leading_index(operator)
        for own, stored in zip(tensor.chunks, tensor.stored, strict=True):
            yield Chunk((*lead, *own.offsets), (*(1 for _ in lead), *own.sizes), stored.extent), stored


def open_merged(directory: Path | str) -> MergedCheckpoint | None:
    """Opens all iterations that one is loaded from, and checks that together they hold every expert.

    Checked are: the files of every iteration that the chain names, that each is the save that was meant, and that each
    expert has there what all experts of its layer have.

    Args:
        directory: an iteration, or a `--save` directory, whose tracker then names it.

    Returns:
        The merged checkpoint; None for an iteration without a chain, which needs only itself.

    Raises:
        UnreadableCheckpoint: names what is missing and who needs it.
    """
    directory = published(resolve_iteration(Path(directory)))
    chain = read_chain(directory)
    if chain is None:
        if says_partial(directory):
            raise UnreadableCheckpoint(
                f"{directory} was saved with some of the experts, but its {MANIFEST}, which says where the others are,"
                " is missing; take another iteration"
            )
        return None
    name = f"iter_{chain.iteration:07d}"
    if directory.name not in (name, f".{name}{REPLACED}"):
        if chain.is_complete and not says_partial(directory):
            return None  # needs no other, under whatever name it was published
        raise UnreadableCheckpoint(
            f"{directory / MANIFEST} is of iteration {chain.iteration}, not of this folder; take another iteration"
        )
    parts = {iteration: _open_part(directory, chain, iteration) for iteration in sorted(chain.iterations)}
    experts = {iteration: experts_of(part) for iteration, part in parts.items()}
    merged = MergedCheckpoint(chain, parts, experts)
    _check_experts(merged)
    return merged


def open_alone(directory: Path) -> DenseCheckpoint:
    """A checkpoint that holds all of its experts itself.

    Args:
        directory: as of `open_merged`.

    Raises:
        UsageError: It holds some of them. UnreadableCheckpoint: As `open_merged` and `open_dense`.
    """
    merged = open_merged(directory)
    if merged is not None and not merged.chain.is_complete:
        raise UsageError(f"{directory} has some of the experts; convert it --to dense first, and take what that makes")
    return open_dense(directory)


def _open_part(directory: Path, chain: Chain, iteration: int) -> DenseCheckpoint:
    folder = directory.parent / f"iter_{iteration:07d}"
    needed = f"{directory.name} needs {folder}, which holds the newest copies of {_named(chain.held_by(iteration))}"
    if iteration == chain.iteration:
        return open_dense(directory)
    if not folder.is_dir():
        raise UnreadableCheckpoint(f"{needed}, but it is missing; put it back or take another iteration")
    try:
        found = read_chain(folder)
        if found is None or found.marks.get(iteration) != chain.marks[iteration]:
            raise UnreadableCheckpoint("it was saved again, by another run or after going back")
        return open_dense(folder)
    except UnreadableCheckpoint as error:
        raise UnreadableCheckpoint(f"{needed}, but: {error}") from error


def _named(experts: tuple[OperatorId, ...]) -> str:
    by_layer: dict[int, list[str]] = {}
    for operator in experts:
        by_layer.setdefault(operator.layer, []).append(str(operator.expert))
    return "; ".join(f"layer {layer} experts {', '.join(indices)}" for layer, indices in by_layer.items())


def _check_experts(merged: MergedCheckpoint) -> None:
    chain = merged.chain
    for layer, row in chain.holders.items():
        operators = [expert(layer, index) for index in range(len(row))]
        fullest = max(operators, key=lambda operator: len(_names(merged, operator)))
        for operator in operators:
            if not _names(merged, operator) or _names(merged, operator) != _names(merged, fullest):
                folder = merged.parts[chain.holder(operator)].directory
                raise UnreadableCheckpoint(
                    f"{folder} does not hold the same state of {operator} as is there of {fullest}; take another"
                    " iteration"
                )
    there = merged.experts[chain.iteration].tensors
    unnamed = [operator for operator in there if operator.expert >= len(chain.holders.get(operator.layer, ()))]
    if unnamed:
        raise UnreadableCheckpoint(
            f"{merged.newest.directory / MANIFEST} does not name {min(unnamed)}, which is there; take another iteration"
        )


def _names(merged: MergedCheckpoint, operator: OperatorId) -> dict[str, object]:
    """What there is of an expert where it is loaded from: shape and dtype of each tensor, and names of objects."""
    tensors = {name: (tensor.shape, tensor.dtype) for name, tensor, _ in merged.tensors_of(operator)}
    return tensors | {name: None for name, _, _ in merged.objects_of(operator)}


def experts_of(checkpoint: DenseCheckpoint) -> Experts:
    """What `checkpoint` holds of single experts. Raises UnreadableCheckpoint for a piece that several experts share."""
    tensors: dict[OperatorId, dict[str, ExpertTensor]] = {}
    objects: dict[OperatorId, dict[str, str]] = {}
    names = set()
    for name, info in checkpoint.tensors.items():
        pieces: dict[ExpertEntry, list[Chunk]] = {}
        for chunk in info.chunks:
            entry = expert_entry(name, chunk.offsets)
            if entry is not None:
                if any(size != 1 for size in chunk.sizes[: entry.axes]):
                    raise UnreadableCheckpoint(
                        f"{name} in {checkpoint.directory} has a piece with several experts, {chunk.sizes} at"
                        f" {chunk.offsets}: single experts cannot be taken from it"
                    )
                pieces.setdefault(entry, []).append(chunk)
        for entry, chunks in pieces.items():
            names.add(name)
            own = tuple(
                Chunk(entry.within_expert(chunk.offsets), entry.within_expert(chunk.sizes), chunk.extent)
                for chunk in chunks
            )
            found = ExpertTensor(entry.within_expert(info.shape), info.dtype, own, tuple(chunks))
            tensors.setdefault(entry.operator, {})[entry.common] = found
    for name, entry in _object_entries(checkpoint):
        names.add(name)
        objects.setdefault(entry.operator, {})[entry.common] = name
    return Experts(tensors, objects, frozenset(names))


def _object_entries(checkpoint: DenseCheckpoint) -> Iterator[tuple[str, ExpertEntry]]:
    for name in checkpoint.objects:
        match = _OBJECT.fullmatch(name)
        if match is None:
            continue
        entry = object_entry(match["key"], tuple(map(int, match["offsets"].split("."))))
        if entry is not None:
            yield name, entry
