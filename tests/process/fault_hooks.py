"""Faults that wait until what a test is about has happened: copies reach peers at their own pace."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

from world import Hook

PATIENCE_S = 60.0
"""How long a fault waits; after that it strikes all the same, and the test says what is missing."""


@contextlib.contextmanager
def struck_when_sealed(memory: str, iteration: int, copies: int) -> Iterator[None]:
    """A rank kills itself only when `copies` snapshots of `iteration` are sealed in the memory of all nodes.

    Snapshots are sealed and replicated in background threads while training continues, so the newest iteration that a
    recovery finds depends on how busy the machine is; with this it does not. An iteration of a tiny model may also be
    over before the snapshot before it is sealed, and then has none: messages wait for what is under way.
    """
    from megatron.core.dist_checkpointing.moe.runtime import faults
    from megatron.core.dist_checkpointing.moe.snapshot.iteration_message import MessageExchange

    kill, send = os.kill, MessageExchange.send

    def send_behind_copies(self: MessageExchange, message: Any, awaiting: Any, until_s: float) -> None:
        send(self, message, awaiting, until_s + PATIENCE_S)

    def kill_when_sealed(pid: int, number: int) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while number == signal.SIGKILL and sealed(Path(memory), iteration) < copies and time.monotonic() < deadline:
            time.sleep(0.02)
        kill(pid, number)

    with (
        mock.patch.object(faults.os, "kill", kill_when_sealed),
        mock.patch.object(MessageExchange, "send", send_behind_copies),
    ):
        yield


def once_sealed(memory: Path, iteration: int, copies: int) -> Hook:
    """The hook for a job with this memory."""
    return partial(struck_when_sealed, str(memory), iteration, copies)


def sealed(memory: Path, iteration: int) -> int:
    """How many snapshots of `iteration` lie sealed in the memory of all nodes, replicas included."""
    return len(list(memory.glob(f"*/*/slot-*/segment-*.iter_{iteration:07}-*.json")))


@contextlib.contextmanager
def slow_storage(seconds: float) -> Iterator[None]:
    """Each piece takes storage so much longer to write."""
    from megatron.core.dist_checkpointing.moe.storage.filesystem import FilesystemStore

    reserve = FilesystemStore.reserve

    def slowly(self: FilesystemStore, *arguments: Any) -> Any:
        time.sleep(seconds)
        return reserve(self, *arguments)

    with mock.patch.object(FilesystemStore, "reserve", slowly):
        yield


@contextlib.contextmanager
def slow_passes(seconds: float) -> Iterator[None]:
    """Each forward pass of a stage sleeps so long, so that other stages wait for it while the cores are idle."""
    from megatron.core.models.gpt import GPTModel

    forward = GPTModel.forward

    def slowly(self: GPTModel, *arguments: Any, **named: Any) -> Any:
        time.sleep(seconds)
        return forward(self, *arguments, **named)

    with mock.patch.object(GPTModel, "forward", slowly):
        yield


@contextlib.contextmanager
def cut_off_while_persisting(iteration: int, rank: int, folder: str) -> Iterator[None]:
    """The first time that `iteration` is written to storage, `rank` kills itself in the middle of it, and all others
    get no further with it."""
    from megatron.core.dist_checkpointing.moe.storage.filesystem import FilesystemStore

    reserve = FilesystemStore.reserve

    def reserved(self: FilesystemStore, snapshot: Any, layout: Any) -> Any:
        writer, mark = reserve(self, snapshot, layout), Path(folder) / f"cut-off-{self.rank}"
        if snapshot.iteration == iteration and not mark.exists():
            put, left = writer.put, iter(range(3))

            def cut_off(key: str, data: Any) -> None:
                if next(left, None) is not None:
                    put(key, data)
                    return
                mark.touch()
                while self.rank == rank and len(list(Path(folder).glob("cut-off-*"))) < 2:
                    time.sleep(0.02)
                if self.rank == rank:
                    os.kill(os.getpid(), signal.SIGKILL)
                time.sleep(600)

            mock.patch.object(writer, "put", cut_off).start()
        return writer

    with mock.patch.object(FilesystemStore, "reserve", reserved):
        yield
