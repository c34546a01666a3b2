"""The calls that the stores make to the operating system, in one place, where a test can let each of them fail."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from ..errors import NO_SPACE, NoRoom, StoreFailure

if TYPE_CHECKING:
    from collections.abc import Buffer


class OperatingSystem:
    """Linux. All calls raise OSError; numbers of bytes may come out smaller than asked for. No call waits for the other
    end of a FIFO that lies where a file should be."""

    close = staticmethod(os.close)
    pwrite = staticmethod(os.pwrite)
    sync = staticmethod(os.fsync)
    rename = staticmethod(os.rename)
    make_directory = staticmethod(os.mkdir)
    remove_directory = staticmethod(os.rmdir)

    def open(self, path: Path, flags: int) -> int:
        """Open a file; programs that are started from here do not inherit the descriptor, nor the locks on it.

        Args:
            path: The file.
            flags: Flags of open(2).
        """
        return os.open(path, flags | os.O_CLOEXEC | os.O_NONBLOCK, 0o644)

    def unlink(self, path: Path) -> None:
        os.unlink(path)

    def pread(self, descriptor: int, into: memoryview, offset: int) -> int:
        """Read into memory; how many bytes there were.

        Args:
            descriptor: The file.
            into: Where the bytes go; at most as many as it has.
            offset: Bytes from the start of the file.
        """
        return os.preadv(descriptor, [into], offset)

    def allocate(self, descriptor: int, nbytes: int) -> None:
        """Reserve blocks or pages, so that no later write runs out of space.

        Args:
            descriptor: The file.
            nbytes: Bytes from its start.
        """
        os.posix_fallocate(descriptor, 0, nbytes)

    def list_directory(self, path: Path) -> list[str]:
        return sorted(os.listdir(path))

    def copy(self, into: memoryview, data: memoryview) -> None:
        """memcpy without the GIL.

        Args:
            into: Where the bytes go.
            data: As many bytes.
        """
        import numpy as np  # here: commands that only read small files start without it

        np.copyto(np.frombuffer(into, np.uint8), np.frombuffer(data, np.uint8))


class PrivateSystem(OperatingSystem):
    """Files that are made are this user's only, and links are not followed. What is a folder where a file should be is
    renamed in place of being removed: nobody reads it then."""

    def open(self, path: Path, flags: int) -> int:
        """As `OperatingSystem.open`, but through no link, and for this user alone."""
        return os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK, 0o600)

    def unlink(self, path: Path) -> None:
        try:
            os.unlink(path)
        except IsADirectoryError:
            os.rename(path, f"{path}.damaged")


def node_memory_bytes(mounted: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")) -> int:
    """Memory that processes here may take in all: the machine's, or what a control group of theirs is allowed of it.

    Args:
        mounted: Where control groups are.
        own: The file that says which of them this process is in.
    """
    limits = [int(psutil.virtual_memory().total)]
    for path in _memory_limits(mounted, own):
        with suppress(OSError, ValueError):  # no such file, or "max"
            limits.append(int(path.read_text()))
    return min(limits)


def _memory_limits(mounted: Path, own: Path) -> Iterator[Path]:
    """The files with limits of this process's groups and of those that they are in, of both versions.

    In a container the path may be that of the host, which is not there: then what is mounted is its own group.
    """
    try:
        lines = os.fsdecode(own.read_bytes()).splitlines()  # groups have any name that folders may have
    except OSError:
        lines = []
    versions = {"": (mounted, "memory.max"), "memory": (mounted / "memory", "memory.limit_in_bytes")}
    inner = dict.fromkeys(versions, "/")
    for line in lines:
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        inner |= {name: path for name in versions if name in controllers.split(",")}
    for name, (root, file) in versions.items():
        folder = root / inner[name].strip("/")
        yield from (group / file for group in (folder, *folder.parents) if group.is_relative_to(root))


class FileLock:
    """A lock on a file, shared or exclusive, that also other processes respect; it ends with the process.

    It is held from creation until `release`, or until nothing refers to it. A forked child does not hold it.
    Raises OSError, BlockingIOError when somebody else holds a lock that excludes this one.
    """

    def __init__(self, system: OperatingSystem, path: Path, exclusive: bool) -> None:
        self._descriptor = -1
        # flock, not fcntl's locks: it belongs to this descriptor, so that two readers of one process hold locks of
        # their own, and closing another descriptor of the file does not end it.
        descriptor = system.open(path, os.O_RDONLY)
        try:
            fcntl.flock(descriptor, (fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH) | fcntl.LOCK_NB)
        except BaseException:
            os.close(descriptor)
            raise
        self._descriptor = descriptor
        _HELD.add(self)

    def release(self) -> None:
        """End the lock."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            fcntl.flock(descriptor, fcntl.LOCK_UN)  # closing is not enough while a forked child has the descriptor too
            os.close(descriptor)

    def forget(self) -> None:
        """Close this process's share of the lock, and leave it to the parent process."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    def __del__(self) -> None:
        with suppress(OSError):
            self.release()


# A child of fork inherits descriptors, and with them the parent's locks: a data loader that outlives a crashed parent
# would keep segments locked for ever.
_HELD: weakref.WeakSet[FileLock] = weakref.WeakSet()


def _forget_all() -> None:
    for lock in list(_HELD):
        lock.forget()


os.register_at_fork(after_in_child=_forget_all)


class LockedMap(mmap.mmap):
    """A mapping that holds a lock for as long as anything refers to its bytes: an array, a tensor, a view."""

    lock: FileLock


def map_file(system: OperatingSystem, path: Path, nbytes: int) -> mmap.mmap:
    """The first `nbytes` of a file as writable memory whose pages are all in place. Raises OSError.

    Args:
        system: The calls to use.
        path: The file, of at least as many bytes.
        nbytes: Bytes to map.
    """
    descriptor = system.open(path, os.O_RDWR)
    # Populated: a page that a copy is the first to touch would cost that copy a fault. The mapping stays when the
    # descriptor is closed: it has one of its own.
    try:
        return mmap.mmap(descriptor, nbytes, mmap.MAP_SHARED | mmap.MAP_POPULATE)
    finally:
        system.close(descriptor)


def map_locked(system: OperatingSystem, path: Path, nbytes: int, lock: FileLock) -> LockedMap:
    """The first `nbytes` of a file as read-only memory that keeps `lock`. Raises OSError.

    Args:
        system: The calls to use.
        path: The file, of at least as many bytes.
        nbytes: Bytes to map.
        lock: The lock, kept until the last view of the memory is gone.
    """
    descriptor = system.open(path, os.O_RDONLY)
    try:
        mapped = LockedMap(descriptor, nbytes, mmap.MAP_SHARED, mmap.PROT_READ)
    finally:
        system.close(descriptor)
    # The lock lives exactly as long as the memory can be seen: arrays and tensors refer to the mapping, it to the lock.
    mapped.lock = lock
    return mapped


LOCK_BYTES = 256 << 20
"""Mapped files are page-locked in pieces of this size; a transfer to or from a device must lie in one of them."""


def within_locks(memory: Buffer) -> Iterator[tuple[int, int]]:
    """Cut memory, which may be any part of a mapped file, at the borders of the pieces that are page-locked.

    Yields:
        First byte of each part, and the one past its last.
    """
    mapping = mapping_of(memory)
    start, nbytes = 0, memoryview(memory).nbytes
    before = address_of(memory) - address_of(mapping) if mapping is not None else 0
    while start < nbytes:
        end = min(start + LOCK_BYTES - (before + start) % LOCK_BYTES, nbytes)
        yield start, end
        start = end


def address_of(memory: Buffer) -> int:
    """Of its first byte."""
    import numpy as np  # as in `OperatingSystem.copy`

    return int(np.frombuffer(memory, np.uint8).ctypes.data)


def mapping_of(memory: Any) -> mmap.mmap | None:
    """The mapping whose pages memory has: a view, or an array, of it."""
    while memory is not None and not isinstance(memory, mmap.mmap):
        memory = memory.obj if isinstance(memory, memoryview) else getattr(memory, "base", None)
    return memory


@contextmanager
def opened(system: OperatingSystem, path: Path, flags: int) -> Iterator[int]:
    """A descriptor that is closed at the end.

    Args:
        system: The calls to use.
        path: The file.
        flags: Flags of open(2).
    """
    descriptor = system.open(path, flags)
    try:
        yield descriptor
    finally:
        system.close(descriptor)


def write_all(system: OperatingSystem, descriptor: int, data: memoryview, offset: int) -> None:
    """Write all bytes, in as many calls as it takes. Raises OSError.

    Args:
        system: The calls to use.
        descriptor: The file.
        data: The bytes.
        offset: Bytes from the start of the file.
    """
    while data:
        written = system.pwrite(descriptor, data, offset)
        if not written:
            raise OSError(errno.EIO, "nothing was written")
        data, offset = data[written:], offset + written


def read_up_to(system: OperatingSystem, descriptor: int, into: memoryview, offset: int) -> int:
    """Fill `into` from the file; returns how many bytes there were before its end. Raises OSError.

    Args:
        system: The calls to use.
        descriptor: The file.
        into: Where the bytes go.
        offset: Bytes from the start of the file.
    """
    done = 0
    while done < len(into):
        count = system.pread(descriptor, into[done:], offset + done)
        if not count:
            break
        done += count
    return done


def write_synced(system: OperatingSystem, path: Path, content: bytes) -> None:
    """Create or overwrite a file and bring it to the device. Raises OSError.

    Args:
        system: The calls to use.
        path: The file.
        content: All of its bytes.
    """
    with opened(system, path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC) as descriptor:
        write_all(system, descriptor, memoryview(content), 0)
        system.sync(descriptor)


def write_over(system: OperatingSystem, path: Path, content: bytes) -> None:
    """Write a file from its beginning, with zeros behind up to the end that it had: the pages that it has are kept.

    Raises OSError.

    Args:
        system: The calls to use.
        path: The file.
        content: Its first bytes.
    """
    # Not truncated: a tmpfs that is full by now would not give the pages back.
    with opened(system, path, os.O_WRONLY | os.O_CREAT) as descriptor:
        write_all(system, descriptor, memoryview(content.ljust(os.fstat(descriptor).st_size, b"\0")), 0)
        system.sync(descriptor)


def sync_directory(path: Path, system: OperatingSystem | None = None) -> None:
    """Make renames inside a directory durable. Raises OSError.

    Args:
        path: The directory.
        system: The calls to use.
    """
    system = system or OperatingSystem()
    with opened(system, path, os.O_RDONLY | os.O_DIRECTORY) as descriptor:
        system.sync(descriptor)


def make_folders(path: Path) -> None:
    """Make a directory, and those above it that are missing, so that no power cut takes their names. Raises OSError."""
    missing = [one for one in (path, *path.parents) if not one.is_dir()]
    path.mkdir(parents=True, exist_ok=True)
    for one in missing:
        with suppress(OSError):  # a folder that may not be read, or a file system that syncs none
            sync_directory(one.parent)


@contextmanager
def failing_as(what: str) -> Iterator[None]:
    """Turns OSError into StoreFailure, or NoRoom for a full device; `what` completes "cannot ..."."""
    try:
        yield
    except OSError as error:
        if error.errno in NO_SPACE:
            raise NoRoom(f"cannot {what}: {error.strerror}; free space there or keep fewer snapshots") from error
        raise StoreFailure(f"cannot {what}: {error.strerror or error}; it is safe to try again") from error


# Memory near the device that writes to it: on a node with several sockets the other one's memory is slower.
#
# Linux puts a page where the thread runs that touches it first. Segments are touched as they are allocated, so the
# thread that allocates them runs on the cores of the device's socket for as long.

SYSFS = Path("/sys")


def local_cpus(pci_address: str, sysfs: Path = SYSFS) -> frozenset[int]:
    """The cores near the device at this address; none where the system does not tell.

    Args:
        pci_address: The device, such as `0000:3b:00.0`.
        sysfs: Where the system describes devices.
    """
    with suppress(OSError, ValueError):
        return _parsed((sysfs / "bus/pci/devices" / pci_address.lower() / "local_cpulist").read_text())
    return frozenset()


@contextmanager
def running_on(cpus: frozenset[int]) -> Iterator[None]:
    """This thread runs on these cores, as far as it may; on those that it had afterwards. Without any it stays."""
    before = os.sched_getaffinity(0)
    near = cpus & before
    if not near:
        yield
        return
    os.sched_setaffinity(0, near)  # 0: this thread alone, the others of the process stay where they are
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def _parsed(text: str) -> frozenset[int]:
    """From a list such as `0-3,8,10-11`."""
    found: set[int] = set()
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        found.update(range(int(first), int(last or first) + 1))
    return frozenset(found)


def unmapped_user() -> int:
    """Whom files of users belong to that this container does not know, such as its own /dev/shm; root where it knows
    all."""
    try:
        if Path("/proc/self/uid_map").read_text().split() == ["0", "0", "4294967295"]:
            return 0
        return int(Path("/proc/sys/kernel/overflowuid").read_text())
    except (OSError, ValueError):
        return 0


# Files that appear whole or not at all: write aside, fsync, rename, fsync the folder.


def write_atomically(path: Path, content: bytes) -> None:
    """Replace `path` by `content`; after a crash a reader finds the old bytes or the new ones. Raises OSError.

    Args:
        path: The file.
        content: All of its bytes.
    """
    aside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        aside.unlink(missing_ok=True)
        # Its own file, in a folder where others may write: no link of theirs is followed, and no pipe waited for.
        descriptor = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
        with open(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())  # before the rename: a crash could keep the new name and lose the bytes
        os.rename(aside, path)
    except OSError:
        aside.unlink(missing_ok=True)
        raise
    sync_directory(path.parent)  # else a crash could bring the old file back after the caller has continued
