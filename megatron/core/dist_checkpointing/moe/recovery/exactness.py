"""Whether a recovered state is the one that was lost, as far as it was compared with what was recorded of it."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from ..policy.lineage import Lineage, past
from ..replay.densify import Compared
from ..storage.small_files import INFORMING_BYTES, put_aside, read_small
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
    plan: RecoveryPlan, topology: Topology, tolerance: float, compared: Mapping[int, frozenset[int]]
) -> Exactness:
    """How exactly a recovery led back to the state, from what the ranks of each stage compared.

    Stages that pass their tensors on to each other are judged together: a loss, or what the last of them sends,
    depends on the weights of all.

    Args:
        plan: What was carried out.
        topology: Of the job.
        tolerance: By which share losses were allowed to differ.
        compared: By stage, the iterations that `compared_in` gave for each of its ranks.
    """
    replayed = [segment for segment in plan.segments if segment.replayed]
    unverified = [one for segment in replayed for one in _unverified(segment, topology, compared)]
    return Exactness(tolerance if replayed else 0.0, tuple(unverified))


def compared_in(segment: ReplaySegment, compared: ComparedIterations, topology: Topology) -> frozenset[int]:
    """The replayed iterations that one rank compared with enough of what was recorded.

    Args:
        segment: The stages that replayed with it.
        compared: What each replayed iteration was compared by.
        topology: Of the job.
    """
    alone = len(segment.stages) < topology.pp
    # Of a stage with several chunks that replays alone, the loss tells of the last chunk only.
    enough = {Compared.SENT} if alone and topology.vpp > 1 else set(Compared)
    return frozenset(iteration for iteration, kinds in compared.items() if kinds & enough)


def _unverified(
    segment: ReplaySegment, topology: Topology, compared: Mapping[int, frozenset[int]]
) -> Iterator[Unverified]:
    for group in _neighbouring(segment.stages, topology):
        known = frozenset[int]().union(*(compared[stage] for stage in group))
        if missing := [iteration for iteration in segment.replayed if iteration not in known]:
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


# Replays that came out otherwise than recorded, noted for the next start of the job, which takes another way.
#
# The note lies in the rank's slot of the node's memory, beside its snapshots, which stay as they are. All ranks gather
# all notes, so it is enough that one of those that replayed together still has it. A note names the attempt and the
# iterations whose snapshots were used, so it never meets those of another past, and it stays as long as the slot does.

log = logging.getLogger(__name__)

FILE = "diverged.json"
"""In the folder of the rank's slot, which a restarted process takes over."""


class Divergence(msgspec.Struct, frozen=True):
    """A replay that came out otherwise.

    Attributes:
        iteration: The first one that did.
        target: To which the recovery led.
        stages: Which replayed together.
        alone: Whether other stages of the pipeline took no part.
        first: Of the iterations whose snapshots it was made from.
        last: Of these.
        timeline: Of the state that was to be rebuilt.
        why: What was compared, with both values.
        tolerance: By which share losses were allowed to differ; a user who allows more may have it tried again.
    """

    iteration: int
    target: int
    stages: tuple[int, ...]
    alone: bool
    first: int
    last: int
    timeline: Lineage
    why: str
    tolerance: float = 0.0

    def __str__(self) -> str:
        stages = f"stage{'s' if len(self.stages) > 1 else ''} {', '.join(map(str, self.stages))}"
        who = f"{stages} alone" if self.alone else "all stages"
        return f"the replay of {who} from iteration {self.first} to {self.target} diverged: {self.why}"

    def used(self, iteration: int, led: Lineage) -> bool:
        """Whether it was made from certain snapshots.

        Args:
            iteration: Of the snapshots.
            led: The timeline that led to them.
        """
        return self.first <= iteration <= self.last and past(led, iteration) == past(self.timeline, iteration)

    def is_of(self, target: int, led: Lineage) -> bool:
        """Whether it was to lead to a certain state.

        Args:
            target: The iteration of the state.
            led: The timeline that led to it.
        """
        return target == self.target and past(led, target) == past(self.timeline, target)


class DivergenceNotes:
    """What one rank noted; folder: of its slot. None: they are kept as long as this object."""

    def __init__(self, folder: Path | None = None) -> None:
        self._path = folder / FILE if folder is not None else None
        self._noted: list[Divergence] = []

    def read(self) -> list[Divergence]:
        """All notes, oldest first.

        None where they are damaged, which is said once: then a replay may be tried once more. It is compared with what
        was recorded as before, so what comes out otherwise is not trained from, and is noted again.
        """
        if self._path is None:
            return list(self._noted)
        try:
            return msgspec.json.decode(read_small(self._path, INFORMING_BYTES), type=list[Divergence])
        except FileNotFoundError:
            return []
        except (OSError, ValueError, RecursionError) as error:  # ValueError: msgspec's, and of text that is no UTF-8
            put_aside(self._path, "replays that diverged before, of which one may be tried again,", error)
            return []

    def add(self, divergence: Divergence) -> None:
        """Keep another one. Never raises: what cannot be written down is tried once more, and said."""
        self._noted.append(divergence)
        if self._path is None:
            return
        aside = self._path.with_name(f".{FILE}.{os.getpid()}")
        try:
            # No fsync: the file has to survive the process, not the node.
            aside.write_bytes(msgspec.json.encode([*self.read(), divergence]))
            aside.replace(self._path)
        except OSError as error:
            log.error("cannot record a diverged replay in %s: %s; it will be tried again", self._path, error)


def without_repetitions(notes: Iterable[Divergence]) -> tuple[Divergence, ...]:
    """One note for each replay: the ranks that replayed together have the same."""
    return tuple(dict.fromkeys(notes))
