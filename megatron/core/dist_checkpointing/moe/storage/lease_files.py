"""The file of a lease in a folder: taken by whoever makes it, renewed in place by who made it."""

from __future__ import annotations

import os
import uuid
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from .objects import located, remote
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
        """Put it there instead of what was read.

        Args:
            content: What to put there.
            instead_of: What was read; None: nothing was there.

        Returns:
            False where something else is there by now.
        """

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
        """As `LeasePlace.take`."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        if instead_of is not None and not self._is_put_away(instead_of):
            return False
        # EXCL: of several processes that find no file one makes it. The descriptor stays open: by its inode the file is
        # known for this process's own later, and it is written through it, so that another's is never written over.
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
        return self._is_mine()  # asked again: whoever took the file away meanwhile has the place

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
        # Renamed first and read then: what is read cannot be exchanged any more.
        try:
            os.rename(self._path, aside)
        except FileNotFoundError:
            return False
        is_judged = read_small(aside, MOST_BYTES) == judged
        if not is_judged:
            # Linked, not renamed: that would replace the file of a third one, which may be there already.
            with suppress(OSError):
                os.link(aside, self._path)
        aside.unlink()
        return is_judged

    def _write(self, content: bytes) -> None:
        # In place and not truncated: all contents of a lease have one length, and a reader never finds an empty file.
        os.pwrite(self._descriptor, content, 0)
        # On a network file system other nodes see it only once it has left the page cache of this one.
        os.fsync(self._descriptor)

    def _is_mine(self) -> bool:
        try:
            there = os.stat(self._path, follow_symlinks=False)
        except FileNotFoundError:
            return False
        try:
            own = os.fstat(self._descriptor)
        except OSError:  # ESTALE where another node has unlinked it, ENOTCONN behind a new mount
            return False
        return (there.st_dev, there.st_ino) == (own.st_dev, own.st_ino)


# The object of a lease below a URL: whoever put it last has it.


class ObjectPlace:
    """Below a URL that fsspec knows, where nothing is exchanged in one act: what was put is read again."""

    settle_s = 1.0

    def __init__(self, url: str) -> None:
        self._files, root = located(url)
        self._path = f"{root.rstrip('/')}/{LEASE}"
        self._mine: tuple[bytes | None, ...] = ()

    def read(self) -> bytes | None:
        with remote(self._path):
            self._files.invalidate_cache()
            try:
                size = self._files.size(self._path)
                return bytes(self._files.cat_file(self._path, 0, min(size, MOST_BYTES)))
            except FileNotFoundError:
                return None

    def take(self, content: bytes, instead_of: bytes | None) -> bool:
        """As `LeasePlace.take`."""
        if self.read() != instead_of:
            return False
        self._put(content, instead_of)
        return True

    def renew(self, content: bytes) -> bool:
        found = self.read()
        if found is None or found not in self._mine:
            return False
        self._put(content, found)
        return True

    def remove(self) -> None:
        if self.read() in self._mine:
            with remote(self._path):
                self._files.rm_file(self._path)

    def let_go(self) -> None:
        """Nothing is held open."""

    def _put(self, content: bytes, instead_of: bytes | None) -> None:
        self._mine = instead_of, content  # both, for a put that fails may have been made all the same
        with remote(self._path):
            self._files.makedirs(self._path.rpartition("/")[0], exist_ok=True)
            self._files.pipe_file(self._path, content)
