"""Replays that came out otherwise than recorded, noted for the next start of the job, which takes another way.

The note lies in the rank's slot of the node's memory, beside its snapshots, which stay as they are. All ranks gather
all notes, so it is enough that one of those that replayed together still has it. A note names the attempt and the
iterations whose snapshots were used, so it never meets those of another past, and it stays as long as the slot does.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable
from pathlib import Path

import msgspec

from ..policy.lineage import Lineage, past
from ..storage.small_files import INFORMING_BYTES, put_aside, read_small

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
        """Whether it was made from snapshots of `iteration` that this timeline led to."""
        return self.first <= iteration <= self.last and past(led, iteration) == past(self.timeline, iteration)

    def is_of(self, target: int, led: Lineage) -> bool:
        """Whether it was to lead to this state."""
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
            log.error("a replay that diverged cannot be noted in %s: %s; it will be tried again", self._path, error)


def without_repetitions(notes: Iterable[Divergence]) -> tuple[Divergence, ...]:
    """One note for each replay: the ranks that replayed together have the same."""
    return tuple(dict.fromkeys(notes))
