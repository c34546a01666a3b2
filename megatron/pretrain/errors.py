"""Errors of the training driver that a person can act on."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from megatron.core.dist_checkpointing.moe.errors import (
    CheckpointFailure,
    MoECheckpointError,
    PeerLost,
    StoreFailure,
    Terminated,
)


class PretrainError(Exception):
    """What went wrong, with the value that is wrong and what to do, on one line.

    The driver prints it from rank 0 without a traceback and ends with `exit_code`.
    """

    exit_code = 1


class InvalidInput(PretrainError):
    """Flags or inputs that cannot work; nothing was changed."""

    exit_code = 2


class TrainingFailure(PretrainError):
    """Training cannot go on; raised where it is noticed, which may be one rank only."""


@contextlib.contextmanager
def driver_errors() -> Iterator[None]:
    """Turn errors of the subsystem into the driver's: a lost peer is worth a restart, all else would come again."""
    try:
        yield
    except Terminated as error:
        raise TrainingFailure(str(error)) from error
    except (PeerLost, StoreFailure) as error:
        raise TrainingFailure(f"{error}; leaving, so that the job can be restarted") from error
    except CheckpointFailure as error:
        raise PretrainError(str(error)) from error
    except MoECheckpointError as error:
        raise InvalidInput(str(error)) from error
