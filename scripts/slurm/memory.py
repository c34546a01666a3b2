"""A node's part of the job's folder in memory: made when its agent starts, given back when the agent ends."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import stat
from pathlib import Path

FOLDER, KEEP = "MOE_CKPT_MEMORY", "MOE_CKPT_KEEP_MEMORY"
"""Environment variables of `job.sh`: the job's folder, and 1 if what is in it waits for the next run of the job."""


def take() -> None:
    """Make the folder, which only the job's user can read. Raises OSError, also where it is another user's."""
    folder = Path(os.environ[FOLDER])
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
        raise PermissionError(errno.EPERM, "it is a link, or belongs to another user", str(folder))
    if is_kept():
        keep()


def keep() -> None:
    """Let the folder outlive this run of the job."""
    os.environ[KEEP] = "1"
    Path(os.environ[FOLDER], "keep").touch()


def holds_state(node: str) -> bool:
    """Whether ranks of this node have sealed something there, whatever version of the engine can read it."""
    return any(Path(os.environ[FOLDER], node).glob("*/*/segment-*.*.json"))


def give_back(node: str, code: int) -> None:
    """Remove what is `node`'s, and the folder with it; kept memory only after a training that has ended (`code` 0)."""
    if code and is_kept():
        return
    folder = Path(os.environ[FOLDER])
    shutil.rmtree(folder / node, ignore_errors=True)
    (folder / "keep").unlink(missing_ok=True)
    with contextlib.suppress(OSError):
        folder.rmdir()


def is_kept() -> bool:
    """Whether what is in the folder waits for the next run of the job."""
    return os.environ.get(KEEP) == "1"
