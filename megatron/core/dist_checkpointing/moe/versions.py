"""Which Python, torch and Megatron-Core this works with, and what is said where it finds others.

What lies below a range cannot work and is refused. What is newer than the range was never looked at: checkpoints by
copying are tried, with a warning, and their completeness check refuses state that it does not know; a replay runs
Megatron-Core's own steps in another way than it does itself, so it is refused.

Entry points ask before anything of torch or Megatron-Core is imported. So versions are read from the files of the
packages that Python would import, which are not always those that pip knows of: a Megatron-LM source tree on PYTHONPATH
comes first and is no installed distribution. Runs on any Python 3, to refuse those that are too old.
"""

from __future__ import annotations

import platform
import re
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from .errors import UsageError


class UnsupportedVersion(UsageError):
    """A Python, torch or Megatron-Core that this cannot work with: what was found, what is supported, what to do."""


@dataclass(frozen=True)
class Range:
    """Versions from `oldest` on that are below `below`, None: no newer one is known to differ."""

    oldest: tuple[int, ...]
    below: tuple[int, ...] | None
    remedy: str

    def __str__(self) -> str:
        oldest = ".".join(map(str, self.oldest))
        if self.below is None:
            return f"{oldest} and newer"
        return f"{oldest} to {'.'.join(map(str, (*self.below[:-1], self.below[-1] - 1)))}"


SUPPORTED = {
    "Python": Range((3, 12), (3, 14), "start it with one of these"),
    "torch": Range((2, 8), None, "pip install 'torch>=2.8'"),
    "megatron-core": Range(
        (0, 17), (0, 20), "pip install 'megatron-core>=0.17,<0.20', or put such a Megatron-LM on PYTHONPATH"
    ),
}


@dataclass(frozen=True)
class FoundVersion:
    """A version as it is written, None: there is none; and the folder that it was found in."""

    version: str | None
    folder: str = ""

    @property
    def release(self) -> tuple[int, ...]:
        """The numbers at its start: (2, 10, 0) of 2.10.0a0+nv25.12."""
        numbers = re.match(r"[\d.]*", self.version or "")
        return tuple(int(number) for number in numbers[0].split(".") if number) if numbers is not None else ()

    def __str__(self) -> str:
        return f"{self.version} ({self.folder})" if self.folder else str(self.version)


def found_versions() -> dict[str, FoundVersion]:
    """Of all that SUPPORTED names: what Python would import now, or has. Imports none of it."""
    return {
        "Python": FoundVersion(platform.python_version()),
        "torch": _written("torch", "version.py", ("__version__",)),
        "megatron-core": _written("megatron.core", "package_info.py", ("MAJOR", "MINOR", "PATCH")),
    }


def check_versions(found: Mapping[str, FoundVersion], replaying: str | None = None) -> list[str]:
    """Warnings, a line for each version that is newer than what is known.

    Args:
        found: what `found_versions` gives.
        replaying: the strategy that runs iterations again, None if the job has no such.

    Raises:
        UnsupportedVersion: a version is missing or too old, or Megatron-Core is too new to replay with.
    """
    warnings = []
    for name, version in found.items():
        supported = SUPPORTED[name]
        if version.version is None:
            what = (
                f"the version of {name} in {version.folder} cannot be read" if version.folder else f"{name} is missing"
            )
            raise UnsupportedVersion(f"{what}; {supported} are supported: {supported.remedy}")
        if version.release < supported.oldest:
            raise UnsupportedVersion(f"{name} {version} is too old; {supported} are supported: {supported.remedy}")
        if supported.below is not None and version.release >= supported.below:
            line = f"{name} {version} is newer than what is supported, {supported}"
            if name == "megatron-core" and replaying is not None:
                raise UnsupportedVersion(
                    f"{line}, and --moe-ckpt-strategy {replaying} replays iterations through code that may have"
                    f" changed: use full or pec, or {supported.remedy}"
                )
            warnings.append(f"{line}; if something fails: {supported.remedy}")
    return warnings


def _written(package: str, file: str, names: tuple[str, ...]) -> FoundVersion:
    """The version in a package's file, as the values of these variables, joined by dots."""
    try:
        spec = find_spec(package)
    except ModuleNotFoundError:  # of what it lies in
        spec = None
    for folder in map(Path, spec.submodule_search_locations or ()) if spec is not None else ():
        if (folder / file).is_file():
            text = (folder / file).read_text(encoding="utf-8")
            values = [re.search(rf"^{name}\b[^=\n]*=\s*['\"]?([\w.+-]+)", text, re.MULTILINE) for name in names]
            readable = [value[1] for value in values if value is not None and value[1][0].isdigit()]
            return FoundVersion(".".join(readable) if len(readable) == len(names) else None, str(folder))
    return FoundVersion(None)
