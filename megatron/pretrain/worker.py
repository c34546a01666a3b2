"""How a worker process ends that cannot do its work: what it says, and its exit code."""

from __future__ import annotations

import logging

from megatron.core.dist_checkpointing.moe import is_lost_peer
from megatron.core.dist_checkpointing.moe.standby.heartbeat import own_heartbeat
from megatron.core.dist_checkpointing.moe.standby.verdict import leave_verdict
from megatron.pretrain.errors import PretrainError, TrainingFailure
from megatron.pretrain.initialize import Launch

log = logging.getLogger(__name__)


def exit_code_of(error: Exception, launch: Launch) -> int:
    """Say what went wrong, once for the job where all ranks know it, and return the exit code of this worker.

    Anything that is neither an error for people nor the loss of a peer is raised again: its traceback is needed.

    Args:
        error: What ended training on this rank.
        launch: The place of this process in the job.
    """
    own_heartbeat().rest(lost_a_peer=is_lost_peer(error))
    if isinstance(error, TrainingFailure):
        log.critical("rank %d: %s", launch.rank, error)
        return error.exit_code
    if isinstance(error, PretrainError):
        log.error("%s", error)
        return final_exit_code(error.exit_code)
    if is_lost_peer(error):
        log.critical("rank %d: peer failure in a collective; exiting for restart", launch.rank)
        return TrainingFailure.exit_code
    raise error


def final_exit_code(exit_code: int) -> int:
    """An exit code that no restart can change: handed to our launcher if that started the job."""
    return 0 if leave_verdict(exit_code) else exit_code
