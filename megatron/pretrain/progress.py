"""The progress file: when a job started, saved and ended."""

from __future__ import annotations

import datetime
import logging
from pathlib import Path

import torch

from megatron.pretrain.checkpoint.state import TrainingState
from megatron.pretrain.initialize import Launch

log = logging.getLogger(__name__)


def log_progress(state: TrainingState, message: str, launch: Launch | None = None) -> None:
    """Append a line to `progress.txt` in the save directory, if `--log-progress` asks for it."""
    if not state.config.training.log_progress or torch.distributed.get_rank() != 0:
        return
    path = Path(str(state.config.checkpoint.save)) / "progress.txt"
    now = datetime.datetime.now().strftime("%Y-%m-%d %H:%M:%S")
    job = f"Job ID: {launch.place.job_here}\tAttempt: {launch.attempt}\t" if launch else ""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a") as file:
            file.write(f"{now}\t{job}Ranks: {torch.distributed.get_world_size()}\t{message}\n")
    except OSError as error:
        log.warning("cannot append to %s: %s", path, error)
