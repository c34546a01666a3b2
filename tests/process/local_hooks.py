"""What tests of local recovery do inside workers: count what is run before all stages stand together, kill there."""

from __future__ import annotations

import contextlib
import functools
import json
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from megatron.core.dist_checkpointing.moe.runtime.faults import kill_self


@contextlib.contextmanager
def counted(folder: str) -> Iterator[None]:
    """Write down how many microbatches each rank ran before it rejoined the others, and where it stood then."""
    from megatron.core.dist_checkpointing.moe.runtime.protected_session import ProtectedSession

    loop = import_module("pretrain_gpt_moe")
    forward, rejoin = loop.forward_step, ProtectedSession.rejoin
    passes = 0

    @functools.wraps(forward)
    def counting_forward(*arguments: Any, **options: Any) -> Any:
        nonlocal passes
        passes += 1
        return forward(*arguments, **options)

    def noting_rejoin(self: Any) -> bool:
        before = passes
        recovered = rejoin(self)
        outcome = self.restart.outcome
        plan = outcome.plan if outcome is not None else None
        told = {"event": "rejoined", "recovered": recovered, "forwards": before}
        if plan is not None:
            told |= {"scope": plan.scope.value, "target": plan.target, "rolled": list(plan.roll_forward)}
            told["stages"] = [list(one.stages) for one in plan.segments if one.replayed]
        _note(folder, told)
        return recovered

    counting = mock.patch.object(loop, "forward_step", counting_forward)
    with counting, mock.patch.object(ProtectedSession, "rejoin", noting_rejoin):
        yield


@contextlib.contextmanager
def killed_at(folder: str, rank: int, place: str) -> Iterator[None]:
    """SIGKILL for `rank`, once in the job, where it parks, begins again, sends what others need, or waits for them."""
    owner, name = _PLACES[place]()
    original, marker = getattr(owner, name), Path(folder) / f"struck-{rank}-{place.replace(' ', '-')}"

    def struck(*arguments: Any, **options: Any) -> Any:
        if torch.distributed.get_rank() == rank and not marker.exists() and _is_there(place, *arguments):
            marker.touch()
            kill_self()
        return original(*arguments, **options)

    with mock.patch.object(owner, name, struck):
        yield


@contextlib.contextmanager
def held_back(folder: str, rank: int, iteration: int, victim: int) -> Iterator[None]:
    """In the first attempt `rank` loses its peers in the norm of an iteration, which the others come to know; of these
    `victim` is killed when it has made the step."""
    from megatron.core.optimizer import ChainedOptimizer

    norm, step, norms = ChainedOptimizer.get_grad_norm, ChainedOptimizer.step, 0
    marker, killed = Path(folder) / "held-back", Path(folder) / "victim"

    def struck(self: Any) -> Any:
        nonlocal norms
        found, norms = norm(self), norms + 1
        if torch.distributed.get_rank() == rank and norms == iteration and not marker.exists():
            marker.touch()
            raise RuntimeError("Connection closed by peer, as far as this rank knows")
        return found

    def stepped(self: Any) -> Any:
        made = step(self)
        if torch.distributed.get_rank() == victim and norms == iteration and not killed.exists():
            killed.touch()
            kill_self()
        return made

    with (
        mock.patch.object(ChainedOptimizer, "get_grad_norm", struck),
        mock.patch.object(ChainedOptimizer, "step", stepped),
    ):
        yield


@contextlib.contextmanager
def replicas_refused(owner: int, iterations: range) -> Iterator[None]:
    """Whoever should keep replicas for `owner` has no room for those of these iterations."""
    from megatron.core.dist_checkpointing.moe.replication.receiver import ReplicaReceiver

    begin = ReplicaReceiver.begin

    def crowded(self: Any, wanted: Any) -> Any:
        if wanted.snapshot.rank == owner and wanted.snapshot.iteration in iterations:
            return None
        return begin(self, wanted)

    with mock.patch.object(ReplicaReceiver, "begin", crowded):
        yield


def _is_there(place: str, *arguments: Any) -> bool:
    if place == "waiting":
        from megatron.core.dist_checkpointing.moe.recovery.recovery import Waiting

        return isinstance(arguments[0].restart._todo, Waiting)
    if place == "restarting":
        return bool(arguments[0].memory.store.snapshots().sealed)  # an earlier attempt was here
    return True


def _parking() -> tuple[Any, str]:
    from megatron.core.dist_checkpointing.moe.local_recovery.park import Parker

    return Parker, "_park_state"


def _session(name: str) -> Callable[[], tuple[Any, str]]:
    def found() -> tuple[Any, str]:
        from megatron.core.dist_checkpointing.moe.runtime.protected_session import ProtectedSession

        return ProtectedSession, name

    return found


def _sending() -> tuple[Any, str]:
    from megatron.core.dist_checkpointing.moe.recovery.fetching import SnapshotFetcher

    return SnapshotFetcher, "_send"


_PLACES: dict[str, Callable[[], tuple[Any, str]]] = {
    "parking": _parking,
    "restarting": _session("restore"),
    "sending": _sending,
    "waiting": _session("rejoin"),
}


def _note(folder: str, event: dict[str, Any]) -> None:
    with (Path(folder) / f"rank-{torch.distributed.get_rank()}.jsonl").open("a") as file:
        file.write(json.dumps(event) + "\n")
