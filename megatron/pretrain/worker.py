"""How a worker process ends that cannot do its work: what it says, and its exit code."""

from __future__ import annotations

import logging
import os
from pathlib import Path

from megatron.core.dist_checkpointing.moe import is_lost_peer
from megatron.core.dist_checkpointing.moe.standby.heartbeat import own_heartbeat
from megatron.pretrain.errors import PretrainError, TrainingFailure
from megatron.pretrain.initialize import Launch
from megatron.pretrain.processes import VERDICT_FILE

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
    """An exit code that no restart can change: handed to our launcher if that started the job.

    torchrun restarts workers that fail, whatever the reason; so they end with 0, and the launcher, which reads the
    verdict, ends with the code.
    """
    verdict = os.environ.get(VERDICT_FILE)
    if verdict is None:
        return exit_code
    Path(verdict).write_text(str(exit_code))
    return 0
