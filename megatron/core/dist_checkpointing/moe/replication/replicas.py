"""What is offered to peers, and what came of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Offer:
    """A sealed piece of this rank: its name, its manifest as it is stored, and the raw bytes of its segment."""

    name: str
    manifest: bytes = field(repr=False)
    raw: memoryview = field(repr=False)


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
