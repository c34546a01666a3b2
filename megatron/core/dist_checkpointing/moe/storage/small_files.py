"""Reads small files that somebody else may have put there: regular ones only, of a size that their kind may have."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path


def read_small(path: Path, most_bytes: int) -> bytes:
    """The content of a file in a folder of ours.

    A FIFO, a device or a folder under its name is not waited for or read, nor is a link followed; a file that is too
    large costs no memory.

    Args:
        path: Of the file.
        most_bytes: What one of its kind may have.

    Raises:
        FileNotFoundError: There is none.
        OSError: It cannot be read, is no regular file, or is larger; `strerror` says which.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW)
    with os.fdopen(descriptor, "rb") as file:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise OSError(errno.EINVAL, "it is no regular file", str(path))
        if found.st_size > most_bytes:
            raise OSError(errno.EFBIG, f"it has {found.st_size} bytes, more than {most_bytes}", str(path))
        return file.read(most_bytes)
