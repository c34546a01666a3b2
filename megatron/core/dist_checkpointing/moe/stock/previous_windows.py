"""Sparse windows of another parallel layout: run again in that layout on one node's CPU, then loaded in this one.

A replay repeats sums in their order, so it takes the layout that made the window. `moe-ckpt convert` does that with
processes of its own and leaves a dense checkpoint, which any layout loads.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist

from ..config import MoECheckpointConfig
from ..dense_saves.directory import CheckpointDirectory
from ..dense_saves.writing import await_everywhere, on_rank_zero, problem_of_all
from ..errors import MoECheckpointError, UsageError
from ..resharding.store import PreviousWindow
from ..storage.small_files import SECRET_FILE

log = logging.getLogger(__name__)

POLL_INTERVAL_S = 0.1
KILLED_S = 10.0
"""How long a process that was killed may take to be gone."""
_HIDDEN = ".moe-ckpt-window-"
_OF_THE_LAUNCHER = re.compile(
    r"(MOE_CKPT|TORCHELASTIC|TORCH_NCCL|NCCL_ASYNC|GROUP|ROLE|LOCAL|MASTER)_\w+|RANK|WORLD_SIZE|OMP_NUM_THREADS"
)
_RESHARDABLE = "--dist-ckpt-optim-fully-reshardable"
_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None
_WHOLE = {
    "ckpt_step": None,
    "finetune": False,
    "no_load_optim": None,
    "no_load_rng": None,
    "pretrained_checkpoint": None,
    "non_persistent_ckpt_type": None,
    "ckpt_format": "torch_dist",
    "exit_on_missing_checkpoint": True,
}
"""Arguments with which all of a checkpoint is loaded, and only that one."""


@contextlib.contextmanager
def made_whole(
    args: Any, config: MoECheckpointConfig, window: PreviousWindow, copy_previous: Callable[[Path], None]
) -> Iterator[None]:
    """A block in which the arguments of Megatron-LM name a checkpoint of the state after `window`, and all of it.

    A collective over all ranks. When a peer is lost meanwhile, the processes that run the window again are told to end,
    and killed after `--moe-ckpt-timeout-s`.

    Args:
        args: Of Megatron-LM.
        config: Of this job.
        window: What another layout left.
        copy_previous: Copies that to a folder; used on rank 0 where some of it lies in memory.

    Raises:
        UsageError: On all ranks alike; everything stays where it is.
    """
    if torch.cuda.is_available():
        raise UsageError(
            f"{window} have to be run again in that layout, on as many GPUs: start with it until a checkpoint is saved"
        )
    with _shared_folder(args.save, config.persist_dir) as folder:
        if dist.get_rank() == 0:
            log.info("converting %s in separate processes on this node", window)
        with ThreadPoolExecutor(1, "older-window") as beside:
            leaving = threading.Event()
            work = config, window, copy_previous, folder, leaving
            converting = beside.submit(_converted, *work) if dist.get_rank() == 0 else None
            try:
                await_everywhere(converting, f"converting {window}")
            except BaseException:
                leaving.set()  # nobody needs what comes of it
                raise
            problem = converting.result() if converting is not None else ""
        if found := problem_of_all(_problem(window, folder, problem)):
            raise UsageError(found)
        changed = _WHOLE | {"load": str(folder)}
        before = {name: getattr(args, name) for name in changed if hasattr(args, name)}
        try:
            vars(args).update({name: changed[name] for name in before})
            yield
        except KeyError as error:
            # Core (0.17 to 0.19) chains its optimizers otherwise where experts have other data-parallel groups.
            raise UsageError(
                f"Megatron-Core cannot bring the optimizer's state to this parallel layout ({error} is missing):"
                f" {window} stay, start in their layout until a checkpoint is saved"
            ) from error
        finally:
            vars(args).update(before)


@contextlib.contextmanager
def _shared_folder(save: str | None, persist_dir: str | None) -> Iterator[Path]:
    """A folder that all ranks see, for as long as they need it: in `--save`, else in storage, else on this node."""
    storage = persist_dir if persist_dir is not None and Path(persist_dir).is_dir() else None
    shared = save or storage

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


def _problem(window: PreviousWindow, folder: Path, problem: str) -> str | None:
    if problem:
        return f"{window} could not be run again there: {problem}; all that was made of them is left"
    if not CheckpointDirectory(str(folder)).folder(window.last).is_dir():
        return (
            f"rank {dist.get_rank()} does not see {folder}, where {window} were made whole: give --save, or"
            " --moe-ckpt-persist-dir, with a folder that all nodes share"
        )
    return None


def _die_with_parent() -> None:
    """Have this process killed when the one that started it ends; takes no lock, so a `preexec_fn` may call it."""
    if _LIBC is not None:
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _converted(
    config: MoECheckpointConfig,
    window: PreviousWindow,
    copy_previous: Callable[[Path], None],
    folder: Path,
    leaving: threading.Event,
) -> str:
    """Make the checkpoint, unless this rank is `leaving`; why it could not be made, empty if it was."""
    try:
        with tempfile.TemporaryDirectory(prefix="moe-ckpt-window-") as view:
            source = config.persist_dir
            if window.in_memory or source is None:
                copy_previous(Path(view))
                source = view
            secret_file = config.secret_file or os.environ.get(SECRET_FILE)
            problem = _convert(source, folder, window, secret_file, leaving, config.timeout_s)
        if not problem and not CheckpointDirectory(str(folder)).folder(window.last).is_dir():
            return f"iteration {window.last} did not come out of it, since some of what it needs is damaged; see above"
        return problem
    except (MoECheckpointError, OSError) as error:
        return str(error)


def _convert(
    source: str,
    folder: Path,
    window: PreviousWindow,
    secret_file: str | None,
    leaving: threading.Event,
    timeout_s: float,
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
            preexec_fn=_die_with_parent,
        )
        while process.poll() is None and not leaving.wait(POLL_INTERVAL_S):
            pass
        if process.poll() is None:
            log.warning("stopping the conversion of %s: this rank is exiting", window)
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
    log.error("moe-ckpt convert did not exit in %g s: killing it and its children", timeout_s)
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
