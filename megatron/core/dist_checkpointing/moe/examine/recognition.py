"""What a folder or a URL holds, told from names and small files alone. No torch."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from itertools import islice
from pathlib import Path
from typing import Any

from ..errors import NewerFormat, UnreadableCheckpoint, UsageError
from ..store.chain import FORMAT_VERSION as CHAIN_VERSION
from ..store.chain import MANIFEST as CHAIN
from ..store.chain import PARTIAL_BACKEND_VERSION
from ..store.checksums import unframed
from ..store.integrity import NAME as INTEGRITY
from ..store.manifest import FORMAT_VERSION as SNAPSHOT_VERSION
from ..store.names import COMMON, FORMAT, INDEX, ITERATION, SHARD_SUFFIX, STAGED, TRACKER
from ..store.ownership import owner_files
from ..types.layout import MANIFEST, UNSEALED, SnapshotId
from .foreign import foreign

DENSE_VERSION = 1
"""Newest version of torch_dist that is read; PARTIAL_BACKEND_VERSION marks iterations with some of the experts."""


class Content(Enum):
    """Kinds of places that can be looked into; the values say what they are."""

    ITERATION = "iteration of a torch_dist checkpoint"
    SAVES = "checkpoints of a --save directory"
    STORAGE = "snapshots in a --moe-ckpt-persist-dir"
    SNAPSHOT = "one snapshot of a --moe-ckpt-persist-dir"
    MEMORY = "memory tier of a --moe-ckpt-memory-dir"


@dataclass(frozen=True)
class Recognized:
    """A place and what it holds. `place` is a folder, or for STORAGE and SNAPSHOT also a URL; as it was given."""

    place: str
    content: Content

    @property
    def path(self) -> Path:
        """The place as a folder; for places that are no URLs."""
        return Path(self.place)


def recognized(place: str) -> Recognized:
    """Say what a place holds. Nothing is checked that takes reading of more than a manifest.

    Raises UsageError when it does not exist or must not be read; UnreadableCheckpoint, one line with what was found and
    what to do, for checkpoints of other frameworks, half-written ones, empty folders and all else; NewerFormat.
    """
    try:
        return Recognized(place, _of_url(place) if "://" in place else _of_folder(Path(place)))
    except FileNotFoundError as error:
        raise UsageError(f"{error.filename or place} does not exist; check the path") from error
    except PermissionError as error:
        raise UsageError(
            f"{error.filename or place}: no permission to read it; run as its owner or ask for it"
        ) from error
    except OSError as error:
        raise UnreadableCheckpoint(f"{error.filename or place} cannot be read: {error.strerror or error}") from error


def _of_folder(folder: Path) -> Content:
    if folder.is_file():
        raise UnreadableCheckpoint(f"{folder} is {foreign(folder, (folder.name,)) or 'a file; give a folder'}")
    names = sorted(os.listdir(folder))
    own = Path(os.path.abspath(folder)).name
    _refuse_unfinished(folder, own)
    if not names:
        raise UnreadableCheckpoint(f"{folder} is empty; give a folder of checkpoints or snapshots")
    for content, looks_so in _LOOKS:
        if looks_so(folder, own, names):
            return content
    stranger = foreign(folder, names)
    if stranger:
        raise UnreadableCheckpoint(f"{folder} is {stranger}")
    if any(owner_files(folder)):
        return Content.MEMORY
    raise UnreadableCheckpoint(
        f"{folder} holds nothing that moe-ckpt knows (found: {_some(names)}); give an iter_XXXXXXX or --save folder, a"
        " --moe-ckpt-persist-dir or a --moe-ckpt-memory-dir"
    )


def _refuse_unfinished(place: object, own: str) -> None:
    staged = STAGED.fullmatch(own)
    if staged:
        doing = "written" if staged[2] == "saving" else "removed"
        raise UnreadableCheckpoint(
            f"{place} is a half-written checkpoint: iteration {int(staged[1])} was being {doing}; take one of the iter_"
            " folders beside it"
        )
    if own.startswith(UNSEALED):
        raise UnreadableCheckpoint(
            f"{place} is a half-written snapshot that was never sealed, or is being deleted; take another one beside it"
        )


def _is_snapshot(folder: Path, own: str, names: Sequence[str]) -> bool:
    has_segment = any(name.startswith("segment") and name.endswith(".bin") for name in names)
    if SnapshotId.parse(own) is None:
        if MANIFEST in names and has_segment:
            raise UnreadableCheckpoint(
                f"{folder} is a snapshot under another name than the job gave it; rename it as its {MANIFEST} says:"
                " iter_XXXXXXX-rank_XXXXX-KIND"
            )
        return False
    if MANIFEST not in names:
        raise UnreadableCheckpoint(
            f"{folder} is a half-written snapshot: it has no {MANIFEST}; take another one beside it"
        )
    _refuse_newer(folder / MANIFEST, "manifest", SNAPSHOT_VERSION)
    return True


def _is_iteration(folder: Path, own: str, names: Sequence[str]) -> bool:
    sharded = any(name.endswith(SHARD_SUFFIX) for name in names)
    if not sharded and not {INDEX, FORMAT, COMMON} & set(names):
        return False
    if FORMAT in names:
        _refuse_other_backend(folder / FORMAT)
    elif INDEX in names and not {COMMON, CHAIN, INTEGRITY} & set(names):
        raise UnreadableCheckpoint(
            f"{folder} is a torch.distributed.checkpoint without Megatron's {FORMAT}, as FSDP and plain DCP write them:"
            " read it with what saved it, or save with --ckpt-format torch_dist"
        )
    missing = [name for name in (INDEX, FORMAT) if name not in names]
    if missing:
        raise UnreadableCheckpoint(
            f"{folder} is a half-written checkpoint: it has no {missing[0]}; take another iteration"
        )
    _refuse_newer(folder / CHAIN, "chain", CHAIN_VERSION)
    return True


def _is_saves(folder: Path, own: str, names: Sequence[str]) -> bool:
    iterations = [folder / name for name in names if ITERATION.fullmatch(name) or name == "release"]
    published = [path for path in iterations if path.is_dir()]
    if not published and TRACKER not in names:
        staged = next((name for name in names if STAGED.fullmatch(name)), None)
        if staged:
            raise UnreadableCheckpoint(
                f"{folder} holds only a half-written checkpoint, {staged}: no save has finished there yet"
            )
        return False
    strangers = [foreign(path, sorted(os.listdir(path))) for path in published]
    if strangers and all(strangers):
        raise UnreadableCheckpoint(f"{published[-1]} is {strangers[-1]}")
    return True


def _is_storage(folder: Path, own: str, names: Sequence[str]) -> bool:
    return any(SnapshotId.parse(name) or name.startswith(UNSEALED) for name in names)


_LOOKS: tuple[tuple[Content, Callable[[Path, str, Sequence[str]], bool]], ...] = (
    (Content.SNAPSHOT, _is_snapshot),
    (Content.ITERATION, _is_iteration),
    (Content.SAVES, _is_saves),
    (Content.STORAGE, _is_storage),
)


def _refuse_other_backend(path: Path) -> None:
    said = _read(path)
    backend, version = said.get("sharded_backend"), said.get("sharded_backend_version")
    if backend is not None and backend != "torch_dist":
        raise UnreadableCheckpoint(
            f"{path.parent} is a Megatron checkpoint in the format {backend!r}, only torch_dist is read: load it with"
            " the Megatron-Core that saved it and save with --ckpt-format torch_dist"
        )
    if isinstance(version, int) and version > DENSE_VERSION and version != PARTIAL_BACKEND_VERSION:
        raise NewerFormat(
            f"{path.parent} is saved in version {version} of torch_dist, this moe-ckpt reads version {DENSE_VERSION}:"
            " use a newer moe-ckpt"
        )


def _refuse_newer(path: Path, key: str, reads: int) -> None:
    """Of our own files, which are a checksum and a body that says its format; damage is for those who need the file."""
    try:
        body = unframed(key, path.read_bytes())
    except FileNotFoundError:
        return
    version = _parsed(body or b"").get("format")
    if isinstance(version, int) and version > reads:
        raise NewerFormat(f"{path} is written in format {version}, this moe-ckpt reads {reads}: use a newer moe-ckpt")


def _read(path: Path) -> dict[str, Any]:
    """What a small file of JSON says; nothing where it is missing or damaged: that is for those who need it."""
    with suppress(FileNotFoundError):
        return _parsed(path.read_bytes())
    return {}


def _parsed(content: bytes) -> dict[str, Any]:
    with suppress(ValueError, RecursionError):
        said = json.loads(content)
        return said if isinstance(said, dict) else {}
    return {}


def _of_url(url: str) -> Content:
    import fsspec  # type: ignore[import-untyped]

    from ..store.objects import remote

    with remote(url):
        try:
            files, root = fsspec.core.url_to_fs(url)
        except (ValueError, ImportError) as error:
            raise UsageError(f"{url} cannot be opened: {error}; install the fsspec package for it") from error
        names = sorted(str(path).rstrip("/").rpartition("/")[2] for path in files.ls(root, detail=False))
    own = str(root).rstrip("/").rpartition("/")[2]
    if SnapshotId.parse(own) and MANIFEST in names:
        return Content.SNAPSHOT
    _refuse_unfinished(url, own)
    if any(map(SnapshotId.parse, names)):
        return Content.STORAGE
    found = f"no snapshots (found: {_some(names)})" if names else "nothing"
    raise UnreadableCheckpoint(
        f"{url} holds {found}; give a --moe-ckpt-persist-dir. Dense checkpoints are read from folders: copy it to one"
    )


def _some(names: Sequence[str]) -> str:
    shown = ", ".join(islice(names, 4))
    return f"{shown}, and {len(names) - 4} more" if len(names) > 4 else shown
