"""What is snapshotted when: plans of single iterations, and windows of them."""

from __future__ import annotations

import enum
import hashlib
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any, SupportsFloat, SupportsInt

from .operators import OperatorId, Part
from .topology import Topology


@dataclass(frozen=True)
class SnapshotPlan:
    """Which part of which operator's state, as it is after `iteration`, goes into that iteration's snapshot.

    An operator that is not in `parts` is not snapshotted. Two plans are equal when they say the same. kinds: the parts
    that occur, where whoever makes the plan knows: thousands of operators are not looked at for them. known: its
    operators, where somebody has that set already.
    """

    iteration: int
    parts: Mapping[OperatorId, Part] = field(repr=False)
    kinds: tuple[Part, ...] = field(default=(), repr=False, compare=False)
    known: frozenset[OperatorId] | None = field(default=None, repr=False, compare=False)

    @cached_property
    def operators(self) -> frozenset[OperatorId]:
        """All operators that this snapshot has a part of."""
        return frozenset(self.parts) if self.known is None else self.known

    @cached_property
    def _giving(self) -> dict[Part, frozenset[OperatorId]]:
        return {}

    def giving(self, part: Part) -> frozenset[OperatorId]:
        """Operators of which this snapshot gives `part`; compute weights also as the cast of master weights."""
        if part not in self._giving:
            enough = (part, Part.MASTER) if part is Part.COMPUTE else (part,)
            kinds = {id(held): held for held in self.kinds or self.parts.values()}
            found = {key for key, held in kinds.items() if any(component in held for component in enough)}
            if not found or len(found) == len(kinds):
                self._giving[part] = self.operators if found else frozenset()
            else:
                self._giving[part] = frozenset(one for one, held in self.parts.items() if id(held) in found)
        return self._giving[part]

    @property
    def anchored(self) -> frozenset[OperatorId]:
        """Operators with full state in this snapshot: from here they can be trained on."""
        return self.giving(Part.MASTER_AND_MOMENTS)

    @property
    def constant(self) -> frozenset[OperatorId]:
        """Operators that training does not change: their copies count for all later iterations too."""
        return self.giving(Part.CONSTANT)

    def digest(self) -> str:
        """128-bit hexadecimal digest, the same on each rank that plans the same; compared at window starts."""
        return hashlib.blake2b(f"{self.iteration}{_in_words(self.parts)}".encode(), digest_size=16).hexdigest()

    def __hash__(self) -> int:
        return hash((self.iteration, len(self.parts)))


_WORDS: deque[tuple[Mapping[OperatorId, Part], str]] = deque(maxlen=32)
"""Of the last plans, whose `parts` nobody changes: most iterations have those of an earlier one."""


def _in_words(parts: Mapping[OperatorId, Part]) -> str:
    """All that a digest is made of but the iteration: of thousands of operators, while training runs."""
    for known, words in tuple(_WORDS):
        if known is parts:
            return words
    # At once, and without asking enums, which is slow.
    names = {id(part): part.value for part in {id(part): part for part in parts.values()}.values()}
    ordered = sorted(parts.items(), key=_in_order)
    words = "".join(f";{one.layer},{one.kind:d},{one.expert},{names[id(part)]}" for one, part in ordered)
    _WORDS.append((parts, words))
    return words


CONSTANT = "constant"
"""The kind of the piece with what training does not change; it restores a state of itself, whatever its span."""


@dataclass(frozen=True)
class Piece:
    """A part of a snapshot that is stored, sealed, replicated and freed on its own, under `kind` (see SnapshotId).

    It lies on the ranks that own a part of it; the first piece of a snapshot, which has the trainer's state, on all.

    span: the iterations whose pieces of this kind together restore a state, its own among them; by itself if empty.
    replicated: whether peers are sent it; else it protects from what a node survives only.
    """

    kind: str
    plan: SnapshotPlan
    span: range = range(0)
    replicated: bool = True

    def __post_init__(self) -> None:
        if not self.span:
            object.__setattr__(self, "span", range(self.plan.iteration, self.plan.iteration + 1))


@dataclass(frozen=True)
class Window:
    """A sparse checkpoint: every operator is snapshotted in full exactly once in `len(groups)` iterations (MoEvement
    3.2).

    `groups[i]` holds the operators anchored by the snapshot of iteration `first_iteration + i`; that snapshot also has
    the compute weights of all operators that later groups anchor, which stay frozen until then. operators: those of all
    groups, where somebody has that set already.
    """

    first_iteration: int
    groups: tuple[tuple[OperatorId, ...], ...] = field(repr=False)
    operators: frozenset[OperatorId] | None = field(default=None, repr=False, compare=False)
    _made: dict[int, SnapshotPlan] = field(default_factory=dict, repr=False, compare=False)

    @property
    def size(self) -> int:
        """W, the number of iterations."""
        return len(self.groups)

    @property
    def last_iteration(self) -> int:
        """The iteration whose snapshot completes the window."""
        return self.first_iteration + self.size - 1

    def plan(self, iteration: int) -> SnapshotPlan:
        """The snapshot of one iteration of the window. Raises IndexError outside of it."""
        step = iteration - self.first_iteration
        if not 0 <= step < self.size:
            raise IndexError(
                f"iteration {iteration} is not in the window {self.first_iteration}..{self.last_iteration}"
            )
        if step not in self._made:
            # Dictionaries are made of dictionaries, whose hashes are known: to hash all operators takes milliseconds.
            parts = dict.fromkeys(self._waiting[step], Part.MASTER_AND_MOMENTS)
            for waiting in self._waiting[step + 1 :]:
                parts.update(waiting)
            kinds = (Part.MASTER_AND_MOMENTS, Part.COMPUTE)[: self.size - step]
            self._made[step] = SnapshotPlan(iteration, parts, kinds, None if step else self.operators)
        return replace(self._made[step], iteration=iteration)

    def beginning(self, iteration: int) -> Window:
        """The window with these groups that begins at an iteration; both share what they make of their plans."""
        return replace(self, first_iteration=iteration)

    @cached_property
    def _waiting(self) -> tuple[dict[OperatorId, Part], ...]:
        """What the snapshots before its own hold of each group."""
        return tuple(dict.fromkeys(group, Part.COMPUTE) for group in self.groups)

    def digest(self) -> str:
        """128-bit hexadecimal digest of the first iteration and the groups in their order."""
        state = hashlib.blake2b(str(self.first_iteration).encode(), digest_size=16)
        for group in self.groups:
            state.update("".join(f";{op.layer},{op.kind.value},{op.expert}" for op in group).encode() + b"|")
        return state.hexdigest()


def _in_order(item: tuple[OperatorId, Part]) -> tuple[int, int, int]:
    operator, _ = item
    return operator.layer, operator.kind, operator.expert


def full_plan(iteration: int, operators: Iterable[OperatorId], part: Part = Part.MASTER_AND_MOMENTS) -> SnapshotPlan:
    """The plan of a dense checkpoint: the same part of every operator.

    Args:
        iteration: The iteration after which the state is taken.
        operators: The operators of the model.
        part: The components of each.
    """
    return SnapshotPlan(iteration, dict.fromkeys(operators, part), (part,))


class Level(enum.Enum):
    """Where copies go in two-level checkpointing (MoC 5.1)."""

    SNAPSHOT = "snapshot"  # the memory tier, at least on the node of its owner
    REPLICAS = "replicas"  # the memory of peers, as far as a strategy tells them from the owner's
    PERSIST = "persist"  # storage


# What a replay of an iteration cannot compute from a part of the state, and what it must come out with.


@dataclass(frozen=True, slots=True)
class StepJournal:
    """The global outcome of one iteration, the same on all ranks that know it; stored with that iteration's snapshot.

    grad_norm: the norm of all gradients before clipping, None where it was not computed. skipped: the optimizer did not
    step, because a gradient was not finite (then there is no norm) or their norm was above core's
    `grad_norm_skip_threshold`. lm_loss: the mean loss, known on the last pipeline stage, else None.
    num_tokens: of the global batch, by which gradients were divided; None where they are not. out_of_pages: the passes
    were run again without `--moe-paged-stash`, because some rank had too few pages for its activations.

    Numbers of an iteration that has just ended may still be on the device: to convert one waits for it.
    """

    grad_norm: SupportsFloat | None = None
    skipped: bool = False
    lm_loss: SupportsFloat | None = None
    num_tokens: SupportsInt | None = None
    out_of_pages: bool = False

    def to_data(self) -> dict[str, Any]:
        """As JSON values; floats exactly."""
        return {
            "grad_norm": None if self.grad_norm is None else float(self.grad_norm),
            "skipped": self.skipped,
            "lm_loss": None if self.lm_loss is None else float(self.lm_loss),
            "num_tokens": None if self.num_tokens is None else int(self.num_tokens),
            **({"out_of_pages": True} if self.out_of_pages else {}),
        }

    @classmethod
    def from_data(cls, data: Mapping[str, Any]) -> StepJournal:
        """What `to_data` described. Raises KeyError, TypeError for something else."""
        tokens, out_of_pages = data.get("num_tokens"), bool(data.get("out_of_pages"))
        return cls(data["grad_norm"], bool(data["skipped"]), data["lm_loss"], tokens, out_of_pages)


@dataclass(frozen=True)
class WaitReport:
    """What became of the waits of a rank's stage since the last report; of a whole stage the mean of its ranks.

    Args:
        waited_s: measured, in the newest passes; 0 where they are not known yet.
        estimated_s: of the same passes, by the pipeline's schedule and what this stage computed; 0: not known.
        passes_s: from their begin to their end.
        copied_bytes, sent_bytes: that began in waits.
        overrun_s: by how much the latest of these chunks ended after the wait in which it began; 0 on devices, where
            the host does not see it.
    """

    waited_s: float = 0.0
    estimated_s: float = 0.0
    passes_s: float = 0.0
    copied_bytes: int = 0
    sent_bytes: int = 0
    overrun_s: float = 0.0

    def to_numbers(self, topology: Topology, rank: int) -> tuple[int, ...]:
        """Integers whose sums over all ranks `of_stages` takes.

        Args:
            topology: The rank layout.
            rank: The rank whose report this is.
        """
        numbers = [0] * (len(_FIELDS) * topology.pp)
        first = len(_FIELDS) * topology.coordinates(rank).pp
        for at, name in enumerate(_FIELDS, first):
            value = getattr(self, name)
            numbers[at] = round(value * _PER_S) if name.endswith("_s") else value
        return tuple(numbers)

    @classmethod
    def of_stages(cls, sums: Sequence[int], topology: Topology) -> tuple[WaitReport, ...]:
        """Of each pipeline stage; none from no numbers.

        Args:
            sums: Sums over all ranks of their `to_numbers`.
            topology: The rank layout.
        """
        ranks, found = topology.world_size // topology.pp, []
        per_s = ranks * _PER_S
        for first in range(0, len(sums), len(_FIELDS)):
            waited, estimated, passes, copied, sent, overrun = sums[first : first + len(_FIELDS)]
            means = waited / per_s, estimated / per_s, passes / per_s, copied // ranks, sent // ranks, overrun / per_s
            found.append(cls(*means))
        return tuple(found)


_FIELDS = tuple(field.name for field in fields(WaitReport))


_PER_S = 1e6
