"""What a manager calls between the lines of a training loop: for a job without a strategy, all of it does nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ..resharding.store import PreviousWindow
from ..types import StepJournal

if TYPE_CHECKING:
    from ..local_recovery.communicator import BoundaryCommunicator
    from ..megatron_state.trainer_state import LiveTrainerState
    from ..policy.parking import Cause
    from ..recovery.timeline import RecoveryTimeline
    from ..snapshot.coordinator import Coordinator, ProtectionReport
    from .opening import Leases
    from .peer_links import PeerLinks

type RunAgain = Callable[[PreviousWindow, Callable[[Path], None]], int]
"""Loads the state after a window of another layout."""


@dataclass(frozen=True)
class Loadable:
    """The dense checkpoint that a loop would load; the same on all ranks.

    Args:
        iteration: Of which it is, -1 if there is none.
        asked_for: Whether a user named this very checkpoint: then only a restart of the same job passes it by.
        in_part: Whether loading leaves some of the state as it is, and so replaces no copies that prove damaged.
        lacks: Whether the checkpoint itself lacks some of the state, so that a snapshot without loss is better though
            older.
        in_doubt: Whether core saved it to have a doubtful iteration run again from it: then it is better than snapshots
            of its iteration, which know nothing of the doubt.
        only_of: Jobs whose snapshots alone are compared with it: others are of a past that training left; empty: all.
    """

    iteration: int = -1
    asked_for: bool = False
    in_part: bool = False
    lacks: bool = False
    in_doubt: bool = False
    only_of: frozenset[str] = frozenset()


NOTHING = Loadable()


@dataclass(frozen=True)
class Request:
    """Where training may begin, if not from a snapshot: the arguments of `MoECheckpointManager.resume`.

    survivors: how many ranks have kept their processes, and can load nothing.
    """

    load: Callable[[], int] | None = None
    newest: Loadable = NOTHING
    run_again: RunAgain | None = None
    survivors: int = 0


class Session:
    """Of a job without a strategy; `ProtectedSession` is that of a job with one.

    The calls up to `rejoin`, the end of a step and `shutdown` are collectives over all ranks; those that a replay makes
    are collectives over the ranks that replay together.

    Attributes:
        protects: Whether anything is.
        parks: Whether live state is put aside when a peer is lost.
        coordinator: Ends each step with a snapshot, once `rejoin` has returned.
        communicator: Through which the stages of the pipeline have to send; None: core's own.
        leases: Of the places that this job writes to; None where nobody asked for any.
        links: Connections to peers, which close when one is lost.
        job_id: On which all ranks have agreed.
        is_replaying: Whether training runs iterations again to make its state dense: nothing may be saved meanwhile.
        replays_alone: Whether it does so while other stages of the pipeline wait.
        repeats_steps: Whether any rank runs iterations, or steps, again; the same on all.
        episode: The timeline of the recovery that training continues from.
        lost_tokens: What faults have cost so far, by MoE layer; None where they can cost nothing.
        unreported: How the iteration of the recovered state came out, where this rank has not written down its numbers.
    """

    protects = parks = is_replaying = replays_alone = repeats_steps = False
    coordinator: Coordinator | None = None
    communicator: BoundaryCommunicator | None = None
    links: PeerLinks | None = None
    episode: RecoveryTimeline | None = None
    lost_tokens: tuple[int, ...] | None = None
    unreported: StepJournal | None = None
    job_id = ""

    def __init__(self, leases: Leases | None = None) -> None:
        self.leases = leases

    def restore(self, trainer: LiveTrainerState, request: Request) -> None:
        """Bring everything that training changes to where it continues. Errors as of `MoECheckpointManager.resume`.

        Args:
            trainer: Its iteration is set.
            request: What else there is to begin from.
        """
        if request.load is not None:
            trainer.iteration = request.load()

    def lost_before(self, iteration: int, lost_tokens: Sequence[int] | None) -> None:
        """As `MoECheckpointManager.lost_before`, of a checkpoint of `iteration`."""

    def begin(self, iteration: int) -> None:
        """Protect training, which stands after `iteration`, or make ready for what comes before `rejoin`."""

    def stepped(self, step: StepJournal) -> None:
        """An iteration was replayed: progress, schedules and random states become those that were recorded of it.

        Raises ReplayDiverged when the iteration came out otherwise than recorded: leave then, so that the next start
        of the job takes another way back.
        """

    def interrupts_replay(self, calls: bool) -> bool:
        """Between two iterations of a replay: whether it stops here for a fault of other stages, and continues when
        they have recovered; a collective over the ranks that replay together.

        Args:
            calls: Whether this rank was told of such a fault.
        """
        return False

    def needs(self, rank: int) -> bool:
        """Whether what this rank does now needs that one, from any thread: a replay of some stages needs no others."""
        return True

    def rejoin(self) -> bool:
        """Wait until all ranks stand at one iteration, and protect training from there on; whether it recovered."""
        return False

    def passes(self, iteration: int) -> None:
        """The passes of an iteration begin."""

    def reduced(self) -> None:
        """They are over, and gradients reduced."""

    def before_optimizer(self) -> float:
        """Wait for copies of what the optimizer's step changes; returns the seconds that it took."""
        return 0.0

    def stepping(self, iteration: int, passed: StepJournal) -> AbstractContextManager[None]:
        """A block for the optimizer's step and what belongs to it.

        Args:
            iteration: Whose step it is.
            passed: What its passes tell, without how the step comes out.
        """
        return nullcontext()

    def on_state_consistent(self, iteration: int, journal: StepJournal) -> None:
        """The state after an iteration is complete.

        Args:
            iteration: After which it stands.
            journal: How the step came out.
        """

    def report(self) -> ProtectionReport | None:
        """What checkpointing did since the last report; None where there is none."""
        return None

    def reported(self, iteration: int) -> None:
        """The numbers of an iteration were written down."""

    def interrupt(self, *, force: bool) -> bool:
        """Forbid that a step begins, from any thread. False, and nothing is done, in the protected part of one."""
        return True

    def await_update(self) -> None:
        """Before this thread closes connections: let the device come to the newest update."""

    def failure(self, cause: Cause) -> None:
        """Training ends with an error, and connections are closed: begin nothing new, and park what is complete."""

    def abandon(self) -> bool:
        """After `failure`, where this process stays: release all that another session in it takes up again.

        Live state and what is sealed in memory stay as they are. Whether all work beside training has come to an end;
        else this process must not continue.
        """
        return True

    def shutdown(self, *, keep_memory: bool) -> None:
        """Training ends well, on all ranks.

        Args:
            keep_memory: Whether it stays for another start of the job.
        """
