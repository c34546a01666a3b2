"""The session of a job without checkpoints in memory (`--moe-ckpt-strategy none`): the loop need not ask for one."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

from ..policy.parking import Cause
from ..resharding.windows import OlderWindow
from ..types import RecoveryPlan, StepJournal
from .leases import Leases


class Unprotected:
    """Has the public members of `Session`, in the same order of calls, and does nothing in any of them.

    Nothing is found, restored or replayed, and no collective is entered; `report` has nothing to tell.
    """

    protects = is_replaying = replays_alone = repeats_steps = is_own = False
    parks = False
    communicator = unreported = episode = links = None
    unusable = job_id = ""
    diverged: tuple[str, ...] = ()
    newest_iteration, of_others = -1, (-1, "")
    leases: Leases | None = None

    def __init__(self, leases: Leases | None = None) -> None:
        """leases: of the places that the loop writes to; None where nobody asked for any."""
        self.leases = leases

    def refresh(self) -> None:
        """There is no state to enumerate."""

    def look(self) -> RecoveryPlan | None:
        """No earlier attempt left anything."""
        return None

    def carry_out(self) -> None:
        """Nothing was planned."""

    def discard(self) -> None:
        """There is nothing to free."""

    def older_window(self) -> OlderWindow | None:
        """No other layout left anything."""
        return None

    def copy_older(self, folder: Path) -> None:
        """There is nothing to copy."""

    def take_over(self, iteration: int) -> None:
        """There is nothing to free."""

    def clear_counters(self) -> None:
        """There are no counters to clear."""

    def begin(self, iteration: int) -> None:
        """Training goes on unprotected."""

    def stepped(self, step: StepJournal) -> None:
        """No iteration is replayed."""

    def rejoin(self) -> bool:
        """There is nothing to recover from."""
        return False

    def passes(self, iteration: int) -> None:
        """No boundary logs are recorded."""

    def reduced(self) -> None:
        """No boundary logs are recorded."""

    def before_optimizer(self) -> float:
        """The seconds that training waited: none."""
        return 0.0

    def stepping(self, iteration: int, loss: float | None, num_tokens: int | None) -> AbstractContextManager[None]:
        """A block in which nothing is guarded."""
        return nullcontext()

    def whole(self, iteration: int, journal: StepJournal) -> None:
        """Nothing would be parked."""

    def step_end(self, iteration: int, journal: StepJournal) -> None:
        """No snapshot is made."""

    def reported(self, iteration: int) -> None:
        """Nothing is noted."""

    def report(self) -> None:
        """There is no protection to report."""

    def interrupt(self, *, force: bool) -> bool:
        """No step is protected."""
        return True

    def failure(self, cause: Cause) -> None:
        """Nothing is parked."""

    def abandon(self) -> bool:
        """Nothing is held."""
        return True

    def shutdown(self, *, keep_memory: bool) -> None:
        """No memory is held."""
