"""The secret that only ranks of a job share: with it a checksum says who made the bytes, not only that they are whole.

The digest is HMAC-SHA256 (RFC 2104), cut to the 128 bits that checksums have.
"""

from __future__ import annotations

import hmac
import os
import stat
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Buffer

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
    """The keyed checksum of contiguous bytes: 32 hexadecimal digits. Nothing is copied and the GIL is released."""
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
