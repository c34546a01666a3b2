"""The integrity file of a dense checkpoint: length and checksum of every other file in its folder. No torch.

One line, `{"xxh3":"<32 hexadecimal digits>","integrity":<body>}`, where the checksum is that of the body's bytes as
they stand, so the file protects itself. It is written last, before the folder gets its final name; Megatron-Core does
not look at it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import msgspec
from xxhash import xxh3_128

from megatron.core.dist_checkpointing.moe.errors import NewerFormat, UnreadableCheckpoint
from megatron.core.dist_checkpointing.moe.storage.atomic import write_atomically
from megatron.core.dist_checkpointing.moe.storage.manifest import framed

from .framed import decoded
from .names import read_if_there

if TYPE_CHECKING:
    from .dense import DenseCheckpoint

NAME = "moe_ckpt_integrity.json"
FORMAT_VERSION = 1

_KEY = "integrity"

MARK = "moe_ckpt_integrity"
"""In the `content_metadata` of a checkpoint: it was saved with an integrity file, so that its absence is a loss."""

_BLOCK_BYTES = 1 << 22
_FileName = Annotated[str, msgspec.Meta(pattern=r"\A(?!\.{1,2}\Z)[^/]+\Z")]
_Length = Annotated[int, msgspec.Meta(ge=0)]
_Xxh3 = Annotated[str, msgspec.Meta(pattern=r"\A[0-9a-f]{32}\Z")]

Advance = Callable[[int], None]
"""Is called with the number of bytes that were read since its last call."""

FileKey = TypeVar("FileKey", str, Path)


@dataclass(frozen=True, slots=True)
class FileSum:
    """A file's length, and the xxh3 of its bytes (128 bits, hexadecimal)."""

    nbytes: int
    xxh3: str


Sums = Mapping[str, FileSum]
"""By the names of the files in the folder of one iteration."""


@dataclass(frozen=True, slots=True)
class Damage:
    """A file that is not what was saved. expected, found: what it was and what it is, as a person reads them."""

    path: Path
    expected: str
    found: str

    def __str__(self) -> str:
        return f"{self.path} is damaged: {self.found}; expected {self.expected}"


def unwatched(nbytes: int) -> None:
    """An Advance for work whose progress nobody watches."""


def file_sum(path: Path, advance: Advance = unwatched) -> FileSum:
    """Length and checksum of a file. Raises OSError."""
    digest, nbytes = xxh3_128(), 0
    block = memoryview(bytearray(_BLOCK_BYTES))
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(block):
            digest.update(block[:count])
            nbytes += count
            advance(count)
    return FileSum(nbytes, digest.hexdigest())


def encode(sums: Sums) -> bytes:
    """The integrity file's content; equal sums give equal bytes."""
    files = {name: [saved.nbytes, saved.xxh3] for name, saved in sorted(sums.items())}
    body = json.dumps({"format": FORMAT_VERSION, "files": files}, separators=(",", ":")).encode("ascii")
    return framed(_KEY, body)


def decode(content: bytes, name: str) -> dict[str, FileSum]:
    """The sums in a file's content; `name` is what errors call the file.

    Raises UnreadableCheckpoint for any deviation from what `encode` writes, NewerFormat for a later format.
    """
    return decoded(content, name, key=_KEY, newest=FORMAT_VERSION, make=_sums, encode=encode)


def _sums(body: dict[str, Any]) -> dict[str, FileSum]:
    rows = msgspec.convert(body["files"], dict[_FileName, tuple[_Length, _Xxh3]])
    return {name: FileSum(*row) for name, row in rows.items()}


def read(directory: Path) -> dict[Path, FileSum] | None:
    """The sums of an iteration's files by their paths, or None if it has no integrity file.

    Raises UnreadableCheckpoint if the integrity file is damaged itself, NewerFormat if a later version wrote it.
    """
    content = read_if_there(directory / NAME)
    if content is None:
        return None
    return {directory / name: saved for name, saved in decode(content, str(directory / NAME)).items()}


def expected(directory: Path, common: Mapping[str, Any]) -> dict[Path, FileSum] | None:
    """As `read`; `common` is the part of the checkpoint that is the same on all ranks.

    Raises UnreadableCheckpoint also if the integrity file is missing although the checkpoint was saved with one.
    """
    sums = read(directory)
    metadata = common.get("content_metadata")
    if sums is None and isinstance(metadata, Mapping) and metadata.get(MARK):
        raise UnreadableCheckpoint(
            f"{directory / NAME}, with which it was saved, is missing, so its bytes cannot be checked; put it back or"
            " take another iteration"
        )
    return sums


def sums_of(parts: Iterable[DenseCheckpoint]) -> dict[Path, FileSum]:
    """What the files of a checkpoint were when they were saved; `parts` are the iterations that it is loaded from.

    Those without an integrity file, as stock Megatron saves, add nothing. Raises as `expected` does.
    """
    sums: dict[Path, FileSum] = {}
    for part in parts:
        sums |= expected(part.directory, part.common) or {}
    return sums


def seal(directory: Path, known: Sums | None = None) -> None:
    """Write the integrity file of a folder that is complete otherwise.

    Args:
        directory: the folder of one iteration.
        known: sums that were made while files were written; all other files are read.

    Raises:
        UnreadableCheckpoint: a file in `known` is not there in the length that was written.
        OSError: the folder cannot be read or written.
    """
    known = known or {}
    names = sorted(path.name for path in directory.iterdir() if path.is_file() and path.name != NAME)
    for name, written in known.items():
        found_bytes = (directory / name).stat().st_size if name in names else None
        if found_bytes != written.nbytes:
            found = "is not there" if found_bytes is None else f"has {found_bytes} bytes"
            raise UnreadableCheckpoint(f"{directory / name} {found}, but {written.nbytes} bytes were written")
    sums = {name: known[name] if name in known else file_sum(directory / name) for name in names}
    write_atomically(directory / NAME, encode(sums))


def check(
    directory: Path, files: Collection[str] | None = None, advance: Advance = unwatched
) -> tuple[Damage, ...] | None:
    """Compares the files of an iteration with what was saved.

    Args:
        directory: the folder of one iteration.
        files: names of those to compare; by default all.
        advance: is called with the number of bytes after each read.

    Returns:
        What is not as it was saved, a damaged integrity file among it; None without an integrity file.

    Raises:
        NewerFormat: a later version wrote the integrity file.
    """
    try:
        sums = read(directory)
    except NewerFormat:
        raise
    except UnreadableCheckpoint as error:
        return (Damage(directory / NAME, "a checksum of its own", str(error)),)
    if sums is None:
        return None
    return damaged({path: saved for path, saved in sums.items() if files is None or path.name in files}, advance)


def damaged(sums: Mapping[Path, FileSum], advance: Advance = unwatched) -> tuple[Damage, ...]:
    """Those of these files that are missing, unreadable or changed. What has another length is not read."""
    found = (_damage(path, saved, advance) for path, saved in sorted(sums.items()))
    return tuple(damage for damage in found if damage is not None)


def _damage(path: Path, saved: FileSum, advance: Advance) -> Damage | None:
    try:
        nbytes = path.stat().st_size
        if nbytes != saved.nbytes:
            return Damage(path, f"{saved.nbytes} bytes", f"it has {nbytes} bytes")
        found = file_sum(path, advance)
    except FileNotFoundError:
        return Damage(path, f"{saved.nbytes} bytes", "it is missing")
    except OSError as error:
        return Damage(path, f"{saved.nbytes} bytes", f"it cannot be read ({error.strerror})")
    return None if found == saved else Damage(path, f"checksum {saved.xxh3}", f"its checksum is {found.xxh3}")


def shares(sums: Mapping[FileKey, FileSum], count: int) -> tuple[tuple[FileKey, ...], ...]:
    """The files, shared out among `count` readers so that each has about as many bytes to read."""
    shared: list[list[FileKey]] = [[] for _ in range(count)]
    loads_bytes = [0] * count
    for key in sorted(sums, key=lambda key: (-sums[key].nbytes, key)):
        least = loads_bytes.index(min(loads_bytes))
        shared[least].append(key)
        loads_bytes[least] += sums[key].nbytes
    return tuple(map(tuple, shared))
