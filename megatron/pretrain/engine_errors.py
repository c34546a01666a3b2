"""Errors of the engine as the driver's; apart from `errors`, which the launcher imports before any core."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from megatron.core.dist_checkpointing.moe.errors import (
    MoECheckpointError,
    NewProcessesNeeded,
    PeerLost,
    ReplayDiverged,
    StoreFailure,
    Terminated,
)
from megatron.pretrain.errors import InvalidInput, PretrainError, TrainingFailure


@contextlib.contextmanager
def driver_errors() -> Iterator[None]:
    """Turn errors of the subsystem into the driver's: a lost peer is worth a restart, all else would come again."""
    try:
        yield
    except Terminated as error:
        raise TrainingFailure(str(error)) from error
    except NewProcessesNeeded as error:
        raise TrainingFailure(str(error)) from error
    except (PeerLost, StoreFailure) as error:
        raise TrainingFailure(f"{error}; leaving, so that the job can be restarted") from error
    except ReplayDiverged as error:
        raise TrainingFailure(f"{error}; leaving, so that a restart takes another way back") from error
    except MoECheckpointError as error:
        kind = InvalidInput if error.exit_code == InvalidInput.exit_code else PretrainError
        raise kind(str(error)) from error
