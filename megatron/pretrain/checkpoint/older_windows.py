"""Sparse windows of another parallel layout: run again in that layout on one node's CPU, then loaded in this one.

A replay repeats sums in their order, so it takes the layout that made the window. `moe-ckpt convert` does that with
processes of its own and leaves a dense checkpoint, which any layout loads.
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
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import replace
from pathlib import Path

import psutil
import torch.distributed as dist

from megatron.core.dist_checkpointing.moe import OlderWindow
from megatron.core.dist_checkpointing.moe.dense_saves.directory import CheckpointDirectory
from megatron.core.dist_checkpointing.moe.errors import MoECheckpointError
from megatron.core.dist_checkpointing.moe.storage.job_secret import SECRET_FILE
from megatron.pretrain.agreement import all_done, on_rank_zero, raise_invalid_input_on_all_ranks
from megatron.pretrain.checkpoint.load import load_checkpoint
from megatron.pretrain.checkpoint.state import TrainingState
from megatron.pretrain.errors import InvalidInput
from megatron.pretrain.processes import die_with_parent

log = logging.getLogger(__name__)

POLL_INTERVAL_S = 0.1
KILLED_S = 10.0
"""How long a process that was killed may take to be gone."""
_HIDDEN = ".moe-ckpt-window-"
_OF_THE_LAUNCHER = re.compile(
    r"(MOE_CKPT|TORCHELASTIC|TORCH_NCCL|NCCL_ASYNC|GROUP|ROLE|LOCAL|MASTER)_\w+|RANK|WORLD_SIZE|OMP_NUM_THREADS"
)
_RESHARDABLE = "--dist-ckpt-optim-fully-reshardable"


def load_window(state: TrainingState, window: OlderWindow, copy_older: Callable[[Path], None]) -> int:
    """Load the state after `window` into the live state; a collective over all ranks.

    When a peer is lost meanwhile, the processes that run the window again are told to end, and killed after
    `--moe-ckpt-timeout-s`.

    Args:
        state: Of this job.
        window: What another layout left.
        copy_older: Copies that to a folder; used on rank 0 where some of it lies in memory.

    Returns:
        The iteration after which training stands.

    Raises:
        InvalidInput: On all ranks alike; everything stays where it is.
    """
    config = state.config
    if config.parallel.device != "cpu":
        raise InvalidInput(
            f"{window} have to be run again in that layout, on as many GPUs: start with it until a checkpoint is saved"
        )
    with shared_folder(state) as folder:
        log.info("%s are run again there, by processes of their own on this node", window)
        with ThreadPoolExecutor(1, "older-window") as beside:
            leaving = threading.Event()
            work = state, window, copy_older, folder, leaving
            converting = beside.submit(_converted, *work) if dist.get_rank() == 0 else None
            try:
                while not all_done(converting is None or converting.done()):
                    wait([converting] if converting is not None else [], POLL_INTERVAL_S)
            except BaseException:
                leaving.set()  # nobody needs what comes of it
                raise
            problem = converting.result() if converting is not None else ""
        raise_invalid_input_on_all_ranks(lambda: _check(window, folder, problem))
        checkpoint = replace(
            config.checkpoint, load=str(folder), ckpt_step=None, finetune=False, load_optim=True, load_rng=True
        )
        load_checkpoint(replace(state, config=replace(config, checkpoint=checkpoint)))
    return state.progress.iteration


@contextlib.contextmanager
def shared_folder(state: TrainingState) -> Iterator[Path]:
    """A folder that all ranks see, for as long as they need it: in `--save`, else in storage, else on this node."""
    persist_dir = state.config.moe_checkpoint.persist_dir
    storage = persist_dir if persist_dir is not None and Path(persist_dir).is_dir() else None
    shared = state.config.checkpoint.save or storage

    def make() -> Path:
        if shared is not None:
            Path(shared).mkdir(parents=True, exist_ok=True)
            for left in Path(shared).glob(f"{_HIDDEN}*"):  # by an attempt that was killed
                shutil.rmtree(left, ignore_errors=True)
        return Path(tempfile.mkdtemp(prefix=_HIDDEN, dir=shared))

    folder = on_rank_zero(make)
    try:
        yield folder
    finally:
        if dist.get_rank() == 0:
            shutil.rmtree(folder, ignore_errors=True)


def _check(window: OlderWindow, folder: Path, problem: str) -> None:
    if problem:
        raise InvalidInput(f"{window} could not be run again there: {problem}; all that was made of them is left")
    if not CheckpointDirectory(str(folder)).folder(window.last).is_dir():
        raise InvalidInput(
            f"rank {dist.get_rank()} does not see {folder}, where {window} were made whole: give --save, or"
            " --moe-ckpt-persist-dir, with a folder that all nodes share"
        )


def _converted(
    state: TrainingState,
    window: OlderWindow,
    copy_older: Callable[[Path], None],
    folder: Path,
    leaving: threading.Event,
) -> str:
    """Make the checkpoint, unless this rank is `leaving`; why it could not be made, empty if it was."""
    try:
        with tempfile.TemporaryDirectory(prefix="moe-ckpt-window-") as view:
            settings = state.config.moe_checkpoint
            source = settings.persist_dir
            if window.in_memory or source is None:
                copy_older(Path(view))
                source = view
            secret_file = settings.secret_file or os.environ.get(SECRET_FILE)
            problem = _convert(source, folder, window, secret_file, leaving, settings.timeout_s)
        if not problem and not CheckpointDirectory(str(folder)).folder(window.last).is_dir():
            return f"iteration {window.last} did not come out of it, since some of what it needs is damaged; see above"
        return problem
    except (MoECheckpointError, OSError) as error:
        return str(error)


def _convert(
    source: str, folder: Path, window: OlderWindow, secret_file: str | None, leaving: threading.Event, timeout_s: float
) -> str:
    """Run `moe-ckpt convert` to its end, or until `timeout_s` after this rank is `leaving`; why it failed, or empty."""
    command = [sys.executable, "-P", "-m", "moe_ckpt", "convert", "--to", "dense", source, str(folder)]
    environment = {name: value for name, value in os.environ.items() if not _OF_THE_LAUNCHER.fullmatch(name)}
    if secret_file is not None:
        environment[SECRET_FILE] = secret_file
    with tempfile.TemporaryFile() as said:
        # With threads about, nothing may run between fork and exec that takes a lock.
        process = subprocess.Popen(
            [*command, "--", _RESHARDABLE],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=said,
            stderr=said,
            preexec_fn=die_with_parent,
        )
        while process.poll() is None and not leaving.wait(POLL_INTERVAL_S):
            pass
        if process.poll() is None:
            log.warning("the conversion of %s is told to end: this rank leaves, and nobody needs it", window)
            _end(process, timeout_s)
        if process.returncode == 0:
            return ""
        said.seek(0)
        lines = [line for line in said.read().decode(errors="replace").splitlines() if line.strip()]
    return lines[-1] if lines else f"exit code {process.returncode}"


def _end(process: subprocess.Popen[bytes], timeout_s: float) -> None:
    """Tell the job that a conversion has started to end, upon which it tidies up and ends itself; else kill them."""
    told, until_s = set[psutil.Process](), time.monotonic() + timeout_s
    while process.poll() is None and time.monotonic() < until_s:
        for job in _below(process, recursive=False) - told:
            told.add(job)
            with contextlib.suppress(psutil.Error):
                job.terminate()
        time.sleep(POLL_INTERVAL_S)
    if process.poll() is not None:
        return
    log.error("waited %g s for moe-ckpt convert to end, and kill it with all that it has started", timeout_s)
    below = _below(process, recursive=True)
    process.kill()
    for one in below:
        with contextlib.suppress(psutil.Error):
            one.kill()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(KILLED_S)


def _below(process: subprocess.Popen[bytes], *, recursive: bool) -> set[psutil.Process]:
    try:
        return set(psutil.Process(process.pid).children(recursive))
    except psutil.Error:  # it has ended
        return set()
