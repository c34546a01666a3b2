"""How training processes tell their launcher that no restart would help."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import tempfile
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

from ..errors import CheckpointFailure, MoECheckpointError
from .heartbeat import own_heartbeat

log = logging.getLogger(__name__)

VERDICT_FILE = "MOE_CKPT_LAUNCH_VERDICT"
"""Environment variable with the file in which a worker leaves an exit code that restarts cannot change."""


@contextlib.contextmanager
def verdict_of_ranks() -> Iterator[Callable[[], int]]:
    """In this block ranks can leave a verdict (`VERDICT_FILE`); gives a function for it, which is 0 where none did."""
    with tempfile.TemporaryDirectory(prefix="moe-ckpt-launch-") as folder, kept_folder(folder):
        file = Path(folder) / "verdict"
        os.environ[VERDICT_FILE] = str(file)
        try:
            yield lambda: int(file.read_text()) if file.exists() else 0
        finally:
            del os.environ[VERDICT_FILE]


@contextlib.contextmanager
def kept_folder(path: str | Path) -> Iterator[None]:
    """In this block nobody takes a folder in /tmp for a leftover: systemd-tmpfiles removes what was not touched for 10
    days, but leaves locked folders alone."""
    held = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(held, fcntl.LOCK_SH)
        yield
    finally:
        os.close(held)


def forget_verdict() -> None:
    """Ranks are started again, since others of this launcher have failed: that of the attempt before does not count."""
    if VERDICT_FILE in os.environ:
        for file in (Path(os.environ[VERDICT_FILE]), _beside("early"), _beside("strict")):
            file.unlink(missing_ok=True)


def has_verdict() -> bool:
    """Whether ranks of this launcher have left an exit code that no restart changes."""
    return Path(os.environ.get(VERDICT_FILE, "")).is_file()


def has_strict_verdict() -> bool:
    """Whether protection was lost on a rank of this launcher, with which it must not train on: a restart forgets that
    the others failed, and not this."""
    return has_verdict() and _beside("strict").is_file()


def leave_verdict(exit_code: int) -> bool:
    """Leave an exit code to the launcher; False where none waits for it, or it cannot be left.

    torchrun restarts workers that fail, whatever the reason: behind a verdict they have to end with 0.
    """
    verdict = os.environ.get(VERDICT_FILE)
    if verdict is None:
        return False
    try:
        Path(verdict).write_text(str(exit_code))
    except OSError as error:
        _remove_part(Path(verdict))
        log.error("exit code %d cannot be left to the launcher, which may start ranks again: %s", exit_code, error)
        return False
    return True


def _remove_part(verdict: Path) -> None:
    """Remove what was written of a verdict until the disk was full."""
    with contextlib.suppress(OSError):
        verdict.unlink()


def leave_early() -> None:
    """Tell the launcher that this process is about to end with 0 before its last iteration, as a signal or a flag asks:
    training has not ended."""
    if VERDICT_FILE in os.environ:
        with contextlib.suppress(OSError):
            _beside("early").touch()


def has_left_early() -> bool:
    """Whether a rank of this launcher has ended so."""
    return _beside("early").is_file()


@cache
def note_iteration() -> None:
    """Tell the launcher that this process has trained an iteration."""
    if VERDICT_FILE in os.environ:
        with contextlib.suppress(OSError):
            _beside("trained").touch()


def has_trained() -> bool:
    """Whether a rank of this launcher has trained an iteration, in this attempt or an earlier one."""
    return _beside("trained").is_file()


def _beside(name: str) -> Path:
    return Path(os.environ.get(VERDICT_FILE, "nowhere/verdict")).with_name(name)


@contextlib.contextmanager
def permanent_errors_end_the_job() -> Iterator[None]:
    """In this block an error that would come again at each restart ends a process that our launcher has started: with
    one line on each node, and the exit code that the error has for the launcher. Elsewhere the error passes.

    Raises:
        SystemExit: In place of such an error.
    """
    try:
        yield
    except MoECheckpointError as error:
        if error.exit_code is None or VERDICT_FILE not in os.environ:
            raise
        if isinstance(error, CheckpointFailure):
            with contextlib.suppress(OSError):
                _beside("strict").touch()
        try:
            with Path(os.environ[VERDICT_FILE]).open("x") as file:
                log.error("%s", error)  # only here: the other ranks of this node say the same
                file.write(str(error.exit_code))
        except FileExistsError:
            pass
        except OSError:
            _remove_part(Path(os.environ[VERDICT_FILE]))
            raise error from None  # to end with 0 now would say that training has ended
        own_heartbeat().rest(lost_a_peer=False)
        raise SystemExit(0) from error
