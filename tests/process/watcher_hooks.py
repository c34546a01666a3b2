"""What tests of the watcher do inside workers: stand in a call of C that no loss ends, as behind a kernel of NCCL."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from megatron.core.dist_checkpointing.moe.runtime.faults import kill_self

PATIENCE_S = 1.0
STANDING_S = 0.5
"""How long those that are left stand in the call before a peer is lost."""


@contextlib.contextmanager
def standing(folder: str, iteration: int, ranks: tuple[int, ...], victim: int | None) -> Iterator[None]:
    """In the first attempt `ranks` enter the call in the passes of an iteration, and `victim` dies then.

    Gloo stands for NCCL, so the watcher is as impatient as with that.
    """
    from megatron.core.dist_checkpointing.moe import MoECheckpointManager
    from megatron.core.dist_checkpointing.moe.local_recovery.park import Parker
    from megatron.core.dist_checkpointing.moe.runtime import watcher

    passes, park = MoECheckpointManager.forward_backward, Parker.park

    @contextlib.contextmanager
    def standing_passes(self: MoECheckpointManager) -> Iterator[None]:
        rank = torch.distributed.get_rank()
        own = Path(folder) / f"stood-{rank}"
        with passes(self):
            if self.iteration + 1 == iteration and not own.exists():
                if rank in ranks:
                    stand(own)
                    note(folder, "continued", rank)
                elif rank == victim:
                    while not all((Path(folder) / f"stood-{other}").exists() for other in ranks):
                        time.sleep(0.01)
                    time.sleep(STANDING_S)
                    note(folder, "died", rank)
                    own.touch()
                    kill_self()
            yield

    def noting_park(self: Any, *arguments: Any) -> Any:
        parked = park(self, *arguments)
        note(folder, "parked", int(os.environ["RANK"]), iteration=parked.iteration)
        return parked

    with (
        mock.patch.object(MoECheckpointManager, "forward_backward", standing_passes),
        mock.patch.object(Parker, "park", noting_park),
        mock.patch.dict(watcher.PATIENCE_S, {"gloo": PATIENCE_S}),
    ):
        yield


def stand(marker: Path) -> None:
    """Enter a call of C that ends, without an error, when the connections of this process are closed."""
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.create_connection(listener.getsockname()) as link:
        there, _ = listener.accept()
        with there:
            marker.touch()
            # A signal is delivered to some other thread, as in a process with CUDA: here it would end the call.
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
            try:
                ctypes.CDLL(None).recv(link.fileno(), ctypes.create_string_buffer(1), 1, 0)
            finally:
                signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})


def note(folder: str, event: str, rank: int, **facts: object) -> None:
    """Write down when something happened."""
    with (Path(folder) / "events.jsonl").open("a") as file:
        file.write(json.dumps({"event": event, "rank": rank, "at_s": time.time(), **facts}) + "\n")
