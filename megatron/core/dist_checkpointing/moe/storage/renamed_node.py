"""A machine that comes back under another name: what a job left in its memory is taken under the name of now.

The memory dir has a folder for each node, named after the host. A container that was started again, or a machine whose
name changed, would find none of its own, begin at iteration 1, and take the memory twice.
"""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ..errors import UsageError, reason
from .ownership import OWNER_FILE, check_private, live_owner, make_private
from .slot_reader import SEALED

log = logging.getLogger(__name__)

LOCK_S = 30.0
_POLL_S = 0.05


def take_over_memory(base: Path, node: str, job: str, others: Collection[str], fix: str) -> None:
    """Move what this job left here under another name of this machine to the folder of `node`.

    Nothing happens where the job continues from what it has under the name of `node`, or where it left nothing under
    others: nodes that run now, and folders that a process holds, are not left.

    Args:
        base: The memory dir.
        node: The name of this node.
        job: Id of the job.
        others: Names of all nodes of the running job.
        fix: What a user can set to choose a name.

    Raises:
        UsageError: Several names have what this job left, or a folder cannot be used.
    """
    names = {node, *others}
    try:
        if _is_needed(base / node / job) or all(path.parent.name in names for path in base.glob(f"*/{job}")):
            return
        with _locked(base):
            # Looked at again: another rank of this node may have been here.
            left = [] if _is_needed(base / node / job) else _left(base, job, names)
            if len(left) > 1:
                found = ", ".join(folder.parent.name for folder in left)
                raise UsageError(
                    f"memory dir {base} has nothing of job {job} under the name of this node, {node}, but under"
                    f" {found}: set {fix} to the name to continue from, or delete what is not needed"
                    f" (rm -r {' '.join(map(str, left))})"
                )
            for folder in left:
                _move(folder, base / node / job)
    except OSError as error:
        raise UsageError(f"memory dir {base} cannot be used: {reason(error)}") from error


def tell_of_memory(base: Path, node: str, job: str, others: Collection[str], fix: str) -> None:
    """See `take_over_memory`: says what it would take where `fix`, which is set, keeps it from being taken."""
    with suppress(OSError, UsageError):
        for folder in [] if _is_needed(base / node / job) else _left(base, job, {node, *others}):
            log.warning(
                "%s holds what job %s left under another name, and stays as it is, for %s is set to %s: set it to %s to"
                " continue from there, or delete what is not needed (rm -r %s)",
                folder, job, fix, node, folder.parent.name, folder,
            )  # fmt: skip


def _is_needed(folder: Path) -> bool:
    """Whether a job continues from what is here, or a process holds it."""
    return any(folder.glob(f"*/segment-*.{SEALED}")) or any(map(live_owner, folder.glob(f"*/{OWNER_FILE}")))


def _move(folder: Path, to: Path) -> None:
    make_private(to.parent)
    shutil.rmtree(to, ignore_errors=True)  # an attempt that came to nothing may have begun there
    os.rename(folder, to)
    log.warning(
        "what job %s left in memory under the name %s is that of %s from here on",
        to.name,
        folder.parent.name,
        to.parent.name,
    )
    with suppress(OSError):
        folder.parent.rmdir()


def _left(base: Path, job: str, names: Collection[str]) -> list[Path]:
    """Folders of the job under other names that no process holds. Raises UsageError where others could fill one."""
    found = []
    for folder in sorted(base.glob(f"*/{job}")):
        is_own = folder.parent.lstat().st_uid == os.geteuid()  # in /dev/shm anybody may have made it
        if folder.parent.name in names or not is_own or not folder.is_dir():
            continue
        check_private(folder.parent, job)
        is_held = any(map(live_owner, folder.glob(f"*/{OWNER_FILE}")))
        if not is_held and _is_needed(folder):
            found.append(folder)
    return found


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Ranks of a node come here together, and one of them moves what is there."""
    # On the folder itself: a file for the lock would have to be removed, and could be while another rank locks it.
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        until_s = time.monotonic() + LOCK_S
        while True:
            # Asked again and again, not waited for: a flock that waits has no timeout.
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > until_s:
                    raise UsageError(f"{folder} has been locked by another process for {LOCK_S:g} s") from None
                time.sleep(_POLL_S)
        yield
    finally:
        os.close(descriptor)
