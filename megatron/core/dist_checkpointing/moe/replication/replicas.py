"""What is offered to peers, where it is received, and what came of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Offer:
    """A sealed piece of this rank: its name, its manifest as it is stored, and the raw bytes of its segment."""

    name: str
    manifest: bytes = field(repr=False)
    raw: memoryview = field(repr=False)


class IncomingReplica(Protocol):
    """Where a replica is received; ends with `seal` or `abandon`. The replicator keeps no view of `buffer`."""

    @property
    def buffer(self) -> memoryview:
        """Writable, as many bytes as the segment of the owner has."""

    def seal(self) -> None:
        """Verify against the checksums in the manifest and commit.

        Raises UnreadableCheckpoint when the bytes are not those of the owner, StoreFailure when storage refuses.
        """

    def abandon(self) -> None:
        """The replica never existed. Called also after a failed `seal`."""


class Receiver(Protocol):
    """Where the replicas of others are kept; errors of its methods reach the owner as a refusal."""

    def holds(self, owner: int, manifest: bytes) -> bool:
        """Whether this piece is sealed here already, so that its bytes need not be sent."""

    def begin(self, owner: int, manifest: bytes) -> IncomingReplica | None:
        """Space for this piece, None when there is none. May raise StoreFailure."""


@dataclass(frozen=True)
class Exchange:
    """What one exchange achieved on this rank.

    acknowledged: for each peer whether it now holds all pieces offered, verified and sealed; False when there was
    nothing to give. kept: owner and name of the pieces held here for others. sent_bytes, received_bytes: raw bytes,
    those of pieces sent again included. failures: a sentence for each piece that was not kept, here or by a peer.
    """

    iteration: int
    acknowledged: Mapping[int, bool]
    kept: tuple[tuple[int, str], ...]
    sent_bytes: int
    received_bytes: int
    failures: tuple[str, ...]
