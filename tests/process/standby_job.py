"""`pretrain_gpt_moe.py` where an injected fault waits until as many standbys as $READY_STANDBYS wait for a slot.

For tests and benchmarks. In the folder $SLOTS each standby leaves `ready-PID` while it waits and `assigned-RANK` once
it trains, and each rank `START-RANK` once all stand at one iteration after the START-th start of training, with its
pid, the addresses of its weights, and how often its state was filled from a snapshot. Each process that begins with a
rank leaves `process-RANK-PID`. $KILLS are faults that strike while training is brought back, such as
`2@1:replay,3@2:connect`: rank 2 in the first recovery, once it has run an iteration again, and rank 3 in the second,
before it connects; with $KILLS_AFTER_S it is killed so long after a replay began, in whatever it does then. At $STOPS
it is stopped in place of killed, and collectives wait no longer than $GROUP_TIMEOUT_S.
Each rank notes in `replays-RANK` the start and the iterations that it runs again, each of which takes $REPLAY_S more.
With KEEP=0 no rank keeps its process. With $LOST_MEMORY an injected fault takes the whole node along, and what it has
in that folder.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import json
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

if os.sched_getscheduler(0) == os.SCHED_IDLE:  # on a machine that is never idle, the test would wait for ever
    os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
sys.path.insert(0, str(Path(__file__).parents[2]))

import pretrain_gpt_moe
from megatron.core.dist_checkpointing.moe.runtime import faults
from megatron.core.dist_checkpointing.moe.standby.slot import WorkerSlot
from megatron.pretrain import loop
from megatron.pretrain.initialize import use_cpu

FOLDER = Path(os.environ["SLOTS"])
WAIT_S = 120


def waiting_standbys() -> int:
    """How many wait for a slot now; of those that can be copied one waits for all."""
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
    if "LOST_MEMORY" in os.environ:
        lose_node(Path(os.environ["LOST_MEMORY"]))
    os.kill(os.getpid(), signal.SIGKILL)


def lose_node(memory: Path) -> None:
    """What a power cut does, but for this process."""
    agent = os.getppid()
    children = {int(pid) for pid in Path(f"/proc/{agent}/task/{agent}/children").read_text().split()}
    for pid in (agent, *(children - {os.getpid()})):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    while (memory / os.environ["MOE_CKPT_NODE"]).exists():  # threads of this process still write there
        shutil.rmtree(memory / os.environ["MOE_CKPT_NODE"], ignore_errors=True)


def warm_up(argv: Sequence[str], done: object = pretrain_gpt_moe.warm_up) -> None:
    """That of the driver."""
    assert callable(done)
    done(argv)
    (FOLDER / f"ready-{os.getpid()}").touch()


def training(slot: WorkerSlot, done: object = WorkerSlot.training) -> None:
    """That of a slot."""
    assert callable(done)
    done(slot)
    if slot.taken_s is not None:
        (FOLDER / f"ready-{os.getpid()}").unlink(missing_ok=True)
        (FOLDER / f"assigned-{os.environ['RANK']}").touch()


class Allocated(ctypes.Structure):
    """glibc's `struct mallinfo2`: bytes that its allocator has, and has given out."""

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost".split()
    )


def allocated_bytes() -> int:
    """What this process has allocated in C and not freed; the resident memory has holes, too."""
    mallinfo2 = ctypes.CDLL(None).mallinfo2
    mallinfo2.restype = Allocated
    counts = mallinfo2()
    return int(counts.uordblks + counts.hblkhd)


def held() -> dict[str, int]:
    """What this process has of the system."""
    kinds = []
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the descriptor of this very folder
            kinds.append(os.readlink(f"/proc/self/fd/{name}"))
    resident = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmRSS"))
    return {
        "descriptors": len(kinds),
        "sockets": sum(kind.startswith("socket:") for kind in kinds),
        "threads": len(list(Path("/proc/self/task").iterdir())),
        "mappings": Path("/proc/self/maps").read_text().count("\n"),
        "resident_kb": int(resident.split()[1]),
        "allocated_kb": allocated_bytes() // 1024,
    }


def strike(point: str) -> None:
    """Kill this process if it is to be killed here, or later in what it does from here on."""
    here = f"{os.environ.get('RANK')}@{os.environ.get('TORCHELASTIC_RESTART_COUNT')}:{point}"
    for name, number in (("KILLS", signal.SIGKILL), ("STOPS", signal.SIGSTOP)):
        if here in os.environ.get(name, "").split(","):
            if after_s := os.environ.get(f"{name}_AFTER_S"):
                threading.Thread(target=kill_in_replay, args=[float(after_s)], daemon=True).start()
            else:
                os.kill(os.getpid(), number)


def kill_in_replay(after_s: float) -> None:
    """Kill this process so long after another rank began to run iterations again."""
    while not any(FOLDER.glob("replays-*")):
        time.sleep(0.01)
    time.sleep(after_s)
    os.kill(os.getpid(), signal.SIGKILL)


def struck(owner: Any, name: str, before: str, after: str) -> None:
    """Have a function of the driver struck before or after what it does."""
    own: Callable[..., Any] = getattr(owner, name)

    @functools.wraps(own)  # Megatron-LM looks at the parameters of some
    def called(*arguments: Any, **options: Any) -> Any:
        strike(before)
        outcome = own(*arguments, **options)
        strike(after)
        return outcome

    setattr(owner, name, called)


def use_cpu_and_instrument() -> None:
    """That of the driver; the modules that are changed want the device to be chosen."""
    use_cpu()
    (FOLDER / f"process-{os.environ['RANK']}-{os.getpid()}").touch()
    instrument()


def instrument() -> None:
    """The points of a recovery at which this process may be killed, and what it leaves when it trains."""
    from megatron.core.dist_checkpointing.moe import MoECheckpointManager
    from megatron.core.dist_checkpointing.moe.dense_saves import writing

    struck(loop, "start_process_group", "connect", "connected")
    struck(MoECheckpointManager, "__init__", "start", "started")
    struck(MoECheckpointManager, "resume", "resume", "resumed")
    struck(writing, "_write_and_sum", "save", "saved")
    if "GROUP_TIMEOUT_S" in os.environ:
        loop._GROUP_TIMEOUT = timedelta(seconds=float(os.environ["GROUP_TIMEOUT_S"]))
    instrument_manager(MoECheckpointManager)


def instrument_manager(kind: Any) -> None:
    """Those of them in a `MoECheckpointManager` that are in the middle of what it does."""
    from megatron.core.dist_checkpointing.moe.megatron_state.restore import LiveRestorer

    rejoin, after_step, poison = kind.rejoin, kind.after_step, LiveRestorer.poison
    filled: list[int] = []

    def rejoined(manager: Any) -> bool:
        strike("rejoin")
        done = rejoin(manager)
        left = FOLDER / f"{os.environ['TORCHELASTIC_RESTART_COUNT']}-{os.environ['RANK']}"
        groups = manager._trainer._optimizer.param_groups
        weights = [weight.data_ptr() for group in groups for weight in group["params"]]
        left.write_text(json.dumps({"pid": os.getpid(), "weights": weights, "held": held(), "filled": len(filled)}))
        strike("rejoined")
        return done

    def after(manager: Any, *arguments: Any, **options: Any) -> Any:
        if replayed := manager.is_replaying:
            with (FOLDER / f"replays-{os.environ['RANK']}").open("a") as file:
                file.write(f"{os.environ['TORCHELASTIC_RESTART_COUNT']} {manager.iteration}\n")
            time.sleep(float(os.environ.get("REPLAY_S", "0")))
        done = after_step(manager, *arguments, **options)
        if replayed:
            strike("replay")
        return done

    def poisoned(restorer: LiveRestorer) -> None:
        filled.append(1)
        poison(restorer)

    kind.rejoin, kind.after_step = rejoined, after
    LiveRestorer.poison = poisoned  # type: ignore[method-assign]


if __name__ == "__main__":
    faults.FaultInjector.__init__.__defaults__ = (kill_once_standbys_are_ready,)
    pretrain_gpt_moe.warm_up = warm_up
    loop.use_cpu = use_cpu_and_instrument
    struck(pretrain_gpt_moe, "model_provider", "build", "built")
    struck(pretrain_gpt_moe, "datasets_provider", "data", "data built")
    WorkerSlot.training = training  # type: ignore[method-assign]
    if os.environ.get("KEEP") == "0":
        WorkerSlot.keep = lambda *_: None  # type: ignore[method-assign]
    pretrain_gpt_moe.command()
