"""Install the torch that this project is tested with, and no CUDA packages on a machine that cannot use them.

A torch that is there already stays as it is. --with-cuda: take what the package index has, GPU or not.
--name: install nothing, and say which torch that is.
"""

import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys

TORCH = "torch==2.13.0" if sys.version_info < (3, 12) else "torch==2.15.0"
OLDEST = (2, 6)


def main() -> int:
    """Exit code: 0 installed or there already, 1 refused or failed; standard error gets what to do."""
    if "--name" in sys.argv[1:]:
        sys.stdout.write(f"{TORCH}\n")
        return 0
    present = _present()
    if present is not None:
        if tuple(map(int, re.findall(r"\d+", present)[:2])) < OLDEST:
            sys.stderr.write(f"torch {present} is here, and 2.6 or newer is needed: remove it, or take another image\n")
            return 1
        sys.stdout.write(f"torch {present} is here and stays\n")
        return 0
    pip = [sys.executable, "-m", "pip", "install", "--quiet"]
    index = ["--index-url", os.environ["TORCH_INDEX_URL"]] if "TORCH_INDEX_URL" in os.environ else []
    if "--with-cuda" not in sys.argv[1:] and not _has_gpu():
        dry_run = [*pip, "--dry-run", "--ignore-installed", "--report", "-", *index, TORCH]
        report = subprocess.run(dry_run, stdout=subprocess.PIPE, text=True, check=False)
        if report.returncode:
            return 1
        names = sorted(item["metadata"]["name"] for item in json.loads(report.stdout)["install"])
        cuda = [name for name in names if name.startswith(("nvidia-", "cuda-", "triton"))]
        if cuda:
            sys.stderr.write(
                f"{TORCH} would bring {len(cuda)} CUDA packages ({cuda[0]}, ...), several GB, and this machine has no "
                "NVIDIA GPU; set TORCH_INDEX_URL to a package index with CPU builds of torch, try again on a machine "
                "with a GPU, or say that you want them all the same: make setup TORCH_FLAGS=--with-cuda\n"
            )
            return 1
    return subprocess.run([*pip, *index, TORCH], check=False).returncode


def _present() -> str | None:
    try:
        return importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return None


def _has_gpu() -> bool:
    if shutil.which("nvidia-smi") is None:
        return False
    return subprocess.run(["nvidia-smi", "-L"], capture_output=True, check=False).returncode == 0


if __name__ == "__main__":
    sys.exit(main())
