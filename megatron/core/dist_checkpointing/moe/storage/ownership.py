"""Who may write in a folder of the memory tier: one job per folder, one process per slot.

A slot is a process's place on its node, its local rank: a restart may give the processes of a node other ranks, and
then they find what is in their slot. It has a folder in each area that it uses: "slot" for snapshots, and others for
what it keeps beside them.
"""

from __future__ import annotations

import fcntl
import getpass
import json
import logging
import os
import pwd
import re
import shutil
import stat
import time
import weakref
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import psutil

from ..boot_clock import is_ending, started
from ..errors import StoreFailure, UsageError, reason
from .small_files import read_small
from .system import unmapped_user

logger = logging.getLogger(__name__)

# Folders that only this user can have filled: made with mode 0700, and refused where anybody else could write.
#
# What lies in memory is believed by its checksums, which anybody can compute. So the folders that it lies in have to be
# this user's own. Each is opened without following a link and looked at through its descriptor, and the next one is
# made and opened relative to that: nothing can be exchanged between the look and the use.

_OTHERS = stat.S_IWGRP | stat.S_IWOTH
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def make_private(base: Path, *names: str) -> None:
    """Make `base` and the folders below it, one in another, where they are missing.

    Raises UsageError for one that is a link, belongs to somebody else, or can be written by others; OSError.
    """
    check_outside(base)
    with suppress(FileExistsError):
        os.mkdir(base, 0o700)
    check_private(base, *names, make=True)


def check_private(base: Path, *names: str, make: bool = False) -> None:
    """As `make_private`, for what is there already; nothing is made unless asked for. Raises UsageError, OSError."""
    descriptor, path = _opened(base, base), base
    try:
        _refuse_others(descriptor, path)
        for name in names:
            path = path / name
            if make:
                with suppress(FileExistsError):
                    os.mkdir(name, 0o700, dir_fd=descriptor)
            inner = _opened(path, name, descriptor)
            os.close(descriptor)
            descriptor = inner
            _refuse_others(descriptor, path)
        _refuse_files_of_others(descriptor, path)
    finally:
        os.close(descriptor)


def check_outside(base: Path) -> None:
    """Refuse a folder whose parent lets others put another folder in its place. Raises UsageError."""
    with suppress(FileNotFoundError):
        found = os.stat(base.parent)
        mode = found.st_mode
        # One of a service that lets nobody else write is that service's to give; root may be whoever began a container.
        if os.geteuid() and mode & _OTHERS and found.st_uid not in (0, os.geteuid(), unmapped_user()):
            raise UsageError(
                f"insecure memory dir {base}: {base.parent} belongs to {_user(found.st_uid)}, who can put another"
                " folder in its place; use a folder in /dev/shm"
            )
        if mode & _OTHERS and not mode & stat.S_ISVTX:
            raise UsageError(
                f"insecure memory dir {base}: {base.parent} is writable by others without the sticky bit (mode"
                f" {_mode(mode)}); use a folder in /dev/shm, or chmod go-w {base.parent}"
            )


def is_shared(folder: Path) -> bool:
    """Whether all users may write in it and only the owner of a file may replace it, as in `/dev/shm`."""
    try:
        return bool(os.stat(folder).st_mode & stat.S_ISVTX)
    except OSError:
        return False


@contextmanager
def refused_as_unusable(base: Path) -> Iterator[None]:
    """Turns OSError into UsageError."""
    try:
        yield
    except OSError as error:
        raise UsageError(f"memory dir {base} cannot be used: {reason(error)}") from error


def _opened(path: Path, name: Path | str, within: int | None = None) -> int:
    try:
        return os.open(name, _FOLDER, dir_fd=within)
    except OSError:
        found = os.stat(name, dir_fd=within, follow_symlinks=False)
        if stat.S_ISLNK(found.st_mode):
            raise UsageError(
                f"memory folder {path} is a link, made by {_user(found.st_uid)}: name the folder that it leads to, or"
                f" remove it (rm {path})"
            ) from None
        if not stat.S_ISDIR(found.st_mode):
            raise UsageError(
                f"memory folder {path} is no folder, and belongs to {_user(found.st_uid)}: name another"
            ) from None
        if found.st_uid != os.geteuid():
            _refuse_owner(path, found)
        raise


def _refuse_others(descriptor: int, path: Path) -> None:
    found = os.fstat(descriptor)
    if found.st_uid != os.geteuid():
        _refuse_owner(path, found)
    if found.st_mode & _OTHERS:
        raise UsageError(
            f"memory folder {path} can be written by others (mode {_mode(found.st_mode)}), who may have planted what is"
            f" in it: take their right (chmod go-w {path}) if all of it is yours, or use another --moe-ckpt-memory-dir"
        )


def _refuse_owner(path: Path, found: os.stat_result) -> None:
    raise UsageError(
        f"memory folder {path} belongs to {_user(found.st_uid)}, but this job runs as {_user(os.geteuid())}: snapshots"
        " in it could be planted; use another --moe-ckpt-memory-dir, or have it removed by its owner"
    )


def _refuse_files_of_others(descriptor: int, folder: Path) -> None:
    for entry in sorted(os.listdir(descriptor)):
        try:
            found = os.stat(entry, dir_fd=descriptor, follow_symlinks=False)
        except FileNotFoundError:  # freed meanwhile
            continue
        path = folder / entry
        if found.st_uid != os.geteuid():
            raise UsageError(
                f"{path} belongs to {_user(found.st_uid)}, but this job runs as {_user(os.geteuid())}: it was not made"
                " by this job; move it away and start again, nothing else was touched"
            )
        if stat.S_ISLNK(found.st_mode):
            raise UsageError(f"{path} is a link, which no job makes: move it away and start again")


def _mode(mode: int) -> str:
    return f"{stat.S_IMODE(mode):04o}"


def default_memory_folder() -> Path:
    """Without --moe-ckpt-memory-dir: one for each user, by number where a container does not know the name."""
    try:
        name = getpass.getuser()
    except (KeyError, OSError):
        name = str(os.getuid())
    return Path("/dev/shm") / f"moe-ckpt-{name}"


def _user(number: int) -> str:
    try:
        return f"user {pwd.getpwuid(number).pw_name}"
    except KeyError:
        return f"user {number}"


OWNER_FILE = "owner.json"
OWNER_BYTES = 4096
"""Of an owner file: what a process says of itself in it has some 150."""
MEMORY_FILE_SYSTEMS = ("tmpfs", "ramfs", "hugetlbfs")

SLOT = "slot"
"""The area of snapshots."""

ENDING_S, LOOKING_S, _TICK_S = 20.0, 1.0, 0.05
"""How long a process that was killed may take to give its folder back, and one that looks to do so; how often that is
looked at."""

_JOB = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,127}")
_AREA = re.compile(r"[a-z]{1,16}")
_MINE: weakref.WeakValueDictionary[Path, Claim] = weakref.WeakValueDictionary()

# The locks of lockf stay with the parent: a forked child holds no folder.
os.register_at_fork(after_in_child=_MINE.clear)


class Claim:
    """One process's folder `<memory_dir>/<job>/<area>-003`, held until `release`, or until the process ends.

    The lock is one that forked children do not inherit, so a data loader that outlives its crashed parent does not
    keep the next process out. Raises UsageError, saying what to do, when the memory directory is missing, is not
    writable, belongs to another job or user or lets others write, or when another live process owns the folder.
    """

    def __init__(self, memory_dir: Path, job: str, slot: int, area: str = SLOT) -> None:
        self._descriptor, self._process = -1, os.getpid()
        self.directory = slot_directory(memory_dir, job, slot, area)
        if not memory_dir.is_dir():
            raise UsageError(f"memory dir {memory_dir} does not exist: create it on a tmpfs, for example in /dev/shm")
        with _readable(f"memory dir {memory_dir} cannot be used"):
            has_it = False
            while not has_it:  # again where the folder was removed while this waited for it
                make_private(memory_dir, *self.directory.relative_to(memory_dir).parts)
                has_it = self._lock(job, slot)
            try:
                _refuse_other_jobs(memory_dir, job)
            except UsageError:
                self.release()
                _remove_if_unused(self.directory)
                raise

    def _lock(self, job: str, slot: int) -> bool:
        """False where the file has another name by now, or none."""
        path = self.directory.resolve() / OWNER_FILE
        if path in _MINE:
            raise UsageError(f"{self.directory} is in use by this process already: close the other store first")
        # lockf, unlike flock, is not inherited by forked children. But it ends when this process closes any descriptor
        # of the file, hence `_MINE`: nobody here opens an owner file that is claimed.
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            raise UsageError(f"{path} is no regular file, so nobody can hold it: remove it")
        began_s = time.monotonic()
        while not _takes(descriptor):
            owner, process = _said_by(descriptor)
            # One that was killed with its launcher, and holds more than this lock; or, where that one is gone or is
            # this process, which comes back in place, another job's that only looks whose it is.
            is_free = process == os.getpid() or bool(process and not psutil.pid_exists(process))
            waits_s = ENDING_S if is_ending(process) else LOOKING_S if is_free else 0
            if time.monotonic() < began_s + waits_s:
                time.sleep(_TICK_S)
                continue
            os.close(descriptor)
            raise UsageError(
                f"{self.directory} is in use by {owner}: stop that process, or give this job another id or memory dir"
            )
        if not (path.exists() and os.path.samestat(os.stat(path), os.fstat(descriptor))):
            os.close(descriptor)
            return False
        self._descriptor = descriptor
        _MINE[path] = self
        facts = {"job": job, "slot": slot, "process": os.getpid(), "host": os.uname().nodename}
        content = json.dumps(facts | {"launcher": launcher()})
        # Over what is there: the page that the file has is not given up where a full device would not give it back.
        os.ftruncate(descriptor, os.pwrite(descriptor, content.encode(), 0))
        return True

    def release(self) -> None:
        """Let another process own the folder."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            # Ends the lock. In a forked child it closes a copy of the descriptor alone: the lock is the parent's.
            os.close(descriptor)
            if self._process == os.getpid():
                _MINE.pop(self.directory.resolve() / OWNER_FILE, None)

    def __del__(self) -> None:
        with suppress(OSError):
            self.release()


def launcher() -> str:
    """The process that starts this one again when it fails: torchrun's agent, where there is one, else the parent.

    A wrapper between them has the variables of a worker too, and is passed by. Differs for each launcher on a node,
    also where one gets the number of another that has ended.
    """
    process = os.getppid()
    with suppress(psutil.Error):
        # A container may give the variable to all of its processes: the first of them has no parent.
        while "LOCAL_RANK" in os.environ and "LOCAL_RANK" in (found := psutil.Process(process)).environ():
            if not (above := found.ppid()):
                break
            process = above
    return f"{process}-{started(process)}"  # no wall time, which steps


def job_of_launcher(memory_dir: Path) -> str:
    """The job that an earlier process of this process's launcher left memory of; empty if none did."""
    own = launcher()
    for path in sorted(memory_dir.glob(f"*/*/{OWNER_FILE}")):
        if is_claimed_here(path):
            continue
        with suppress(OSError, ValueError, AttributeError, TypeError, KeyError, RecursionError, MemoryError):
            said = json.loads(read_small(path, OWNER_BYTES))
            if said.get("launcher") == own:
                return str(said["job"])
    return ""


def slot_directory(memory_dir: Path, job: str, slot: int, area: str = SLOT) -> Path:
    """Where a process's segments lie.

    Args:
        memory_dir: The node's folder of the memory tier.
        job: Id of the job.
        slot: The number of the process on this node.
        area: The kind of segments, 1 to 16 letters a-z.

    Raises:
        UsageError: The job id or the area cannot be a folder's name.
    """
    if not _JOB.fullmatch(job):
        raise UsageError(f"job id {job!r} must be 1 to 128 letters, digits, '.', '_' or '-', and not begin with '.'")
    if not _AREA.fullmatch(area):
        raise UsageError(f"area {area!r} of the memory tier must be 1 to 16 letters a-z")
    return memory_dir / job / f"{area}-{slot:03d}"


def slot_directories(memory_dir: Path, job: str, area: str = SLOT) -> dict[int, Path]:
    """The folders in an area of all processes of a job that were on this node, by slot.

    Args:
        memory_dir: The node's folder of the memory tier.
        job: Id of the job.
        area: The kind of segments.
    """
    found = sorted((memory_dir / job).glob(f"{area}-*"))
    slots = ((path.name[len(area) + 1 :], path) for path in found if path.is_dir())
    return {int(slot): path for slot, path in slots if slot.isdecimal()}


def owner_files(folder: Path) -> Iterator[Path]:
    """Those of all slots in a memory dir with its nodes, or below the folder of a node, a job or a slot in it."""
    return (path for depth in ("", "*/", "*/*/", "*/*/*/") for path in folder.glob(f"{depth}{OWNER_FILE}"))


@contextmanager
def kept_free(folder: Path) -> Iterator[None]:
    """A block in which no process can claim a slot of a folder that is about to be removed.

    Raises:
        StoreFailure: A process has one.
        OSError: Its files cannot be read.
    """
    with ExitStack() as stack:
        for path in sorted(owner_files(folder)):
            is_free = not is_claimed_here(path)  # else it is not even opened: closing it would end the claim
            if is_free:
                descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
                stack.callback(os.close, descriptor)
                is_free = _takes(descriptor)
            if not is_free:
                raise StoreFailure(f"{path.parent} is used by a process now: the job runs")
        yield


def is_claimed_here(owner_file: Path) -> bool:
    """Whether this process itself holds the folder; it must not open the file then: closing it would end the lock."""
    return owner_file.parent.resolve() / OWNER_FILE in _MINE


def warn_unless_in_memory(memory_dir: Path) -> None:
    """Logs a warning when the folder is on a disk: it works, but at the disk's speed."""
    kind = file_system(memory_dir)
    if kind not in MEMORY_FILE_SYSTEMS:
        logger.warning(
            "memory dir %s is on %s, not tmpfs: snapshots are limited by that device; use a folder in /dev/shm",
            memory_dir,
            kind,
        )


def file_system(path: Path) -> str:
    """The kind of the innermost, last mounted file system that `path` is in."""
    mounts = [found for found in psutil.disk_partitions(all=True) if path.resolve().is_relative_to(found.mountpoint)]
    return str(max(reversed(mounts), key=lambda found: len(found.mountpoint)).fstype) if mounts else "an unknown device"


def _refuse_other_jobs(memory_dir: Path, job: str) -> None:
    for path in sorted(memory_dir.glob(f"*/*/{OWNER_FILE}")):
        other = path.parent.parent
        if other.name == job:
            continue
        owner = live_owner(path)
        if owner:
            raise UsageError(f"memory dir {memory_dir} is in use by {owner}: give each job its own memory dir")
        raise UsageError(
            f"{other} was left behind by job {other.name}, which has ended: resume that job with its id, or delete the"
            f" folder (rm -r {other}), or use another memory dir"
        )


def live_owner(path: Path) -> str | None:
    """Who holds the owner file of another job, None when nobody does."""
    if is_claimed_here(path):
        return "this process"
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    # Shared, because a descriptor for reading takes no other lock; it ends as the descriptor is closed.
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return _said_by(descriptor)[0]
    finally:
        os.close(descriptor)
    return None


def _takes(descriptor: int) -> bool:
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _said_by(descriptor: int) -> tuple[str, int]:
    """Who holds the lock, for people, and its process; 0 where it is not known."""
    try:
        said = json.loads(os.pread(descriptor, OWNER_BYTES, 0))
        name = f"job {said['job']}, slot {said['slot']}, process {said['process']} on {said['host']}"
        return name, int(said["process"])
    except (OSError, ValueError, TypeError, KeyError, OverflowError, RecursionError):
        return "another process", 0


def _remove_if_unused(directory: Path) -> None:
    """Takes back the empty folder of a claim that was refused, so that it does not stand in another job's way."""
    if sorted(path.name for path in directory.iterdir()) == [OWNER_FILE]:
        shutil.rmtree(directory, ignore_errors=True)
        with suppress(OSError):
            directory.parent.rmdir()


@contextmanager
def _readable(what: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise UsageError(f"{what}: {error.filename or ''} {reason(error)}") from error
