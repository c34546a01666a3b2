"""The slots of processes in a memory dir, seen from outside: whose they are, and whether their process still lives."""

from __future__ import annotations

import fcntl
import json
import os
import struct
from dataclasses import dataclass
from pathlib import Path

from megatron.core.dist_checkpointing.moe.errors import UnreadableCheckpoint, UsageError
from megatron.core.dist_checkpointing.moe.storage.ownership import is_claimed_here, owner_files
from megatron.core.dist_checkpointing.moe.storage.slot_reader import SlotReader

from .files import disk_bytes

_FLOCK = "hhqqi4x"  # struct flock of Linux: type, whence, start, length, process


@dataclass(frozen=True)
class Slot:
    """One process's folder in one area of the memory tier: <memory_dir>/<node>/<job>/<area>-<local_rank>.

    owner: what its process wrote of itself when it took the folder: "process 4711 on host", empty if it cannot be read.
    alive: a process holds the folder now. What a dead one left is adopted by a restart of the same job.
    """

    directory: Path
    node: str
    job: str
    area: str
    local_rank: int
    owner: str
    alive: bool

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
        alive, owner = True, f"process {os.getpid()} on {os.uname().nodename}"
    else:
        try:
            alive, owner = _is_locked(file), _owner_of(file)
        except FileNotFoundError:
            return None  # its job ended just now and took it along
    node, job = directory.parent.parent.name, directory.parent.name
    return Slot(directory, node, job, area, int(number), owner, alive)


def _is_locked(file: Path) -> bool:
    """Whether another process holds the lock of an owner file. Taking it to find out might refuse a starting job."""
    descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
    try:
        query = struct.pack(_FLOCK, fcntl.F_RDLCK, os.SEEK_SET, 0, 0, 0)
        (kind, *_) = struct.unpack(_FLOCK, fcntl.fcntl(descriptor, fcntl.F_GETLK, query))
    finally:
        os.close(descriptor)
    return bool(kind != fcntl.F_UNLCK)


def _owner_of(file: Path) -> str:
    try:
        owner = json.loads(file.read_bytes())
        return f"process {owner['process']} on {owner['host']}"
    except (ValueError, TypeError, KeyError):
        return ""
