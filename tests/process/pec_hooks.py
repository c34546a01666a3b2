"""What tests of partial snapshots write down inside workers: what was planned and copied, restored, and held when.

Each rank appends JSON lines to a file of its own; the tests judge what is in them.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch


@contextlib.contextmanager
def watched(folder: str) -> Iterator[None]:
    """Write down each snapshot's bytes and experts, the state after each iteration, and each recovery."""
    from megatron.core.dist_checkpointing.moe.extensions.lossy.pec import Pec
    from megatron.core.dist_checkpointing.moe.extensions.lossy.selective import Selective
    from megatron.core.dist_checkpointing.moe.runtime.protected_session import ProtectedSession
    from megatron.core.dist_checkpointing.moe.types import Part

    whole, restore, report = ProtectedSession.on_state_consistent, ProtectedSession.restore, ProtectedSession.report
    plans = {kind: kind.plan for kind in (Pec, Selective)}

    def watched_plan(self: Any, iteration: int) -> Any:
        made = plans[type(self)](self, iteration)
        if made is not None:
            experts = [one for one in made.anchored if one.is_expert]
            k = len(experts) / len({one.layer for one in experts})
            every = self._interval_policy.persist_interval
            _note(folder, {"event": "planned", "iteration": iteration, "k": k, "persist_interval": every})
        return made

    def watched_whole(self: Any, iteration: int, *journal: Any) -> None:
        _note(folder, {"event": "ended", "iteration": iteration, "state": _state(self)})
        whole(self, iteration, *journal)

    def watched_report(self: Any) -> Any:
        done = report(self)
        _note(folder, {"event": "reported", "snapshot_bytes": done.snapshot_bytes})
        return done

    def watched_restore(self: Any, *given: Any) -> None:
        restore(self, *given)
        outcome = self.restart.outcome
        if outcome is not None:
            experts = [
                [source.rank, source.iteration, source.tier.name, _name(operator, part)]
                for source in outcome.plan.sources
                for operator in sorted(source.operators)
                for part in (Part.MASTER, Part.MOMENTS)
                if operator.is_expert and part in source.part
            ]
            taken = [
                [one.iteration, one.tier.name, operator.layer, operator.expert]
                for one in outcome.plan.taken
                for operator in sorted(one.operators)
                if operator.is_expert
            ]
            found = {"event": "recovered", "target": outcome.plan.target, "experts": experts, "taken": taken}
            _note(folder, {**found, "state": _state(self)})

    with (
        mock.patch.object(Pec, "plan", watched_plan),
        mock.patch.object(Selective, "plan", watched_plan),
        mock.patch.object(ProtectedSession, "on_state_consistent", watched_whole),
        mock.patch.object(ProtectedSession, "report", watched_report),
        mock.patch.object(ProtectedSession, "restore", watched_restore),
    ):
        yield


def _state(protection: Any) -> dict[str, str]:
    """A digest of what this rank owns: of the weights and the moments of each expert, and of all the rest together.

    Without step counts of experts: after a recovery these are what Megatron's one count for all parameters says.
    """
    from megatron.core.dist_checkpointing.moe.megatron_state.megatron import state_tensors

    training, found = protection.training, dict[str, Any]()
    for one in state_tensors(training.chunks, training.optimizer, protection.topology):
        if one.operator.is_expert and one.field == "step":
            continue
        name = _name(one.operator, one.part) if one.operator.is_expert else "rest"
        state = found.setdefault(name, hashlib.blake2b(digest_size=16))
        state.update(one.key.encode())
        state.update(one.tensor.detach().contiguous().view(torch.uint8).numpy().tobytes())
    return {name: state.hexdigest() for name, state in found.items()}


def _name(expert: Any, part: Any) -> str:
    """Weights of all precisions are one: compute weights are restored as the cast of master weights."""
    return f"{expert.layer} {expert.expert} {'moments' if part.name == 'MOMENTS' else 'weights'}"


def _note(folder: str, event: dict[str, Any]) -> None:
    with (Path(folder) / f"rank-{torch.distributed.get_rank()}.jsonl").open("a") as file:
        file.write(json.dumps(event) + "\n")
