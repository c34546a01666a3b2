"""The integrity file of a dense checkpoint: length and checksum of every other file in its folder. No torch.

One line, `{"xxh3":"<32 hexadecimal digits>","integrity":<body>}`, where the checksum is that of the body's bytes as
they stand, so the file protects itself. In a job with a secret its first member is called `hmac`, and all checksums are
keyed, as those of snapshots (`storage.small_files`). It is written last, before the folder gets its final name;
Megatron-Core does not look at it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Collection, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec

from megatron.core.dist_checkpointing.moe.errors import NewerFormat, UnreadableCheckpoint
from megatron.core.dist_checkpointing.moe.storage.manifest import BODY, RunningChecksum, is_keyed, sealed, unsealed
from megatron.core.dist_checkpointing.moe.storage.small_files import open_regular
from megatron.core.dist_checkpointing.moe.storage.system import write_atomically

from .framed import decoded
from .names import COMMON, DOUBTFUL, FORMAT, INDEX, read_if_there

if TYPE_CHECKING:
    from .dense import DenseCheckpoint

NAME = "moe_ckpt_integrity.json"
OWN_FILES = "moe_ckpt_"
"""How the names of all files begin that are added to those of Megatron-Core."""
_READ = frozenset({COMMON, INDEX, FORMAT, DOUBTFUL})
"""Other files for which a loader looks by name."""
FORMAT_VERSION = 1

_KEY = "integrity"

MARK = "moe_ckpt_integrity"
"""In the `content_metadata` of a checkpoint: it was saved with an integrity file, so that its absence is a loss."""

UNSIGNED = "if you know where it comes from, moe-ckpt sign it; or leave out the secret, or take another iteration"
"""What to do about an iteration without a signature in a job that has a secret."""

_BLOCK_BYTES = 1 << 22
_FileName = Annotated[str, msgspec.Meta(pattern=r"\A(?!\.{1,2}\Z)[^/]+\Z")]
_Length = Annotated[int, msgspec.Meta(ge=0)]
_Xxh3 = Annotated[str, msgspec.Meta(pattern=r"\A[0-9a-f]{32}\Z")]

Advance = Callable[[int], None]
"""Is called with the number of bytes that were read since its last call."""


@dataclass(frozen=True, slots=True)
class FileSum:
    """A file's length, and the checksum of its bytes (128 bits, hexadecimal): xxh3, or keyed in a job with a secret."""

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
    """Length and checksum of a file; the next block is read while one is summed up. Raises OSError.

    Args:
        path: A regular file, or a link to one.
        advance: Called with the number of bytes that were read since its last call.
    """
    digest, nbytes = RunningChecksum(), 0
    blocks = [memoryview(bytearray(_BLOCK_BYTES)) for _ in range(2)]
    with open_regular(path, through_links=True) as file, ThreadPoolExecutor(1, "read-ahead") as ahead:
        coming = ahead.submit(file.readinto, blocks[0])
        while count := coming.result():
            block = blocks[0][:count]
            blocks.reverse()
            coming = ahead.submit(file.readinto, blocks[0])
            digest.update(block)
            nbytes += count
            advance(count)
    return FileSum(nbytes, digest.hexdigest())


def encode(sums: Sums) -> bytes:
    """The integrity file's content; equal sums give equal bytes."""
    files = {name: [saved.nbytes, saved.xxh3] for name, saved in sorted(sums.items())}
    body = json.dumps({"format": FORMAT_VERSION, "files": files}, separators=(",", ":")).encode("ascii")
    return sealed(_KEY, body)


def decode(content: bytes, name: str) -> dict[str, FileSum]:
    """The sums in a file's content, by name of the file.

    Raises UnreadableCheckpoint for any deviation from what `encode` writes, for one that was sealed without the secret
    of this process, or with one that it does not have; NewerFormat for a later format.

    Args:
        content: Bytes of the whole file.
        name: Name of the file in errors.
    """
    body = unsealed(_KEY, content, name, UNSIGNED)
    if body is None and is_keyed():
        raise UnreadableCheckpoint(
            f"{name} does not match its checksum: it is damaged, forged, or of a job with another secret; take another"
            " iteration"
        )
    return decoded(content, name, body=body, newest=FORMAT_VERSION, make=_sums, encode=encode)


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

    Raises UnreadableCheckpoint also if the integrity file is missing although the checkpoint was saved with one, or
    although this process has a secret, without which anybody could have made the checkpoint; and for a file that was
    added to it, which would be loaded.
    """
    sums = read(directory)
    metadata = common.get("content_metadata")
    if sums is None and is_keyed():
        raise UnreadableCheckpoint(
            f"{directory} has no {NAME}, so it is not signed, and anybody may have made it: {UNSIGNED}"
        )
    if sums is not None and (added := _added(directory, sums)):
        raise UnreadableCheckpoint(
            f"{added[0]} was not there when {directory.name} was {'signed' if is_keyed() else 'saved'}, and would"
            " change the state that is loaded: remove the file, or take another iteration"
        )
    if sums is None and isinstance(metadata, Mapping) and metadata.get(MARK):
        raise UnreadableCheckpoint(
            f"{directory / NAME}, with which it was saved, is missing, so its bytes cannot be checked; put it back or"
            " take another iteration"
        )
    return sums


def _added(directory: Path, sums: Collection[Path]) -> list[Path]:
    """Files that a loader would read and that are not of this save, as where an older one was copied over. Raises
    UnreadableCheckpoint."""
    try:
        there = [path for path in directory.iterdir() if path.name in _READ or path.name.startswith(OWN_FILES)]
    except FileNotFoundError:
        return []  # removed meanwhile
    except OSError as error:
        raise UnreadableCheckpoint(f"{directory} cannot be read: {error}; take another iteration") from error
    return sorted(path for path in there if path not in sums and path.name != NAME)


def sums_of(parts: Iterable[DenseCheckpoint]) -> dict[Path, FileSum]:
    """What the files of a checkpoint were when they were saved; `parts` are the iterations that it is loaded from.

    Those without an integrity file, as stock Megatron saves, add nothing. Raises as `expected` does.
    """
    sums: dict[Path, FileSum] = {}
    for part in parts:
        sums |= expected(part.directory, part.common) or {}
    return sums


Identities = Mapping[Path, tuple[int, ...]]
"""Of files: what tells each apart from any that takes its name later."""


def identities(folders: Iterable[Path]) -> Identities:
    """Of all files of iterations that are about to be read. Raises UnreadableCheckpoint."""
    try:
        found = {path: path.stat() for folder in folders for path in folder.iterdir() if path.is_file()}
    except OSError as error:
        raise UnreadableCheckpoint(f"{error.filename} cannot be read ({error.strerror}); try again") from error
    kept = 5 if is_keyed() else 4  # where the result will be signed, also the time that no writer chooses
    return {path: identity(one)[:kept] for path, one in found.items()}


def identity(found: os.stat_result) -> tuple[int, ...]:
    """Of a file: device, inode, length, and when its content and its inode changed, in nanoseconds."""
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


def refuse_saved_again(before: Identities) -> None:
    """Raises UnreadableCheckpoint where these iterations have other files by now: what was read is of several saves."""
    after = identities({path.parent for path in before})
    if after != before:
        path, _ = min(before.items() ^ after.items())
        raise UnreadableCheckpoint(f"{path.parent} was saved again while it was read ({path.name}); try again")


def seal(directory: Path, known: Sums | None = None) -> None:
    """Write the integrity file of a folder that is complete otherwise.

    Args:
        directory: the folder of one iteration.
        known: sums that were made while files were written; all other files are read.

    Raises:
        UnreadableCheckpoint: a file in `known` is not there in the length that was written; or one must not be signed.
        OSError: the folder cannot be read or written.
    """
    known = known or {}
    names = sorted(path.name for path in directory.iterdir() if path.is_file() and path.name != NAME)
    for name, written in known.items():
        found_bytes = (directory / name).stat().st_size if name in names else None
        if found_bytes != written.nbytes:
            found = "is not there" if found_bytes is None else f"has {found_bytes} bytes"
            raise UnreadableCheckpoint(f"{directory / name} {found}, but {written.nbytes} bytes were written")
    for name in (name for name in names if name not in known):
        # Core syncs what it writes with shards, and not its commit marker.
        with open_regular(directory / name, through_links=True) as file:
            os.fsync(file.fileno())
    if is_keyed():
        _refuse_bodies(directory, names)
    sums = {name: known[name] if name in known else file_sum(directory / name) for name in names}
    write_atomically(directory / NAME, encode(sums))


def _refuse_bodies(directory: Path, names: Iterable[str]) -> None:
    """Raises UnreadableCheckpoint for a file that is the body of a manifest: its signature, in the integrity file for
    all to read, would be that of a snapshot which the job never made."""
    for name in names:
        with open_regular(directory / name, through_links=True) as file:
            if file.read(len(BODY)) == BODY:
                raise UnreadableCheckpoint(
                    f"{directory / name} is no file of a checkpoint, and to sign it would sign a snapshot: remove it"
                )


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
    found = damaged({path: saved for path, saved in sums.items() if files is None or path.name in files}, advance)
    if files is not None:
        return found
    return (
        *found,
        *(Damage(path, "no such file, as none was saved", "it was added") for path in _added(directory, sums)),
    )


def damaged(sums: Mapping[Path, FileSum], advance: Advance = unwatched) -> tuple[Damage, ...]:
    """The files that are missing, unreadable or changed. A file of another length is not read.

    Args:
        sums: Length and checksum of each file as it was saved.
        advance: Called with the number of bytes that were read since its last call.
    """
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


def shares[FileKey: (str, Path)](sums: Mapping[FileKey, FileSum], count: int) -> tuple[tuple[FileKey, ...], ...]:
    """The files, shared out among readers so that each has about as many bytes to read.

    Args:
        sums: Length and checksum of each file.
        count: Number of readers.
    """
    shared: list[list[FileKey]] = [[] for _ in range(count)]
    loads_bytes = [0] * count
    for key in sorted(sums, key=lambda key: (-sums[key].nbytes, key)):
        least = loads_bytes.index(min(loads_bytes))
        shared[least].append(key)
        loads_bytes[least] += sums[key].nbytes
    return tuple(map(tuple, shared))
