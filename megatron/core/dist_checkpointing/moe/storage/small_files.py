"""Reads small files that somebody else may have put there: regular ones only, of a size that their kind may have.

Whatever lies under the name of a file of ours is never waited for (a FIFO), read without end (a device, or a link to
one) or taken into memory because it says that it is long (a sparse file): it costs itself, and one line with its path.
"""

from __future__ import annotations

import contextlib
import errno
import hmac
import logging
import os
import stat
from io import BufferedReader
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from ..errors import UsageError
from .system import OperatingSystem, opened, read_up_to

if TYPE_CHECKING:
    from collections.abc import Buffer

log = logging.getLogger(__name__)

INFORMING_BYTES = 1 << 20
"""Of a file that only informs: the longest, times of faults, have some hundred bytes for each."""

_ALWAYS_BYTES = 64 << 20
"""Longer files than this are read only where twice their length is free: their content is copied as it is parsed."""

_LINUX = OperatingSystem()


def read_small(path: Path, most_bytes: int, *, through_links: bool = False, system: OperatingSystem = _LINUX) -> bytes:
    """The content of a regular file.

    Args:
        path: Of the file.
        most_bytes: What one of its kind may have.
        through_links: Whether the file may be a link to another one, as in folders that are not ours.
        system: That reads it.

    Raises:
        FileNotFoundError: There is none.
        OSError: It cannot be read, is no regular file, or is larger; `strerror` says which.
    """
    with opened(system, path, _flags(through_links)) as descriptor:
        length = _regular(descriptor, path).st_size
        if length > most_bytes:
            raise OSError(errno.EFBIG, f"it has {length} bytes, more than {most_bytes}", str(path))
        if length > _ALWAYS_BYTES and 2 * length > psutil.virtual_memory().available:
            raise OSError(errno.ENOMEM, f"it has {length} bytes, more than half of the free memory", str(path))
        content = memoryview(bytearray(length))
        return bytes(content[: read_up_to(system, descriptor, content, 0)])


def open_regular(path: Path, *, through_links: bool = False) -> BufferedReader:
    """A regular file of any length, for reading.

    Args:
        path: The file.
        through_links: Whether symbolic links are followed.

    Raises:
        OSError: As `read_small`.
    """
    descriptor = _LINUX.open(path, _flags(through_links))
    try:
        _regular(descriptor, path)
        return os.fdopen(descriptor, "rb")
    except BaseException:  # nothing has taken the descriptor over
        os.close(descriptor)
        raise


def regular_stat(path: Path) -> os.stat_result:
    """Of a regular file in a folder of ours. Raises OSError as `read_small`."""
    found = path.lstat()
    _require_regular(found, path)
    return found


def put_aside(path: Path, what: str, why: object) -> None:
    """Say once that a file which only informs cannot be believed, and rename it, so that the next start is quiet.

    Args:
        path: The file, which gets `.damaged` behind its name.
        what: What it holds, for the message.
        why: The error, or the reason.
    """
    reason = f"{why} is missing" if isinstance(why, KeyError) else getattr(why, "strerror", None) or why
    # An error: what one rank alone knows is not heard of otherwise.
    log.error("%s in %s not readable, renamed to *.damaged: %s", what, path, reason)
    with contextlib.suppress(OSError):
        path.replace(path.with_name(f"{path.name}.damaged"))


def _flags(through_links: bool) -> int:
    return os.O_RDONLY if through_links else os.O_RDONLY | os.O_NOFOLLOW


def _regular(descriptor: int, path: Path) -> os.stat_result:
    found = os.fstat(descriptor)
    _require_regular(found, path)
    return found


def _require_regular(found: os.stat_result, path: Path) -> None:
    if not stat.S_ISREG(found.st_mode):
        raise OSError(errno.EINVAL, "it is no regular file", str(path))


# The secret that only ranks of a job share: with it a checksum says who made the bytes, not only that they are whole.
#
# The digest is HMAC-SHA256 (RFC 2104), cut to the 128 bits that checksums have.

SECRET_FILE = "MOE_CKPT_SECRET_FILE"
"""Environment variable with the path of the secret's file, for jobs and for tools that read what they left."""

LEAST_BYTES, MOST_BYTES = 16, 4096
DIGITS = 32


def read_secret(path: str | None) -> bytes | None:
    """The secret in a file; `path` None: in that of MOE_CKPT_SECRET_FILE, if it is set, else None.

    Raises UsageError for a file that others can read or change, or with too little in it.
    """
    path = path or os.environ.get(SECRET_FILE)
    if not path:
        return None
    try:
        # Judged through the descriptor that is read: the file cannot be exchanged between the look and the use.
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        with open(descriptor, "rb") as file:
            found = os.fstat(descriptor)
            _check_file(path, found)
            secret = file.read(MOST_BYTES + 1).strip()
    except OSError as error:
        raise UsageError(f"secret file {path} cannot be read: {error.strerror}; make it on every node") from error
    if not LEAST_BYTES <= len(secret) <= MOST_BYTES:
        raise UsageError(
            f"secret file {path} has {len(secret)} bytes, but {LEAST_BYTES} to {MOST_BYTES} are needed: make one with"
            f" (umask 077; openssl rand -hex 32 > {path})"
        )
    return secret


def signed(secret: bytes, data: Buffer) -> str:
    """The keyed checksum of contiguous bytes: 32 hexadecimal digits. Nothing is copied and the GIL is released.

    Args:
        secret: The job's secret.
        data: Contiguous bytes.
    """
    digest = keyed_digest(secret)
    digest.update(memoryview(data).cast("B"))
    return digest.hexdigest()[:DIGITS]


def keyed_digest(secret: bytes) -> hmac.HMAC:
    """To be updated; the first DIGITS of its hexadecimal digits count."""
    return hmac.new(secret, digestmod="sha256")


def _check_file(path: str, found: os.stat_result) -> None:
    if not stat.S_ISREG(found.st_mode):
        raise UsageError(f"secret file {Path(path)} is no file")
    if found.st_uid not in (os.geteuid(), 0):
        raise UsageError(f"secret file {path} belongs to user {found.st_uid}, who knows it: use one of your own")
    if found.st_mode & 0o077:
        raise UsageError(
            f"secret file {path} can be read or written by others (mode {stat.S_IMODE(found.st_mode):04o}): chmod 600"
            f" {path}, and change the secret if they may have read it"
        )
