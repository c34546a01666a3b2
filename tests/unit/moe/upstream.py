"""What was read of Megatron-Core, by release, and whether the installed one is that."""

from __future__ import annotations

import hashlib
import importlib
import inspect
from operator import attrgetter

import pytest

from megatron.core.package_info import __shortversion__ as installed  # the long one names the commit around it

RELEASES = ("0.17.1", "0.18.2", "0.19.2")
GONE = "gone"


def read_in_installed(row: str) -> str:
    """The digest of the installed release in a row of three: `=` stands for the one before, `gone` for no such name."""
    if installed not in RELEASES:
        pytest.skip(f"megatron-core {installed} was not read: {', '.join(RELEASES)} were")
    digests: list[str] = []
    for digest in row.split():
        digests.append(digests[-1] if digest == "=" else digest)
    return digests[RELEASES.index(installed)]


def digest_of(module: str, name: str) -> str:
    """Of the source of a name below `megatron.core`; `gone` if there is none."""
    try:
        source = inspect.getsource(attrgetter(name)(importlib.import_module(f"megatron.core.{module}")))
    except (AttributeError, ModuleNotFoundError):
        return GONE
    return hashlib.sha256(source.encode()).hexdigest()[:12]
