"""A rank whose job cannot work: rank 0 says so and is gone before the others, which fail for that."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

if __name__ == "__main__":
    verdict = Path(os.environ["MOE_CKPT_LAUNCH_VERDICT"])
    if os.environ["RANK"] == "0":
        verdict.write_text("2")
        sys.exit(0)
    while not verdict.exists():
        time.sleep(0.02)
    sys.exit(1)
