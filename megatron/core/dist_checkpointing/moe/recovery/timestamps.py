"""When a rank passed the points of a fault and of the recovery from it, kept in memory that survives the process."""

from __future__ import annotations

import enum
import json
import logging
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ..ports import Json

log = logging.getLogger(__name__)

FILE = "marks.json"
"""In the folder of the rank's slot, which a restarted process takes over."""


class Milestone(enum.Enum):
    """The points of a recovery, in their order. Those before RESTARTED are passed by the attempt that failed."""

    DETECTED = "detected"
    """This rank heard of the fault: a collective raised, or SIGTERM came."""
    PARKED = "parked"
    """Its live state is sealed in memory, or it will not be; the process is about to end."""
    RESTARTED = "restarted"
    """The new process began."""
    RENDEZVOUS = "rendezvous"
    """All ranks are connected again."""
    BUILT = "built"
    """Model, optimizer and memory are there."""
    INVENTORY = "inventory"
    """It is known what all ranks hold."""
    PLANNED = "planned"
    FETCHED = "fetched"
    """What this rank restores before training or replaying anything is in its live state."""
    REPLAYED = "replayed"
    """The replay of this rank is over; ranks that only wait do not have it."""
    REJOINED = "rejoined"
    """All ranks stand at the same iteration; the next thing is to train."""


class Timestamps:
    """Times of one process, in seconds since 1970 by the clock of its node, which its next process shares.

    Only wall clocks can be compared over processes and nodes, as far as they agree: see `RecoveryTimeline`.
    """

    def __init__(self, wall_s: Callable[[], float] = time.time) -> None:
        self._wall_s = wall_s
        self._times: dict[Milestone, float] = {}

    def mark(self, milestone: Milestone, at_s: float | None = None) -> None:
        """Note a point that is passed now, or was `at_s`. Of a point that is passed again the last time counts, but a
        fault is detected once."""
        if milestone is not Milestone.DETECTED or milestone not in self._times:
            self._times[milestone] = self.now_s() if at_s is None else at_s

    def now_s(self) -> float:
        """What the clock says."""
        return self._wall_s()

    def times(self) -> dict[str, Json]:
        """The points by name; also what a parked copy carries as its scalar `times`."""
        return {milestone.value: at_s for milestone, at_s in self._times.items()}

    def leave(self, folder: Path, attempt: str) -> None:
        """Keep these times for the next process, beside those of attempts that failed before. attempt: what its ranks
        share and what sorts behind earlier ones. Never raises: what cannot be written is missing in the timeline."""
        records = [record for record in left_in(folder) if record["attempt"] != attempt]
        records.append({"attempt": attempt, "times": self.times()})
        aside = folder / f".{FILE}.{os.getpid()}"
        try:
            # No fsync: the file has to survive the process, not the node.
            aside.write_text(json.dumps(records))
            aside.replace(folder / FILE)
        except OSError as error:
            log.warning("the times of this fault cannot be kept in %s: %s", folder, error.strerror)


def left_in(folder: Path) -> list[dict[str, Any]]:
    """What `leave` kept there, oldest first; nothing where there is no such file, or it is damaged."""
    try:
        records = json.loads((folder / FILE).read_text())
        return [{"attempt": str(record["attempt"]), "times": _times(record["times"])} for record in records]
    except FileNotFoundError:
        return []
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        log.warning("the times of the last fault in %s are not readable: %s", folder / FILE, error)
        return []


def forget(folder: Path) -> None:
    """The recovery is over, or training goes on from elsewhere: the next fault begins a timeline of its own."""
    try:
        (folder / FILE).unlink(missing_ok=True)
    except OSError as error:
        log.warning("the times of the last fault in %s cannot be removed: %s", folder, error.strerror)


def _times(data: Mapping[str, Any]) -> dict[str, float]:
    names = {milestone.value for milestone in Milestone}
    return {name: float(at_s) for name, at_s in data.items() if name in names}
