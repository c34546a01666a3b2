"""Checksums of the parts of shard files, so that a job compares what it loads while it reads it, and reads it once.

`moe_ckpt_items.json` says for each `.distcp` file where the pieces of tensors and objects lie that Megatron wrote one
by one, and what each one's bytes were. The integrity file has a checksum of it, as of every file, and where a job has a
secret both are keyed. No torch.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated, Any, TypeAlias

import msgspec

from megatron.core.dist_checkpointing.moe.storage.atomic import write_atomically
from megatron.core.dist_checkpointing.moe.storage.manifest import KEYED, RunningChecksum, sealed, unkeyed, unsealed

from .framed import decoded
from .integrity import UNSIGNED, Advance, FileSum, file_sum, unwatched
from .names import read_if_there

NAME = "moe_ckpt_items.json"
FORMAT_VERSION = 1

_KEY = "items"
_Number = Annotated[int, msgspec.Meta(ge=0)]
_Xxh3 = Annotated[str, msgspec.Meta(pattern=r"\A[0-9a-f]{32}\Z")]
_FileName = Annotated[str, msgspec.Meta(pattern=r"\A(?!\.{1,2}\Z)[^/]+\Z")]

Extent: TypeAlias = tuple[int, int]
"""Where an item begins in its file, and how many bytes it has."""
ItemSums: TypeAlias = Mapping[str, Mapping[Extent, str]]
"""The checksum of each item (128 bits, hexadecimal), by the name of its file: xxh3, or keyed in a job with a secret."""


def sums_of_file(
    path: Path, extents: Iterable[Extent], advance: Advance = unwatched
) -> tuple[FileSum, dict[Extent, str]]:
    """What a file is as a whole, and each of its items; it is read once. Raises OSError."""
    items = _Items(extents)
    whole = file_sum(path, advance, items.read)
    return whole, items.found


class _Items:
    """Digests of stretches of a file that is read from its begin to its end."""

    def __init__(self, extents: Iterable[Extent]) -> None:
        self._left = sorted(set(extents), reverse=True)
        self._digest = RunningChecksum()
        self.found: dict[Extent, str] = {}

    def read(self, at: int, data: memoryview) -> None:
        """These bytes of the file were read, beginning at `at`; an empty last block ends it."""
        end = at + len(data)
        while self._left:
            offset, nbytes = self._left[-1]
            first, last = max(offset, at), min(offset + nbytes, end)
            if first < last:
                self._digest.update(data[first - at : last - at])
            if offset + nbytes > end:
                return
            self.found[self._left.pop()] = self._digest.hexdigest()
            self._digest = RunningChecksum()


def encode(items: ItemSums) -> bytes:
    """The file's content; equal sums give equal bytes."""
    files = {name: [[*extent, xxh3] for extent, xxh3 in sorted(of.items())] for name, of in sorted(items.items())}
    body = json.dumps({"format": FORMAT_VERSION, "files": files}, separators=(",", ":")).encode("ascii")
    return sealed(_KEY, body)


def decode(content: bytes, name: str) -> dict[str, dict[Extent, str]]:
    """The sums in a file's content; `name` is what errors call the file.

    Raises UnreadableCheckpoint for any deviation from what `encode` writes, also in a process with another secret, or
    with none; NewerFormat for a later format.
    """
    body = unsealed(_KEY, content, name, UNSIGNED)
    return decoded(content, name, body=body, newest=FORMAT_VERSION, make=_items, encode=encode)


def _items(body: dict[str, Any]) -> dict[str, dict[Extent, str]]:
    rows = msgspec.convert(body["files"], dict[_FileName, list[tuple[_Number, _Number, _Xxh3]]])
    return {name: {(offset, nbytes): xxh3 for offset, nbytes, xxh3 in of} for name, of in rows.items()}


def has_key(directory: Path) -> bool:
    """Whether the file is sealed with a secret. Raises UnreadableCheckpoint."""
    return (read_if_there(directory / NAME) or b"").startswith(KEYED)


def seal(directory: Path) -> dict[str, FileSum]:
    """Write the file anew with the secret of this process, from the files as they are; what these are as a whole.

    Raises OSError; UnreadableCheckpoint where it was damaged.
    """
    with nullcontext() if has_key(directory) else unkeyed():
        known = read(directory)
    sums = {path.name: sums_of_file(path, of) for path, of in known.items()}
    if known:
        write_atomically(directory / NAME, encode({name: of for name, (_, of) in sums.items()}))
    return {name: whole for name, (whole, _) in sums.items()}


def read(directory: Path) -> dict[Path, dict[Extent, str]]:
    """The sums of the items of an iteration's files by their paths; none where they were not written.

    Raises UnreadableCheckpoint if the file is damaged, NewerFormat if a later version wrote it.
    """
    content = read_if_there(directory / NAME)
    found = {} if content is None else decode(content, str(directory / NAME))
    return {directory / name: of for name, of in found.items()}
