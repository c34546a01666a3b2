"""The table of places: the one way from a path or a URL to what can be asked of it."""

from __future__ import annotations

from .location import CheckpointLocation, LocationKind
from .memory import MemoryLocation
from .recognition import recognize
from .saves import IterationLocation, SavesLocation
from .storage import SnapshotLocation, StorageLocation

PLACES: dict[LocationKind, type[CheckpointLocation]] = {
    location.kind: location
    for location in (IterationLocation, SavesLocation, StorageLocation, SnapshotLocation, MemoryLocation)
}


def locate(place: str) -> CheckpointLocation:
    """What is at a place. Raises as `recognition.recognize`, one line with what was found and what to do."""
    return PLACES[recognize(place)](place)
