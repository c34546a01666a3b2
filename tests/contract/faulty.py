"""An operating system that fails: at the n-th call of a store it refuses, kills the process, or loses power."""

from __future__ import annotations

import enum
import errno
import os
import random
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megatron.core.dist_checkpointing.moe.storage.system import OperatingSystem

CALLS = (
    "open close pread pwrite allocate sync rename unlink make_directory remove_directory list_directory copy".split()
)
TRANSFERS = ("pread", "pwrite", "copy")


class Fault(enum.Enum):
    """What happens at the n-th call."""

    NONE = "nothing"
    KILL = "the process is killed before the call"
    KILL_AFTER = "the process is killed after the call, in the middle of it when it moves bytes"
    POWER_CUT = "the process is killed, and the device loses what was not synced"
    NO_SPACE = "the call fails with ENOSPC"
    IO_ERROR = "the call fails with EIO"
    SHORT = "a transfer moves fewer bytes than asked for; other calls fail with EINTR"


KILLING = (Fault.KILL, Fault.KILL_AFTER, Fault.POWER_CUT)
_ERRORS = {Fault.NO_SPACE: errno.ENOSPC, Fault.IO_ERROR: errno.EIO, Fault.SHORT: errno.EINTR}


_WORKING = OperatingSystem()


class FaultySystem(OperatingSystem):
    """Counts its calls, and lets the fault happen at call number `at` (from 1)."""

    def __init__(self, fault: Fault = Fault.NONE, at: int = 0, seed: int = 0) -> None:
        self.fault, self.at, self.calls = fault, at, 0
        self._random = random.Random(seed)
        self._unsynced: dict[tuple[int, int], Path] = {}
        self._renames: list[tuple[Path, Path]] = []

    def call(self, name: str, *arguments: Any) -> Any:
        self.calls += 1
        if self.calls == self.at and self.fault is not Fault.NONE:
            return self._fail(name, *arguments)
        result = getattr(_WORKING, name)(*arguments)
        self._remember(name, result, *arguments)
        return result

    def _fail(self, name: str, *arguments: Any) -> Any:
        if self.fault is Fault.SHORT and name in ("pread", "pwrite"):
            descriptor, data, offset = arguments
            return getattr(_WORKING, name)(descriptor, data[: max(1, len(data) // 2)], offset)
        if self.fault is Fault.KILL_AFTER:
            self._half(name, *arguments)
        if self.fault is Fault.POWER_CUT:
            self._lose_unsynced()
        if self.fault in KILLING:
            os.kill(os.getpid(), signal.SIGKILL)
        if name == "copy":
            return _WORKING.copy(*arguments)  # memcpy does not fail
        if name == "close":
            _WORKING.close(*arguments)  # after an error the descriptor is closed all the same
        raise OSError(_ERRORS[self.fault], os.strerror(_ERRORS[self.fault]))

    def _half(self, name: str, *arguments: Any) -> None:
        if name == "pwrite":
            descriptor, data, offset = arguments
            _WORKING.pwrite(descriptor, data[: len(data) // 2], offset)
        elif name == "copy":
            into, data = arguments
            if len(data) > 1:
                _WORKING.copy(into[: len(data) // 2], data[: len(data) // 2])
        else:
            getattr(_WORKING, name)(*arguments)

    def _remember(self, name: str, result: Any, *arguments: Any) -> None:
        if name == "pwrite":
            self._unsynced[_identity(arguments[0])] = Path(os.readlink(f"/proc/self/fd/{arguments[0]}"))
        elif name == "rename":
            old, new = arguments
            self._renames.append((old, new))
            for key, path in self._unsynced.items():
                if path.is_relative_to(old):
                    self._unsynced[key] = new / path.relative_to(old)
        elif name == "sync":
            self._unsynced.pop(_identity(arguments[0]), None)
            synced = Path(os.readlink(f"/proc/self/fd/{arguments[0]}"))
            self._renames = [pair for pair in self._renames if pair[1].parent != synced]

    def _lose_unsynced(self) -> None:
        for path in self._unsynced.values():
            if path.exists():
                _damage(path, self._random)
        for old, new in reversed(self._renames):
            if self._random.random() < 0.5 and new.exists() and not old.exists():
                os.rename(new, old)


class FaultyFiles:
    """An fsspec file system, or a file of it, whose n-th call raises; `calls` is shared by all of them."""

    def __init__(self, inner: Any, at: int, calls: list[str], error: Exception) -> None:
        self._inner, self._at, self._calls, self._error = inner, at, calls, error

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._inner, name)

        def call(*arguments: Any, **named: Any) -> Any:
            self._calls.append(name)
            if len(self._calls) == self._at:
                raise self._error
            result = method(*arguments, **named)
            return FaultyFiles(result, self._at, self._calls, self._error) if name == "open" else result

        return call


def _identity(descriptor: int) -> tuple[int, int]:
    found = os.fstat(descriptor)
    return found.st_dev, found.st_ino


def _damage(path: Path, source: random.Random) -> None:
    content = bytearray(path.read_bytes())
    if content and source.random() < 0.5:
        start = source.randrange(len(content))
        content[start:] = bytes(len(content) - start)  # the blocks were allocated, but never written
    else:
        content = content[: source.randrange(len(content) + 1)]
    path.write_bytes(content)


def _wrapped(name: str) -> Callable[..., Any]:
    def call(self: FaultySystem, *arguments: Any) -> Any:
        return self.call(name, *arguments)

    return call


for _name in CALLS:
    setattr(FaultySystem, _name, _wrapped(_name))
