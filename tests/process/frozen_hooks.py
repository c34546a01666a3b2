"""What tests of frozen execution do inside workers: run an iteration as ever and again with frozen operators, compare.

Each rank leaves a JSON file; the tests judge what is in them.
"""

from __future__ import annotations

import contextlib
import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from stock_trainer import Trainer, before_training, instead_of_training

NAN = float("nan")
GARBAGE = 77
BEFORE = 2
ITERATIONS = 4
HALVES = 3


@contextlib.contextmanager
def frozen(folder: str) -> Iterator[None]:
    """Instead of training to the end: a few iterations as ever, then each of them again with operators frozen."""
    with instead_of_training(lambda trainer: Frozen(trainer).facts(), folder):
        yield


@contextlib.contextmanager
def begun_frozen() -> Iterator[None]:
    """Before training begins, and before anything was ever reduced or gathered: an iteration with operators frozen."""

    def examine(trainer: Trainer) -> None:
        from megatron.core.dist_checkpointing.moe.types import StepJournal

        trainer.read_on()  # so that the loop still finds the first batches where it reads
        driver = Frozen(trainer)
        start = driver.moment()
        for chosen in ("half of them, 0", "half of them, 1"):
            driver.execution.freeze(driver.choices()[chosen], StepJournal(1.0))
            driver.iterate()
        driver.restore(start)
        driver.execution.thaw()

    with before_training(examine):
        yield


@dataclass(frozen=True)
class Moment:
    """The whole state between two iterations, and how the iteration before came out."""

    tensors: list[torch.Tensor]
    weights: dict[str, torch.Tensor]
    scalars: dict[str, Any]
    random: dict[str, bytes]
    journal: Any


class Frozen:
    """Drives one trainer back and forth between the states of a few iterations."""

    def __init__(self, trainer: Trainer) -> None:
        from megatron.core.dist_checkpointing.moe.megatron_state.megatron import (
            operators_of_parameters,
            read_topology,
            state_tensors,
        )
        from megatron.core.dist_checkpointing.moe.megatron_state.module_tree import model_operators
        from megatron.core.dist_checkpointing.moe.replay.execution import LiveExecution

        self.trainer = trainer
        self.chunks, self.optimizer, self.trainer_state = trainer.chunks, trainer.optimizer, trainer.state
        topology = read_topology(8)
        self.tensors = state_tensors(self.chunks, self.optimizer, topology)
        self.operators = model_operators(self.chunks)
        self.operator_of = operators_of_parameters(self.chunks, topology)
        self.execution = LiveExecution(self.chunks, self.optimizer, self.operator_of)

    def iterate(self) -> Any:
        """One iteration of the loop, and how it came out."""
        return self.trainer.iterate()

    def named_weights(self) -> dict[str, torch.nn.Parameter]:
        """All compute weights that this rank has, also those of which it owns only a part."""
        chunks = enumerate(self.chunks)
        return {f"{at}/{name}": one for at, chunk in chunks for name, one in chunk.named_parameters()}

    def moment(self, journal: Any = None) -> Moment:
        """The state as it is."""
        from megatron.core.dist_checkpointing.moe.megatron_state.restore import gather_compute_weights

        gather_compute_weights(self.chunks)
        return Moment(
            [one.tensor.clone() for one in self.tensors],
            {name: one.detach().clone() for name, one in self.named_weights().items()},
            json.loads(json.dumps(self.trainer_state.scalars())),
            {name: bytes(view) for name, view in self.trainer_state.tensors().items()},
            journal,
        )

    @torch.no_grad()
    def restore(self, moment: Moment) -> None:
        """Go back, or forth, to a state."""
        from megatron.core.dist_checkpointing.moe.megatron_state.restore import gather_compute_weights, settle_gathers

        settle_gathers(self.chunks)
        for one, copy in zip(self.tensors, moment.tensors, strict=True):
            one.tensor.copy_(copy)
        tensors = {name: memoryview(data) for name, data in moment.random.items()}
        self.trainer_state.restore(moment.scalars, tensors)
        gather_compute_weights(self.chunks)
        self.trainer.read_on()

    @torch.no_grad()
    def poison(self, operators: set[Any]) -> None:
        """Fill what the optimizer keeps of these operators with what no training makes."""
        from megatron.core.dist_checkpointing.moe.types import Part

        for one in self.tensors:
            if one.operator in operators and not one.serves(Part.COMPUTE):
                one.tensor.fill_(GARBAGE if one.field == "step" else NAN)

    def facts(self) -> dict[str, Any]:
        """What went otherwise than without frozen operators; all lists are empty if all is well."""
        for _ in range(BEFORE):
            self.iterate()
        moments = [self.moment()]
        for _ in range(ITERATIONS):
            journal = self.iterate()
            moments.append(self.moment(journal))
        facts: dict[str, Any] = {
            "journals": [moment.journal.to_data() for moment in moments[1:]],
            "gemms": self.gemms(moments[0], moments[1]),
            "refusals": self.refusals(),
            "differences": {},
        }
        for at, (name, active) in enumerate(self.choices().items()):
            before = at % (ITERATIONS - 1)
            facts["differences"][name] = self.replayed(active, moments[before], moments[before + 1])
        return facts | {"thawed": self.thawed(moments), "twice": self.thawed(moments)}

    def choices(self) -> dict[str, set[Any]]:
        """Sets of active operators; the same on all ranks."""
        from megatron.core.dist_checkpointing.moe.types import OperatorKind

        everything, draw = set(self.operators), random.Random(5)
        experts = sorted(one for one in everything if one.is_expert)
        kinds = {kind: {one for one in everything if one.kind is kind} for kind in OperatorKind}
        top = max(one.layer for one in everything)
        chosen = {
            "all active": everything,
            "no experts": everything - set(experts),
            "only experts": set(experts),
            "only routers": kinds[OperatorKind.ROUTER],
            "only the embedding": kinds[OperatorKind.EMBEDDING],
            "only the head": kinds[OperatorKind.HEAD],
            "the upper half": {one for one in everything if one.layer >= top / 2},
            "the last layer": {one for one in everything if one.layer == top - 1},
            "the lower half": {one for one in everything if one.layer < top / 2},
            "nothing": set(),
        }
        if experts:
            chosen |= {"one expert above": {experts[-1]}, "one expert below": {experts[0]}}
        return chosen | {
            f"half of them, {at}": set(draw.sample(self.operators, len(self.operators) // 2)) for at in range(HALVES)
        }

    def replayed(self, active: set[Any], before: Moment, after: Moment) -> list[str]:
        """What differs after an iteration in which only these operators were active."""
        frozen = set(self.operators) - active
        self.restore(before)
        self.poison(frozen)
        self.execution.freeze(frozen, after.journal)
        journal = self.iterate()
        return self.differences(self.moment(journal), before, after, frozen)

    def differences(self, now: Moment, before: Moment, after: Moment, frozen: set[Any]) -> list[str]:
        """What is not as it should be: active state as after the iteration, the weights of frozen ones as before it."""
        from megatron.core.dist_checkpointing.moe.types import Part

        found = []
        everything = zip(self.tensors, now.tensors, before.tensors, after.tensors, strict=True)
        for one, is_now, was, should in everything:
            if one.operator in frozen and not one.serves(Part.COMPUTE):
                right = torch.equal(is_now, torch.full_like(is_now, GARBAGE)) or bool(torch.isnan(is_now).all())
            else:
                keeps = one.operator in frozen and one.field != "buffer"
                right = torch.equal(is_now, was if keeps else should)
            found += [] if right else [one.key]
        for name, parameter in self.named_weights().items():
            keeps = self.operator_of[parameter] in frozen
            if not torch.equal(now.weights[name], (before if keeps else after).weights[name]):
                found.append(name)
        found += [name for name in ("journal", "random") if repr(getattr(now, name)) != repr(getattr(after, name))]
        # A skipped step counts for all loss scales; in training, one part of the optimizer may not know of it.
        unsure = {"grad_scalers"} if frozen and after.journal.skipped else set()
        for name in set(now.scalars) - unsure:
            found += [] if repr(now.scalars[name]) == repr(after.scalars[name]) else [name]
        return found

    def thawed(self, moments: list[Moment]) -> list[str]:
        """What differs later, when operators were frozen and thawed again."""
        some = set(self.choices()["half of them, 0"])
        self.replayed(some, moments[0], moments[1])
        self.restore(moments[1])
        self.execution.freeze((), moments[2].journal)
        found = []
        for after in moments[2:]:
            now = self.moment(self.iterate())
            found += [f"{after.scalars['iteration']}: {what}" for what in self.differences(now, after, after, set())]
            self.execution.thaw()
        return found

    def refusals(self) -> dict[str, str]:
        """What is said of models, optimizers and journals that cannot do; an empty string where nothing is."""
        from megatron.core.dist_checkpointing.moe.megatron_state.megatron import read_topology, state_tensors
        from megatron.core.dist_checkpointing.moe.replay.execution import LiveExecution
        from megatron.core.dist_checkpointing.moe.types import StepJournal
        from megatron.core.utils import unwrap_model

        chunks, optimizer = self.chunks, self.optimizer
        member, config = optimizer.chained_optimizers[0], unwrap_model(chunks[0]).config
        unnamed = dict(list(self.operator_of.items())[1:])

        def built(operator_of: Any = self.operator_of) -> None:
            """As a session does it: what no state can be enumerated of is not frozen either."""
            state_tensors(chunks, optimizer, read_topology(8))
            LiveExecution(chunks, optimizer, operator_of)

        found = {"as it is": _refusal(built), "a parameter of no operator": _refusal(lambda: built(unnamed))}
        with mock.patch.object(config, "fp4", "e2m1"):
            found["fp4"] = _refusal(built)
        with mock.patch.object(member, "optimizer", torch.optim.SGD([torch.zeros(1)])):
            found["SGD"] = _refusal(lambda: LiveExecution(chunks, optimizer, self.operator_of))
        for name, journal in {"no norm": StepJournal(None), "skipped": StepJournal(None, True)}.items():
            found[name] = _refusal(lambda journal=journal: self.execution.freeze((), journal))
            self.execution.thaw()
        return found

    def gemms(self, before: Moment, after: Moment) -> dict[str, int]:
        """Floating-point operations of the matrix products of all linear layers on this rank in one iteration."""

        def counted(active: set[Any] | None) -> int:
            self.restore(before)
            if active is not None:
                self.execution.freeze(set(self.operators) - active, after.journal)
            count = products(self.iterate)
            self.execution.thaw()
            return count

        choices = self.choices()
        self.restore(before)
        return {
            "forward": products(self.trainer.forward),
            "as ever": counted(None),
            "all active": counted(choices["all active"]),
            "only the embedding": counted(choices["only the embedding"]),
            "no experts": counted(choices["no experts"]),
            "only experts": counted(choices["only experts"]),
            "nothing": counted(set()),
        }


def _refusal(work: Any) -> str:
    from megatron.core.dist_checkpointing.moe.errors import UsageError

    try:
        work()
    except UsageError as error:
        return str(error)
    return ""


def products(work: Any) -> int:
    """Floating-point operations in products of two matrices; attention, which multiplies batches, does not count."""
    from torch.utils.flop_counter import FlopCounterMode

    counter = FlopCounterMode(display=False)
    with counter:
        work()
    counts = counter.get_flop_counts()["Global"]
    return int(sum(count for operation, count in counts.items() if "bmm" not in str(operation)))
