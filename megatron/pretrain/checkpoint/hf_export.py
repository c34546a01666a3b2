"""Weights for Hugging Face beside native checkpoints: a process of its own converts what has been published.

It reads the published files, so training waits for nothing, no rank gathers anything, and what is exported is what was
saved. It lives on the node of rank 0, at low priority, and dies with it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import deque
from pathlib import Path
from typing import IO, Any

import torch

from megatron.core.dist_checkpointing.moe.dense_saves.directory import CheckpointDirectory
from megatron.core.dist_checkpointing.moe.storage.job_secret import SECRET_FILE
from megatron.pretrain.agreement import all_done
from megatron.pretrain.config import PretrainConfig
from megatron.pretrain.config.training import CheckpointConfig
from moe_ckpt.dense.names import ITERATION
from moe_ckpt.hugging_face.exporting import BESIDE
from moe_ckpt.hugging_face.folder import CONFIG, staged

log = logging.getLogger(__name__)

WORKER = "megatron.pretrain.checkpoint.hf_export_worker"
FINISH_TIMEOUT_S = 3600.0
POLL_INTERVAL_S = 0.1
_LAST_LINE_CHARACTERS = 500


class Exports:
    """Exports of one job, one after the other; on ranks other than 0 nothing happens.

    Args:
        config: of the job.
        iteration: from which it goes on, and which an earlier start may have saved without having exported it.
    """

    def __init__(self, config: PretrainConfig, iteration: int) -> None:
        flags = config.checkpoint
        self._flags = flags
        # Checkpoints are signed with it, so it takes it to read them.
        secret = config.moe_checkpoint.secret_file
        self._environment = {"OMP_NUM_THREADS": "1"} | ({} if secret is None else {SECRET_FILE: secret})
        self._is_active = flags.export_hf_interval is not None and torch.distributed.get_rank() == 0
        self._waiting: deque[int] = deque()
        self._running: tuple[int, subprocess.Popen[bytes], IO[bytes], float] | None = None
        if self._is_active:
            self._sweep()
            if CheckpointDirectory(str(flags.save)).folder(iteration).is_dir():
                self.saved(iteration)

    @property
    def needed(self) -> frozenset[int]:
        """Iterations that are still to be read: retention keeps them."""
        running = [] if self._running is None else [self._running[0]]
        return frozenset((*self._waiting, *running))

    def saved(self, iteration: int) -> None:
        """The native checkpoint of an iteration was published."""
        interval = self._flags.export_hf_interval
        if not self._is_active or interval is None or iteration % interval:
            return
        if iteration in self.needed or self._target(iteration).exists():
            return
        self._waiting.append(iteration)
        self.poll()

    def poll(self) -> None:
        """Say how an export ended, and begin the next one."""
        if self._running is not None and self._running[1].poll() is not None:
            self._ended()
        if self._running is None and self._waiting:
            self._start(self._waiting.popleft())

    def finish(self) -> None:
        """Wait for all exports; a collective, so that no rank waits for rank 0 alone."""
        deadline = time.monotonic() + FINISH_TIMEOUT_S
        while not all_done(not self.needed):
            self.poll()
            if self.needed and time.monotonic() > deadline:
                log.error("exports of iterations %s did not end in %.0f s", sorted(self.needed), FINISH_TIMEOUT_S)
                self.abandon()
            time.sleep(POLL_INTERVAL_S)

    def abandon(self) -> None:
        """Give up: what was being written never gets its name, and the next start begins with the newest."""
        if self.needed:
            log.warning("exports of iterations %s are given up, as training ends early", sorted(self.needed))
        self._waiting.clear()
        if self._running is not None:
            iteration, process, output, _ = self._running
            self._running = None
            process.kill()
            process.wait()
            output.close()
            shutil.rmtree(staged(self._target(iteration)), ignore_errors=True)

    def _target(self, iteration: int) -> Path:
        return Path(str(self._flags.export_hf)) / f"iter_{iteration:07d}"

    def _start(self, iteration: int) -> None:
        source = CheckpointDirectory(str(self._flags.save)).folder(iteration)
        command = [sys.executable, "-P", "-m", WORKER, str(os.getpid()), "--to", "hf"]
        if (like := model_folder(self._flags)) is not None:
            command += ["--hf-model", str(like)]
        # Standard error goes to a file: a pipe that nobody reads would stop the process.
        output = tempfile.TemporaryFile()  # noqa: SIM115 # closed when the process has ended
        environment = os.environ | self._environment
        try:
            process: Any = subprocess.Popen(
                [*command, str(source), str(self._target(iteration))], env=environment,
                stdin=subprocess.DEVNULL, stdout=output, stderr=output,
            )  # fmt: skip
        except OSError as error:
            output.close()
            self._report_failure(iteration, str(error))
            return
        self._running = iteration, process, output, time.monotonic()

    def _ended(self) -> None:
        assert self._running is not None
        iteration, process, output, started_at = self._running
        self._running = None
        with output:
            output.seek(0)
            lines = output.read().decode(errors="replace").split("\n")
        said = [line for line in lines if line.strip()]
        if process.returncode:
            why = said[-1][-_LAST_LINE_CHARACTERS:] if said else f"exit code {process.returncode}"
            self._report_failure(iteration, why)
            return
        elapsed_s = time.monotonic() - started_at
        log.info("exported weights of iteration %d to %s in %.2f s", iteration, self._target(iteration), elapsed_s)

    def _report_failure(self, iteration: int, why: str) -> None:
        log.error(
            "weights of iteration %d were NOT exported to %s: %s; training goes on, moe-ckpt convert --to hf can make"
            " them from the checkpoint",
            iteration,
            self._flags.export_hf,
            why,
        )

    def _sweep(self) -> None:
        """Remove what processes that were killed left behind."""
        with contextlib.suppress(OSError):
            for entry in Path(str(self._flags.export_hf)).iterdir():
                unfinished = re.fullmatch(r"\.(.+)\.exporting", entry.name)
                if unfinished and ITERATION.fullmatch(unfinished[1]):
                    shutil.rmtree(entry, ignore_errors=True)


def model_folder(flags: CheckpointConfig) -> Path | None:
    """Where config and tokenizer of exports come from: `--hf-model`, or what `--load` was converted from."""
    if flags.hf_model is not None:
        return Path(flags.hf_model)
    for root in (flags.load, flags.save):
        if root is not None and (Path(root) / BESIDE / CONFIG).is_file():
            return Path(root) / BESIDE
    return None
