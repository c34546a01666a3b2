"""In place of the worker of exports: writes half a folder, and never ends by itself."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

from megatron.pretrain.processes import live_and_die_with_parent
from moe_ckpt.hugging_face.folder import published

if __name__ == "__main__":
    live_and_die_with_parent()
    with published(Path(sys.argv[-1])) as staging:
        (staging / "config.json").write_text("{}")
        (staging / "pid.tmp").write_text(str(os.getpid()))
        (staging / "pid.tmp").rename(staging / "pid")
        time.sleep(600)
