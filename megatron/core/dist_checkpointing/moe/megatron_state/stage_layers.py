"""The layers of a model that is no plain GPT, numbered over the chunks of all pipeline stages.

Each stage says which layers its chunks have, and what is around them. What follows from that is the same on all stages,
and, where layers keep their order, under any number of stages:

    stack      layers whose paths differ in one index: `decoder.layers.3`. A stack continues from chunk to chunk, where
               its indices begin at 0 again
    number     stacks one after the other, in the order in which chunks show them, and in each the order of its layers
    around     the embedding and the head by a table of names of the language model, else by place: what comes before
               all layers is the embedding, what comes after all of them the head, and the rest belongs to the layer
               before it on its chunk, or to the first layer there
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from ..errors import UsageError
from ..types import OperatorId, OperatorKind, expert
from .operators import OUTPUT_WEIGHTS, POSITION_EMBEDDINGS, WORD_EMBEDDINGS, GlobalName

EMBEDDING = OperatorId(-1, OperatorKind.EMBEDDING)
_KNOWN = {
    "embedding.": OperatorKind.EMBEDDING,
    "decoder.final_layernorm.": OperatorKind.HEAD,
    "decoder.final_norm.": OperatorKind.HEAD,
    "output_layer.": OperatorKind.HEAD,
}
_IN_STACK = re.compile(r"(?P<stack>(?:.*\.)?)(?P<index>\d+)(?P<rest>(?:\.\D[^.]*)*)")


class ChunkLayer(NamedTuple):
    """A layer as its chunk has it: its path, that of the MoE layer in it, and whether it has more than that.

    `experts` is their number in the whole model, 0 without an MoE layer.
    """

    path: str
    moe: str = ""
    experts: int = 0
    more: bool = True


class ChunkParts(NamedTuple):
    """What the other stages have to know of a chunk.

    Attributes:
        layers: In the order in which they are registered.
        around: Parameters and buffers outside of them, and how many layers come before each.
        language: The path of the language model in it, with a dot; empty where that is the chunk.
        tied: Whether its output layer uses the weights of the word embeddings.
    """

    layers: tuple[ChunkLayer, ...]
    around: dict[str, int]
    language: str = ""
    tied: bool = False


class TreeLayer(NamedTuple):
    """A layer of this chunk, its number and its path in the whole model."""

    of: ChunkLayer
    number: int
    path: str


class StageLayers:
    """The layers of all chunks.

    Args:
        chunks: Of all stages, in the order in which a microbatch passes them.

    Raises:
        UsageError: Layers or parameters of two stages cannot be told apart.

    Attributes:
        layers: Of each chunk.
        operators: Of the whole model, ascending.
    """

    def __init__(self, chunks: Sequence[ChunkParts]) -> None:
        self._chunks = tuple(chunks)
        self.layers = tuple(_numbered(chunks))
        self._last = sum(map(len, self.layers))
        experts = {layer.experts: layer.path for chunk in chunks for layer in chunk.layers if layer.moe}
        if len(experts) > 1:
            counts = ", ".join(f"{path} {count}" for count, path in experts.items())
            raise UsageError(f"MoE layers have different numbers of experts ({counts}): give all of them as many")
        self.experts = max(experts, default=0)
        found = set(self._of_layers())
        seen: dict[str, int] = {}
        for number, chunk in enumerate(chunks):
            for name in chunk.around:
                of = self.around(name, number)
                found.add(of.operator)
                if seen.setdefault(of.name, number) != number and not of.name.endswith(WORD_EMBEDDINGS):
                    raise UsageError(
                        f"{of.name} is on several pipeline stages: only word embeddings are known to be alike there"
                    )
        self.operators = tuple(sorted(found))

    def around(self, name: str, chunk: int) -> GlobalName:
        """The operator and the global name of a parameter or buffer outside of layers.

        Args:
            name: What the chunk calls it.
            chunk: Its number.
        """
        parts, layers = self._chunks[chunk], self.layers[chunk]
        short = name.removeprefix(parts.language) if name.startswith(parts.language) else ""
        if chunk and short == POSITION_EMBEDDINGS:  # a copy beside layers that predict further tokens, trained apart
            return GlobalName(EMBEDDING, f"{parts.language}mtp.{short}")
        copies = f"{parts.language}{WORD_EMBEDDINGS}" in parts.around
        if chunk and short == OUTPUT_WEIGHTS and parts.tied and not copies:
            return GlobalName(EMBEDDING, f"{parts.language}{WORD_EMBEDDINGS}")
        known = next((kind for prefix, kind in _KNOWN.items() if short.startswith(prefix)), None)
        before = parts.around[name]
        is_first = not before and not any(map(len, self.layers[:chunk]))
        is_last = before == len(layers) and not any(map(len, self.layers[chunk + 1 :]))
        if known is OperatorKind.EMBEDDING or (known is None and is_first):
            return GlobalName(EMBEDDING, name)
        if known is OperatorKind.HEAD or is_last or not layers:
            return GlobalName(OperatorId(self._last, OperatorKind.HEAD), name)
        return GlobalName(OperatorId(layers[max(before - 1, 0)].number, OperatorKind.NON_EXPERT), name)

    def _of_layers(self) -> Iterator[OperatorId]:
        for layer in (layer for chunk in self.layers for layer in chunk):
            if layer.of.more:
                yield OperatorId(layer.number, OperatorKind.NON_EXPERT)
            if layer.of.moe:
                yield OperatorId(layer.number, OperatorKind.ROUTER)
                # Experts that other ranks have are in the tree of none of this rank's.
                yield from (expert(layer.number, index) for index in range(layer.of.experts))


def _numbered(chunks: Sequence[ChunkParts]) -> Iterator[tuple[TreeLayer, ...]]:
    """Of each chunk."""
    paths = list(_paths(chunks))
    sizes = Counter(stack for chunk in paths for stack, _ in chunk)  # in the order of their first layers
    next_number, first = dict[str, int](), 0
    for stack, size in sizes.items():
        next_number[stack], first = first, first + size
    for chunk, found in zip(chunks, paths, strict=True):
        layers = []
        for layer, (stack, path) in zip(chunk.layers, found, strict=True):
            layers.append(TreeLayer(layer, next_number[stack], path))
            next_number[stack] += 1
        yield tuple(layers)


def _paths(chunks: Sequence[ChunkParts]) -> Iterator[list[tuple[str, str]]]:
    """Of each layer of each chunk: its stack, and its path in the whole model."""
    counts, single = Counter[str](), dict[str, int]()
    for number, chunk in enumerate(chunks):
        indices: dict[str, set[str]] = {}
        found = []
        for layer in chunk.layers:
            parts = _IN_STACK.fullmatch(layer.path)
            if parts is None:
                if single.setdefault(layer.path, number) != number:
                    raise UsageError(f"layer {layer.path} is on several pipeline stages and has no number in its path")
                found.append((layer.path, layer.path))
                continue
            stack, index = parts["stack"], parts["index"]
            found.append((stack, f"{stack}{int(index) + counts[stack]}{parts['rest']}"))
            indices.setdefault(stack, set()).add(index)
        counts.update({stack: len(of_stack) for stack, of_stack in indices.items()})
        yield found
