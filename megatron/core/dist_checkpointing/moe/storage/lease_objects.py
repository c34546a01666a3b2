"""The object of a lease below a URL: whoever put it last has it."""

from __future__ import annotations

import fsspec  # type: ignore[import-untyped]

from .lease_files import LEASE, MOST_BYTES
from .objects import remote


class ObjectPlace:
    """Below a URL that fsspec knows, where nothing is exchanged in one act: what was put is read again."""

    settle_s = 1.0

    def __init__(self, url: str) -> None:
        with remote(url):
            self._files, root = fsspec.core.url_to_fs(url)
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
