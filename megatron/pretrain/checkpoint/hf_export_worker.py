"""`moe-ckpt convert` as a helper of a trainer: at low priority, and not for longer than the trainer lives."""

from __future__ import annotations

import os
import runpy
import sys

from megatron.pretrain.processes import live_and_die_with_parent

_NICENESS = 10

if __name__ == "__main__":
    live_and_die_with_parent()
    if os.getppid() != int(sys.argv[1]):
        sys.exit("moe-ckpt: the trainer has ended")
    os.nice(_NICENESS)
    sys.argv[1:2] = ["convert"]
    runpy.run_module("moe_ckpt", run_name="__main__")
