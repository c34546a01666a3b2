"""`pretrain_gpt_moe.py` that notes when each iteration ends, and can be wrapped in NVRx's in-process restart.

$PROGRESS is a folder: rank 0 appends to `iterations` a line with the number of each iteration and the time at which it
ended, all leave their pid in `pid-RANK` when training begins, and the rank $VICTIM kills itself in iteration
$STRIKES_AT, after noting the time in `killed`. With $NVRX, a folder with the package, `inprocess.Wrapper` restarts the
function that trains: all processes but $NPROC are its reserve. It has no seat to fill from outside, and brings back no
state: that comes from the newest dense checkpoint. $HANG_UP=1 adds what gloo needs to its `Abort`: closed connections.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import stat
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import pretrain_gpt_moe
from megatron.pretrain import loop
from megatron.pretrain.initialize import Launch, use_cpu

PROGRESS = Path(os.environ["PROGRESS"])
VICTIM, STRIKES_AT = int(os.environ["VICTIM"]), int(os.environ["STRIKES_AT"])
WAIT_S = 60


def instrument() -> None:
    """Note the iterations, and strike once; once the device is chosen."""
    from megatron.core.dist_checkpointing.moe import MoECheckpointManager as Manager

    rejoin, passes, reported = Manager.rejoin, Manager.forward_backward, Manager.reported

    def rejoining(manager: Manager) -> bool:
        (PROGRESS / f"pid-{os.environ['RANK']}").write_text(str(os.getpid()))
        return rejoin(manager)

    @contextlib.contextmanager
    def passing(manager: Manager) -> Iterator[None]:
        due = manager.iteration + 1 == STRIKES_AT and int(os.environ["RANK"]) == VICTIM
        if due and not (PROGRESS / "killed").exists():
            wait_for_standby()
            (PROGRESS / "killed").write_text(str(time.time()))
            os.kill(os.getpid(), signal.SIGKILL)
        with passes(manager):
            yield

    def reporting(manager: Manager) -> None:
        reported(manager)
        if os.environ["RANK"] == "0":
            with (PROGRESS / "iterations").open("a") as file:
                file.write(f"{manager.iteration} {time.time()}\n")

    Manager.rejoin, Manager.forward_backward, Manager.reported = rejoining, passing, reporting  # type: ignore[method-assign]


def wait_for_standby() -> None:
    """Somebody who can take this rank's place."""
    until = time.monotonic() + WAIT_S
    while not (PROGRESS / "standby").exists():
        if time.monotonic() > until:
            raise SystemExit(f"no standby was ready within {WAIT_S} s")
        time.sleep(0.02)
    time.sleep(1)


def warm_up(argv: Sequence[str], done: Callable[..., None] = pretrain_gpt_moe.warm_up) -> None:
    """That of the driver."""
    done(argv)
    (PROGRESS / "standby").touch()


def use_cpu_and_instrument() -> None:
    """That of the driver."""
    use_cpu()
    instrument()


def train_with_nvrx(argv: Sequence[str]) -> None:
    """What `inprocess.Wrapper` protects: the driver without seats, from its flags to the end of training."""
    use_cpu()
    import logging

    import torch.distributed as dist
    from nvidia_resiliency_ext import inprocess
    from nvidia_resiliency_ext.inprocess.rank_assignment import FillGaps, MaxActiveWorldSize

    from megatron.core.dist_checkpointing.moe.core_versions.training import drop_auxiliary_losses
    from megatron.core.dist_checkpointing.moe.in_place.building import own_build
    from megatron.training.training import destroy_global_state, set_startup_timestamps

    ports = {int(os.environ["NVRX_PORT"]), int(os.environ["MASTER_PORT"])}

    class HangUp(inprocess.abort.Abort):  # type: ignore[misc]
        """End the connections between ranks, but not those to stores."""

        def __call__(self, state: Any) -> Any:
            close_connections_except(ports)
            return state

    class Forget(inprocess.finalize.Finalize):  # type: ignore[misc]
        """Process groups and what Megatron-LM keeps in globals; the rendezvous of the next round has another name."""

        def __call__(self, state: Any) -> Any:
            own_build.cache_clear()  # the model is built again
            drop_auxiliary_losses()
            destroy_global_state()
            if dist.is_initialized():
                dist.destroy_process_group()
            dist.distributed_c10d._world.group_count = 0  # a process from the reserve begins to count, too
            os.environ["TORCHELASTIC_RESTART_COUNT"] = str(int(os.environ["TORCHELASTIC_RESTART_COUNT"]) + 1)
            return state

    def train() -> None:
        logging.getLogger("megatron").setLevel(logging.WARNING)
        set_startup_timestamps(time.time())  # as Megatron-LM's own scripts do: where it is set, ranks agree on it
        loop._train(Launch.from_environment(), pretrain_gpt_moe.parts(), "cpu", None, recover_only=False)

    instrument()
    hang_up = [HangUp()] if os.environ.get("HANG_UP") == "1" else []
    every = timedelta(seconds=float(os.environ.get("NVRX_INTERVAL_S", "1")))
    wrapper = inprocess.Wrapper(
        store_kwargs={"port": int(os.environ["NVRX_PORT"])},
        abort=inprocess.Compose(inprocess.abort.AbortTorchDistributed(), *hang_up),
        finalize=Forget(),
        rank_assignment=inprocess.Compose(MaxActiveWorldSize(int(os.environ["NPROC"])), FillGaps()),
        monitor_thread_interval=every,
        monitor_process_interval=every,
        heartbeat_interval=every,
        progress_watchdog_interval=every,
        last_call_wait=every,
    )
    vars(wrapper).update(restart_health_check=None)  # of a GPU
    if int(os.environ["RANK"]) >= int(os.environ["NPROC"]):
        pretrain_gpt_moe.warm_up(argv)  # a reserve, with all imports done
        (PROGRESS / "standby").touch()
    wrapper(train)()


def close_connections_except(ports: set[int]) -> None:
    """Shut down the connected TCP sockets of this process whose other end has none of these ports."""
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # closed meanwhile, or not connected
            if not stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                continue
            connection = socket.socket(fileno=os.dup(int(name)))
            with connection:
                if connection.type == socket.SOCK_STREAM and not {_port(connection, 0), _port(connection, 1)} & ports:
                    connection.shutdown(socket.SHUT_RDWR)


def _port(connection: socket.socket, end: int) -> int:
    """Of the other end or of this one; raises OSError where there is none."""
    if connection.family not in (socket.AF_INET, socket.AF_INET6):
        raise OSError
    return int((connection.getsockname() if end else connection.getpeername())[1])


if __name__ == "__main__":
    if "NVRX" in os.environ:
        sys.path.append(os.environ["NVRX"])
        train_with_nvrx(sys.argv[1:])
        sys.exit(0)
    pretrain_gpt_moe.warm_up = warm_up
    loop.use_cpu = use_cpu_and_instrument
    sys.exit(pretrain_gpt_moe.main(sys.argv[1:]))
