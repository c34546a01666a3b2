"""Whether a recovered state is the one that was lost, as far as it was compared with what was recorded of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from ..ports import Json
from ..replay.densify import Compared
from ..types import RecoveryPlan, ReplaySegment, Topology

ComparedIterations = Mapping[int, frozenset[Compared]]


@dataclass(frozen=True)
class Unverified:
    """Stages whose replay of these iterations was compared with nothing."""

    stages: tuple[int, ...]
    iterations: tuple[int, ...]


@dataclass(frozen=True)
class Exactness:
    """What can be said of a state that was recovered.

    tolerance: by which share losses of replayed iterations
    were allowed to differ; 0 where none were replayed. unverified: what was replayed and not compared.
    """

    tolerance: float = 0.0
    unverified: tuple[Unverified, ...] = ()

    def __str__(self) -> str:
        if self.unverified:
            return "unverified"
        return f"within tolerance {self.tolerance:g} of the recorded losses" if self.tolerance else "exactly"


def exactness(
    plan: RecoveryPlan, topology: Topology, tolerance: float, compared: Sequence[ComparedIterations]
) -> Exactness:
    """From what each rank compared. Stages that pass their tensors on to each other are judged together: a loss, or
    what the last of them sends, depends on the weights of all."""
    replayed = [segment for segment in plan.segments if segment.replayed]
    unverified = [one for segment in replayed for one in _unverified(segment, topology, compared)]
    return Exactness(tolerance if replayed else 0.0, tuple(unverified))


def to_values(compared: ComparedIterations) -> Json:
    """As JSON values."""
    return [[iteration, *sorted(one.value for one in kinds)] for iteration, kinds in sorted(compared.items())]


def from_values(values: Json) -> ComparedIterations:
    """What `to_values` gave."""
    rows = cast("list[tuple[Any, ...]]", values)
    return {iteration: frozenset(map(Compared, kinds)) for iteration, *kinds in rows}


def _unverified(
    segment: ReplaySegment, topology: Topology, compared: Sequence[ComparedIterations]
) -> Iterator[Unverified]:
    alone = len(segment.stages) < topology.pp
    # Of a stage with several chunks that replays alone, the loss tells of the last chunk only.
    enough = {Compared.SENT} if alone and topology.vpp > 1 else set(Compared)
    for group in _neighbouring(segment.stages, topology):
        missing = [
            iteration
            for iteration in segment.replayed
            if not any(
                all(compared[rank].get(iteration, frozenset()) & enough for rank in topology.stage_ranks(stage))
                for stage in group
            )
        ]
        if missing:
            yield Unverified(group, tuple(missing))


def _neighbouring(stages: Sequence[int], topology: Topology) -> list[tuple[int, ...]]:
    """Stages beside each other, together; with virtual stages the last one is beside the first."""
    groups: list[list[int]] = []
    for stage in sorted(stages):
        if groups and groups[-1][-1] == stage - 1:
            groups[-1].append(stage)
        else:
            groups.append([stage])
    if topology.vpp > 1 and len(groups) > 1 and groups[0][0] == 0 and groups[-1][-1] == topology.pp - 1:
        groups[0] = groups.pop() + groups[0]
    return [tuple(group) for group in groups]
