"""A worker without torch: `slot_worker.py FOLDER BEHAVIOUR`.

In FOLDER it leaves `ready-PID` once it waits for a slot (`slow copies`: 3 s before, `standby hangs`: for ever), and
`ATTEMPT-RANK` with its pid once it sits, and whether it has done what standbys do before. The last rank of the first
attempt kills itself, when as many standbys as BEHAVIOUR says are ready; the second attempt ends well, but with `copies`
only the third. With `spare` ranks train until FOLDER has `lost`, and end well from then on.
"""

import os
import signal
import sys
import time
from pathlib import Path

from moe_ckpt.megatron_core import skip_megatron_core

skip_megatron_core()

from megatron.core.dist_checkpointing.moe.standby import slot  # noqa: E402

folder, behaviour = Path(sys.argv[1]), sys.argv[2]
WAIT_S = 240
is_warm = False


def warmed_up() -> None:
    global is_warm
    is_warm = True
    (folder / f"ready-{os.getpid()}").touch()
    time.sleep({"slow copies": 3, "standby hangs": 600}.get(behaviour, 0))
    if behaviour == "standbys die" and len(list(folder.glob("ready-*"))) <= 3:
        os.kill(os.getpid(), signal.SIGKILL)


if behaviour == "another release":
    slot.VERSION = 99
if behaviour != "no slots":
    slot.wait_for_rank(warmed_up, copies=behaviour in ("copies", "slow copies", "standby hangs", "spare"))
attempt, rank = os.environ["TORCHELASTIC_RESTART_COUNT"], int(os.environ["RANK"])
(folder / f"{attempt}-{rank}").write_text(f"{os.getpid()} {is_warm}")
if behaviour == "spare":
    slot.own_slot().training()
    until = time.monotonic() + WAIT_S
    while not (folder / "lost").exists() and time.monotonic() < until:
        time.sleep(0.02)
elif attempt == "0" or (behaviour == "copies" and attempt == "1"):
    if behaviour != "no slots":
        slot.own_slot().training()
    wanted = {"two standbys": 2, "standbys die": 3, "any": 0, "no slots": 0, "another release": 0}.get(behaviour, 1)
    until = time.monotonic() + WAIT_S
    while rank == 0 or len(list(folder.glob("ready-*"))) < wanted:
        if time.monotonic() > until:
            sys.exit(f"{wanted} standbys were not ready within {WAIT_S} s")
        time.sleep(0.02)
    time.sleep(0.5)  # so that what is ready was heard
    os.kill(os.getpid(), signal.SIGKILL)
