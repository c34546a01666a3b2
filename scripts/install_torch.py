"""Install the newest torch that this project is tested with and that the package index and constraints allow.

A torch that is there already stays as it is. On a machine without a GPU a CPU build is taken where the index has one.
--name: install nothing, and print the requirement.
"""

import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from pip._vendor.packaging.specifiers import SpecifierSet

OLDEST, NEWEST = "2.8", "2.15.0"
TORCH = f"torch>={OLDEST},<={NEWEST}"
TOO_LONG_S = 1800
"""For a download of the CUDA build, which is 4.7 GB with what it needs."""


def main() -> int:
    """Exit code: 0 installed or there already, 1 refused or failed; standard error gets what to do."""
    if "--name" in sys.argv[1:]:
        sys.stdout.write(f"{TORCH}\n")
        return 0
    present = _present()
    if present is not None:
        if _numbers(present) < _numbers(OLDEST):
            sys.stderr.write(
                f"torch {present} is installed (expected {OLDEST} or newer); remove it, or use another image\n"
            )
            return 1
        sys.stdout.write(f"torch {present} is installed and stays\n")
        return 0
    has_gpu = _has_gpu()
    requirement = TORCH if has_gpu else _cpu_build() or TORCH
    found, refused = _resolved(requirement)
    if not found and requirement != TORCH:  # constraints may not allow the CPU build
        requirement = TORCH
        found, refused = _resolved(TORCH)
    if not found:
        sys.stderr.write(f"{_why_not(refused)}\n")
        return 1
    cuda = [name for name in found if name.startswith(("nvidia-", "cuda-", "triton"))]
    if cuda and not has_gpu:
        sys.stdout.write(
            f"installing the CUDA build of torch {found['torch']}, several GB: this machine has no GPU, and the package"
            " index has no CPU build for this Python; TORCH_INDEX_URL names another index\n"
        )
    return subprocess.run([*_pip("install"), requirement], check=False, timeout=TOO_LONG_S).returncode


def _pip(command: str) -> list[str]:
    index = ["--index-url", os.environ["TORCH_INDEX_URL"]] if "TORCH_INDEX_URL" in os.environ else []
    quiet = ["--quiet"] if command == "install" else []  # others would print nothing
    return [sys.executable, "-m", "pip", command, *quiet, "--disable-pip-version-check", *index]


def _present() -> str | None:
    try:
        return importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return None


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", version.partition("+")[0])[:3]))


def _cpu_build() -> str | None:
    """The newest CPU build in the index, as a requirement; pip cannot be asked for `any +cpu`."""
    listed = subprocess.run([*_pip("index"), "versions", "torch"], capture_output=True, text=True, check=False)
    builds = set(re.findall(r"\b(\d[\w.]*\+cpu)\b", listed.stdout))
    fit = [build for build in builds if _numbers(OLDEST) <= _numbers(build) <= _numbers(NEWEST)]
    return f"torch=={max(fit, key=_numbers)}" if fit else None


def _resolved(requirement: str) -> tuple[dict[str, str], str]:
    """Names and versions that pip would install; or none, and what pip says then."""
    dry_run = [*_pip("install"), "--dry-run", "--ignore-installed", "--report", "-", requirement]
    report = subprocess.run(dry_run, capture_output=True, text=True, check=False)
    if report.returncode:
        return {}, report.stderr
    return {item["metadata"]["name"]: item["metadata"]["version"] for item in json.loads(report.stdout)["install"]}, ""


def _why_not(refused: str) -> str:
    for name in _constraint_files() if "conflicting dependencies" in refused else ():
        lines = Path(name).read_text().splitlines() if Path(name).is_file() else []
        for line in lines:
            limits = re.match(r"torch\s*([<>=!~][^;#]*)", line)
            if limits and not any(SpecifierSet(limits[1].strip()).contains(end) for end in (OLDEST, NEWEST)):
                return (
                    f"constraint {line.strip()!r} of {name} allows no torch that is supported (expected {OLDEST} to"
                    f" {NEWEST}); change that line, or point PIP_CONSTRAINT to another file"
                )
    said = next((line for line in refused.splitlines() if line.startswith("ERROR")), "pip says nothing")
    python = sys.version.split()[0]
    return f"no torch {OLDEST} to {NEWEST} is found for Python {python} ({said}); TORCH_INDEX_URL names another index"


def _constraint_files() -> list[str]:
    """As pip finds them: the environment wins over its configuration."""
    given = os.environ.get("PIP_CONSTRAINT")
    if given is None:
        list_all = [sys.executable, "-m", "pip", "config", "list"]
        listed = subprocess.run(list_all, capture_output=True, text=True, check=False).stdout
        given = " ".join(re.findall(r"^\S*constraint='(.*)'$", listed, re.MULTILINE))
    return given.split()


def _has_gpu() -> bool:
    if shutil.which("nvidia-smi") is None:
        return False
    return subprocess.run(["nvidia-smi", "-L"], capture_output=True, check=False).returncode == 0


if __name__ == "__main__":
    sys.exit(main())
