"""How a folder that a tool writes appears: whole, by one rename. No torch."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from megatron.core.dist_checkpointing.moe.storage.system import OperatingSystem, make_folders, opened, sync_directory

from .names import refuse_existing

_LOCK = "lock"


@contextmanager
def staging(target: Path, doing: str, *, replaces: bool = False) -> Iterator[Path]:
    """A folder to write into, which becomes `target` by one rename when all of it is on the disk, or goes.

    Raises UsageError where `target` is there by then, OSError.

    Args:
        target: The folder to make.
        doing: Names the hidden folder around it; what killed processes left under that name is removed first.
        replaces: Whether an older `target` is removed instead.
    """
    make_folders(target.parent)
    prefix = f".{target.name}.{doing}-"
    for left in list(target.parent.iterdir()):
        if left.name.startswith(prefix):
            with suppress(OSError):
                with _locked(left):
                    shutil.rmtree(left, ignore_errors=True)
                left.rmdir()  # NFS keeps a name for an open file
    # What is renamed lies inside: the lock stays out of it, and it has the permissions of any new folder.
    around = Path(tempfile.mkdtemp(prefix=prefix, dir=target.parent))
    try:
        with open(around / "unlocked", "w") as lock:
            with suppress(OSError):  # a file system without locks: there nobody removes what others left
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.rename(lock.name, around / _LOCK)  # found by others from now on, and held
            folder = around / "new"
            folder.mkdir()
            yield folder
            for path in (*folder.iterdir(), folder):
                with opened(OperatingSystem(), path, os.O_RDONLY) as written:
                    os.fsync(written)
            if replaces and os.path.lexists(target):
                os.rename(target, around / "old")
            try:
                os.rename(folder, target)
            except OSError:
                if not replaces:
                    refuse_existing(target)
                with suppress(OSError):
                    os.rename(around / "old", target)
                raise
    finally:
        shutil.rmtree(around, ignore_errors=True)
    sync_directory(target.parent)


def is_abandoned(around: Path) -> bool:
    """Whether the process that wrote into such a hidden folder has ended."""
    try:
        with _locked(around):
            return True
    except OSError as error:  # held, of another user, or on a file system without locks
        return isinstance(error, FileNotFoundError)


@contextmanager
def _locked(around: Path) -> Iterator[None]:
    # Opened for writing: NFS gives exclusive locks on nothing else.
    with opened(OperatingSystem(), around / _LOCK, os.O_RDWR) as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
