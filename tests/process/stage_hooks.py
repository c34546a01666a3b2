"""What tests of replays without the neighbours do inside workers: train, lose some stages, run those again from logs.

Ranks that do not take part wait for files, never in a collective: a replay that entered one with them would hang.
Each rank leaves a JSON file; the tests judge what is in them.
"""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from frozen_hooks import BEFORE, ITERATIONS, Frozen, Moment
from stock_trainer import Trainer, configured, instead_of_training

PATIENCE_S = 120.0


@contextlib.contextmanager
def replayed_alone(folder: str, segments: Sequence[Sequence[int]]) -> Iterator[None]:
    """Instead of training to the end: a few iterations as ever, then each segment of stages runs them again alone."""
    stages = [tuple(one) for one in segments]
    with instead_of_training(lambda trainer: Alone(trainer, Path(folder)).facts(stages), folder):
        yield


@contextlib.contextmanager
def overlapped_sends() -> Iterator[None]:
    """Send and receive beside computation in the interleaved schedule, as Megatron-LM does it on GPUs.

    What is being sent stays: gloo, unlike NCCL, reads it from the tensor's memory as long as that takes.
    """
    with configured(overlap_p2p_comm=True, batch_p2p_comm=False, deallocate_pipeline_outputs=False):
        yield


class Kept:
    """A sink that keeps copies of all that is sent."""

    def __init__(self) -> None:
        self.tensors: dict[str, list[torch.Tensor]] = {"forward": [], "backward": []}

    def sent(self, direction: Any, tensor: torch.Tensor) -> None:
        """As `ports.BoundarySink.sent`."""
        self.tensors[direction.value].append(tensor.detach().clone())

    def receiving(self, direction: Any) -> Callable[[torch.Tensor], None]:
        """As `ports.BoundarySink.receiving`."""
        return lambda tensor: None


class Alone(Frozen):
    """Drives one trainer: what it is in training, and what its stage makes of it alone."""

    def __init__(self, trainer: Trainer, folder: Path) -> None:
        from megatron.core.dist_checkpointing.moe.megatron_state.megatron import read_topology
        from megatron.core.dist_checkpointing.moe.stock.iteration import SuppressedEffects
        from megatron.core.dist_checkpointing.moe.storage.filesystem import FilesystemStore
        from megatron.training import training

        super().__init__(trainer)
        self.folder, self.rank = folder, torch.distributed.get_rank()
        self.topology = read_topology(8)
        self.stage = self.topology.stage(self.rank)
        self.logs = FilesystemStore(folder / "logs", self.rank)
        self.done: Counter[str] = Counter()
        self.replayed_iterations = 0
        self.communicator = self.communicating()
        self.quiet = SuppressedEffects(training, trainer.manager)
        self.count_what_is_done()
        owned: list[Any] = [None] * self.topology.world_size
        torch.distributed.all_gather_object(owned, {one.operator for one in self.tensors})
        self.owned = owned

    def communicating(self) -> Any:
        """Let the driver's schedules send and receive in our way, as a session that logs does."""
        from megatron.core import parallel_state
        from megatron.core.dist_checkpointing.moe.local_recovery.communicator import BoundaryCommunicator

        group = parallel_state.get_pipeline_model_parallel_group()
        communicator = BoundaryCommunicator(group, self.trainer.config)
        self.session = self.trainer.communicate(communicator)
        communicator.connect()
        return communicator

    def count_what_is_done(self) -> None:
        """Count passes, steps and messages from here on."""
        from megatron.core.pipeline_parallel import schedules

        def counted(owner: Any, name: str) -> None:
            work = getattr(owner, name)

            def count(*arguments: Any, **options: Any) -> Any:
                self.done[name] += 1
                return work(*arguments, **options)

            setattr(owner, name, count)

        config, finalize = self.trainer.config, self.trainer.config.finalize_model_grads_func

        def finalized(chunks: Any, num_tokens: torch.Tensor | None = None, **options: Any) -> None:
            finalize(chunks, num_tokens, **options)
            self.num_tokens = None if num_tokens is None else int(num_tokens.item())

        config.finalize_model_grads_func = finalized
        counted(schedules, "forward_step")
        counted(schedules, "backward_step")
        counted(self.communicator, "_communicate")
        for member in self.optimizer.chained_optimizers:
            counted(member, "prepare_grads")

    def facts(self, segments: list[tuple[int, ...]]) -> dict[str, Any]:
        """What came out otherwise than in training; all lists are empty if all is well."""
        for _ in range(BEFORE):
            self.iterate()
        moments = [self.moment()]
        passes = -self.done["forward_step"]
        for _ in range(ITERATIONS):
            moments.append(self.logged())
        passes += self.done["forward_step"]
        after = self.moment(self.iterate())
        self.meet("trained")
        facts: dict[str, Any] = {
            "journals": [moment.journal.to_data() for moment in moments[1:]],
            "passes": passes,
            "checksums": self.checksums(),
            "refused": self.refusal(),
            "segments": {},
        }
        for stages in segments:
            found = self.lost(stages, moments, after)
            facts["segments"]["+".join(map(str, stages))] = found
        return facts

    def iterate(self) -> Any:
        """One iteration of the driver, and how it came out."""
        from dataclasses import replace

        return replace(super().iterate(), num_tokens=self.num_tokens)

    def logged(self) -> Moment:
        """An iteration whose sent tensors are sealed in a log afterwards."""
        from megatron.core.dist_checkpointing.moe.policy.rollback import log_keys
        from megatron.core.dist_checkpointing.moe.ports import Facts, Field, Layout, SnapshotId

        kept = self.communicator.sink = Kept()
        moment = self.moment(self.iterate())
        self.communicator.sink = None
        tensors = [*kept.tensors["forward"], *kept.tensors["backward"]]
        keys = log_keys(self.topology, self.stage, self.trainer.microbatches)
        named = dict(zip(keys, tensors, strict=True))
        layout = Layout.of(Field(key, str(one.dtype)[6:], tuple(one.shape)) for key, one in named.items())
        snapshot = SnapshotId(moment.scalars["iteration"], self.rank, "log")
        with self.logs.reserve(snapshot, layout) as writer:
            for key, one in named.items():
                writer.put(key, one.contiguous().view(torch.uint8).numpy())
            writer.seal(Facts("job", scalars={"journal": moment.journal.to_data(), "trainer": moment.scalars}))
        return moment

    def checksums(self) -> list[str]:
        """Of everything that this rank sent."""
        listed = [one for one in self.logs.snapshots().sealed if one.rank == self.rank]
        return [record.xxh3 for one in listed for record in self.logs.open(one).manifest.records]

    def refusal(self) -> str:
        """What is said of a journal with nothing but a norm; an empty string if that is enough."""
        from megatron.core.dist_checkpointing.moe.errors import UsageError
        from megatron.core.dist_checkpointing.moe.types import StepJournal

        try:
            self.execution.freeze((), StepJournal(1.0), alone=True)
        except UsageError as error:
            return str(error)
        self.execution.thaw()
        return ""

    def lost(self, stages: tuple[int, ...], moments: list[Moment], after: Moment) -> dict[str, Any]:
        """These stages lose everything, run the iterations again alone in two ways, and then all continue together."""
        ranks = [rank for stage in stages for rank in self.topology.stage_ranks(stage)]
        before, found = Counter(self.done), dict[str, Any]()
        self.replayed_iterations = 0
        if self.rank in ranks:
            with self.replaying_alone():
                for name, work in {"confused": self.confused, "dense": self.dense, "sparse": self.sparse}.items():
                    found[name] = work(stages, moments)
        else:
            self.restore(moments[-1])
        self.meet("+".join(map(str, stages)), ranks)
        found["done"] = {name: self.done[name] - before[name] for name in self.done}
        found["replayed"] = self.replayed_iterations
        # Nothing of the others was touched, and from here on all need each other again.
        if self.rank not in ranks:
            found["others"] = self.all_differences(self.moment(moments[-1].journal), moments[-1])
        found["rejoined"] = self.all_differences(self.moment(self.iterate()), after)
        return found

    @contextlib.contextmanager
    def replaying_alone(self) -> Iterator[None]:
        """As the hooks of the loop know it; no collective of other stages is entered."""
        from megatron.core.dist_checkpointing.moe import MoECheckpointManager

        alone = {"is_replaying": True, "replays_alone": True}
        with mock.patch.multiple(MoECheckpointManager, **alone), mock.patch.object(self.session, "replays_alone", True):
            self.quiet.begin()
            try:
                yield
            finally:
                self.quiet.end()

    def confused(self, stages: tuple[int, ...], moments: list[Moment]) -> list[str]:
        """What differs when an iteration gets what was sent in the one after it."""
        self.restore(moments[0])
        first, second = (moment.scalars["iteration"] for moment in moments[1:3])
        journal = self.replayed_with(stages, first, set(), sent_in=second)
        self.execution.thaw()
        return self.all_differences(self.moment(journal), moments[1])

    def dense(self, stages: tuple[int, ...], moments: list[Moment]) -> list[str]:
        """What differs when the dense state of the first moment is replayed."""
        self.poison_all()
        self.restore(moments[0])
        found = []
        for after in moments[1:]:
            now = self.moment(self.replayed_with(stages, after.scalars["iteration"], set()))
            found += self.all_differences(now, after)
        self.execution.thaw()
        return found

    def sparse(self, stages: tuple[int, ...], moments: list[Moment]) -> list[str]:
        """What differs when operators come back one part after the other, as a sparse checkpoint gives them."""
        from megatron.core.dist_checkpointing.moe.megatron_state.restore import gather_compute_weights, settle_gathers

        parts = [set(self.operators[at :: len(moments)]) for at in range(len(moments))]
        inside = {rank for stage in stages for rank in self.topology.stage_ranks(stage)}
        outside = set(self.operators) - set().union(*(self.owned[rank] for rank in inside))
        self.poison_all()
        self.restore(moments[0])
        frozen, found = set(self.operators) - parts[0], []
        self.poison(frozen)
        for part, after in zip(parts[1:], moments[1:], strict=True):
            iteration = after.scalars["iteration"]
            # Whether operators of the others count as frozen makes no difference but for what is computed in vain.
            journal = self.replayed_with(stages, iteration, frozen | outside if iteration % 2 else frozen)
            if repr(journal) != repr(after.journal):
                found.append(f"{iteration}: {journal} instead of {after.journal}")
            settle_gathers(self.chunks)
            frozen -= part
            self.load(after, part, frozen)
            gather_compute_weights(self.chunks)
        self.execution.thaw()
        return found + self.all_differences(self.moment(journal), moments[-1])

    @torch.no_grad()
    def load(self, moment: Moment, whole: set[Any], weights: set[Any]) -> None:
        """The whole state of some operators, the weights of others."""
        from megatron.core.dist_checkpointing.moe.types import Part

        for one, copy in zip(self.tensors, moment.tensors, strict=True):
            if one.operator in whole or (one.operator in weights and one.serves(Part.COMPUTE)):
                one.tensor.copy_(copy)

    def replayed_with(
        self, stages: tuple[int, ...], iteration: int, frozen: set[Any], sent_in: int | None = None
    ) -> Any:
        """Run one iteration again with what the neighbours outside sent; how it came out."""
        from megatron.core.dist_checkpointing.moe.local_recovery.boundary_logs import StageSource
        from megatron.core.dist_checkpointing.moe.types import StepJournal

        outsider = next(rank for rank in range(len(self.owned)) if self.topology.stage(rank) not in stages)
        with self.log(iteration, outsider) as log:
            scalars = log.manifest.facts.scalars
        logs = self.neighbours(stages, sent_in or iteration)
        source = self.communicator.source = StageSource(logs, torch.cuda.current_device())
        self.execution.freeze(frozen, StepJournal.from_data(scalars["journal"]), alone=True)
        journal = self.iterate()
        self.replayed_iterations += 1
        source.check_all_taken()
        self.communicator.source = None
        self.trainer_state.restore_common(scalars["trainer"])
        for log in logs.values():
            log.close()
        return StepJournal(journal.grad_norm, journal.skipped, journal.lm_loss, scalars["journal"]["num_tokens"])

    def neighbours(self, stages: tuple[int, ...], iteration: int) -> dict[Any, Any]:
        """The logs of this rank's neighbours outside the segment, by the direction in which they sent to it."""
        from megatron.core.dist_checkpointing.moe.types import Direction

        step, world = self.topology.ranks_per_stage, self.topology.world_size
        senders = {Direction.FORWARD: (self.rank - step) % world, Direction.BACKWARD: (self.rank + step) % world}
        outside = {way: sender for way, sender in senders.items() if self.topology.stage(sender) not in stages}
        return {way: self.log(iteration, sender) for way, sender in outside.items()}

    def log(self, iteration: int, sender: int) -> Any:
        """What a rank sent in an iteration."""
        from megatron.core.dist_checkpointing.moe.ports import SnapshotId

        return self.logs.open(SnapshotId(iteration, sender, "log"))

    def all_differences(self, now: Moment, after: Moment) -> list[str]:
        """What is not as it was after an iteration, with the iteration."""
        return [f"{after.scalars['iteration']}: {what}" for what in self.differences(now, after, after, set())]

    @torch.no_grad()
    def poison_all(self) -> None:
        """Lose the whole state, copies of other ranks' weights and random states too."""
        for one in (*self.named_weights().values(), *(one.tensor for one in self.tensors)):
            one.fill_(float("nan"))
        torch.manual_seed(0)
        torch.cuda.manual_seed(0)

    def meet(self, what: str, ranks: Sequence[int] | None = None) -> None:
        """Wait until all of these ranks were here; without any word between the processes."""
        (self.folder / f"{what}-{self.rank}").touch()
        everybody, deadline = range(self.topology.world_size) if ranks is None else ranks, time.monotonic() + PATIENCE_S
        waiting = {rank for rank in everybody if not (self.folder / f"{what}-{rank}").exists()}
        while waiting:
            if time.monotonic() > deadline:
                raise TimeoutError(f"rank {self.rank} waited {PATIENCE_S} s for ranks {sorted(waiting)}: {what}")
            time.sleep(0.01)
            waiting = {rank for rank in waiting if not (self.folder / f"{what}-{rank}").exists()}
