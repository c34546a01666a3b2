"""What tests of boundary logs do inside workers: train with logs, and hold against them what the neighbours received.

Each rank leaves a JSON file; the tests judge what is in them.
"""

from __future__ import annotations

import contextlib
import logging
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from stock_trainer import Trainer, instead_of_training

ITERATIONS = 4
BASE = 1
"""Where the earliest replay would start: the logs of the first iteration go."""
KILLED_IN = 3
JOB = "job"


@contextlib.contextmanager
def logged(folder: str, killed: int | None = None) -> Iterator[None]:
    """Instead of training to the end: a few iterations whose boundary tensors are logged, then the comparison.

    killed: a rank that dies, as by a signal, in the middle of the passes of iteration KILLED_IN.
    """

    def examine(trainer: Trainer) -> dict[str, Any]:
        rank = Logged(trainer, Path(folder), killed)
        rank.train()
        facts = rank.facts()
        rank.close()
        return facts

    with instead_of_training(examine, folder):
        yield


class Received:
    """What arrived in each iteration, by direction, in the order of arrival."""

    def __init__(self) -> None:
        self.tensors: list[dict[str, list[torch.Tensor]]] = []

    def begin(self) -> None:
        """The next iteration begins."""
        self.tensors.append({"forward": [], "backward": []})

    def add(self, from_prev: torch.Tensor | None, from_next: torch.Tensor | None) -> None:
        """What one call is about to receive, or has received; looked at when the iteration has ended."""
        for way, tensor in (("forward", from_prev), ("backward", from_next)):
            if tensor is not None and self.tensors:
                self.tensors[-1][way].append(tensor)

    def end(self) -> None:
        """The iteration has ended: keep copies."""
        for tensors in self.tensors[-1].values():
            tensors[:] = [tensor.detach().clone() for tensor in tensors]


class Problems(logging.Handler):
    """What the logs complain about."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.said: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.said.append(record.getMessage())


class Logged:
    """Drives one trainer through some iterations with logs around them, and evaluations between them."""

    def __init__(self, trainer: Trainer, folder: Path, killed: int | None) -> None:
        from megatron.core.dist_checkpointing.moe.megatron_state.megatron import read_topology

        self.trainer, self.folder, self.killed = trainer, folder, killed
        self.rank, self.topology = torch.distributed.get_rank(), read_topology(8)
        self.stage = self.topology.stage(self.rank)
        self.received, self.problems = Received(), Problems()
        logging.getLogger("megatron.core.dist_checkpointing.moe.local_recovery.boundary_logs").addHandler(self.problems)
        self.coverage: list[tuple[int | None, str]] = []
        self.prepare()

    def prepare(self) -> None:
        """Real logs on a store of its own, fed by what the trainer's communicator is asked to send."""
        from megatron.core import parallel_state
        from megatron.core.dist_checkpointing.moe.boot_clock import SystemClock
        from megatron.core.dist_checkpointing.moe.local_recovery.boundary_copies import BoundaryRecorder
        from megatron.core.dist_checkpointing.moe.local_recovery.boundary_logs import (
            BoundaryLogs,
            LogPlan,
            LogPorts,
        )
        from megatron.core.dist_checkpointing.moe.local_recovery.communicator import BoundaryCommunicator
        from megatron.core.dist_checkpointing.moe.policy.lineage import Identity
        from megatron.core.dist_checkpointing.moe.policy.rollback import tensor_shape
        from megatron.core.dist_checkpointing.moe.snapshot.copy_engines import ThreadEngine
        from megatron.core.dist_checkpointing.moe.snapshot.workers import ThreadExecutor
        from megatron.core.dist_checkpointing.moe.storage.memory import MemoryStore

        config, args = self.trainer.config, self.trainer.args
        shape = tensor_shape(
            self.topology,
            args.seq_length,
            args.micro_batch_size,
            config.hidden_size,
            sequence_parallel=config.sequence_parallel,
        )
        self.microbatches = self.trainer.microbatches
        dtype = str(config.pipeline_dtype).removeprefix("torch.")
        self.plan = LogPlan(self.topology, self.rank, shape, dtype, 3, config.microbatch_group_size_per_vp_stage)
        sizes = self.plan.sizes(self.microbatches)
        self.store = MemoryStore(self.folder, JOB, self.rank, sizes, area="standby")
        self.recorder = BoundaryRecorder(ThreadEngine("boundary-copy"))
        ports = LogPorts(store=self.store, lane=ThreadExecutor("logs"), recorder=self.recorder, clock=SystemClock())
        self.logs = BoundaryLogs(self.plan, Identity(JOB, {}, frozenset()), ports, timeout_s=60.0)
        received = self.received

        class Listening(BoundaryCommunicator):
            """Notes what it receives."""

            def _communicate(self, **asked: Any) -> Any:
                found = super()._communicate(**asked)
                received.add(*found[:2])
                return found

        group = parallel_state.get_pipeline_model_parallel_group()
        self.communicator = Listening(group, config)
        self.communicator.sink = self.recorder
        self.trainer.communicate(self.communicator)

    def train(self) -> None:
        """Iterations as a session frames them."""
        for iteration in range(1, ITERATIONS + 1):
            self.logs.begins(iteration, self.microbatches)
            self.received.begin()
            if self.rank == self.killed and iteration == KILLED_IN:
                self.die_while_sending()
            self.trainer.iterate()
            self.passed()
            if self.trainer.args.eval_iters and iteration % self.trainer.args.eval_interval == 0:
                self.trainer.evaluate(
                    p2p_communicator=self.communicator, pg_collection=self.trainer.manager.process_groups
                )
            self.evaluated()
            self.commit(iteration)
        assert self.logs.drain(60.0) == ""

    def passed(self) -> None:
        """The step is done; what an evaluation sends is none of the iteration."""
        self.logs.passed()
        self.received.end()
        self.training, self.received.tensors = self.received.tensors, []

    def evaluated(self) -> None:
        """Back to what training received."""
        self.received.tensors = self.training

    def commit(self, iteration: int) -> None:
        """As a session does at the end of an iteration."""
        from megatron.core.dist_checkpointing.moe.types import StepJournal

        found = self.logs.on_commit(iteration, StepJournal(float(iteration)), {"iteration": iteration}, BASE)
        self.coverage.append((found.since, found.why))

    def die_while_sending(self) -> None:
        """Be killed when the second tensor of the iteration is about to be sent."""
        import os

        sent, count = self.recorder.sent, iter(range(1000))

        def dying(direction: Any, tensor: torch.Tensor) -> None:
            sent(direction, tensor)
            if next(count):
                os.kill(os.getpid(), signal.SIGKILL)

        self.communicator.sink = mock.Mock(sent=dying, receiving=self.recorder.receiving)

    def facts(self) -> dict[str, Any]:
        """What this rank received against what its neighbours' logs hold, and how large its own logs are."""
        from megatron.core.dist_checkpointing.moe.policy.rollback import sent_bytes
        from megatron.core.dist_checkpointing.moe.types import LOG

        torch.distributed.barrier()
        item = torch.empty((), dtype=self.trainer.config.pipeline_dtype).element_size()
        predicted = sent_bytes(self.topology, self.stage, self.microbatches, self.plan.shape, item)
        own = [one for one in self.store.snapshots().sealed if one.kind == LOG]
        held = {}
        for snapshot in own:
            with self.store.open(snapshot) as reader:
                sent = (one for one in reader.manifest.records if not one.key.startswith("received/"))
                held[snapshot.iteration] = sum(record.nbytes for record in sent)
        facts = {
            "differences": [text for iteration in range(1, ITERATIONS + 1) for text in self.compared(iteration)],
            "compared": [{way: len(all_) for way, all_ in one.items()} for one in self.received.tensors],
            "checksums": self.checksums(own),
            "predicted_bytes": predicted,
            "log_bytes": held,
            "coverage": self.coverage,
            "problems": self.problems.said,
        }
        torch.distributed.barrier()
        return facts

    def checksums(self, own: list[Any]) -> list[str]:
        """Of everything in this rank's logs."""
        found = []
        for snapshot in own:
            with self.store.open(snapshot) as reader:
                sent = (one for one in reader.manifest.records if not one.key.startswith("received/"))
                found += [record.xxh3 for record in sent]
        return found

    def compared(self, iteration: int) -> list[str]:
        """Where the k-th tensor that came from a side is not the k-th one in the log of the rank there."""
        from megatron.core.dist_checkpointing.moe.ports import SnapshotId
        from megatron.core.dist_checkpointing.moe.storage.ownership import slot_directories
        from megatron.core.dist_checkpointing.moe.storage.slot_reader import SlotReader
        from megatron.core.dist_checkpointing.moe.types import LOG

        step, world, found = self.topology.ranks_per_stage, self.topology.world_size, []
        folders = slot_directories(self.folder, JOB, "standby")
        for way, distance in (("forward", -step), ("backward", step)):
            arrived = self.received.tensors[iteration - 1][way]
            sender = (self.rank + distance) % world
            shelf, snapshot = SlotReader(folders[sender]), SnapshotId(iteration, sender, LOG)
            if snapshot not in shelf.snapshots().sealed:
                found += [f"no log of iteration {iteration} of rank {sender}"] if iteration > BASE else []
                continue
            with shelf.open(snapshot) as reader:
                keys = [one.key for one in reader.manifest.layout.fields if one.key.startswith(f"{way}/")]
                logs = [bytes(reader.read(key)) for key in keys]
            raw = [tensor.reshape(-1).view(torch.uint8).numpy().tobytes() for tensor in arrived]
            if len(logs) != len(raw):
                found.append(f"{len(raw)} tensors came {way} from rank {sender}, its log has {len(logs)}")
            found += [f"{iteration}: {key}" for key, one, other in zip(keys, logs, raw, strict=False) if one != other]
            found += self.unlike_fingerprints(SnapshotId(iteration, self.rank, LOG), way, arrived)
        return found

    def unlike_fingerprints(self, own: Any, way: str, arrived: list[torch.Tensor]) -> list[str]:
        """Where this rank's own log has other fingerprints than those of what came."""
        from megatron.core.dist_checkpointing.moe.local_recovery.boundary_copies import fingerprint

        if own not in self.store.snapshots().sealed or not arrived:
            return []
        with self.store.open(own) as reader:
            kept = memoryview(bytes(reader.read(f"received/{way}"))).cast("q").tolist()
        came = [int(fingerprint(tensor)) for tensor in arrived]
        return [] if kept == came else [f"{own}: the fingerprints {kept} are not those of what came {way}: {came}"]

    def close(self) -> None:
        """End the use of the store."""
        self.recorder.close()
        self.store.close()
