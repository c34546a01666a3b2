"""Make communicators in a world of one rank, and abort them while a kernel spins: a line of JSON for each figure.

The argument says how: `other` aborts one on which nothing is under way, `row` all one after the other as torch does,
`threads` all at once as this project does.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parent))

from gpu_place import BACKEND, DEVICE, REHEARSED, seconds

from megatron.core.dist_checkpointing.moe.in_place.process_groups import ProcessGroups
from megatron.core.dist_checkpointing.moe.runtime.peer_links import close_connections

GROUPS = 12
SPIN_S = 8.0


def timed(run: Callable[[], object]) -> float:
    """Seconds of the host, which does not wait for the device."""
    begun_s = time.perf_counter()
    run()
    return time.perf_counter() - begun_s


def say(**values: object) -> None:
    """One figure."""
    print(json.dumps(values), flush=True)


def start() -> list[dist.ProcessGroup]:
    """The default group and the others, each used once."""
    store = dist.FileStore(tempfile.mktemp(), 1)
    say(init_s=timed(lambda: dist.init_process_group(BACKEND, store=store, rank=0, world_size=1)))
    made_s, groups = [], []
    for _ in range(GROUPS):
        made_s.append(timed(lambda: groups.append(dist.new_group([0]))))
    one = torch.ones(1 << 20, device=DEVICE)
    used_s = [seconds(partial(dist.all_reduce, one, group=group)) for group in groups]
    say(groups=GROUPS, made_s=made_s, first_use_s=used_s)
    return groups


def spin(group: dist.ProcessGroup) -> None:
    """Give the device work for SPIN_S, and a collective of the group behind it."""
    if REHEARSED:
        return
    sleep, ticks = torch.cuda._sleep, 10**8
    ticks_per_s = ticks / seconds(lambda: sleep(ticks))
    with torch.cuda.stream(torch.cuda.Stream()):
        sleep(int(SPIN_S * ticks_per_s))
        dist.all_reduce(torch.ones(1 << 20, device=DEVICE), group=group, async_op=True)


def abort(how: str, groups: list[dist.ProcessGroup]) -> None:
    """Abort them in this way."""
    if how == "threads":
        close_connections()
    elif how == "row":
        dist.distributed_c10d._abort_process_group()
    else:
        groups[1].abort()


class Said(logging.Handler):
    """What the project logs of it is a figure, too: how many were aborted, and which were not in time."""

    def emit(self, record: logging.LogRecord) -> None:
        """As `logging.Handler.emit`."""
        say(log=record.getMessage())


if __name__ == "__main__":
    (_, way) = sys.argv
    logging.basicConfig(level=logging.INFO, handlers=[Said()])
    if not REHEARSED:
        torch.cuda.set_device(0)
    made = start()
    spin(made[0])
    say(how=way, spinning_s=0.0 if REHEARSED else SPIN_S, abort_s=timed(lambda: abort(way, made)))
    if way != "other" and not REHEARSED:  # gloo has nothing that is aborted in this way
        del made
        torch.cuda.synchronize()
        if way == "threads":
            ProcessGroups.taken_down()
        say(again=True)
        start()
    # Not through destructors: threads that abort may be at work still, and how a process ends is not what is measured.
    os._exit(0)
