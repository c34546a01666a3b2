"""Folders that only this user can have filled: made with mode 0700, and refused where anybody else could write.

What lies in memory is believed by its checksums, which anybody can compute. So the folders that it lies in have to be
this user's own. Each is opened without following a link and looked at through its descriptor, and the next one is made
and opened relative to that: nothing can be exchanged between the look and the use.
"""

from __future__ import annotations

import os
import pwd
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ..errors import UsageError, reason

_OTHERS = stat.S_IWGRP | stat.S_IWOTH
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def make_private(base: Path, *names: str) -> None:
    """Make `base` and the folders below it, one in another, where they are missing.

    Raises UsageError for one that is a link, belongs to somebody else, or can be written by others; OSError.
    """
    check_outside(base)
    with suppress(FileExistsError):
        os.mkdir(base, 0o700)
    check_private(base, *names, make=True)


def check_private(base: Path, *names: str, make: bool = False) -> None:
    """As `make_private`, for what is there already; nothing is made unless asked for. Raises UsageError, OSError."""
    descriptor, path = _opened(base, base), base
    try:
        _refuse_others(descriptor, path)
        for name in names:
            path = path / name
            if make:
                with suppress(FileExistsError):
                    os.mkdir(name, 0o700, dir_fd=descriptor)
            inner = _opened(path, name, descriptor)
            os.close(descriptor)
            descriptor = inner
            _refuse_others(descriptor, path)
        _refuse_files_of_others(descriptor, path)
    finally:
        os.close(descriptor)


def check_outside(base: Path) -> None:
    """Refuse a folder whose parent lets others put another folder in its place. Raises UsageError."""
    with suppress(FileNotFoundError):
        mode = os.stat(base.parent).st_mode
        if mode & _OTHERS and not mode & stat.S_ISVTX:
            raise UsageError(
                f"memory dir {base} lies in {base.parent}, where others can replace it (mode {_mode(mode)} without the"
                " sticky bit): use a folder in /dev/shm, or take their right to write"
            )


def is_shared(folder: Path) -> bool:
    """Whether all users may write in it and only the owner of a file may replace it, as in `/dev/shm`."""
    try:
        return bool(os.stat(folder).st_mode & stat.S_ISVTX)
    except OSError:
        return False


@contextmanager
def refused_as_unusable(base: Path) -> Iterator[None]:
    """Turns OSError into UsageError."""
    try:
        yield
    except OSError as error:
        raise UsageError(f"memory dir {base} cannot be used: {reason(error)}") from error


def _opened(path: Path, name: Path | str, within: int | None = None) -> int:
    try:
        return os.open(name, _FOLDER, dir_fd=within)
    except OSError:
        found = os.stat(name, dir_fd=within, follow_symlinks=False)
        if stat.S_ISLNK(found.st_mode):
            raise UsageError(
                f"memory folder {path} is a link, made by {_user(found.st_uid)}: name the folder that it leads to, or"
                f" remove it (rm {path})"
            ) from None
        if not stat.S_ISDIR(found.st_mode):
            raise UsageError(
                f"memory folder {path} is no folder, and belongs to {_user(found.st_uid)}: name another"
            ) from None
        if found.st_uid != os.geteuid():
            _refuse_owner(path, found)
        raise


def _refuse_others(descriptor: int, path: Path) -> None:
    found = os.fstat(descriptor)
    if found.st_uid != os.geteuid():
        _refuse_owner(path, found)
    if found.st_mode & _OTHERS:
        raise UsageError(
            f"memory folder {path} can be written by others (mode {_mode(found.st_mode)}), who may have planted what is"
            f" in it: take their right (chmod go-w {path}) if all of it is yours, or use another --moe-ckpt-memory-dir"
        )


def _refuse_owner(path: Path, found: os.stat_result) -> None:
    raise UsageError(
        f"memory folder {path} belongs to {_user(found.st_uid)}, but this job runs as {_user(os.geteuid())}: snapshots"
        " in it could be planted; use another --moe-ckpt-memory-dir, or have it removed by its owner"
    )


def _refuse_files_of_others(descriptor: int, folder: Path) -> None:
    for entry in sorted(os.listdir(descriptor)):
        try:
            found = os.stat(entry, dir_fd=descriptor, follow_symlinks=False)
        except FileNotFoundError:  # freed meanwhile
            continue
        path = folder / entry
        if found.st_uid != os.geteuid():
            raise UsageError(
                f"{path} belongs to {_user(found.st_uid)}, but this job runs as {_user(os.geteuid())}: it was not made"
                " by this job; move it away and start again, nothing else was touched"
            )
        if stat.S_ISLNK(found.st_mode):
            raise UsageError(f"{path} is a link, which no job makes: move it away and start again")


def _mode(mode: int) -> str:
    return f"{stat.S_IMODE(mode):04o}"


def _user(number: int) -> str:
    try:
        return f"user {pwd.getpwuid(number).pw_name}"
    except KeyError:
        return f"user {number}"
