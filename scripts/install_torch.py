"""Install the torch that this project is tested with, and no CUDA packages on a machine that cannot use them."""

import json
import os
import shutil
import subprocess
import sys

TORCH = "torch==2.13.0"


def main() -> int:
    """Exit code: 0 installed, 1 refused or failed; standard error gets what to do."""
    pip = [sys.executable, "-m", "pip", "install", "--quiet"]
    index = ["--index-url", os.environ["TORCH_INDEX_URL"]] if "TORCH_INDEX_URL" in os.environ else []
    if not _has_gpu():
        dry_run = [*pip, "--dry-run", "--ignore-installed", "--report", "-", *index, TORCH]
        report = subprocess.run(dry_run, stdout=subprocess.PIPE, text=True, check=False)
        if report.returncode:
            return 1
        names = sorted(item["metadata"]["name"] for item in json.loads(report.stdout)["install"])
        cuda = [name for name in names if name.startswith(("nvidia-", "cuda-", "triton"))]
        if cuda:
            sys.stderr.write(
                f"{TORCH} would bring {len(cuda)} CUDA packages ({cuda[0]}, ...), several GB, and this machine has no "
                "NVIDIA GPU; set TORCH_INDEX_URL to a package index with CPU builds of torch, or try again on a "
                "machine with a GPU\n"
            )
            return 1
    return subprocess.run([*pip, *index, TORCH], check=False).returncode


def _has_gpu() -> bool:
    if shutil.which("nvidia-smi") is None:
        return False
    return subprocess.run(["nvidia-smi", "-L"], capture_output=True, check=False).returncode == 0


if __name__ == "__main__":
    sys.exit(main())
