"""What goes beyond `full` and `sparse`: a folder each, one line here; a job imports what its flags ask for."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from ..config import MoECheckpointConfig

if TYPE_CHECKING:
    from ..ports import MappedReader, Pace, RecordedStep, SendPace, StepRecorder
    from ..types import OperatorId, SnapshotPlan

EXTENSIONS: Mapping[str, Callable[[MoECheckpointConfig], bool]] = {
    "shard": lambda config: config.shard != "none",
    "gradient_replicas": lambda config: config.replicate == "gradients",
    "bubbles": lambda config: config.copy_placement == "bubbles",
    "persist_agent": lambda config: config.persist_agent_s is not None,
    "capacity_boost": lambda config: config.strategy == "selective" and config.capacity_boost > 0,
}
"""The folder of each, which has an `EXTENSION`, and whether a job asks for it."""


def load(name: str) -> ModuleType:
    """The package of an extension, or a module in it."""
    return import_module(f".{name}", __name__)


AGENT_LOCK = "persisting.lock"
"""In the slot of a process that has, or had, a persist agent."""


def wait_for_agent(slot: Path, limit_s: float | None) -> None:
    """Wait for the agent of an earlier attempt, also in a job that has none itself.

    Args:
        slot: Of this process, in memory.
        limit_s: How long an agent of this job may take; None where it has none.
    """
    if (slot / AGENT_LOCK).exists():
        load("persist_agent.agent").wait_for_agent(slot, limit_s)


def asked_for(config: MoECheckpointConfig) -> tuple[type[Extension], ...]:
    """Those that a job with these settings has, in the order of the table."""
    return tuple(load(name).EXTENSION for name, is_asked_for in EXTENSIONS.items() if is_asked_for(config))


# Where an extension takes part: at the opening of a session, in what protects, in each iteration, and at the end.


class Shared(NamedTuple):
    """What a rank stores where data-parallel ranks hold the same state.

    Attributes:
        stored: Tensors of state.
        restorer: Puts them back, and gets the rest from peers.
        left_out: Which operators peers store in a snapshot in place of this rank.
        varying: Keys of what this rank stores in some snapshots and leaves to its peers in others.
    """

    stored: tuple[Any, ...]
    restorer: Any
    left_out: Callable[[SnapshotPlan], frozenset[OperatorId]]
    varying: frozenset[str]


Share = Callable[[Sequence[Any]], Shared]
"""Of all state tensors of this rank."""


class StepSender(Protocol):
    """Sends peers the step that led to a snapshot in place of its bytes, and makes a snapshot of one that arrives."""

    def steps(
        self, iteration: int, pieces: Sequence[Any], readers: Sequence[MappedReader], step: RecordedStep | None
    ) -> list[memoryview]:
        """For each piece what a peer can make it from; empty where its state has to be sent.

        Args:
            iteration: Of the snapshot.
            pieces: Of it.
            readers: One for each piece.
            step: What led to it; None where that was not recorded.
        """

    def exchanged(self, pieces: Sequence[Any], done: Any, *, offered: bool) -> None:
        """How it went.

        Args:
            pieces: That were to go to peers.
            done: The exchange.
            offered: Whether a step was.
        """

    def follow(self, step: bytearray, base: MappedReader, manifest: Any, into: memoryview) -> None:
        """Make a snapshot from the one before and the step between; nothing is verified here.

        Args:
            step: As it arrived.
            base: Of the snapshot of the iteration before.
            manifest: Of the one to make.
            into: Its bytes.
        """


class Numbers(Protocol):
    """Numbers that go with the message of each iteration, and come back as the sums over all ranks."""

    def take(self) -> tuple[int, ...]:
        """Those of this rank; as many on all ranks."""

    def summed(self, sums: Sequence[int]) -> None:
        """Those of all ranks."""


@dataclass
class Additions:
    """What extensions add to what protects: each sets what it brings.

    Attributes:
        steps: Records optimizer steps for peers that follow them.
        sender: Sends peers these steps.
        pace: When the chunks of a copy of so many bytes may begin, in passes that take so many seconds; None: as they
            are spread evenly.
        sends: The pace of what goes to peers.
        numbers: Go with the messages of all ranks.
        announce: Receives the orders that are about to be written to storage, and none when these are done.
        beyond: Takes what gives the tokens of the iteration that were processed beyond capacities.
    """

    steps: StepRecorder | None = None
    sender: StepSender | None = None
    pace: Callable[[int, float | None], Pace | None] = lambda nbytes, passes_s: None
    sends: SendPace | None = None
    numbers: Numbers | None = None
    announce: Callable[[Sequence[Any]], None] = lambda orders: None
    beyond: Callable[[], Callable[[], Any]] | None = None


class Extension:
    """Of one session; each call does nothing unless an extension has something to do there.

    What an extension opens it closes by a callback on `session.held`.

    Args:
        session: The `ProtectedSession`, as far as it is opened.

    Attributes:
        share: Which part of its state this rank stores; None: all of it.
    """

    share: Share | None = None

    def __init__(self, session: Any) -> None:
        self.session = session

    def chosen(self) -> None:
        """The strategy is chosen, and no memory is taken yet; a collective. Raises UsageError."""

    def opened(self) -> None:
        """The memory of this rank is open; a collective. Raises UsageError."""

    def protects(self, additions: Additions) -> None:
        """All ranks stand at one iteration: from here on training is protected."""

    def passes(self) -> None:
        """The passes of an iteration begin."""

    def reduced(self) -> None:
        """They are over, and gradients reduced."""

    def copying(self) -> None:
        """Copies of the state after an iteration have begun."""

    def reported(self, report: Any) -> Any:
        """A `ProtectionReport`, with what this extension has to tell."""
        return report

    def failed(self) -> None:
        """Training ends with an error on this rank: nothing is waited for, and this process may be gone at any time."""

    def stop(self) -> None:
        """Training has ended well, and all that was begun beside it has come to its end."""
