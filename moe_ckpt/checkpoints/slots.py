"""The slots of processes in a memory dir, seen from outside: whose they are, and whether their process still lives."""

from __future__ import annotations

import fcntl
import json
import os
import struct
from dataclasses import dataclass
from pathlib import Path

from megatron.core.dist_checkpointing.moe.errors import UnreadableCheckpoint, UsageError
from megatron.core.dist_checkpointing.moe.storage.ownership import OWNER_BYTES, is_claimed_here, owner_files
from megatron.core.dist_checkpointing.moe.storage.slot_reader import SlotReader
from megatron.core.dist_checkpointing.moe.storage.small_files import open_regular, read_small

from .files import disk_bytes

_FLOCK = "hhqqi4x"  # struct flock of Linux: type, whence, start, length, process


@dataclass(frozen=True)
class Slot:
    """One process's folder in one area of the memory tier: <memory_dir>/<node>/<job>/<area>-<local_rank>.

    owner: what its process wrote of itself when it took the folder: "process 4711 on host", empty if it cannot be read.
    alive: a process holds the folder now. What a dead one left is adopted by a restart of the same job. problem: why
    the owner file cannot be read; where not even its lock can be asked for, a process may hold the folder.
    """

    directory: Path
    node: str
    job: str
    area: str
    local_rank: int
    owner: str
    alive: bool
    problem: str = ""

    @property
    def reader(self) -> SlotReader:
        """Its snapshots, for reading; a running owner is disturbed for no longer than a reader is open."""
        return SlotReader(self.directory)

    @property
    def nbytes(self) -> int:
        """Bytes that its files take now; those that vanish meanwhile do not count."""
        return disk_bytes(self.directory)


def slots(memory_dir: Path) -> tuple[Slot, ...]:
    """All slots below a --moe-ckpt-memory-dir, or below the folder of a node, of a job, or of a slot in it; by path.

    Raises UsageError for a folder that must not be read, UnreadableCheckpoint when there is no slot.
    """
    try:
        found = tuple(filter(None, map(_slot, sorted(owner_files(memory_dir)))))
    except PermissionError as error:
        raise UsageError(f"{error.filename}: no permission to read it; run as its owner or ask for it") from error
    if not found:
        raise UnreadableCheckpoint(
            f"{memory_dir} holds no memory of a job: none runs here, or it has another --moe-ckpt-memory-dir; give that"
        )
    return found


def _slot(file: Path) -> Slot | None:
    directory = Path(os.path.abspath(file.parent))
    area, dash, number = directory.name.rpartition("-")
    if not dash or not number.isdecimal():
        return None
    if is_claimed_here(file):
        alive, owner, problem = True, f"process {os.getpid()} on {os.uname().nodename}", ""
    else:
        try:
            alive, owner, problem = _asked(file)
        except FileNotFoundError:
            return None  # its job ended just now and took it along
    node, job = directory.parent.parent.name, directory.parent.name
    return Slot(directory, node, job, area, int(number), owner, alive, problem)


def _asked(file: Path) -> tuple[bool, str, str]:
    """Of an owner file whether its lock is held, who wrote it, and what is wrong with it. Raises FileNotFoundError,
    PermissionError."""
    try:
        alive, owner = _is_locked(file), _owner_of(file)
    except (FileNotFoundError, PermissionError):
        raise
    except OSError as error:
        return True, "", f"{file}: {error.strerror}: whether a process uses this folder is not known"
    return alive, owner, "" if owner or alive else f"{file}: it does not say whose the folder was"


def _is_locked(file: Path) -> bool:
    """Whether another process holds the lock of an owner file. Taking it to find out might refuse a starting job."""
    with open_regular(file) as opened:
        query = struct.pack(_FLOCK, fcntl.F_RDLCK, os.SEEK_SET, 0, 0, 0)
        (kind, *_) = struct.unpack(_FLOCK, fcntl.fcntl(opened.fileno(), fcntl.F_GETLK, query))
    return bool(kind != fcntl.F_UNLCK)


def _owner_of(file: Path) -> str:
    try:
        owner = json.loads(read_small(file, OWNER_BYTES))
        return f"process {owner['process']} on {owner['host']}"
    except (ValueError, TypeError, KeyError, RecursionError):
        return ""
