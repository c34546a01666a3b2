"""The port to other ranks: bytes and small values, beside the collectives of training."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from ..types.layout import Json

if TYPE_CHECKING:
    from collections.abc import Buffer


class Transfer(Protocol):
    """Bytes on their way to or from another rank; the buffer must stay as it is until `wait` has returned."""

    def wait(self) -> None:
        """Return when all bytes were sent or received. Raises PeerLost, at the latest after the transport's timeout."""


class Transport(Protocol):
    """Bytes and small numbers between the ranks of a job, beside the collectives of training.

    Between two ranks messages arrive whole and in the order of their sending; the receiver knows their sizes. Used by
    one thread at a time. After a PeerLost all messages under way are void, and `renew` must be called before the next.
    """

    @property
    def rank(self) -> int:
        """This rank."""

    @property
    def world_size(self) -> int:
        """Number of ranks."""

    def send(self, to: int, data: Buffer) -> Transfer:
        """Begin to send contiguous bytes; nothing is copied."""

    def receive(self, source: int, into: memoryview) -> Transfer:
        """Begin to receive as many bytes as `into` has; nothing is copied."""

    def least(self, values: Sequence[int]) -> tuple[int, ...]:
        """Element by element the smallest value of all ranks; 64-bit integers. Raises PeerLost."""

    def total(self, values: Sequence[int]) -> tuple[int, ...]:
        """Element by element the sum over all ranks; 64-bit integers. Raises PeerLost."""

    def least_and_total(self, values: Sequence[int], added: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """`least` of the ones and `total` of the others, in the time of one of them. Raises PeerLost."""

    def gather(self, value: Json) -> list[Json]:
        """The values of all ranks, by rank. Raises PeerLost."""

    def renew(self) -> None:
        """Connect all ranks anew after a failure; every rank must come. Raises PeerLost when one does not."""

    def close(self) -> None:
        """End all connections."""
