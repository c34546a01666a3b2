"""What is snapshotted when: plans of single iterations, and windows of them."""

from __future__ import annotations

import enum
import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from .operators import OperatorId, Part


@dataclass(frozen=True)
class SnapshotPlan:
    """Which part of which operator's state, as it is after `iteration`, goes into that iteration's snapshot.

    An operator that is not in `parts` is not snapshotted. Two plans are equal when they say the same.
    """

    iteration: int
    parts: Mapping[OperatorId, Part] = field(repr=False)

    @cached_property
    def _giving(self) -> dict[Part, frozenset[OperatorId]]:
        return {}

    def giving(self, part: Part) -> frozenset[OperatorId]:
        """Operators of which this snapshot gives `part`; compute weights also as the cast of master weights."""
        if part not in self._giving:
            enough = (part, Part.MASTER) if part is Part.COMPUTE else (part,)
            self._giving[part] = frozenset(
                operator for operator, held in self.parts.items() if any(component in held for component in enough)
            )
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
        state = hashlib.blake2b(str(self.iteration).encode(), digest_size=16)
        for operator, part in sorted(self.parts.items(), key=_in_order):
            state.update(f";{operator.layer},{operator.kind.value},{operator.expert},{part.value}".encode())
        return state.hexdigest()

    def __hash__(self) -> int:
        return hash((self.iteration, len(self.parts)))


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
    the compute weights of all operators that later groups anchor, which stay frozen until then.
    """

    first_iteration: int
    groups: tuple[tuple[OperatorId, ...], ...] = field(repr=False)

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
        parts = dict.fromkeys(self.groups[step], Part.MASTER_AND_MOMENTS)
        for group in self.groups[step + 1 :]:
            parts.update(dict.fromkeys(group, Part.COMPUTE))
        return SnapshotPlan(iteration, parts)

    def digest(self) -> str:
        """128-bit hexadecimal digest of the first iteration and the groups in their order."""
        state = hashlib.blake2b(str(self.first_iteration).encode(), digest_size=16)
        for group in self.groups:
            state.update("".join(f";{op.layer},{op.kind.value},{op.expert}" for op in group).encode() + b"|")
        return state.hexdigest()


def _in_order(item: tuple[OperatorId, Part]) -> tuple[int, int, int]:
    operator, _ = item
    return operator.layer, operator.kind.value, operator.expert


def full_plan(iteration: int, operators: Iterable[OperatorId], part: Part = Part.MASTER_AND_MOMENTS) -> SnapshotPlan:
    """The plan of a dense checkpoint: the same part of every operator."""
    return SnapshotPlan(iteration, dict.fromkeys(operators, part))


class Level(enum.Enum):
    """Where copies go in two-level checkpointing (MoC 5.1)."""

    SNAPSHOT = "snapshot"  # the memory tier, at least on the node of its owner
    REPLICAS = "replicas"  # the memory of peers, as far as a strategy tells them from the owner's
    PERSIST = "persist"  # storage
