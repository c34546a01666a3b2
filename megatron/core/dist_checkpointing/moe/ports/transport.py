"""The port to other ranks: bytes and small values, beside the collectives of training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

from ..types.layout import Json

if TYPE_CHECKING:
    from collections.abc import Buffer
from collections.abc import Callable
from contextlib import AbstractContextManager


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
        """Begin to send contiguous bytes; nothing is copied.

        Args:
            to: The rank that receives.
            data: The bytes, which must not change until the transfer is done.
        """

    def receive(self, source: int, into: memoryview) -> Transfer:
        """Begin to receive as many bytes as `into` has; nothing is copied.

        Args:
            source: The rank that sends.
            into: Where the bytes go.
        """

    def least(self, values: Sequence[int]) -> tuple[int, ...]:
        """Element by element the smallest value of all ranks; 64-bit integers. Raises PeerLost."""

    def total(self, values: Sequence[int]) -> tuple[int, ...]:
        """Element by element the sum over all ranks; 64-bit integers. Raises PeerLost."""

    def least_and_total(self, values: Sequence[int], added: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """`least` of some numbers and `total` of others, in the time of one of them.

        Args:
            values: The numbers that `least` takes.
            added: The numbers that `total` takes.

        Raises:
            PeerLost: A rank is gone.
        """

    def gather(self, value: Json) -> list[Json]:
        """The values of all ranks, by rank. Raises PeerLost."""

    def merge(self, value: bytes, combine: Callable[[bytes, bytes], bytes]) -> bytes:
        """The values of all ranks as one, on all ranks; on its way up a tree, so that no rank gets all of them.

        Args:
            value: Of this rank.
            combine: Of two neighbouring runs of ranks, the lower ones first; a ValueError is the fault of a rank.

        Raises:
            PeerLost: A rank is gone, or calls for something else.
        """

    def exchange(self, outgoing: Mapping[int, bytes]) -> list[tuple[int, bytes]]:
        """What any rank has for this one, by the rank that it comes from, ascending; all ranks take part.

        Args:
            outgoing: What this rank has, by the rank that it is for, itself perhaps.

        Raises:
            PeerLost: A rank is gone, or calls for something else.
        """

    def renew(self) -> None:
        """Connect all ranks again after a failure; every rank must come. Raises PeerLost when one does not."""

    def close(self) -> None:
        """End all connections."""


# The ports to time and to work that runs beside training.


class Clock(Protocol):
    """Time as the coordinator sees it."""

    def now_s(self) -> float:
        """Seconds from an arbitrary start, never going back."""

    def sleep(self, seconds: float) -> None:
        """Let this much time pass."""


Lap = Callable[[], float | None]
"""Tells how many seconds some work took; None as long as the device has not come to its end."""


class Stopwatch(Protocol):
    """Time of the device that trains: between `resume` and `pause` work is launched, else it may stand still.

    It is running when it is made.
    """

    def pause(self) -> Lap:
        """Training launches nothing more for now; tells how long what was launched since `resume` takes."""

    def resume(self) -> float:
        """It continues; the seconds for which the device had nothing to do since `pause`."""


class Pace(Protocol):
    """When the chunks of a copy, or of what is sent, may begin. One thread takes and moves, any may be in a hurry.

    chunk_bytes: the most that a chunk has. free_bytes: so many come first without a pause.
    """

    chunk_bytes: int
    free_bytes: int

    def take(self, nbytes: int) -> float:
        """Return when the next chunk, of so many bytes, may begin; the seconds that it was held back."""

    def moved(self, nbytes: int) -> None:
        """The chunk that was taken has been moved, as far as the host can tell."""

    def hurry(self) -> None:
        """Hold nothing back any more: somebody waits for the end. From any thread."""


class SendPace(Protocol):
    """Makes the pace of all that one exchange sends.

    moving_s: what chunks have taken so far, pauses between them left out.
    """

    moving_s: float

    def begin(self, total_bytes: int) -> Pace:
        """Of so many bytes, of which the first chunk follows."""


class WaitObserver(Protocol):
    """Is told when training on this rank waits for another pipeline stage."""

    def waiting(self) -> AbstractContextManager[None]:
        """A block in which the thread that trains, or on a device its stream, does nothing else. Never raises."""


class Task[T](Protocol):
    """Work that was submitted to a lane."""

    def done(self) -> bool:
        """Whether it has ended, in whatever way."""

    def result(self, timeout: float | None = None) -> T:
        """What it returned, or raises what it raised; TimeoutError after `timeout` seconds."""


class Executor(Protocol):
    """Runs work beside training, one piece after the other in the order of submission; as `concurrent.futures`."""

    def submit[T](self, work: Callable[[], T], /) -> Task[T]:
        """Run `work` after all that was submitted before."""

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Take nothing more; wait for the rest, or drop what has not begun.

        Args:
            wait: Return only when all that has begun has ended.
            cancel_futures: Drop tasks that have not begun.
        """

    @property
    def has_ended(self) -> bool:
        """Whether all work has ended and no more will begin."""
