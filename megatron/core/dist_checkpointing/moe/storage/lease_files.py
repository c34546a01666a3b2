"""The file of a lease in a folder: taken by whoever makes it, renewed in place by who made it."""

from __future__ import annotations

import os
import uuid
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from .small_files import read_small

LEASE = ".moe-ckpt-lease.json"
MOST_BYTES = 1 << 20


class LeasePlace(Protocol):
    """Where the file of a lease is. All methods raise OSError and StoreFailure.

    settle_s: after which what was put has to be read again: of two that put it the last one has it.
    """

    settle_s: float

    def read(self) -> bytes | None:
        """Its content, None where there is none."""

    def take(self, content: bytes, instead_of: bytes | None) -> bool:
        """Put it there instead of what was read; False where something else is there by now."""

    def renew(self, content: bytes) -> bool:
        """Replace what `take` put there; False where it is another's by now."""

    def remove(self) -> None:
        """Remove what `take` put there, unless it is another's by now."""

    def let_go(self) -> None:
        """Leave the file where it is."""


class FolderPlace:
    """In a folder. What is renewed is the very file that was made, under whatever name it is by now."""

    settle_s = 0.0

    def __init__(self, folder: Path) -> None:
        self._path, self._descriptor = folder / LEASE, -1

    def read(self) -> bytes | None:
        try:
            return read_small(self._path, MOST_BYTES)
        except FileNotFoundError:
            return None

    def take(self, content: bytes, instead_of: bytes | None) -> bool:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        if instead_of is not None and not self._is_put_away(instead_of):
            return False
        try:
            self._descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        except FileExistsError:
            return False
        self._write(content)
        return True

    def renew(self, content: bytes) -> bool:
        if not self._is_mine():
            return False
        self._write(content)
        return self._is_mine()

    def remove(self) -> None:
        if self._is_mine():
            self._path.unlink(missing_ok=True)
        self.let_go()

    def let_go(self) -> None:
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    def _is_put_away(self, judged: bytes) -> bool:
        """Move the file away that was judged; what came in its place meanwhile is put back."""
        aside = self._path.with_name(f"{LEASE}.{uuid.uuid4().hex[:8]}")
        try:
            os.rename(self._path, aside)
        except FileNotFoundError:
            return False
        is_judged = read_small(aside, MOST_BYTES) == judged
        if not is_judged:
            with suppress(OSError):  # a third one is there already
                os.link(aside, self._path)
        aside.unlink()
        return is_judged

    def _write(self, content: bytes) -> None:
        os.pwrite(self._descriptor, content, 0)
        os.fsync(self._descriptor)

    def _is_mine(self) -> bool:
        try:
            there, own = os.stat(self._path, follow_symlinks=False), os.fstat(self._descriptor)
        except FileNotFoundError:
            return False
        return (there.st_dev, there.st_ino) == (own.st_dev, own.st_ino)
