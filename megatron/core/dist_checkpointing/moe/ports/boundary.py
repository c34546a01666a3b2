"""The ports to the boundaries between pipeline stages: logs of what is sent, and a replay's source of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from ..types import Direction


class BoundarySink(Protocol):
    """Takes what this rank sends over a stage boundary; tensors of the framework in use."""

    def sent(self, direction: Direction, tensor: Any) -> None:
        """This tensor is about to be sent to the next (FORWARD) or previous (BACKWARD) stage, and does not change now.

        Returns at once: the copy runs beside training. Never raises.
        """

    def receiving(self, direction: Direction) -> Callable[[Any], None]:
        """The next tensor is asked for from the previous (FORWARD) or the next (BACKWARD) stage.

        Returns:
            What is to be called with it once it has come, and was not changed yet. Schedules may wait for tensors in
            another order than they asked for them; senders send in the order of asking. Neither raises.
        """


class BoundarySource(Protocol):
    """Gives what a stage outside of a replay sent when the iteration ran first."""

    def received(self, direction: Direction) -> Any | None:
        """The next tensor that came from the previous (FORWARD) or the next (BACKWARD) stage, in the order of arrival.

        None where the stage on that side takes part: then it is received as ever, and what is sent to it is sent.
        Raises UnreadableCheckpoint when there is no further one.
        """

    def serves(self, direction: Direction) -> bool:
        """Whether `received` gives tensors of this direction; what would be sent to that side is `dropped`."""

    def dropped(self, direction: Direction, tensor: Any) -> None:
        """This tensor would have been sent to the next (FORWARD) or previous (BACKWARD) stage, which has it already."""
