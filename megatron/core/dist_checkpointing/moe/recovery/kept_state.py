"""The state that a process kept through the loss of others: parked, and still in its tensors as it was parked.

Whoever recovers from that very snapshot has nothing to copy back. Or the state is that between two iterations of a
replay, which continues from there where the next plan has the same replay (MoEvement App. A). It is noted where a
process stays in its slot, and taken by the next session in it, which is the first that may change the state.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

from ..policy.lineage import Lineage
from ..ports import Json, Reader
from ..types import PARKED, ReplaySegment
from .exactness import ComparedIterations


@dataclass(frozen=True)
class KeptReplay:
    """A replay that a fault of other stages has interrupted between two iterations, on all its ranks at the same one.

    Args:
        segment: What is run again, by which stages, and what is frozen meanwhile.
        timeline: Of the snapshots that it was begun from.
        iteration: The last one that was run again, and the state after it loaded.
        scalars: What the trainer has beside operators.
        tensors: Its random states.
        compared: As of `Replay`.
    """

    segment: ReplaySegment
    timeline: Lineage
    iteration: int
    scalars: Mapping[str, Json]
    tensors: Mapping[str, bytes]
    compared: ComparedIterations


@dataclass
class KeptState:
    """Which snapshot live tensors equal; none once something else was restored.

    Args:
        iteration: After which they are the state; None: of nothing that is known.
        timeline: What the manifest of the parked snapshot says of the attempts before it.
        replay: How far a replay has brought them, in place of a snapshot.
    """

    iteration: int | None = None
    timeline: Json = None
    replay: KeptReplay | None = None

    def is_that_of(self, readers: Iterable[Reader]) -> bool:
        """Whether all of these snapshots of this rank, and there are some, are the one that live tensors equal."""
        manifests = [reader.manifest for reader in readers]
        return bool(manifests) and all(
            (one.snapshot.kind, one.snapshot.iteration) == (PARKED, self.iteration)
            and one.facts.scalars.get("timeline") == self.timeline
            for one in manifests
        )

    def forget(self) -> None:
        """Something else is about to be written to them."""
        self.iteration = self.timeline = self.replay = None


_KEPT: WeakKeyDictionary[Any, KeptState] = WeakKeyDictionary()


def keep(optimizer: Any, state: KeptState) -> None:
    """Until the next session takes up this optimizer and its model, nobody changes them.

    Args:
        optimizer: Of the live state.
        state: What it is, with the model.
    """
    _KEPT[optimizer] = state


def take(optimizer: Any) -> KeptState:
    """What was kept, which may be nothing; once."""
    return _KEPT.pop(optimizer, KeptState())
