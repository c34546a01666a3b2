"""Which kind of checkpoints a folder or a URL holds, from names and small files alone. No torch."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any

from megatron.core.dist_checkpointing.moe.errors import NewerFormat, UnreadableCheckpoint, UsageError
from megatron.core.dist_checkpointing.moe.storage.manifest import FORMAT_VERSION as SNAPSHOT_VERSION
from megatron.core.dist_checkpointing.moe.storage.manifest import MOST_BYTES as MANIFEST_BYTES
from megatron.core.dist_checkpointing.moe.storage.manifest import unframed
from megatron.core.dist_checkpointing.moe.storage.ownership import owner_files
from megatron.core.dist_checkpointing.moe.types.layout import MANIFEST, UNSEALED, SnapshotId
from moe_ckpt.dense.chain import FORMAT_VERSION as CHAIN_VERSION
from moe_ckpt.dense.chain import MANIFEST as CHAIN
from moe_ckpt.dense.chain import PARTIAL_BACKEND_VERSION
from moe_ckpt.dense.integrity import NAME as INTEGRITY
from moe_ckpt.dense.names import (
    COMMON,
    FORMAT,
    INDEX,
    INFORMING_BYTES,
    ITERATION,
    SHARD_SUFFIX,
    STAGED,
    SUMS_BYTES,
    TRACKER,
    read_beside,
)

from .location import LocationKind

DENSE_VERSION = 1
"""Newest version of torch_dist that is read; PARTIAL_BACKEND_VERSION marks iterations with some of the experts."""

UNSUPPORTED = "in a format that is not supported: load it with what saved it and save with --ckpt-format torch_dist"
"""What a checkpoint is that is no torch_dist of Megatron, to continue after "X is"."""

_OWN_FILES = {INDEX, FORMAT, COMMON, CHAIN, INTEGRITY}


def is_url(place: str) -> bool:
    """Whether a place is meant for fsspec; else it is a folder."""
    return "://" in place


def is_unsupported(names: Sequence[str]) -> bool:
    """Whether a published iteration with these files is none of torch_dist, whole or not; an empty one might be."""
    return bool(names) and not _OWN_FILES & set(names) and not any(name.endswith(SHARD_SUFFIX) for name in names)


def is_of_torch_alone(names: Sequence[str]) -> bool:
    """Whether these files are of torch.distributed.checkpoint, as torch_dcp and fsdp_dtensor are."""
    return INDEX in names and not (_OWN_FILES - {INDEX}) & set(names)


def recognize(place: str) -> LocationKind:
    """Say what a place holds. Nothing is checked that takes reading of more than a manifest.

    Raises:
        UsageError: it does not exist or must not be read.
        UnreadableCheckpoint: one line with what was found and what to do, for half-written checkpoints, formats that
            are not supported, empty folders and all else.
        NewerFormat: a later version of this package wrote it.
    """
    try:
        return _of_url(place) if is_url(place) else _of_folder(Path(place))
    except FileNotFoundError as error:
        raise UsageError(f"{error.filename or place} does not exist; check the path") from error
    except PermissionError as error:
        raise UsageError(
            f"{error.filename or place}: no permission to read it; run as its owner or ask for it"
        ) from error
    except OSError as error:
        raise UnreadableCheckpoint(f"{error.filename or place} cannot be read: {error.strerror or error}") from error


def _of_folder(folder: Path) -> LocationKind:
    if folder.is_file():
        raise UnreadableCheckpoint(f"{folder} is a file; give a folder")
    names = sorted(os.listdir(folder))
    own = Path(os.path.abspath(folder)).name
    _refuse_unfinished(folder, own)
    if not names:
        raise UnreadableCheckpoint(f"{folder} is empty; give a folder of checkpoints or snapshots")
    for kind, looks_so in _LOOKS:
        if looks_so(folder, own, names):
            return kind
    if any(owner_files(folder)):
        return LocationKind.MEMORY
    raise UnreadableCheckpoint(
        f"{folder} holds nothing in a format that moe-ckpt supports (found: {_some(names)}); give an iter_XXXXXXX or"
        " --save folder of torch_dist, a --moe-ckpt-persist-dir or a --moe-ckpt-memory-dir"
    )


def _refuse_unfinished(place: object, own: str) -> None:
    staged = STAGED.fullmatch(own)
    if staged and staged[2] == "replaced":
        raise UnreadableCheckpoint(
            f"{place} is iteration {int(staged[1])}, moved aside by a save of it: if that did not finish, the next"
            " start publishes it; take an iter_ folder there"
        )
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
    _refuse_newer(folder / MANIFEST, "manifest", SNAPSHOT_VERSION, MANIFEST_BYTES)
    return True


def _is_iteration(folder: Path, own: str, names: Sequence[str]) -> bool:
    sharded = any(name.endswith(SHARD_SUFFIX) for name in names)
    if not sharded and not {INDEX, FORMAT, COMMON} & set(names):
        return False
    if FORMAT in names:
        _refuse_other_backend(folder / FORMAT)
    elif is_of_torch_alone(names):
        raise UnreadableCheckpoint(
            f"{folder} is a torch.distributed.checkpoint without Megatron's {FORMAT}: read it with what saved it, or"
            " save with --ckpt-format torch_dist"
        )
    missing = [name for name in (INDEX, FORMAT) if name not in names]
    if missing:
        raise UnreadableCheckpoint(
            f"{folder} is a half-written checkpoint: it has no {missing[0]}; take another iteration"
        )
    _refuse_newer(folder / CHAIN, "chain", CHAIN_VERSION, SUMS_BYTES)
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
    if published and all(is_unsupported(os.listdir(path)) for path in published):
        raise UnreadableCheckpoint(f"{published[-1]} is {UNSUPPORTED}")
    return True


def _is_storage(folder: Path, own: str, names: Sequence[str]) -> bool:
    return any(SnapshotId.parse(name) or name.startswith(UNSEALED) for name in names)


_LOOKS: tuple[tuple[LocationKind, Callable[[Path, str, Sequence[str]], bool]], ...] = (
    (LocationKind.SNAPSHOT, _is_snapshot),
    (LocationKind.ITERATION, _is_iteration),
    (LocationKind.SAVES, _is_saves),
    (LocationKind.STORAGE, _is_storage),
)


def _refuse_other_backend(path: Path) -> None:
    marker = _read(path)
    backend, version = marker.get("sharded_backend"), marker.get("sharded_backend_version")
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


def _refuse_newer(path: Path, key: str, reads: int, most_bytes: int) -> None:
    """Of our own files, which are a checksum and a body that says its format; damage is for those who need the file."""
    try:
        body = unframed(key, read_beside(path, most_bytes))
    except FileNotFoundError:
        return
    version = _parsed(body or b"").get("format")
    if isinstance(version, int) and version > reads:
        raise NewerFormat(f"{path} is written in format {version}, this moe-ckpt reads {reads}: use a newer moe-ckpt")


def _read(path: Path) -> dict[str, Any]:
    """The object in a small file of JSON; empty where it is missing or damaged: that is for those who need it."""
    with suppress(FileNotFoundError):
        return _parsed(read_beside(path, INFORMING_BYTES))
    return {}


def _parsed(content: bytes) -> dict[str, Any]:
    with suppress(ValueError, RecursionError, MemoryError):
        parsed = json.loads(content)
        return parsed if isinstance(parsed, dict) else {}
    return {}


def _of_url(url: str) -> LocationKind:
    import fsspec  # type: ignore[import-untyped]

    from megatron.core.dist_checkpointing.moe.storage.objects import remote

    with remote(url):
        try:
            files, root = fsspec.core.url_to_fs(url)
        except (ValueError, ImportError) as error:
            raise UsageError(f"{url} cannot be opened: {error} (with pip; fsspec finds it then)") from error
        names = sorted(str(path).rstrip("/").rpartition("/")[2] for path in files.ls(root, detail=False))
    own = str(root).rstrip("/").rpartition("/")[2]
    if SnapshotId.parse(own) and MANIFEST in names:
        return LocationKind.SNAPSHOT
    _refuse_unfinished(url, own)
    if any(map(SnapshotId.parse, names)):
        return LocationKind.STORAGE
    found = f"no snapshots (found: {_some(names)})" if names else "nothing"
    raise UnreadableCheckpoint(
        f"{url} holds {found}; give a --moe-ckpt-persist-dir. Dense checkpoints are read from folders: copy it to one"
    )


def _some(names: Sequence[str]) -> str:
    shown = ", ".join(islice(names, 4))
    return f"{shown}, and {len(names) - 4} more" if len(names) > 4 else shown
