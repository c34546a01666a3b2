"""What tests of replays that come out otherwise do inside workers: change a loss, a byte that a stage is given."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator
from dataclasses import replace
from typing import Any
from unittest import mock

import torch


@contextlib.contextmanager
def another_loss(iterations: Collection[int], share: float = 1e-6) -> Iterator[None]:
    """As on hardware that does not repeat itself: whenever one of these iterations is replayed its loss is higher."""
    from megatron.core.dist_checkpointing.moe.runtime.protected_session import ProtectedSession

    stepped = ProtectedSession.stepped

    def otherwise(self: Any, step: Any) -> None:
        if self.restart.replay.iteration in iterations and step.lm_loss is not None:
            step = replace(step, lm_loss=step.lm_loss * (1 + share))
        stepped(self, step)

    with mock.patch.object(ProtectedSession, "stepped", otherwise):
        yield


@contextlib.contextmanager
def a_wrong_byte(rank: int, iteration: int, microbatch: int) -> Iterator[None]:
    """Whenever `rank` replays without its neighbours, a byte of the activations of a microbatch that it is served is
    wrong, as if its log had been sealed like that."""
    from megatron.core.dist_checkpointing.moe.local_recovery.boundary_logs import StageSource
    from megatron.core.dist_checkpointing.moe.types import Direction

    received, served = StageSource.received, 0

    def flipped(self: Any, direction: Any) -> Any:
        nonlocal served
        tensor = received(self, direction)
        if torch.distributed.get_rank() != rank or direction is not Direction.FORWARD:
            return tensor
        log = self._logs[direction]
        if log.manifest.snapshot.iteration == iteration:
            if served == microbatch:
                tensor.view(torch.uint8).view(-1)[7] ^= 1
            served += 1
        return tensor

    with mock.patch.object(StageSource, "received", flipped):
        yield


@contextlib.contextmanager
def logs_without_fingerprints() -> Iterator[None]:
    """Boundary logs as earlier versions wrote them: nothing is said of what is received."""
    from megatron.core.dist_checkpointing.moe.local_recovery import boundary_copies

    with mock.patch.object(boundary_copies, "receives", return_value=0):
        yield
