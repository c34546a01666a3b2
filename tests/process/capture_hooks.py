"""What tests of capture and restore do inside workers: snapshot a training model, continue, come back, write down
facts.

Each rank leaves a JSON file; the tests judge what is in them.
"""

from __future__ import annotations

import contextlib
import itertools
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from operator_hooks import _complete_state, _differences
from stock_trainer import Trainer, before_training, instead_of_training
from worker_hooks import poison

BEFORE_SNAPSHOT = 2
TIMEOUT_S = 60.0


class LastMoment:
    """An engine that copies when it is waited for: as late as it may."""

    def __init__(self, engine: Any) -> None:
        self._engine, self._jobs = engine, []

    def now(self, job: Any) -> None:
        self._engine.now(job)

    def begin(self, jobs: Sequence[Any], pace: Any = None) -> None:
        self._jobs = [*self._jobs, *jobs]

    def wait(self, timeout_s: float) -> None:
        jobs, self._jobs = self._jobs, []
        self._engine.begin(jobs)
        self._engine.wait(timeout_s)


class Careless(LastMoment):
    """One that also leaves for later what the next forward pass changes."""

    def now(self, job: Any) -> None:
        self._jobs.append(job)


@contextlib.contextmanager
def captured(folder: str) -> Iterator[None]:
    """Train a little, with snapshots in a memory store under `folder`; poison everything, restore, train on."""
    with instead_of_training(lambda trainer: _Capture(trainer, folder).facts(), folder):
        yield


class _Capture:
    def __init__(self, trainer: Trainer, folder: str) -> None:
        from megatron.core.dist_checkpointing.moe.megatron_state.megatron import read_topology, state_tensors
        from megatron.core.dist_checkpointing.moe.snapshot.capturer import LiveCapturer
        from megatron.core.dist_checkpointing.moe.snapshot.copy_engines import ThreadEngine
        from megatron.core.dist_checkpointing.moe.storage.memory import MemoryStore
        from megatron.core.dist_checkpointing.moe.types import Part
        from megatron.core.dist_checkpointing.moe.types.snapshots import full_plan

        self.trainer, self.trainer_state = trainer, trainer.state
        self.topology, self.rank = read_topology(8), torch.distributed.get_rank()
        self.tensors = state_tensors(trainer.chunks, trainer.optimizer, self.topology)
        self.iterations: list[dict[str, Any]] = []
        engine = ThreadEngine()
        self.capturers = [
            LiveCapturer(self.tensors, self.trainer_state, kind)
            for kind in (LastMoment(engine), Careless(engine), engine)
        ]
        operators = self.capturers[0].operators
        self.plan = lambda iteration: full_plan(iteration, operators, Part.EVERYTHING)
        nbytes = self.capturers[0].layout(self.plan(0), trainer=True).nbytes
        self.store = MemoryStore(Path(folder), "job", self.rank, [nbytes] * 3)

    def iterate(self) -> None:
        """One iteration, with a note of all that it computed."""
        journal = self.trainer.iterate()
        self.iterations.append(journal.to_data() | {"trainer": self.trainer_state.scalars()})

    def facts(self) -> dict[str, Any]:
        from megatron.core.dist_checkpointing.moe.megatron_state.module_tree import model_operators

        for _ in range(BEFORE_SNAPSHOT):
            self.iterate()
        references, snapshots = [], []
        for at, capturer in enumerate(self.capturers):
            references.append(self._hashed())
            snapshots.append(self._capture(capturer, first=at == 0))
        facts = {
            "operators": [_plain(operator) for operator in sorted({tensor.operator for tensor in self.tensors})],
            "of the model": [_plain(operator) for operator in model_operators(self.trainer.chunks)],
            "wrong records": [self._wrong(*pair) for pair in zip(snapshots, references, strict=True)],
            "buffers": sorted(tensor.key for tensor in self.tensors if tensor.field == "buffer"),
        }
        return facts | self._restorations(snapshots[0]) | {"iterations": self.iterations}

    def _hashed(self) -> dict[str, bytes]:
        return {one.key: one.tensor.view(torch.uint8).numpy().tobytes() for one in self.tensors}

    def _capture(self, capturer: Any, first: bool) -> Any:
        """A snapshot of the state as it is, taken while the next iteration runs."""
        from megatron.core.dist_checkpointing.moe.megatron_state.restore import gather_compute_weights
        from megatron.core.dist_checkpointing.moe.types.layout import Facts, SnapshotId

        trainer = self.trainer
        plan = self.plan(self.trainer_state.iteration)
        layout = capturer.layout(plan, trainer=True)
        snapshot = SnapshotId(plan.iteration, self.rank)
        writer = self.store.reserve(snapshot, layout)
        capturer.begin([(layout, writer)])
        scalars = self.trainer_state.scalars()
        if first:
            gather_compute_weights(trainer.chunks)
            self.reference = _complete_state(trainer)
        step = trainer.optimizer.step

        def step_after_copies() -> Any:
            capturer.end(TIMEOUT_S)
            return step()

        with mock.patch.object(trainer.optimizer, "step", step_after_copies):
            self.iterate()
        writer.seal(Facts("job", plan.digest(), scalars=scalars))
        return snapshot

    def _wrong(self, snapshot: Any, reference: dict[str, bytes]) -> list[str]:
        with self.store.open(snapshot) as reader:
            return sorted(key for key, value in reference.items() if bytes(reader.read(key)) != value)

    def _restorations(self, snapshot: Any) -> dict[str, Any]:
        """What differs from the state of the snapshot after several ways to restore it; then train on from there."""
        from megatron.core.dist_checkpointing.moe.types import Part

        facts: dict[str, Any] = {"differences": {}}
        with self.store.open(snapshot) as reader:
            for name, part in {"full": Part.MASTER_AND_MOMENTS, "everything": Part.EVERYTHING}.items():
                facts[f"{name} bytes"] = self._restore(reader, part)
                facts["differences"][name] = _differences(self.trainer, self.reference)
            facts["refusals"] = self._refusals(reader)
        self.trainer.read_on()
        for _ in self.capturers:
            self.iterate()
        return facts

    def _restore(self, reader: Any, part: Any) -> list[int]:
        from megatron.core.dist_checkpointing.moe.megatron_state.megatron import live_restorer

        trainer, operators = self.trainer, self.capturers[0].operators
        _poison(trainer)
        trainer.scheduler.num_steps = 7777
        for member in getattr(trainer.optimizer, "chained_optimizers", [trainer.optimizer]):
            if hasattr(member.grad_scaler if hasattr(member, "grad_scaler") else None, "_growth_tracker"):
                member.grad_scaler._growth_tracker = member.grad_scaler._hysteresis_tracker = 99
        restorer = live_restorer(trainer.chunks, trainer.optimizer, self.topology)
        restorer.poison()
        restored_bytes = restorer.restore(reader.read, {part: operators})
        self.trainer_state.restore(reader.manifest.facts.scalars, self._random(reader))
        restorer.complete()
        expected_bytes = sum(tensor.nbytes for tensor in self.tensors if tensor.part & part)
        return [restored_bytes, expected_bytes]

    def _random(self, reader: Any) -> dict[str, memoryview]:
        return {name: reader.read(f"random/{name}") for name in self.trainer_state.tensors()}

    def _refusals(self, reader: Any) -> list[str]:
        """What is said of trainer state that lacks one thing."""
        from megatron.core.dist_checkpointing.moe.errors import UnreadableCheckpoint

        scalars, tensors = dict(reader.manifest.facts.scalars), self._random(reader)
        without = [({k: v for k, v in scalars.items() if k != name}, tensors) for name in scalars]
        without += [(scalars, {k: v for k, v in tensors.items() if k != name}) for name in tensors]
        short = {name: view[:-1] if name == "torch" else view for name, view in tensors.items()}
        said = []
        for lacking in [*without, (scalars, short), (scalars | {"scheduler": {}}, tensors)]:
            before = json.dumps(self.trainer_state.scalars())
            try:
                self.trainer_state.restore(*lacking)
            except UnreadableCheckpoint as error:
                said.append(str(error))
            assert json.dumps(self.trainer_state.scalars()) == before
        return said


def _plain(operator: Any) -> list[int]:
    return [operator.layer, operator.kind.value, operator.expert]


def _poison(trainer: Trainer) -> None:
    poison(SimpleNamespace(chunks=trainer.chunks, optimizer=trainer.optimizer, progress=trainer.state))
    trainer.args.consumed_train_samples = trainer.args.consumed_valid_samples = 5


@contextlib.contextmanager
def allocated_lazily(eagerly: bool) -> Iterator[None]:
    """The loop leaves the state of the optimizer to its first step, or to `allocate_optimizer_state`."""

    def examine(trainer: Trainer) -> None:
        from megatron.core.dist_checkpointing.moe.megatron_state.optimizer_state import (
            allocate_optimizer_state,
            torch_adams,
        )

        def states() -> list[Any]:
            inner = torch_adams(trainer.optimizer)
            return list(itertools.chain.from_iterable(one.state.values() for one in inner))

        assert not states()
        if eagerly:
            allocate_optimizer_state(trainer.optimizer)
            first = states()
            assert first
            allocate_optimizer_state(trainer.optimizer)
            assert [id(one) for one in states()] == [id(one) for one in first]

    from megatron.core.dist_checkpointing.moe.stock import hooks

    with mock.patch.object(hooks, "allocate_step_counts"), before_training(examine):
        yield


@contextlib.contextmanager
def counted(folder: str) -> Iterator[None]:
    """Train to the end of the flags, and write down what each rank's routers counted in each iteration."""

    def examine(trainer: Trainer) -> list[dict[int, list[int]]]:
        from megatron.core.dist_checkpointing.moe.megatron_state.popularity import TokenCounter

        counter, counts = TokenCounter(trainer.chunks), []
        for _ in range(trainer.args.train_iters):
            trainer.iterate()
            trainer.evaluate()
            counts.append(dict(counter.take()()))
        counter.close()
        trainer.read_on()
        trainer.iterate()
        assert all(not any(row) for row in counter.take()().values())
        return counts

    with instead_of_training(examine, folder):
        yield
