"""Errors of the checkpoint subsystem that a person can act on."""

from __future__ import annotations

import errno
from collections.abc import Sequence

NO_SPACE = (errno.ENOSPC, errno.EDQUOT)
_NO_RIGHT = (errno.EACCES, errno.EPERM, errno.EROFS)
MAY_PASS = (errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.ENOTCONN, errno.EHOSTDOWN, errno.EHOSTUNREACH)
"""Of a file system on a network: another start may find it reachable again."""
NAMED_RANKS = 8
"""Of so many ranks a message tells the numbers; of the others how many they are."""


class MoECheckpointError(Exception):
    """What went wrong, with the facts, and what to do, on one line.

    exit_code: With which a job ends for it; None: a restart may help.
    """

    exit_code: int | None = 2


def format_error(error: BaseException) -> str:
    """Errors for people speak for themselves, others by their type."""
    return str(error) if isinstance(error, MoECheckpointError) else f"{type(error).__name__}: {error}"


def may_pass(error: BaseException) -> bool:
    """Whether it comes of an error of the file system that another try may not meet."""
    return isinstance(error.__cause__, OSError) and error.__cause__.errno in MAY_PASS


def reason(error: OSError) -> str:
    """Why a folder cannot be used, and what to do about it where that can be said."""
    said = error.strerror or str(error)
    if error.errno in NO_SPACE:
        return f"{said}: it is full; free space there, or use another folder"
    return f"{said}; check its permissions" if error.errno in _NO_RIGHT else said


def ranks_named(ranks: Sequence[int], count: int = 0) -> str:
    """Such as `rank 3`, `ranks 3, 7` or `ranks 0, 1, 2, 3, 4, 5, 6, 7 and 504 more`.

    Args:
        ranks: The first ones, ascending.
        count: How many there are; 0: no more than these.
    """
    named, more = ranks[:NAMED_RANKS], max(count, len(ranks)) - len(ranks[:NAMED_RANKS])
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, named))}{f' and {more} more' if more else ''}"


class UsageError(MoECheckpointError):
    """A flag or an argument that cannot work; nothing was changed."""


class CheckpointFailure(MoECheckpointError):
    """Protection was lost and `--moe-ckpt-strict` says that training must not continue without it."""

    exit_code = 1


class UnreadableCheckpoint(MoECheckpointError):
    """A checkpoint that is missing, torn, foreign or damaged."""


class NewerFormat(UnreadableCheckpoint):
    """A checkpoint that a later version of this software wrote: not damaged, and not to be replaced."""


class WrongSecret(UnreadableCheckpoint):
    """A checkpoint that may be sound for a process with another secret, or without one."""


class OtherSecret(WrongSecret):
    """One that a process with a secret made where this one has none, or the other way around: not to be replaced."""


class NotAccepted(UnreadableCheckpoint):
    """A whole state of another layout that a flag would let this job continue from: not to be freed."""


class RecoveryImpossible(MoECheckpointError):
    """No set of intact copies leads to a state that all ranks can stand on."""


class ReplayDiverged(MoECheckpointError):
    """A replayed iteration did not give the result that was recorded: training from it would not be exact.

    What it was made from is noted, so that the next start of the job takes an older state; nothing was freed.
    """

    exit_code = None


class NoExactState(MoECheckpointError):
    """All that is left of the training state leads through a replay that came out otherwise than recorded."""

    exit_code = 1


class NewProcessesNeeded(MoECheckpointError):
    """Training can continue only from a checkpoint, or from scratch: in processes that begin again, on all ranks."""

    exit_code = None


class StoreFailure(MoECheckpointError):
    """A store could not take, show or give up a snapshot now; what it had sealed before is untouched."""

    exit_code = None


class NoRoom(StoreFailure):
    """No space for another snapshot until one is freed, or until the last reader of a freed one has ended."""


class PeerLost(MoECheckpointError):
    """Another rank did not answer in time, or its connection broke; the sentence names it and what was waited for."""

    exit_code = None


class PeerSilent(PeerLost):
    """Another rank did not answer in time: it may be stopped, or wait for a third one. `ranks` are those that are known
    to be missing; empty where only the other end of a connection is known."""

    def __init__(self, sentence: str, ranks: tuple[int, ...] = ()) -> None:
        super().__init__(sentence)
        self.ranks = ranks


class Terminated(MoECheckpointError):
    """The launcher asked this process to end (SIGTERM), as it does with all when one has failed."""

    exit_code = None


OF_ALL_RANKS = (StoreFailure, NewProcessesNeeded, ReplayDiverged, NoExactState)
"""What all ranks end with alike, for storage that fails or a state that is not there: no node is to blame."""
