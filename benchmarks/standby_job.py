"""`pretrain_gpt_moe.py` where an injected fault waits until as many standbys as $READY_STANDBYS wait for a seat.

For tests and benchmarks. In the folder $SEATS each standby leaves `ready-PID` while it waits, and `seated-RANK` once it
trains.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

if os.sched_getscheduler(0) == os.SCHED_IDLE:  # on a machine that is never idle, the test would wait for ever
    os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
sys.path.insert(0, str(Path(__file__).parents[1]))

import pretrain_gpt_moe
from megatron.core.dist_checkpointing.moe.runtime import faults
from megatron.core.dist_checkpointing.moe.seats.seat import Seat

FOLDER = Path(os.environ["SEATS"])
WAIT_S = 120


def waiting_standbys() -> int:
    """How many wait for a seat now."""
    pids = [path.name.removeprefix("ready-") for path in FOLDER.glob("ready-*")]
    return sum(Path(f"/proc/{pid}").exists() for pid in pids)


def kill_once_standbys_are_ready() -> None:
    """The fault."""
    until = time.monotonic() + WAIT_S
    while waiting_standbys() < int(os.environ["READY_STANDBYS"]):
        if time.monotonic() > until:
            sys.exit(f"standbys were not ready within {WAIT_S} s")
        time.sleep(0.02)
    time.sleep(1)  # so that the launcher has heard of all
    os.kill(os.getpid(), signal.SIGKILL)


def warm_up(argv: Sequence[str], done: object = pretrain_gpt_moe.warm_up) -> None:
    """That of the driver."""
    assert callable(done)
    done(argv)
    (FOLDER / f"ready-{os.getpid()}").touch()


def training(seat: Seat, done: object = Seat.training) -> None:
    """That of a seat."""
    assert callable(done)
    done(seat)
    if seat.taken_s is not None:
        (FOLDER / f"ready-{os.getpid()}").unlink(missing_ok=True)
        (FOLDER / f"seated-{os.environ['RANK']}").touch()


if __name__ == "__main__":
    faults.FaultInjector.__init__.__defaults__ = (kill_once_standbys_are_ready,)
    pretrain_gpt_moe.warm_up = warm_up
    Seat.training = training  # type: ignore[method-assign]
    sys.exit(pretrain_gpt_moe.main(sys.argv[1:]))
