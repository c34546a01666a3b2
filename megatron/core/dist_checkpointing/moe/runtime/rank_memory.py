"""What a rank takes of its node's memory: snapshots, and beside them boundary logs and parked state."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial

import torch

from ..config import MoECheckpointConfig
from ..errors import UsageError
from ..local_recovery.stage_source import StageSource
from ..local_recovery.survivor import Survivor, SurvivorBuffers
from ..ports import Clock, NoRoom, Transport
from ..replay.densify import Logs
from ..replication.agreement import raise_on_all_ranks
from ..snapshot.memory_limit import BufferAllocator, ask_for_less, memory_report_of, segment_sizes, taken_bytes
from ..storage.memory import MemoryStore
from ..strategies import Job, Strategy
from ..types.operators import scaled
from .live_state import LiveState, Training
from .opening import open_memories, parallel_layout
from .process_info import ProcessInfo, drop_memory, memory_folder, node_memory

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
        self.room, self._refusals = partial(node_memory(config, place).room, control), 0
        self._memories: Mapping[str, MemoryStore] = {}

    def open(self) -> None:
        """Take the memory; a collective. Local recovery needs pipeline stages, and a strategy that replays.

        Where the node has too little the strategy asks for less. Raises UsageError where it cannot, or must not.
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
                    layout = parallel_layout(self._topology, self._config.shard)
                    near = self._state.near_cpus
                    memories = open_memories(self._config, self._place, sizes, self._control, near, layout)
                    break
                except NoRoom as error:
                    shortage = str(error)
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
        in which nothing is goes back to the node, where it would be in the way of other jobs."""
        for memory in self._memories.values():
            keeps = began or bool(memory.snapshots().sealed)
            memory.close(keep_mapped=began) if keeps else memory.remove()
        if not began:
            with suppress(OSError):  # others are still there
                (memory_folder(self._config) / self._place.node).rmdir()

    def _wanted(self) -> tuple[dict[str, list[int]], Callable[[Mapping[str, MemoryStore]], Survivor] | None]:
        """Bytes of segments by area, those of the rank that needs most, and what makes a survivor of them, if any."""
        config, passes, state = self._config, self._training.passes, self._state
        self.specs = self._strategy.buffer_specs()
        sizes = {"slot": segment_sizes(self.specs, state.capturer, self._control, self._owners)}
        may_be_local = self._strategy.keeps_logs and self._topology.pp > 1 and config.recovery != "global"
        if not (self._strategy.replays and may_be_local) or passes is None:
            raise_on_all_ranks(self._control, lambda: drop_memory(config, self._place, "standby"))
            return sizes, None
        plan = passes.log_plan(self._topology, self._rank, self._strategy.logged)
        buffers = SurvivorBuffers.gathered(state.live, plan, passes, self._control)
        sizes["standby"] = buffers.sizes(plan)

        def survivor(memories: Mapping[str, MemoryStore]) -> Survivor:
            times_s = config.timeout_s, self._place.park_timeout_s
            return Survivor(memories["standby"], buffers, state.live, plan, passes, self._clock, *times_s)

        return sizes, survivor

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
        places = self.store, self._state.capturer, self._control, self._owners
        taker = BufferAllocator(*places, self.room, self.standby_bytes)
        self.specs, _ = taker.fit(self._strategy, self.specs)

    def fit_logs(self) -> None:
        """Fit boundary logs to what the strategy wants now. To be called while no copy is under way."""
        assert self.survivor is not None
        self.survivor.resize_logs(self._strategy.logged)

    def log_bytes(self) -> int:
        """What boundary logs and parked state take of it."""
        return self.survivor.log_bytes if self.survivor is not None else 0

    def standby_bytes(self, logged: int) -> int:
        """What they would take with logs of `logged` iterations."""
        return self.survivor.standby_bytes(logged) if self.survivor is not None else 0

    def stage_source(self, logs: Logs) -> StageSource:
        """Stands for the neighbours of this rank's stage where it replays alone."""
        sends = self.survivor.sends if self.survivor is not None else ()
        return StageSource(logs, torch.cuda.current_device(), sends, f"stage {self._topology.stage(self._rank)}")
