"""Dense checkpoints with some of the experts: which iteration has the newest copy of each, and how tensors are named.

A partial iteration has everything but experts whose newest copy lies in an older one, or but the weights or the moments
of those. Its manifest names the iteration that holds it, for every expert of every MoE layer, so nothing is left to be
guessed. No torch.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import msgspec

from megatron.core.dist_checkpointing.moe.errors import UsageError
from megatron.core.dist_checkpointing.moe.policy.partial import BOTH, OPTIMIZER, PEC_SCOPES, WEIGHTS
from megatron.core.dist_checkpointing.moe.storage.manifest import framed, unframed
from megatron.core.dist_checkpointing.moe.types import OperatorId, expert

from .components import MASTER, MODEL, TENSOR_RULES, component_of
from .framed import decoded
from .names import FORMAT, INFORMING_BYTES, read_beside, read_if_there

MANIFEST = "moe_ckpt_chain.json"
FORMAT_VERSION = 2
_KEY = "chain"
# What `metadata.json` says of a partial iteration. Megatron-Core knows version 1 of `torch_dist` and refuses any other
# before it reads a tensor, whatever it may do about missing keys.
PARTIAL_BACKEND_VERSION = 100

_EXPERT = re.compile(
    r"(?P<stem>(?:.+\.)?decoder\.layers)\.(?:(?P<layer>\d+)\.)?mlp\.experts\.experts\.(?:(?P<expert>\d+)\.)?(?P<rest>.+)"
)
_MARK = re.compile(r"[0-9a-f]{16}")
_LEFT_OUT = {WEIGHTS.name: "weights", OPTIMIZER.name: "moments", BOTH.name: "FULL"}


@dataclass(frozen=True)
class Chain:
    """What one iteration holds, and where the newest copies of all other experts are.

    iteration: the one that this manifest lies in.
    holders: by MoE layer (global number), then by expert, the iteration with its newest copy.
    marks: by iteration, for this one and each that `holders` names: 16 random hexadecimal digits, made at its save.
        They tell an iteration from another that was saved later under the same number.
    position: where the rotation of experts stands after this iteration, see `policy.partial.next_position`.
    stacked_layers: length of the layer axis of the tensors of experts, None where each layer has tensors of its own.
    content: what is saved of the state and for which layout; iterations with another content are no continuation.
    scope: what this iteration leaves out of the other experts, a name of `PEC_SCOPES`. The rest of them it holds, and
        the iteration with their newest copy holds all of their state.
    unsaved: by MoE layer and expert, tokens that were routed to it since its newest copy; empty where none are counted.
    ages: likewise, checkpoints since its newest copy.
    Raises UsageError for holders that are not named in `marks`, or newer than `iteration`, for layers that differ in
    their number of experts, for an unknown scope, and for tokens or ages of other experts, or below 0.
    """

    iteration: int
    holders: Mapping[int, tuple[int, ...]]
    marks: Mapping[int, str]
    position: int
    stacked_layers: int | None
    content: str
    scope: str = BOTH.name
    unsaved: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    ages: Mapping[int, tuple[int, ...]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if set(self.marks) != self.iterations:
            raise UsageError(f"marks are of iterations {sorted(self.marks)}, but must be of {sorted(self.iterations)}")
        if max(self.iterations) > self.iteration or min(self.iterations) < 0:
            raise UsageError(f"holders name {sorted(self.iterations)}, but must be from 0 to {self.iteration}")
        if len({len(row) for row in self.holders.values()}) != 1:
            raise UsageError("holders must have at least one layer, and equally many experts in each")
        if not all(_MARK.fullmatch(mark) for mark in self.marks.values()):
            raise UsageError("marks must be 16 hexadecimal digits each")
        if self.scope not in PEC_SCOPES:
            raise UsageError(f"scope is {self.scope!r}, but must be one of {', '.join(PEC_SCOPES)}")
        for name, rows in (("unsaved", self.unsaved), ("ages", self.ages)):
            sizes = {layer: len(row) for layer, row in self.holders.items()} if self.unsaved else {}
            if {layer: len(row) for layer, row in rows.items()} != sizes or any(min(row) < 0 for row in rows.values()):
                raise UsageError(f"{name} must have a number of at least 0 for each expert that holders name")

    @cached_property
    def iterations(self) -> frozenset[int]:
        """Those that are needed to load this one, itself among them."""
        return frozenset((self.iteration, *(holder for row in self.holders.values() for holder in row)))

    @property
    def num_experts(self) -> int:
        """Experts of each MoE layer."""
        return len(next(iter(self.holders.values())))

    @property
    def is_complete(self) -> bool:
        """Whether this iteration holds every expert itself."""
        return self.iterations == {self.iteration}

    def holder(self, operator: OperatorId) -> int:
        """The iteration with the newest copy of an expert. Raises KeyError for an expert that is not named."""
        row = self.holders.get(operator.layer, ())
        if not 0 <= operator.expert < len(row):
            raise KeyError(f"{operator} is not named in {MANIFEST} of iteration {self.iteration}")
        holder: int = row[operator.expert]
        return holder

    def source(self, operator: OperatorId, common: str) -> int:
        """The iteration from which an entry of an expert is loaded. Raises KeyError for an expert that is not named.

        Args:
            operator: The expert.
            common: Common name of the entry, see `ExpertEntry`.
        """
        return self.holder(operator) if self._leaves_out(common) else self.iteration

    def _leaves_out(self, common: str) -> bool:
        if self.scope == BOTH.name:
            return True
        is_weight = component_of(common, TENSOR_RULES) in (MODEL, MASTER)
        return is_weight == (self.scope == WEIGHTS.name)

    def left_out(self, operator: OperatorId) -> str:
        """What of an expert lies in the iteration of its newest copy: FULL, weights or moments."""
        return _LEFT_OUT[BOTH.name if self.holder(operator) == self.iteration else self.scope]

    @property
    def leading_axes(self) -> tuple[int, ...]:
        """Sizes of the axes that count layers and experts where Megatron-Core stacks them."""
        return (self.num_experts,) if self.stacked_layers is None else (self.stacked_layers, self.num_experts)

    def leading_index(self, operator: OperatorId) -> tuple[int, ...]:
        """Where an expert is on these axes."""
        return (operator.expert,) if self.stacked_layers is None else (operator.layer, operator.expert)

    @cached_property
    def experts(self) -> tuple[OperatorId, ...]:
        """All that are named, by layer."""
        return tuple(expert(layer, index) for layer in sorted(self.holders) for index in range(self.num_experts))

    def held_by(self, iteration: int) -> tuple[OperatorId, ...]:
        """Experts whose newest copy is in `iteration`."""
        return tuple(operator for operator in self.experts if self.holder(operator) == iteration)

    def followed_by(self, iteration: int, mark: str, selected: Iterable[OperatorId], position: int) -> Chain:
        """The chain of a newer iteration; older iterations that nothing needs are dropped.

        No tokens of selected experts are unsaved then; tokens of the others are those of this chain.

        Args:
            iteration: The newer iteration.
            mark: Its mark: 16 random hexadecimal digits.
            selected: Experts that the newer iteration holds.
            position: Where the rotation of experts stands after it.
        """
        chosen = frozenset(selected)

        def updated(rows: Mapping[int, tuple[int, ...]], saved: int, step: int) -> dict[int, tuple[int, ...]]:
            return {
                layer: tuple(saved if expert(layer, at) in chosen else old + step for at, old in enumerate(row))
                for layer, row in rows.items()
            }

        holders = updated(self.holders, iteration, 0)
        needed = {iteration, *(holder for row in holders.values() for holder in row)}
        known_marks = {**self.marks, iteration: mark}
        marks = {number: known for number, known in known_marks.items() if number in needed}
        unsaved, ages = updated(self.unsaved, 0, 0), updated(self.ages, 0, 1)
        return replace(
            self, iteration=iteration, holders=holders, marks=marks, position=position, unsaved=unsaved, ages=ages
        )

    def staleness(self) -> tuple[str, ...]:
        """One line for each MoE layer of which not all experts are of this iteration."""
        return tuple(
            self._staleness_of(layer) for layer, row in sorted(self.holders.items()) if set(row) != {self.iteration}
        )

    def _staleness_of(self, layer: int) -> str:
        row = self.holders[layer]
        parts = []
        for holder in sorted(set(row), reverse=True):
            experts = ", ".join(str(index) for index, its_holder in enumerate(row) if its_holder == holder)
            behind = f", {self.iteration - holder} behind" if holder != self.iteration else ""
            parts.append(f"{experts} of iteration {holder}{behind}")
        of_experts = "experts" if self.scope == BOTH.name else f"{_LEFT_OUT[self.scope]} of experts"
        lost = sum(self.unsaved.get(layer, ()))
        if lost:
            parts.append(f"{lost} routed tokens' updates lost")
        return f"layer {layer}: {of_experts} {'; '.join(parts)}"


def encode(chain: Chain) -> bytes:
    """The manifest file's content; equal chains give equal bytes.

    Where whole experts are left out and no tokens counted it is of format 1, which older versions read.
    """
    of_format_2 = {}
    if chain.scope != BOTH.name or chain.unsaved:
        rows = {"unsaved": chain.unsaved, "ages": chain.ages}
        of_format_2 = {"scope": chain.scope, **{name: _by_layer(found) for name, found in rows.items()}}
    body = json.dumps(
        {
            "format": 2 if of_format_2 else 1,
            "iteration": chain.iteration,
            "position": chain.position,
            "stacked_layers": chain.stacked_layers,
            "content": chain.content,
            "marks": {str(iteration): mark for iteration, mark in sorted(chain.marks.items())},
            "holders": _by_layer(chain.holders),
            **of_format_2,
        },
        separators=(",", ":"),
    ).encode("ascii")
    return framed(_KEY, body)


def _by_layer(rows: Mapping[int, Sequence[int]]) -> dict[str, list[int]]:
    return {str(layer): list(row) for layer, row in sorted(rows.items())}


def decode(content: bytes, name: str) -> Chain:
    """The chain in a file's content.

    Raises UnreadableCheckpoint for any deviation: a changed byte, an expert without an iteration; NewerFormat.

    Args:
        content: Bytes of the whole file.
        name: Name of the file in errors.
    """
    # JSON has no numbers as keys: str_keys reads layers and iterations from strings.
    make: Callable[[dict[str, Any]], Chain] = partial(msgspec.convert, type=Chain, str_keys=True)
    return decoded(content, name, body=unframed(_KEY, content), newest=FORMAT_VERSION, make=make, encode=encode)


def read_chain(directory: Path) -> Chain | None:
    """The manifest of an iteration, or None if it has none, as iterations have that were saved whole.

    Raises UnreadableCheckpoint for one that is damaged, NewerFormat for one of a later version.
    """
    content = read_if_there(directory / MANIFEST)
    return None if content is None else decode(content, str(directory / MANIFEST))


def says_partial(directory: Path) -> bool:
    """Whether the commit marker of an iteration says that it was saved with some of the experts."""
    try:
        marker = json.loads(read_beside(directory / FORMAT, INFORMING_BYTES))
    except (OSError, ValueError, RecursionError, MemoryError):
        return False
    return isinstance(marker, dict) and marker.get("sharded_backend_version") == PARTIAL_BACKEND_VERSION


@dataclass(frozen=True)
class ExpertEntry:
    """An entry of a checkpoint that belongs to one expert.

    common: the name without layer and expert, the same for all experts.
    axes: how many leading axes of the entry's shape count layers and experts: 0 where the name tells both.
    """

    operator: OperatorId
    common: str
    axes: int

    @property
    def own_name(self) -> str:
        """The name in a partial iteration, where each expert has entries of its own."""
        before, after = self.common.split(".mlp.experts.experts.")
        return f"{before}.{self.operator.layer}.mlp.experts.experts.{self.operator.expert}.{after}"

    def within_expert(self, along_axes: Sequence[int]) -> tuple[int, ...]:
        """A shape, sizes or offsets of the entry, without the axes that count layers and experts."""
        return tuple(along_axes[self.axes :])


def expert_entry(name: str, offsets: Sequence[int]) -> ExpertEntry | None:
    """The expert of an entry; None for an entry that belongs to no single expert.

    Megatron-Core stacks experts, and mostly layers too, so that the leading offsets say which piece is whose; a partial
    iteration names both.

    Args:
        name: Name of a tensor or sharded object in the index.
        offsets: Offsets of a piece of the tensor, or of the sharded object.
    """
    match = _EXPERT.fullmatch(name)
    if match is None:
        return None
    common = f"{match['stem']}.mlp.experts.experts.{match['rest']}"
    if match["expert"] is not None:
        return (
            ExpertEntry(expert(int(match["layer"] or 0), int(match["expert"])), common, 0) if match["layer"] else None
        )
    layers = () if match["layer"] else offsets[:1]
    experts = offsets[len(layers) : len(layers) + 1]
    if not experts:
        return None
    layer = int(match["layer"]) if match["layer"] else layers[0]
    return ExpertEntry(expert(layer, experts[0]), common, len(layers) + 1)


def object_entry(key: str, offsets: Sequence[int]) -> ExpertEntry | None:
    """As `expert_entry`, of a sharded object, which cannot be cut: None also if other axes than those shard it."""
    entry = expert_entry(key, offsets)
    return entry if entry is not None and entry.axes in (0, len(offsets)) else None


def stacked_name(common: str, layer: int, stacked_layers: int | None) -> str:
    """The name under which Megatron-Core stacks the experts.

    Args:
        common: Common name of the entry, see `ExpertEntry`.
        layer: Global number of the MoE layer.
        stacked_layers: Length of the layer axis; None: each layer has a tensor of its own, which has the number in its
            name.
    """
    if stacked_layers is not None:
        return common
    before, after = common.split(".mlp.experts.experts.")
    return f"{before}.{layer}.mlp.experts.experts.{after}"


def stacked_object_name(chain: Chain, common: str, operator: OperatorId) -> str:
    """The name that an object of one expert has where those of all experts are in one iteration.

    Args:
        chain: Says along which axes experts are stacked.
        common: Common name of the entry, see `ExpertEntry`.
        operator: The expert.
    """
    index, axes = (".".join(map(str, numbers)) for numbers in (chain.leading_index(operator), chain.leading_axes))
    return f"{stacked_name(common, operator.layer, chain.stacked_layers)}/shard_{index}_{axes}"
