"""`pretrain_gpt_moe.py` where an injected fault kills its rank in its next call of a kind, which $STRIKE_IN names.

The others have launched that collective or are about to. All ranks of the node share GPU 0. When it struck stands in
the file $STRUCK, by the clock that all processes share.
"""

from __future__ import annotations

import functools
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
import torch.distributed as dist

CALLS = {
    "all-to-all": ("all_to_all_single",),
    "p2p": ("batch_isend_irecv",),
    "reduce-scatter": ("reduce_scatter_tensor", "_reduce_scatter_base"),
}
"""Functions of torch.distributed that Megatron-Core calls."""


class Strike:
    """Armed by the fault, it strikes in the next call."""

    armed = False

    @classmethod
    def arm(cls) -> None:
        """In place of the kill."""
        cls.armed = True

    @classmethod
    def within(cls, name: str) -> None:
        """Have a function of torch.distributed struck."""
        own = getattr(dist, name)

        @functools.wraps(own)
        def called(*arguments: Any, **options: Any) -> Any:
            if cls.armed:
                Path(os.environ["STRUCK"]).write_text(str(time.monotonic()))
                os.kill(os.getpid(), signal.SIGKILL)
            return own(*arguments, **options)

        setattr(dist, name, called)


def share_the_gpu() -> None:
    """Let each rank of the node have device 0; Megatron-LM is told so by its flag."""
    own = torch.cuda.set_device
    torch.cuda.set_device = lambda _device: own(0)
    sys.argv += ["--local-rank", "0"]


if __name__ == "__main__":
    # Before Megatron-Core, which keeps some of these functions by names of its own.
    for each in CALLS.get(os.environ["STRIKE_IN"], ()):
        Strike.within(each)
    if torch.cuda.is_available():
        share_the_gpu()

    import pretrain_gpt_moe
    from megatron.core.dist_checkpointing.moe.runtime import faults

    faults.FaultInjector.__init__.__defaults__ = (Strike.arm,)
    sys.exit(pretrain_gpt_moe.main(sys.argv[1:]))
