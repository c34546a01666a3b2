"""Where and when something was measured: what runs keep with their data, and pages say of it."""

from __future__ import annotations

import datetime
import os
import platform
import subprocess
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
UNKNOWN_COMMIT = "a commit that was not recorded"
"""Of runs that were kept before they named one."""


def machine() -> dict[str, Any]:
    """What the numbers depend on, and how busy it was."""
    cpu = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    return {
        "cpu": cpu[0].split(":")[1].strip() if cpu else platform.processor(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gb": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9,
        "kernel": platform.release(),
        "torch": version("torch"),
        "megatron_core": version("megatron-core"),
        "commit": commit(),
        "date": datetime.date.today().isoformat(),
        "load_before": os.getloadavg()[0],
    }


def after(before: Mapping[str, Any]) -> dict[str, Any]:
    """The machine as it was before something was measured, with how busy it is now."""
    return {**before, "load_after": os.getloadavg()[0]}


def commit() -> str:
    """Of the sources that run, with `-dirty` where they were changed, as `git describe` has it; "" without git."""
    asked = (
        ["rev-parse", "--short", "HEAD"],
        ["status", "--porcelain", "-uno", "--", ".", ":!docs", ":!benchmarks/results"],
    )
    head, changed = (subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True) for words in asked)
    return head.stdout.strip() + ("-dirty" if changed.stdout else "")


def revision() -> str:
    """The commit of the sources that run, and the day, for people: of runs that no load changes."""
    return f"commit {commit()}, {datetime.date.today().isoformat()}"


def where(result: Mapping[str, Any]) -> str:
    """The machine, for people."""
    about = result["machine"]
    loads = " and ".join(f"{about[f'load_{at}']:.1f} {at}" for at in ("before", "after") if f"load_{at}" in about)
    commit = "".join(
        f", {prefix}{about[key]}" for key, prefix in (("commit", "commit "), ("date", "")) if about.get(key)
    )
    return (
        f"on {about['cores']} cores ({about['cpu']}), torch {about['torch']}, Megatron-Core {about['megatron_core']}"
        f"{commit}; one-minute load {loads}, the benchmark's own included"
    )
