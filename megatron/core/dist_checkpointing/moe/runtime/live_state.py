"""What is trained, what its state consists of, and what a rank takes of its node's memory to keep it."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

import torch

from megatron.core.optimizer import MegatronOptimizer
from megatron.core.utils import unwrap_model

from ..config import MoECheckpointConfig
from ..errors import UsageError
from ..extensions import Share
from ..local_recovery.boundary_logs import StageSource
from ..local_recovery.survivor import LiveTensors, Passes, Survivor, SurvivorBuffers
from ..megatron_state.megatron import (
    copies_embeddings,
    live_restorer,
    operators_of_parameters,
    state_tensors,
    stepped_parameters,
    tables,
    unchanging_operators,
)
from ..megatron_state.module_tree import ties_embeddings
from ..megatron_state.optimizer_state import allocate_optimizer_state
from ..megatron_state.partitions import check_complete, draws_in, tensor_grids
from ..megatron_state.quantization import allocate_quantization_state, quantization_tensors
from ..policy.resharding import RecordKey
from ..ports import Clock, Execution, Json, NoRoom, TrainerState, Transport
from ..replay.densify import Logs
from ..replay.execution import LiveExecution
from ..replication.agreement import raise_on_all_ranks
from ..resharding.generation import LiveLayout, LiveTensor
from ..snapshot.capturer import LiveCapturer
from ..snapshot.copy_engines import CopyEngine, ThreadEngine
from ..snapshot.memory_limit import BufferAllocator, ask_for_less, memory_report_of, segment_sizes, taken_bytes
from ..snapshot.page_locks import LOCKS
from ..snapshot.stream_engine import StreamEngine
from ..storage.memory import MemoryStore
from ..storage.system import local_cpus
from ..strategies import Job, Strategy
from ..types import OperatorId, Topology
from ..types.operators import scaled
from .opening import give_back, open_memories
from .process_info import ProcessInfo, drop_memory, memory_folder, node_memory


@dataclass(frozen=True)
class Training:
    """What is trained: live objects of Megatron-Core, and what belongs to no operator.

    Attributes:
        chunks: The model chunks of this rank, wrapped in DistributedDataParallel.
        optimizer: What core's `get_megatron_optimizer` gave for them.
        trainer: The state that belongs to no operator.
        tokens_per_iteration: Input tokens of the whole job.
        iterations: Iterations of the whole training.
        topk: Experts per token.
        passes: The shape of an iteration's passes; without it boundaries of pipeline stages are not logged.
        save: Folder that the loop saves checkpoints to.
    """

    chunks: Sequence[torch.nn.Module]
    optimizer: MegatronOptimizer
    trainer: TrainerState
    tokens_per_iteration: int
    iterations: int
    topk: int = 1
    passes: Passes | None = None
    save: str | None = None


class LiveState:
    """The training state of one rank, enumerated: how it is copied, restored, parked.

    Args:
        training: What is trained.
        topology: The layout of the job.
        rank: This rank.
        share: Which part of it this rank stores; None: all of it.

    Raises:
        UsageError: The model or its optimizer cannot be protected.
        IncompleteState: Not every byte of its state belongs to exactly one operator.

    Attributes:
        on_device: Whether it lies on a GPU.
        varying: Keys of what this rank stores in some snapshots and leaves to its peers in others.
    """

    varying: frozenset[str] = frozenset()

    def __init__(self, training: Training, topology: Topology, rank: int, share: Share | None = None) -> None:
        self._training, self._topology, self._rank, self._share = training, topology, rank, share
        self._engine: CopyEngine | None = None
        self._tables = [(table, table.to("cpu", copy=True)) for table in tables(training.chunks)]
        self.refresh()

    def refresh(self) -> None:
        """Enumerate it again, as is needed after a checkpoint was loaded in another way."""
        chunks, optimizer, trainer = self._training.chunks, self._training.optimizer, self._training.trainer
        # First: optimizers make their moments in the first step, and before that there is nothing to enumerate.
        allocate_optimizer_state(optimizer)
        allocate_quantization_state(chunks)
        tensors = every = state_tensors(chunks, optimizer, self._topology)
        check_complete(chunks, optimizer, tensors, quantization_tensors(chunks))
        # Made once: an engine has a thread or streams, and locked pages that take long to lock again.
        if self._engine is None:
            self.on_device = any(state.tensor.is_cuda for state in tensors)
            self._locks = LOCKS if self.on_device else None
            self._engine = StreamEngine(self._locks) if self.on_device else ThreadEngine()
        self.restorer, left_out = live_restorer(chunks, optimizer, self._topology), None
        if self._share is not None:
            tensors, self.restorer, left_out, self.varying = self._share(tensors)
        if self._locks is not None:
            self.restorer.locked_bytes = self._locks.reach
        self._stored = tuple(state for state in tensors if state.part)
        self.capturer = LiveCapturer(tensors, trainer, self._engine, left_out=left_out, varying=self.varying)
        stepped = stepped_parameters(chunks, optimizer, self._topology)
        self.live = LiveTensors(self.capturer, trainer, optimizer, every, stepped, self._locks)

    @property
    def unchanging(self) -> frozenset[OperatorId]:
        """Operators of which this rank has a part, none of which training changes."""
        return unchanging_operators(self._training.chunks, self._topology)

    def layout(self, facts: Mapping[str, Json]) -> LiveLayout:
        """What snapshots of this rank hold, for those that another layout made. facts: the layout of this job."""
        chunks, topology = self._training.chunks, self._topology
        tensors = [LiveTensor(one.record, RecordKey.parse(one.key), one.in_forward) for one in self._stored]
        scalars = self._training.trainer.scalars()
        model, grids = unwrap_model(chunks[0]), tensor_grids(chunks, topology)
        draws, tied = draws_in(chunks), ties_embeddings(model)
        return LiveLayout(self._rank, topology, facts, tuple(tensors), grids, scalars, draws, tied)

    def dtypes(self) -> Mapping[str, str]:
        """Of all of it, by the keys of its records."""
        return {one.key: one.record.dtype for one in self.live.tensors}

    def buckets(self, transport: Transport) -> str:
        """A digest of which elements of parameters each rank steps; a collective."""
        keys = sorted(one.key for one in self.live.tensors if one.field == "master")
        # Of so many bits that 64 hold the sum over all ranks.
        own = hashlib.sha256(f"{self._rank}: {keys}".encode()).digest()[:5]
        return f"{transport.total([int.from_bytes(own)])[0] % (1 << 32):08x}"

    def execution(self) -> Execution:
        """With what operators are frozen in a replay. Raises UsageError for models that cannot be."""
        chunks, optimizer = self._training.chunks, self._training.optimizer
        return LiveExecution(chunks, optimizer, operators_of_parameters(chunks, self._topology))

    def clear_counters(self) -> None:
        """Set what routers count to zero, and tables to what they were at first."""
        for state in state_tensors(self._training.chunks, self._training.optimizer, self._topology):
            if state.field == "buffer":
                state.tensor.zero_()
        for table, filled in self._tables:
            table.copy_(filled)

    @property
    def near_cpus(self) -> frozenset[int]:
        """The cores near the GPU that it lies on; none where it lies on the host, or the system does not tell."""
        if not self.on_device:
            return frozenset()
        found = torch.cuda.get_device_properties(torch.cuda.current_device())
        try:
            address = f"{found.pci_domain_id:04x}:{found.pci_bus_id:02x}:{found.pci_device_id:02x}.0"
        except AttributeError:  # releases of torch that do not know it
            return frozenset()
        return local_cpus(address)

    @property
    def engine(self) -> CopyEngine:
        """What copies it."""
        assert self._engine is not None
        return self._engine

    def close(self, *, keeps_memory: bool = False) -> None:
        """Copy nothing any more.

        Args:
            keeps_memory: Whether what snapshots were copied to stays mapped, for the next session of this process.
        """
        self.engine.close()
        # Pages are unlocked before somebody unmaps them: CUDA knows them by address only.
        if self._locks is not None and not keeps_memory:
            self._locks.release()

    @property
    def copies_embeddings(self) -> bool:
        """Whether the first and the last pipeline stage share their embedding."""
        return copies_embeddings(unwrap_model(self._training.chunks[0]))


# What a rank takes of its node's memory: snapshots, and beside them boundary logs and parked state.

log = logging.getLogger(__name__)


class RankMemory:
    """Of one session. Whatever says "a collective" is one over its control transport.

    Attributes:
        store: For snapshots, once `open` has returned.
        survivor: What logs and parks in the memory beside it; None where a recovery cannot be local.
        specs: Buffers of snapshots that the strategy asks for, as they are now.
        room: What the node has of it, measured again with each call; a collective.
    """

    store: MemoryStore
    survivor: Survivor | None = None

    def __init__(
        self,
        config: MoECheckpointConfig,
        place: ProcessInfo,
        job: Job,
        strategy: Strategy,
        state: LiveState,
        training: Training,
        control: Transport,
        owners: Sequence[int],
        clock: Clock,
    ) -> None:
        self._config, self._place, self._job, self._strategy = config, place, job, strategy
        self._state, self._training, self._control = state, training, control
        self._owners, self._clock = owners, clock
        self._topology, self._rank = job.topology, torch.distributed.get_rank()
        here = self._topology.ranks_by_node[self._topology.node(self._rank)]
        self._refusals, self._memories = 0, dict[str, MemoryStore]()
        self.room = partial(
            node_memory(config, place, here, ("slot", *("standby",) * self._may_be_local)).room, control
        )

    def open(self, layout: Mapping[str, Json]) -> None:
        """Take the memory; a collective. Local recovery needs pipeline stages, and a strategy that replays.

        Where the node has too little the strategy asks for less. Raises UsageError where it cannot, or must not.
        layout: of this job.
        """
        # Room, sizes and what strategies give up are the same on all ranks, which so make as many turns: each has
        # collectives.
        room = self.room()
        while True:
            sizes, survivor = self._wanted()
            taken = self._most(sizes)
            shortage = "" if self._strategy.gave_up else room.shortage(taken)
            if not shortage:
                if self._rank == 0:
                    log.info("memory: %s of %s per node (%d ranks)", scaled(taken * room.ranks), room, room.ranks)
                try:
                    near = self._state.near_cpus
                    memories = open_memories(self._config, self._place, sizes, self._control, near, layout)
                    break
                except NoRoom as error:
                    shortage = str(error)
            # Needed until training is protected without it: a start that is refused must leave it as it was.
            if "standby" not in sizes and self._drop_standby():
                room = self.room()
                continue
            if self._config.strict or not ask_for_less(self._strategy, shortage, speaks=self._rank == 0):
                raise UsageError(shortage)
            self._refusals += 1  # `fit_strategy` lets another strategy give up as much
        self._memories, self.store = memories, memories["slot"]
        for memory in memories.values():
            memory.lend(self._state.engine)  # a GPU's begins to lock pages on a thread, while training comes up
        self.survivor = survivor(memories) if survivor else None
        if self._rank == 0:
            log.info("%s", memory_report_of(self.specs, self._job, self._rank, len(self._owners), self.log_bytes()))

    def close(self, *, began: bool = True) -> None:
        """Release it; what is in it stays with the node. began: whether training was protected with it; else memory
        in which nothing is, no note of a replay either, goes back to the node, where it would be in the way of others.
        """
        for memory in self._memories.values():
            memory.close(keep_mapped=True) if began else give_back(memory)
        if not began:
            with suppress(OSError):  # others are still there
                (memory_folder(self._config) / self._place.node).rmdir()

    def _wanted(self) -> tuple[dict[str, list[int]], Callable[[Mapping[str, MemoryStore]], Survivor] | None]:
        """Bytes of segments by area, those of the rank that needs most, and what makes a survivor of them, if any."""
        config, passes, state = self._config, self._training.passes, self._state
        self.specs = self._strategy.buffer_specs()
        sizes = {"slot": segment_sizes(self.specs, state.capturer, self._control, self._owners)}
        if not self._may_be_local or passes is None:
            return sizes, None
        plan = passes.log_plan(self._topology, self._rank, self._strategy.logged)
        buffers = SurvivorBuffers.gathered(state.live, plan, passes, self._control)
        sizes["standby"] = buffers.sizes(plan)

        def survivor(memories: Mapping[str, MemoryStore]) -> Survivor:
            times_s = config.timeout_s, self._place.park_timeout_s
            return Survivor(memories["standby"], buffers, state.live, plan, passes, self._clock, *times_s)

        return sizes, survivor

    @property
    def _may_be_local(self) -> bool:
        """Whether logs and parked state are kept."""
        strategy, config = self._strategy, self._config
        keeps_logs = strategy.keeps_logs and strategy.replays and self._training.passes is not None
        return keeps_logs and self._topology.pp > 1 and config.recovery != "global"

    def _drop_standby(self) -> bool:
        """Give back what an earlier attempt logged and parked, where this one does neither; whether there was any."""
        dropped = raise_on_all_ranks(self._control, lambda: drop_memory(self._config, self._place, "standby"))
        return bool(self._control.total([int(dropped)])[0])

    def free_unused_standby(self) -> None:
        """Once all have restored: what an earlier attempt logged and parked goes, where this one does neither."""
        if self.survivor is None:
            with suppress(UsageError):  # of a process that still runs, which this slot's cannot be: it stays
                drop_memory(self._config, self._place, "standby")

    def _most(self, sizes: Mapping[str, Sequence[int]]) -> int:
        """The bytes of the rank that takes most."""
        # Negated, as the transport knows the least only.
        (least,) = self._control.least([-sum(map(taken_bytes, sizes.values()))])
        return -least

    def fit_strategy(self, strategy: Strategy) -> None:
        """Another strategy object takes over: what memory had no room for at the start it has none for now."""
        self._strategy = strategy
        for _ in range(self._refusals):
            strategy.buffers_refused()

    def make_room(self) -> None:
        """Fit the memory to what the strategy needs once it knows what it knew before a fault; a collective."""
        self.free_unused_standby()
        places = self.store, self._state.capturer, self._control, self._owners
        taker = BufferAllocator(*places, self.room, self.standby_bytes, self._config.strict)
        self.specs, _ = taker.fit(self._strategy, self.specs)

    def fit_logs(self) -> None:
        """Fit boundary logs to what the strategy wants now. To be called while no copy is under way."""
        assert self.survivor is not None
        self.survivor.resize_logs(self._strategy.logged)

    def log_bytes(self) -> int:
        """What boundary logs take of it."""
        return self.survivor.log_bytes if self.survivor is not None else 0

    def standby_bytes(self, logged: int) -> int:
        """What they and parked state would take with logs of `logged` iterations."""
        return self.survivor.standby_bytes(logged) if self.survivor is not None else 0

    def stage_source(self, logs: Logs) -> StageSource:
        """Stands for the neighbours of this rank's stage where it replays alone."""
        sends = self.survivor.sends if self.survivor is not None else ()
        return StageSource(logs, torch.cuda.current_device(), sends, f"stage {self._topology.stage(self._rank)}")
