"""A rank whose job cannot work: rank 0 says so and is gone before the others, which fail for that."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from torch.distributed import TCPStore

if __name__ == "__main__":
    store = TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    if os.environ["RANK"] == "0":
        Path(os.environ["MOE_CKPT_LAUNCH_VERDICT"]).write_text("2")
        store.set("left", "")
        sys.exit(0)
    store.wait(["left"])
    sys.exit(1)
