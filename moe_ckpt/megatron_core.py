"""Keeps Megatron-Core, and with it torch, out of processes that do not need it, and brings it in where one does.

Importing this module makes our packages below `megatron.core` importable too, where no installation did (see there).
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import warnings

import moe_ckpt_finder  # noqa: F401

SHARED_PACKAGES = ("megatron.core", "megatron.core.dist_checkpointing")
"""The packages of the wheel below which ours lie."""
UNUSABLE = 2
"""Exit code of what cannot work however often it is started."""


def skip_megatron_core() -> None:
    """Make what lies below the packages that we share with Megatron-Core importable without running them.

    Importing anything below `megatron.core` first runs that package of the wheel, which imports all of Megatron-Core
    and torch: seconds, and warnings of optional packages. Policies and planner need none of it; commands that do call
    `load_megatron_core`. Does nothing in a process that has imported Megatron-Core already.
    """
    for name in SHARED_PACKAGES:
        if name not in sys.modules:
            spec = importlib.util.find_spec(name)
            if spec is None:
                raise ModuleNotFoundError(f"{name} is missing: install megatron-core")
            package = importlib.util.module_from_spec(spec)
            package.__dict__["skipped"] = True
            sys.modules[name] = package


def refuse_unsupported_versions() -> None:
    """End the process with a line and exit code 2 where Python, torch or Megatron-Core is too old, or is missing.

    For entry points, before they import anything that might not work there. Leaves Megatron-Core skipped.
    """
    skip_megatron_core()
    from megatron.core.dist_checkpointing.moe.versions import UnsupportedVersion, check_versions, found_versions

    try:
        check_versions(found_versions())
    except UnsupportedVersion as error:
        sys.stderr.write(f"{error}\n")
        raise SystemExit(UNUSABLE) from None


def is_skipped() -> bool:
    """Whether packages of the wheel were skipped at the start, and nothing has needed them since."""
    return "skipped" in sys.modules[SHARED_PACKAGES[-1]].__dict__


def load_megatron_core() -> None:
    """Run the packages of the wheel that were skipped at the start, quietly; for what needs Megatron-Core's classes."""
    warnings.filterwarnings("ignore", r"(?:Transformer Engine|Apex).* not installed", UserWarning)
    shared = SHARED_PACKAGES[-1]
    if is_skipped():
        for name in SHARED_PACKAGES:
            del sys.modules[name]
        importlib.import_module(shared).__dict__["moe"] = importlib.import_module(f"{shared}.moe")
