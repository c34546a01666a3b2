"""What tests of sparse checkpoints do inside workers: watch plans and frozen operators, kill in replays."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from megatron.core.dist_checkpointing.moe.runtime.faults import kill_self

MARK = 0.5


@contextlib.contextmanager
def watched(folder: str) -> Iterator[None]:
    """Write down what is planned for each iteration, and how many operators are frozen in each replayed one."""
    from megatron.core.dist_checkpointing.moe.replay.execution import LiveExecution
    from megatron.core.dist_checkpointing.moe.strategies import STRATEGIES

    kind: Any = STRATEGIES["sparse"]
    plan, freeze = kind.plan, LiveExecution.freeze

    def watched_plan(self: Any, iteration: int) -> Any:
        made = plan(self, iteration)
        if made is not None:
            anchored = [f"{one.layer} {one.kind.name} {one.expert}" for one in sorted(made.anchored)]
            event = {"event": "planned", "iteration": iteration, "digest": made.digest(), "anchored": anchored}
            _note(folder, event)
        return made

    def watched_freeze(self: Any, frozen: Any, step: Any, *, alone: bool = False) -> None:
        operators = len(set(self._operator_of.values()))
        own = len(set(self._operator_of.values()) & set(frozen))
        _note(folder, {"event": "frozen", "frozen": own, "operators": operators, "skipped": step.skipped})
        freeze(self, frozen, step, alone=alone)

    with (
        mock.patch.object(kind, "plan", watched_plan),
        mock.patch.object(LiveExecution, "freeze", watched_freeze),
    ):
        yield


@contextlib.contextmanager
def killed_in_replay(folder: str, rank: int, nth: int, phase: str) -> Iterator[None]:
    """SIGKILL for `rank` in the `nth` iteration (from 1) of its first replay: before its forward pass or after it."""
    from megatron.core.dist_checkpointing.moe.runtime.protected_session import ProtectedSession

    marker, done = Path(folder) / f"struck-{rank}-{nth}-{phase}", 0
    before_optimizer, stepped = ProtectedSession.before_optimizer, ProtectedSession.stepped

    def strike(self: Any, here: str) -> None:
        if torch.distributed.get_rank() != rank or here != phase or done != nth or marker.exists():
            return
        marker.touch()
        kill_self()

    def watched_before(self: Any) -> float:
        nonlocal done
        if self.is_replaying:
            done += 1
            strike(self, "before step")
        return before_optimizer(self)

    def watched_stepped(self: Any, step: Any) -> None:
        strike(self, "after step")
        stepped(self, step)

    with (
        mock.patch.object(ProtectedSession, "before_optimizer", watched_before),
        mock.patch.object(ProtectedSession, "stepped", watched_stepped),
    ):
        yield


@contextlib.contextmanager
def untouched(folder: str) -> Iterator[None]:
    """Write down which master weights and moments of frozen operators a replayed iteration has changed.

    They were poisoned with NaN, which looks the same after any arithmetic, so they get a number first.
    """
    from megatron.core.dist_checkpointing.moe.megatron_state.megatron import state_tensors
    from megatron.core.dist_checkpointing.moe.replay.densify import Replay
    from megatron.core.dist_checkpointing.moe.replay.execution import LiveExecution
    from megatron.core.dist_checkpointing.moe.runtime.protected_session import ProtectedSession

    begin, freeze, take = ProtectedSession.begin, LiveExecution.freeze, Replay._load
    sessions: list[Any] = []
    marked: list[Any] = []

    def watched_begin(self: Any, iteration: int) -> None:
        sessions.append(self)
        begin(self, iteration)

    def marking_freeze(self: Any, frozen: Any, step: Any, *, alone: bool = False) -> None:
        session, held_back = sessions[-1], set(frozen)
        tensors = state_tensors(session.training.chunks, session.training.optimizer, session.topology)
        trained = [one for one in tensors if one.field not in ("compute", "buffer")]
        marked[:] = [one for one in trained if one.operator in held_back]
        with torch.no_grad():
            for one in marked:
                one.tensor.fill_(MARK)
        freeze(self, frozen, step, alone=alone)

    def watched_take(self: Any, *arguments: Any) -> None:
        changed = [one.key for one in marked if not bool((one.tensor == MARK).all())]
        _note(folder, {"event": "marked", "tensors": len(marked), "changed": changed})
        take(self, *arguments)

    with (
        mock.patch.object(ProtectedSession, "begin", watched_begin),
        mock.patch.object(LiveExecution, "freeze", marking_freeze),
        mock.patch.object(Replay, "_load", watched_take),
    ):
        yield


@contextlib.contextmanager
def paced(iterations: int) -> Iterator[None]:
    """Copies seem so slow that an iteration has time for one part in `iterations` of what the largest rank owns."""
    from megatron.core.dist_checkpointing.moe.strategies.sparse import Sparse

    original = Sparse.throughput_measured

    def slowly(self: Sparse, pace: Any) -> None:
        largest = max(sum(size.full_bytes for size in sizes.values()) for sizes in self._job.sizes.values())
        bandwidth = largest / iterations / max(pace.iteration_s, 1e-3)
        original(self, replace(pace, bandwidth_bytes_per_s=bandwidth))

    with mock.patch.object(Sparse, "throughput_measured", slowly):
        yield


def _note(folder: str, event: dict[str, Any]) -> None:
    with (Path(folder) / f"rank-{torch.distributed.get_rank()}.jsonl").open("a") as file:
        file.write(json.dumps(event) + "\n")
