"""Bytes that outlive a simulated rank, as a tmpfs or a disk does, and can be damaged or lost."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count
from typing import Protocol

import numpy as np

from megatron.core.dist_checkpointing.moe.errors import UnreadableCheckpoint
from megatron.core.dist_checkpointing.moe.storage.manifest import decode
from megatron.core.dist_checkpointing.moe.types.layout import SnapshotId


@dataclass(eq=False)
class Segment:
    """Bytes that hold at most one snapshot: sealed when there is a manifest, otherwise torn or being written.

    writer: the slot that wrote it. held: the buffers of readers and writers that may still be referred to.
    """

    name: str
    data: bytearray
    snapshot: SnapshotId | None = None
    manifest: bytes = b""
    writer: int = 0
    held: list[weakref.ref[np.ndarray]] = field(default_factory=list)

    @property
    def is_held(self) -> bool:
        """Whether somebody can still read or write its bytes."""
        return any(one() is not None for one in self.held)

    def lend(self, offset: int, nbytes: int) -> memoryview:
        """A view of its bytes; the segment is held until the last reference to it is gone."""
        lent = np.ndarray((nbytes,), np.uint8, self.data, offset)
        self.held = [one for one in self.held if one() is not None]
        self.held.append(weakref.ref(lent))
        return lent.data

    def clear(self) -> None:
        """Forget what it holds; the bytes stay until they are overwritten."""
        self.snapshot, self.manifest = None, b""


class Owner(Protocol):
    """The store that has a Memory for itself."""

    @property
    def is_alive(self) -> bool:
        """Whether its process was not killed since."""


class Memory:
    """What a tmpfs or a disk holds: it stays when a rank is killed, until it is wiped."""

    def __init__(self) -> None:
        self.segments: dict[str, Segment] = {}
        self.mutex = threading.RLock()
        self.owner: Owner | None = None
        self.names: Iterator[str] = (f"segment-{at:03d}" for at in count())

    def wipe(self) -> None:
        """Lose everything, as with a node."""
        self.segments, self.owner = {}, None

    def flip(self, snapshot: SnapshotId, bit: int, *, manifest: bool = False) -> None:
        """Change one bit of a sealed snapshot: of its records, or of its manifest; counted around its end.

        Raises UnreadableCheckpoint when there is none.
        """
        segment = self.sealed(snapshot)
        if segment is None:
            raise UnreadableCheckpoint(f"the {snapshot} is not sealed here, so no bit of it can be flipped")
        if manifest:
            content = bytearray(segment.manifest)
            content[bit // 8 % len(content)] ^= 1 << bit % 8
            segment.manifest = bytes(content)
            return
        records = decode(segment.manifest, snapshot.name).records
        places = [record.offset + at for record in records for at in range(record.nbytes)]
        segment.data[places[bit // 8 % len(places)]] ^= 1 << bit % 8

    def sealed(self, snapshot: SnapshotId) -> Segment | None:
        """The segment of a sealed snapshot."""
        found = [one for one in self.segments.values() if one.snapshot == snapshot and one.manifest]
        return found[0] if found else None
