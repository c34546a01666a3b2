"""Checkpointing of one training process from start to end: real ports around the coordinator and the recovery."""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch.distributed.distributed_c10d import _get_default_store

from megatron.core.optimizer import MegatronOptimizer

from ..capture.engines import CopyEngine, StreamEngine, ThreadEngine
from ..capture.popularity import TokenCounter
from ..capture.snapshot import LiveCapturer
from ..config import MoECheckpointConfig
from ..errors import MoECheckpointError, UsageError
from ..policy.strategies import GATE_UNIT, STRATEGIES, Job
from ..policy.timelines import continued
from ..ports import Execution, TrainerState
from ..replay.densify import Replay
from ..replay.execution import LiveExecution
from ..replicate.process_group import ProcessGroupTransport
from ..replicate.replicator import Replicator
from ..store.memory import MemoryStore
from ..types import RecoveryPlan, StepJournal, Topology
from .clock import SystemClock
from .completeness import check_complete
from .coordinator import Coordinator, Ports, Report
from .keeper import Identity, Keeper
from .lanes import ThreadLane
from .megatron import live_restorer, operators_of_parameters, read_topology, state_tensors
from .model_operators import model_operators
from .optimizer_state import allocate_optimizer_state
from .persister import Persister
from .places import Place, memory_folder, open_memory, open_persistent, replicas_placed
from .recovery import Outcome, Recovery, RecoveryPorts
from .rooms import account_of, fit_memory, gathered_sizes, segment_sizes
from .sharing import assign, joining_restorer, share_out

log = logging.getLogger(__name__)

Value = TypeVar("Value")

RECOVERY_PATIENCE = 12
"""How many times `--moe-ckpt-timeout-s` a rank may take to read its state during a recovery."""


@dataclass(frozen=True)
class Training:
    """What is trained: live objects of Megatron-Core, and what belongs to no operator.

    tokens_per_iteration: input tokens of the whole job. iterations: of the whole training. topk: experts per token.
    """

    chunks: Sequence[torch.nn.Module]
    optimizer: MegatronOptimizer
    trainer: TrainerState
    tokens_per_iteration: int
    iterations: int
    topk: int = 1


class Session:
    """In this order, each a collective over all ranks: the constructor, `look`, then `carry_out` or `discard`, `begin`;
    in every iteration `before_optimizer` and `step_end`, or `stepped` while `is_replaying`; at last `shutdown`, or
    `failure` on each rank that fails.

    Raises UsageError, on all ranks alike, for flags, models and folders that cannot work.
    """

    def __init__(self, config: MoECheckpointConfig, training: Training, place: Place) -> None:
        self._config, self._training, self._place = config, training, place
        rank, world_size = torch.distributed.get_rank(), torch.distributed.get_world_size()
        store = _get_default_store()  # of this attempt: addresses of earlier ones would mislead
        self._control, self._data = (
            ProcessGroupTransport(store, rank, world_size, f"moe-ckpt-{name}", config.timeout_s)
            for name in ("control", "data")
        )
        # Ranks wait here for others that read from slow storage; a dead one is noticed at once all the same.
        self._patient = ProcessGroupTransport(
            store, rank, world_size, "moe-ckpt-recovery", RECOVERY_PATIENCE * config.timeout_s
        )
        self._rank, self._clock = rank, SystemClock()
        self._engine: CopyEngine | None = None
        self._topology = self._together(self._read_topology)
        self._together(self.refresh)
        self._job = Job(
            config,
            model_operators(training.chunks),
            self._topology,
            training.tokens_per_iteration,
            training.iterations,
            training.topk,
            tied_embeddings=bool(getattr(_unwrapped(training.chunks[0]), "share_embeddings_and_output_weights", False)),
            sizes=gathered_sizes(self._capturer, self._control),
        )
        self._strategy = self._together(lambda: STRATEGIES[config.strategy](self._job))
        placement = self._together(lambda: replicas_placed(config, self._topology))
        self._peers, self._owners = placement.peers[rank], placement.kept_by[rank]
        self._rooms = self._strategy.rooms()
        self._segments = self._segment_sizes()
        self._persistent = self._together(lambda: open_persistent(config, rank))
        # What cannot be replayed is refused before it is needed.
        self._execution = self._together(self._made_execution) if self._strategy.replays else None
        self._memory = self._opened_memory()
        told = _told(self._topology, config.shard)
        self._identity = Identity(place.job_id, told, self._capturer.operators, config.strategy)
        # Sorts by time, and differs even between attempts that start in the same instant.
        self._attempt = str(self._control.gather(f"{time.time_ns():020d}-{secrets.token_hex(4)}")[0])
        self._recovery: Recovery | None = None
        self._outcome: Outcome | None = None
        self._replay: Replay | None = None
        self._coordinator: Coordinator | None = None
        self._counter = None
        if self._strategy.counts_tokens:
            self._counter = TokenCounter(training.chunks, gate_unit=GATE_UNIT if self._strategy.counts_gates else None)

    def refresh(self) -> None:
        """Enumerate the training state anew, as is needed after a checkpoint was loaded in another way."""
        chunks, optimizer = self._training.chunks, self._training.optimizer
        allocate_optimizer_state(optimizer)
        tensors = state_tensors(chunks, optimizer, self._topology)
        check_complete(chunks, optimizer, tensors)
        if self._engine is None:
            self._engine = StreamEngine() if any(one.tensor.is_cuda for one in tensors) else ThreadEngine()
        self._restorer = live_restorer(chunks, optimizer, self._topology)
        if self._config.shard != "none":
            assignment = assign(self._config.shard, chunks, tensors, self._topology)
            portions = share_out(tensors, assignment, self._topology, self._rank)
            self._restorer = joining_restorer(chunks, optimizer, portions)
            tensors = tuple(part for portion in portions for part in portion.stored)
        self._capturer = LiveCapturer(tensors, self._training.trainer, self._engine)

    def look(self) -> RecoveryPlan | None:
        """What an earlier attempt left and what can be made of it; None when that is nothing."""
        ports = RecoveryPorts(
            self._memory,
            self._persistent,
            self._patient,
            self._restorer,
            self._training.trainer,
            self._clock,
            execution=self._execution,
            make_room=self._make_room,
        )
        self._recovery = Recovery(self._job, self._strategy, ports, self._identity, self._owners)
        return self._recovery.look()

    def carry_out(self) -> Outcome | Replay | None:
        """Restore what `look` planned; None when all copies proved damaged: then the live state is unusable.

        A Replay where iterations have to be run again before the state is dense: `begin` prepares the first of them.
        """
        assert self._recovery is not None
        done = self._recovery.carry_out()
        if isinstance(done, Replay):
            self._replay = done
        elif done is not None:
            self._recovered(done)
        return done

    @property
    def is_replaying(self) -> bool:
        """Whether training runs iterations again to make its state dense: nothing may be saved meanwhile."""
        return self._replay is not None

    def stepped(self, step: StepJournal) -> None:
        """In place of `step_end` after an iteration that was replayed: on to the next one, or to protect what follows.

        Training's progress, schedules and random states are those of the recorded iteration afterwards. Raises
        MoECheckpointError when the iteration came out otherwise than recorded.
        """
        assert self._replay is not None and self._recovery is not None
        self._replay.stepped(step)
        if self._replay.is_done:
            self._replay = None
            if self._counter is not None:
                self._counter.take()  # these tokens were counted when the iterations ran first
            outcome = self._recovery.finish()
            self._recovered(outcome)
            self._protect(outcome.plan.target)

    @property
    def is_own(self) -> bool:
        """Whether what `look` planned is a state that this very job left."""
        return self._recovery is not None and self._recovery.is_own

    @property
    def unusable(self) -> str:
        """Why snapshots in storage cannot be used by this job; empty if there are none of that kind."""
        return self._recovery.unusable if self._recovery else ""

    def clear_counters(self) -> None:
        """After a `carry_out` that came to nothing: what routers count has no place in a checkpoint that is loaded."""
        for one in state_tensors(self._training.chunks, self._training.optimizer, self._topology):
            if one.field == "buffer":
                one.tensor.zero_()

    def discard(self) -> None:
        """Training goes on from another state than any in memory: all that is there is freed."""
        assert self._recovery is not None
        self._recovery.discard()
        self._strategy = STRATEGIES[self._config.strategy](self._job)  # a vain recovery may have taught it something

    def begin(self, iteration: int) -> None:
        """Protect training from here on; it stands after `iteration`. After a replay instead, if one has to be."""
        if self._replay is not None:
            self._replay.begin()
        else:
            self._protect(iteration)

    def _recovered(self, outcome: Outcome) -> None:
        self._outcome = outcome
        for line in outcome.table.lines() if self._rank == 0 else ():
            log.info("%s", line)

    def _made_execution(self) -> Execution:
        chunks, optimizer = self._training.chunks, self._training.optimizer
        return LiveExecution(chunks, optimizer, operators_of_parameters(chunks, self._topology))

    def _protect(self, iteration: int) -> None:
        self._patient.close()
        before = self._outcome.timeline if self._outcome is not None else ()
        identity = replace(self._identity, timeline=continued(before, self._attempt, iteration))
        ports = Ports(
            self._memory,
            self._capturer,
            self._training.trainer,
            self._control,
            ThreadLane,
            self._clock,
            self._owners,
            self._rooms,
            self._release_segments,
        )
        replicator = Replicator(self._data, self._peers, self._owners) if self._peers or self._owners else None
        keeper = Keeper(self._memory, replicator, self._data, self._clock, identity, owners=self._owners)
        persister = None
        if self._persistent is not None:
            persister = Persister(
                self._memory,
                self._persistent,
                self._rank,
                identity,
                lambda piece, index: self._capturer.layout(piece.plan, trainer=index == 0),
                clock=self._clock,
            )
        self._coordinator = Coordinator(self._job, self._strategy, ports, keeper, persister)
        if self._outcome is not None:
            self._coordinator.resume(self._outcome)

    def step_end(self, iteration: int, journal: StepJournal) -> None:
        """See `Coordinator.step_end`."""
        assert self._coordinator is not None
        self._coordinator.step_end(iteration, self._counter.take() if self._counter else None, journal)

    def before_optimizer(self) -> float:
        """See `Coordinator.before_optimizer`; nothing is under way in a replay."""
        return self._coordinator.before_optimizer() if self._coordinator is not None else 0.0

    def report(self) -> Report:
        """See `Coordinator.report`."""
        assert self._coordinator is not None
        return self._coordinator.report()

    def failure(self) -> None:
        """See `Coordinator.failure`."""
        if self._coordinator is not None:
            self._coordinator.failure()

    def shutdown(self, *, keep_memory: bool) -> None:
        """See `Coordinator.shutdown`; gives the memory back to the node unless it is to be kept for another start."""
        assert self._coordinator is not None
        self._coordinator.shutdown()
        if keep_memory:
            self._memory.close()
        else:
            self._memory.remove()
            with suppress(OSError):
                self._memory.directory.parents[1].rmdir()  # the node's; others of its processes may still be there
        for transport in (self._control, self._data):
            transport.close()

    def _read_topology(self) -> Topology:
        nodes = [str(node) for node in self._control.gather(self._place.node)]
        names = list(dict.fromkeys(nodes))
        return replace(read_topology(max(map(nodes.count, names))), nodes=tuple(map(names.index, nodes)))

    def _segment_sizes(self) -> list[int]:
        """Segments of equal size on all ranks, so that any rank's snapshots fit where a restart may place it."""
        sizes = segment_sizes(self._rooms, self._capturer, self._control, self._owners)
        (most,) = self._control.least([-sum(sizes)])
        if self._rank == 0:
            log.info(
                "snapshots in memory: at most %.3f GB per rank in %s (%d segments)",
                -most / 1e9,
                memory_folder(self._config),
                len(sizes),
            )
            log.info("%s", account_of(self._rooms, self._job, self._rank, len(self._owners)))
        return sizes

    def _opened_memory(self) -> MemoryStore:
        """The memory of this rank; where another rank has none, what is not needed to come back is given up again."""
        opened: list[MemoryStore] = []
        try:
            self._together(lambda: opened.append(open_memory(self._config, self._place, self._segments)))
        except UsageError:
            for memory in opened:
                memory.close() if memory.snapshots().sealed else memory.remove()
            raise
        return opened[0]

    def _release_segments(self) -> None:
        if self._engine is not None:
            self._engine.release()

    def _make_room(self) -> None:
        """Fit the memory to what the strategy needs once it knows what it knew before a fault; a collective."""
        rooms = self._strategy.rooms()
        if rooms != self._rooms:
            sizes = segment_sizes(rooms, self._capturer, self._control, self._owners)
            done, why = fit_memory(self._memory, sizes, self._control, self._release_segments)
            self._rooms = rooms if done else self._rooms
            if why:
                log.error("rank %d: %s", self._rank, why)

    def _together(self, action: Callable[[], Value]) -> Value:
        """What `action` gives on this rank; an error for people on any rank becomes one on all. A collective."""
        problem, value = "", None
        try:
            value = action()
        except MoECheckpointError as error:
            problem = str(error)
        for rank, told in enumerate(self._control.gather(problem)):
            if told:
                raise UsageError(f"rank {rank}: {told}")
        return value  # type: ignore[return-value]


def _unwrapped(chunk: Any) -> Any:
    while hasattr(chunk, "module"):
        chunk = chunk.module
    return chunk


def _told(topology: Topology, shard: str) -> dict[str, Any]:
    """The parallel layout that a snapshot is made in, and who stores what in it; nodes do not matter."""
    names = ("world_size", "tp", "pp", "vpp", "cp", "ep")
    layout = {name: getattr(topology, name) for name in names} | {"etp": topology.expert_tp}
    return layout if shard == "none" else layout | {"shard": shard}
