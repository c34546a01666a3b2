"""Write the lock file of this environment: every package with its version and the hash of what pip would install.

    python tools/lock.py            # writes requirements/lock-py312.txt, named after the running Python

torch is left out: its build follows the machine, see `scripts/install_torch.py`. So are packages without a file in the
package index, such as this one.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
FOLLOWS_THE_MACHINE = (
    "torch",
    "torchvision",
    "triton",
    "nvidia-",
    "cuda-",
    "transformer-engine",
    "transformer_engine",
    "megatron-moe-ckpt",
    "pip",
    "setuptools",
)
HEADER = "# Made by tools/lock.py. Install: python -m pip install --require-hashes --no-deps -r FILE\n"


def main() -> int:
    """Exit code of pip."""
    pip = [sys.executable, "-m", "pip"]
    frozen = subprocess.run([*pip, "list", "--format=json"], stdout=subprocess.PIPE, text=True, check=True).stdout
    wanted = [f"{one['name']}=={one['version']}" for one in json.loads(frozen) if not _follows(one["name"])]
    report = subprocess.run(
        [*pip, "install", "--quiet", "--dry-run", "--ignore-installed", "--no-deps", "--report", "-", *wanted],
        stdout=subprocess.PIPE, text=True, check=False,
    )  # fmt: skip
    if report.returncode:
        return report.returncode
    path = ROOT / "requirements" / f"lock-py{sys.version_info.major}{sys.version_info.minor}.txt"
    path.parent.mkdir(exist_ok=True)
    path.write_text(HEADER + "".join(sorted(map(line_of, json.loads(report.stdout)["install"]))))
    sys.stdout.write(f"{len(wanted)} packages: {path.relative_to(ROOT)}\n")
    return 0


def line_of(item: Mapping[str, Any]) -> str:
    """Of one package in pip's report."""
    about, digest = item["metadata"], item["download_info"]["archive_info"]["hashes"]["sha256"]
    return f"{about['name'].lower()}=={about['version']} --hash=sha256:{digest}\n"


def _follows(name: str) -> bool:
    return name.lower().startswith(FOLLOWS_THE_MACHINE)


if __name__ == "__main__":
    sys.exit(main())
