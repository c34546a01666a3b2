"""`pretrain_gpt_moe.py` in the stock loop where an injected fault takes the whole node along, as in `lost_node`."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "process"))
sys.path.insert(0, str(Path(__file__).parents[2]))

from lost_node import lose_node

import pretrain_gpt_moe
from megatron.core.dist_checkpointing.moe.extensions.elastic.growth import Growth
from megatron.core.dist_checkpointing.moe.runtime import faults


def take_time() -> None:
    """Ranks that are fewer than there were let other nodes come while they train."""
    ends_training = Growth.ends_training

    def late(growth: Growth, iteration: int, **begins: bool) -> bool:
        if iteration < int(os.environ["ALONE_TO"]):
            return False
        time.sleep(float(os.environ["ALONE_S"]))
        return ends_training(growth, iteration, **begins)

    Growth.ends_training = late  # type: ignore[method-assign]


if __name__ == "__main__":
    if float(os.environ["ALONE_S"]) and os.environ["WORLD_SIZE"] != os.environ["MOST_RANKS"]:
        take_time()
    faults.FaultInjector.__init__.__defaults__ = (lose_node,)
    pretrain_gpt_moe.command()
