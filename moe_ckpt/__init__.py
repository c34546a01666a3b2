"""Entry of the `moe-ckpt` command: keeps Megatron-Core, and with it torch, out of a process that does not need them."""

from __future__ import annotations

import importlib.util
import sys

SHARED_PACKAGES = ("megatron.core", "megatron.core.dist_checkpointing")


def main() -> None:
    """Runs `moe-ckpt`."""
    skip_megatron_core()
    from moe_ckpt.commands.main import main as run

    run()


def skip_megatron_core() -> None:
    """Make what lies below the packages that we share with Megatron-Core importable without running them.

    Importing anything below `megatron.core` first runs that package of the wheel, which imports all of Megatron-Core
    and torch: seconds, and warnings of optional packages. Policies and planner need none of it; commands that do call
    `cli.megatron_core.load_megatron_core`. Does nothing in a process that has imported Megatron-Core already.
    """
    for name in SHARED_PACKAGES:
        if name not in sys.modules:
            spec = importlib.util.find_spec(name)
            if spec is None:
                raise ModuleNotFoundError(f"{name} is missing: install megatron-core")
            package = importlib.util.module_from_spec(spec)
            package.__dict__["skipped"] = True
            sys.modules[name] = package
