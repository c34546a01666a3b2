"""Where the scripts and examples are; `python -m moe_ckpt.scripts` prints it, also for an installed wheel."""

from __future__ import annotations

import sys
from pathlib import Path


def scripts_folder() -> Path:
    """The folder that has `scripts`, `examples`, `tools` and `pretrain_gpt_moe.py`: the repository, or a wheel's copy.

    Scripts write beside themselves, so a wheel's are copied to where they may before they are started.
    """
    share = Path(__file__).resolve().parent / "share"
    return share if share.is_dir() else share.parents[1]


if __name__ == "__main__":
    sys.stdout.write(f"{scripts_folder()}\n")
