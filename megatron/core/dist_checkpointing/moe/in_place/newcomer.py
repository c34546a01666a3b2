"""A process that connects to the others of its job for the first time."""

from __future__ import annotations

from collections.abc import Callable

from ..runtime.disconnect import close_connections, is_lost_peer
from ..seats.seat import own_seat
from .called_off import unless_called_off
from .kept_process import SEAT_S
from .process_groups import ProcessGroups


def connected[T](connect: Callable[[], T]) -> T:
    """What `connect` returns, which makes process groups with the rank that the environment says.

    A standby that has got a rank is still as good as any other where a rank is lost meanwhile: it keeps its process,
    waits for its rank in the next start, and connects again.

    Raises what `connect` raises; PeerLost where the launcher has ended, or says nothing.
    """
    seat, found = own_seat(), list[T]()
    if seat.taken_s is not None:
        seat.keep(close_connections)
    while not found:
        try:
            unless_called_off(lambda: found.append(connect()), seat)
        except Exception as error:
            if not seat.keeps or not (seat.is_called_off or is_lost_peer(error)):
                raise
            ProcessGroups.taken_down()
            seat.leave(SEAT_S)
    return found[0]
