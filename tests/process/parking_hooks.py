"""What tests of parking do inside workers: lose peers at each collective of a step, park, come back, compare.

In one job all faults follow each other: a lost peer is an error that is raised, not a process that ends. Up to the
chosen collective all ranks take part; there some of them find garbage and an error, the others its result, and from
there on nobody reaches anybody. Each rank leaves a JSON file; the tests judge what is in them.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from frozen_hooks import Frozen, Moment
from stock_trainer import Trainer, instead_of_training

BEFORE, ITERATIONS = 1, 3
KINDS = ("gradients", "finish", "loss", "step", "gather", "report")
"""The collectives of a step in their order: gradients are reduced over data-parallel ranks; tied embeddings are and
expert biases updated; the mean loss; what the optimizer compares before it updates (overflows and norms); compute
weights are gathered; stages agree on what they report."""
LOSERS = {"all": lambda rank: True, "odd": lambda rank: rank % 2 == 1, "the first": lambda rank: rank == 0}
WAIT_S = 60.0


@contextlib.contextmanager
def interrupted(folder: str) -> Iterator[None]:
    """Instead of training to the end: a few iterations as ever, then each of them again with each fault."""

    def examine(trainer: Trainer) -> dict[str, Any]:
        return Parking(trainer, Path(folder) / f"memory-{torch.distributed.get_rank()}").facts()

    with instead_of_training(examine, folder):
        yield


def guarded_by(guard: Any) -> Any:
    """A session that does nothing but follow the step; `inside` while that is under way."""
    from megatron.core.dist_checkpointing.moe.runtime.session import Session

    class Guarded(Session):
        protects, inside = True, False

        def __init__(self) -> None:
            self.guard, self.passes, self.reduced = guard, guard.passes, guard.reduced

        @contextlib.contextmanager
        def stepping(self, iteration: int, *_unused: Any) -> Iterator[None]:
            self.inside = True
            try:
                with guard.stepping(iteration):
                    yield
            finally:
                self.inside = False

        def whole(self, iteration: int, journal: Any) -> None:
            guard.stands(iteration)

    return Guarded()


@dataclass(frozen=True)
class Fault:
    """The peers are lost in collective `at` of this kind; `is_loser`: whether this rank is among those that fail."""

    kind: str
    at: int
    is_loser: bool

    @property
    def place(self) -> tuple[int, int]:
        return KINDS.index(self.kind), self.at


class Lost(RuntimeError):
    """As gloo would say it."""

    def __init__(self) -> None:
        super().__init__("Connection closed by peer [127.0.0.1]:12345")


class Network:
    """Counts the collectives of a step, and breaks at a fault."""

    def __init__(self, guarded: Any, fault: Fault | None = None) -> None:
        self.guarded, self.fault = guarded, fault
        self.counts = dict.fromkeys(KINDS, 0)
        self.within = False

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """For the time of one step."""
        from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBucketGroup
        from megatron.training import training

        reduce, gather = _ParamAndGradBucketGroup.start_grad_sync, _ParamAndGradBucketGroup.start_param_sync
        all_reduce = torch.distributed.all_reduce

        def reduced(group: Any, *arguments: Any, **options: Any) -> None:
            buffers = [bucket.grad_data for bucket in group.buckets]
            self.reach("gradients", lambda: reduce(group, *arguments, **options), buffers)

        def gathered(group: Any, *arguments: Any, **options: Any) -> None:
            self.reach("gather", lambda: gather(group, *arguments, **options), list(_foreign(group)))

        def agreed(reduce: Any) -> Any:
            """As the hooks of the loop: its own verdict serves a rank whose peers are lost behind the update."""

            @functools.wraps(reduce)
            def own_or_reduced(value: Any, **options: Any) -> Any:
                with contextlib.suppress(Lost):
                    return reduce(value, **options)
                return value

            return own_or_reduced

        def summed(tensor: torch.Tensor, *arguments: Any, **options: Any) -> Any:
            kind = self.kind_of_sum()
            if self.within or not kind:
                return all_reduce(tensor, *arguments, **options)
            return self.reach(kind, lambda: all_reduce(tensor, *arguments, **options), [tensor])

        verdict, norm = (
            training.logical_and_across_model_parallel_group,
            training.reduce_max_stat_across_model_parallel_group,
        )
        with (
            mock.patch.object(training, verdict.__name__, agreed(verdict)),
            mock.patch.object(training, norm.__name__, agreed(norm)),
            mock.patch.object(_ParamAndGradBucketGroup, "start_grad_sync", reduced),
            mock.patch.object(_ParamAndGradBucketGroup, "start_param_sync", gathered),
            mock.patch.object(torch.distributed, "all_reduce", summed),
        ):
            yield

    def kind_of_sum(self) -> str:
        """What is being summed up here; empty within forward and backward passes."""
        if self.guarded.guard.phase.name == "UPDATED":
            return "report"
        if self.guarded.inside:
            return "step"
        if self.guarded.guard.phase.name == "REDUCED":
            return "loss"
        return "finish" if self.counts["gradients"] else ""

    def reach(self, kind: str, collective: Any, results: list[torch.Tensor]) -> Any:
        """A collective of the step: it happens unless the peers are lost by now."""
        place = (KINDS.index(kind), self.counts[kind])
        self.counts[kind] += 1
        if self.fault is not None and place > self.fault.place:
            raise Lost
        self.within = True
        outcome = collective()
        self.within = False
        if self.fault is not None and place == self.fault.place and self.fault.is_loser:
            with torch.no_grad():
                for tensor in results:
                    tensor.fill_(float("nan") if tensor.is_floating_point() else 77)
            raise Lost
        return outcome


def _foreign(group: Any) -> Iterator[torch.Tensor]:
    """The weights of the buckets of a group that other ranks own."""
    from megatron.core.distributed.param_and_grad_buffer import shard_buffer

    for bucket in group.buckets:
        shards = shard_buffer(bucket.param_data, group.intra_distributed_optimizer_instance_size)
        own = group.intra_distributed_optimizer_instance_rank
        yield from (shard for at, shard in enumerate(shards) if at != own)


class Parking(Frozen):
    """Drives one trainer through faults."""

    def __init__(self, trainer: Trainer, folder: Path) -> None:
        from megatron.core.dist_checkpointing.moe.local_recovery.step_guard import StepGuard
        from megatron.core.dist_checkpointing.moe.megatron_state.megatron import (
            live_restorer,
            read_topology,
            stepped_parameters,
        )

        super().__init__(trainer)
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        self.folder, self.rank = folder, torch.distributed.get_rank()
        live = (self.chunks, self.optimizer, read_topology(8))
        self.guard = StepGuard(self.optimizer)
        self.guarded = guarded_by(self.guard)
        self.restorer, self.stepped = live_restorer(*live), stepped_parameters(*live)
        self.parker = self._parker()

    def _parker(self) -> Any:
        from megatron.core.dist_checkpointing.moe.boot_clock import SystemClock
        from megatron.core.dist_checkpointing.moe.local_recovery.park import Parker, ParkPorts
        from megatron.core.dist_checkpointing.moe.local_recovery.step_guard import LiveBuffers, LiveGradients
        from megatron.core.dist_checkpointing.moe.policy.lineage import Identity
        from megatron.core.dist_checkpointing.moe.snapshot.capturer import LiveCapturer
        from megatron.core.dist_checkpointing.moe.snapshot.copy_engines import ThreadEngine
        from megatron.core.dist_checkpointing.moe.storage.memory import MemoryStore

        capturer = LiveCapturer(self.tensors, self.trainer_state, ThreadEngine())
        self.buffers = LiveBuffers(self.tensors)
        gradients = LiveGradients(self.optimizer, self.stepped, lambda: self.guard.prepared)
        identity = Identity("job", {}, capturer.operators, timeline=(("first", 0),))
        store = MemoryStore(self.folder, "job", self.rank, [1], area="standby")
        ports = ParkPorts(
            store=store,
            capturer=capturer,
            trainer=self.trainer_state,
            clock=SystemClock(),
            rank=self.rank,
            facts=identity.facts,
            moving=self.buffers,
            gradients=gradients,
        )
        parker = Parker(ports)
        store.resize(parker.sizes())
        self.store = store
        return parker

    def train(self, session: Any = None) -> Any:
        """The passes and the step of one iteration, with or without the guard; returns its journal."""
        manager = self.trainer.manager = self.trainer.managed(session)
        manager.resume(lambda: self.trainer_state.iteration)
        try:
            return self.trainer.iterate()
        except Lost:
            if self.guarded.inside:  # the schedule moved with the update: as the hooks of the loop, count the iteration
                self.trainer.args.consumed_train_samples += self.trainer.args.global_batch_size
                self.trainer_state.iteration += 1
                manager.step_done()
            raise
        finally:
            manager.detach()

    def facts(self) -> dict[str, Any]:
        """Of each fault what was parked, and what of it differs from a run without; all lists are empty if all is
        well."""
        for _ in range(BEFORE):
            self.train()
        moments = [self.moment()]
        for _ in range(ITERATIONS):
            moments.append(self.moment(self.train()))
        pairs = list(itertools.pairwise(moments))
        guarded = [self.fault_free(before, after) for before, after in pairs]
        return {
            "skipped": [moment.journal.skipped for moment in moments[1:]],
            "guarded": [difference for found, _ in guarded for difference in found],
            "faults": [
                fault
                for (before, after), (_, counts) in zip(pairs, guarded, strict=True)
                for fault in self.faults(before, after, counts)
            ],
        }

    def fault_free(self, before: Moment, after: Moment) -> tuple[list[str], dict[str, int]]:
        """What differs when the step is followed and nothing happens, and how many collectives of each kind it had."""
        network = Network(self.guarded)
        self.prepare(before)
        with network.watched():
            journal = self.train(self.guarded)
        return self.differences(self.moment(journal), after, after, set()), network.counts

    def faults(self, before: Moment, after: Moment, counts: dict[str, int]) -> Iterator[dict[str, Any]]:
        """Lose peers at each place of the step: the first, second and last collective of each kind."""
        most: list[dict[str, int]] = [{}] * torch.distributed.get_world_size()
        torch.distributed.all_gather_object(most, counts)
        for kind in KINDS:
            last = max(count[kind] for count in most) - 1
            for at in sorted({place for place in (0, 1, last) if 0 <= place <= last}):
                for name, is_loser in LOSERS.items():
                    fault = Fault(kind, at, is_loser(self.rank))
                    yield {"kind": kind, "at": at, "losers": name} | self.fault(fault, before, after)

    def prepare(self, before: Moment) -> None:
        """Stand where an iteration begins, as a process that stays after a fault."""
        from megatron.core.rerun_state_machine import RerunState, get_rerun_state_machine

        get_rerun_state_machine().state = RerunState.NOT_RUNNING_YET
        self.restore(before)
        iteration = self.trainer_state.iteration
        self.guard.stands(iteration)
        self.parker.note(iteration)

    def fault(self, fault: Fault, before: Moment, after: Moment) -> dict[str, Any]:
        """One step that is interrupted; parked, and what of it differs."""
        from megatron.core.dist_checkpointing.moe.policy.parking import Cause

        self.prepare(before)
        failed = ""
        with Network(self.guarded, fault).watched():
            try:
                self.train(self.guarded)
            except Lost as error:
                failed = str(error)
        phase = self.guard.phase.name
        decision = self.guard.decide(Cause.PEER_LOST)
        parked = self.parker.park(decision, {}, WAIT_S)
        steps = None if parked.iteration is None else parked.iteration - before.scalars["iteration"]
        wrong = [parked.why] if parked.why else []
        if steps is not None:
            wrong += self.stored(parked.iteration, (before, after)[steps])
        reaches = torch.tensor([int(steps == 1 or parked.gradients)])
        torch.distributed.all_reduce(reaches, op=torch.distributed.ReduceOp.MIN)
        if steps is not None and reaches.item():
            wrong += self.back(parked, after)
        elif parked.gradients:
            self.come_back(parked, after)
            wrong += self.compared(after, set())
        self.parker.keep_only(None)
        return {
            "failed": failed,
            "phase": phase,
            "steps": steps,
            "gradients": parked.gradients,
            "reaches": bool(reaches.item()),
            "wrong": wrong,
        }

    def stored(self, iteration: int, moment: Moment) -> list[str]:
        """What of the parked state is not as it was after its iteration without a fault."""
        from megatron.core.dist_checkpointing.moe.ports import RANDOM, SnapshotId
        from megatron.core.dist_checkpointing.moe.types import PARKED, Part

        with self.store.open(SnapshotId(iteration, self.rank, PARKED)) as reader:
            found = []
            for one, should in zip(self.tensors, moment.tensors, strict=True):
                if one.serves(Part.MASTER_AND_MOMENTS):
                    value = torch.frombuffer(bytearray(reader.read(one.key)), dtype=should.dtype)
                    found += [] if torch.equal(value, should) else [f"parked {one.key}"]
            for name, data in moment.random.items():
                found += [] if bytes(reader.read(f"{RANDOM}{name}")) == data else [f"parked random {name}"]
            scalars = reader.manifest.facts.scalars["trainer"]
            found += [f"parked {key}" for key in moment.scalars if repr(scalars[key]) != repr(moment.scalars[key])]
        return found

    def come_back(self, parked: Any, after: Moment) -> None:
        """As after a restart: nothing is known but what is parked, and the journal and the scalars of the target."""
        from megatron.core.dist_checkpointing.moe.local_recovery.step_guard import roll_forward
        from megatron.core.dist_checkpointing.moe.ports import RANDOM, SnapshotId
        from megatron.core.dist_checkpointing.moe.types import GRADIENTS, PARKED, Part

        self.scatter_numbers()
        self.restorer.poison()
        names = list(self.trainer_state.tensors())
        with self.store.open(SnapshotId(parked.iteration, self.rank, PARKED)) as reader:
            self.restorer.restore(reader.read, {Part.MASTER_AND_MOMENTS: self.operators})
            scalars = reader.manifest.facts.scalars["trainer"]
            self.trainer_state.restore(scalars, {name: reader.read(f"{RANDOM}{name}") for name in names})
        if parked.gradients:
            with self.store.open(SnapshotId(parked.iteration + 1, self.rank, GRADIENTS)) as reader:
                roll_forward(self.optimizer, self.stepped, reader.read, replace(after.journal))
                self.buffers.restore(reader.read)
                # Scalars of anybody; here, of the run without faults.
                tensors = {name: reader.read(f"{RANDOM}{name}") for name in names}
                self.trainer_state.restore(after.scalars, tensors)

    def back(self, parked: Any, after: Moment) -> list[str]:
        """All ranks come back to the target, and share their weights again; what differs."""
        self.come_back(parked, after)
        self.restorer.complete()
        return [f"back {what}" for what in self.differences(self.moment(after.journal), after, after, set())]

    def compared(self, after: Moment, _: set[Any]) -> list[str]:
        """What of this rank's own state differs, where not all ranks reach the target."""
        from megatron.core.dist_checkpointing.moe.types import Part

        pairs = zip(self.tensors, after.tensors, strict=True)
        return [
            f"rolled {one.key}"
            for one, should in pairs
            if one.serves(Part.MASTER_AND_MOMENTS) and not torch.equal(one.tensor, should)
        ]

    def scatter_numbers(self) -> None:
        """Let random states, schedules and gradients be something else, as in a new process."""
        torch.manual_seed(1234)
        torch.rand(7)
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
