"""What a rank does besides snapshots so that a fault costs only the stages that it struck (MoEvement 3.4, App. A).

When a process dies, those that are left hear of it in a collective, end, and are started again with the new one. Their
state is lost with them although it was whole. A survivor therefore keeps three things in memory that outlives it, in an
area of its own beside the snapshots:

- In every iteration, what it sends over stage boundaries (`BoundaryLogs`), so that a neighbouring stage that lost its
  state can replay iterations without this one. Logs reach back to the oldest window from which a replay may start.
- When it is interrupted, its complete live state (`Parker`), so that it need not replay at all. What the passes of the
  next iteration change, such as random states, was noted before them and is put back.
- Beside it, where the interruption came between the reduction of gradients and the optimizer's step, these gradients: a
  peer that has made the step knows the norm and the verdict, and with them this rank can make it later, alone.

`StepGuard` says which of these is whole: it follows the optimizer's step from inside. All methods but `park` are called
between two phases of training by the thread that trains; the copies of logs, and their sealing, run beside it.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from megatron.core import parallel_state
from megatron.core.optimizer import MegatronOptimizer

from ..errors import MoECheckpointError, format_error
from ..megatron_state.operators import StateTensor
from ..megatron_state.optimizer_state import SteppedTensor
from ..policy.lineage import Identity
from ..policy.parking import Cause, ParkingBudget, StepPhase
from ..policy.rollback import tensor_shape
from ..ports import RANDOM, Capturer, Clock, Json, SnapshotId, StoreFailure, TrainerState, Transport
from ..recovery.recovery import RollForward
from ..recovery.sources import KeptState
from ..snapshot.copy_engines import ThreadEngine
from ..snapshot.memory_limit import taken_bytes
from ..snapshot.page_locks import PageLocks
from ..snapshot.stream_engine import StreamEngine
from ..snapshot.workers import ThreadExecutor
from ..storage.manifest import HURRIED_THREADS, checksum_bytes_per_s
from ..storage.memory import MemoryStore
from ..types import PARKED, StepJournal, Topology
from .boundary_copies import BoundaryRecorder, LogPlan
from .boundary_logs import BoundaryLogs, LogPorts
from .communicator import BoundaryCommunicator
from .park import Parker, ParkPorts, park_sizes
from .step_guard import LiveBuffers, LiveGradients, Prepared, StepGuard, roll_forward

log = logging.getLogger(__name__)

DRAIN_TIMEOUT_S = 5.0
"""How much of it may be spent on boundary logs that are being sealed."""


@dataclass(frozen=True)
class Passes:
    """The shape of the passes of an iteration: tokens of a sample, samples of a microbatch, microbatches of a rank.

    config: Megatron-Core's, of the model.
    """

    config: Any
    seq_length: int
    micro_batch_size: int
    microbatches: int

    def log_plan(self, topology: Topology, rank: int, lookback: int) -> LogPlan:
        """What the boundary logs of this rank hold.

        Args:
            topology: Of the job.
            rank: This rank.
            lookback: Of how many iterations logs are kept.
        """
        config, parallel = self.config, bool(self.config.sequence_parallel)
        sizes = self.seq_length, self.micro_batch_size, config.hidden_size
        shape = tensor_shape(topology, *sizes, sequence_parallel=parallel)
        dtype = str(config.pipeline_dtype).removeprefix("torch.")
        group = config.microbatch_group_size_per_vp_stage if topology.vpp > 1 else None
        return LogPlan(topology, rank, shape, dtype, lookback, group)


@dataclass(frozen=True)
class LiveTensors:
    """The live state of a rank: what copies it, its tensors, and the master weights that its optimizers step.

    locks: of the memory that it is copied to; None where no GPU copies it.
    """

    capturer: Capturer
    trainer: TrainerState
    optimizer: MegatronOptimizer
    tensors: Sequence[StateTensor]
    stepped: Sequence[SteppedTensor]
    locks: PageLocks | None = None


@dataclass(frozen=True)
class SurvivorBuffers:
    """Bytes of segments, alike on all ranks: of those that hold parked state, and of one for an iteration's logs."""

    parked: tuple[int, ...]
    logged: int

    @classmethod
    def gathered(cls, live: LiveTensors, plan: LogPlan, passes: Passes, transport: Transport) -> SurvivorBuffers:
        """Those of the rank that needs most; a collective.

        Args:
            live: The state of this rank.
            plan: What its boundary logs hold.
            passes: The shape of an iteration's passes.
            transport: To all ranks.

        Raises:
            PeerLost: A rank did not answer.
        """
        gradients = LiveGradients(live.optimizer, live.stepped, Prepared)
        state = park_sizes(live.capturer, live.trainer, LiveBuffers(live.tensors), gradients)
        own = [*state, plan.layout(passes.microbatches).nbytes]
        *parked, logged = (-least for least in transport.least([-nbytes for nbytes in own]))
        return cls(tuple(parked), logged)

    def sizes(self, plan: LogPlan) -> list[int]:
        """Of all segments that the store needs."""
        return [*self.parked, *[self.logged] * plan.segments]


@dataclass
class _Progress:
    """The newest whole iteration, how it came out, the newest reported one, and what passes of the next one tell."""

    iteration: int = -1
    journal: StepJournal = field(default_factory=StepJournal)
    reported: int = -1
    passed: StepJournal = field(default_factory=StepJournal)


class Survivor:
    """Follows training, to be ready for the loss of a peer.

    Sequence: `set_lineage` when an attempt begins, or replays; then in each iteration `passes`, `reduced`, a block of
    `stepping`, `on_state_consistent`, `on_commit` and `reported`; `park` when a peer is lost.

    Args:
        store: Keeps boundary logs and parked state, and nothing else, in segments of these `buffers`.
        live: May be replaced by that of another state between two attempts.
        plan: Of the logs.
        passes: What the logs are made of.
        timeout_s: The longest wait for copies of logs.
        park_timeout_s: How long parking may take.

    Attributes:
        kept: What live state is since it was parked.
    """

    def __init__(
        self,
        store: MemoryStore,
        buffers: SurvivorBuffers,
        live: LiveTensors,
        plan: LogPlan,
        passes: Passes,
        clock: Clock,
        timeout_s: float,
        park_timeout_s: float,
    ) -> None:
        self.store, self._buffers, self.live, self._clock = store, buffers, live, clock
        self._passes, self._plan, self._timeout_s = passes, plan, timeout_s
        self._park_timeout_s = min(timeout_s, park_timeout_s)
        group = parallel_state.get_pipeline_model_parallel_group()
        self.communicator = BoundaryCommunicator(group, passes.config)
        self.communicator.connect()  # while all ranks are here: a replay may be the first to send, without some of them
        self._on_device = any(state.tensor.is_cuda for state in live.tensors)
        engine = ThreadEngine("boundary-copy") if live.locks is None else StreamEngine(live.locks, "boundary-copy")
        self._recorder = BoundaryRecorder(engine)
        self.communicator.sink = self._recorder
        self._guard, self._lane = StepGuard(live.optimizer), ThreadExecutor("logs")
        self._identity: Identity | None = None
        self._logs: BoundaryLogs | None = None
        self._parker: Parker | None = None
        self._progress, self._began, self._refused = _Progress(), 0, 0
        self._rolled: tuple[int, StepJournal] | None = None
        self.kept: KeptState | None = None

    def set_lineage(self, identity: Identity, iteration: int, phase: StepPhase = StepPhase.IDLE) -> None:
        """From here on what is kept belongs to this attempt.

        Args:
            identity: Of the snapshots of this attempt.
            iteration: After which the rank stands, or begins to replay.
            phase: IDLE where it trains, else what it does on the way back.
        """
        self._identity = identity
        self._logs = self._logs_of(identity)
        self._parker = Parker(self._park_ports(identity))
        if phase in (StepPhase.REPLAYING, StepPhase.ROLLING_FORWARD):
            self._guard.enter(phase)
            return
        self._guard.stands(iteration, phase)
        self._began = iteration
        if iteration > self._progress.iteration:  # it was loaded: how it came out is not known here
            self._progress.iteration = self._progress.reported = iteration
        self._parker.note(iteration)

    def _logs_of(self, identity: Identity) -> BoundaryLogs:
        self.settle()
        ports = LogPorts(store=self.store, lane=self._lane, recorder=self._recorder, clock=self._clock)
        return BoundaryLogs(self._plan, identity, ports, timeout_s=self._timeout_s)

    def passes(self, iteration: int, *, logged: bool = True) -> None:
        """Before the passes of an iteration.

        Args:
            iteration: The iteration.
            logged: Whether what this rank sends in it is logged.
        """
        assert self._logs is not None
        if logged:
            self._logs.begins(iteration, self._passes.microbatches)
        self.kept = None  # from here on live state is that of no snapshot
        self._guard.passes(iteration)

    def reduced(self) -> None:
        """The passes have ended; see `StepGuard.reduced`."""
        assert self._logs is not None
        self._logs.passed()
        self._guard.reduced(_marked_stream if self._on_device else None)
        self._progress.passed = StepJournal()

    def interrupt(self, *, force: bool) -> bool:
        """See `StepGuard.interrupt`; called by another thread than the one that trains."""
        return self._guard.interrupt(force=force)

    def await_update(self) -> None:
        """See `StepGuard.await_update`."""
        self._guard.await_update()

    def stepping(self, iteration: int, passed: StepJournal) -> AbstractContextManager[None]:
        """See `StepGuard.stepping`; `passed` is what the passes of the iteration tell of it."""
        self._progress.passed = passed
        return self._guard.stepping(iteration)

    def on_state_consistent(self, iteration: int, journal: StepJournal) -> None:
        """The state after an iteration is complete.

        Args:
            iteration: The iteration.
            journal: How its step came out.
        """
        assert self._parker is not None
        self._progress.iteration, self._progress.journal = iteration, journal
        self._parker.note(iteration)
        self._guard.stands(iteration)

    def on_commit(self, iteration: int, journal: StepJournal, oldest_base: int | None) -> None:
        """All that follows the step of an iteration is done.

        Args:
            iteration: The iteration.
            journal: How its step came out.
            oldest_base: The iteration from whose state the earliest replay may start; None while there is none.
        """
        assert self._parker is not None and self._logs is not None
        self._logs.on_commit(iteration, journal, self.live.trainer.scalars(), oldest_base)
        self._parker.note(iteration)
        # The state that training continued from spares the next replay what came before it, until a window is kept that
        # began later.
        superseded = oldest_base is not None and oldest_base > self._began
        try:
            self._parker.keep_only(None if superseded else self._began)
        except StoreFailure as error:
            log.warning("cannot free parked state, its memory stays in use: %s", error)

    def replayed(self, iteration: int, journal: StepJournal, *, logged: bool) -> None:
        """An iteration was run again.

        Args:
            iteration: The iteration.
            journal: How it came out, as recorded.
            logged: Whether it was logged again, in place of a log that was lost.
        """
        assert self._logs is not None
        self._progress.iteration, self._progress.journal = iteration, journal
        if logged:
            self._logs.on_commit(iteration, journal, self.live.trainer.scalars(), None)

    def reported(self, iteration: int) -> None:
        """The numbers of an iteration were written down."""
        self._progress.reported = iteration

    def standby_bytes(self, logged: int) -> int:
        """What the store takes with logs of so many iterations; never less than it has."""
        return taken_bytes(self._buffers.sizes(replace(self._plan, lookback=max(logged, self._plan.lookback))))

    def resize_logs(self, lookback: int) -> None:
        """Keep the logs of more iterations from here on; between two iterations, while no snapshot is under way.

        Args:
            lookback: Of how many; nothing happens where they are no more than before.
        """
        if lookback <= self._plan.lookback or lookback == self._refused or self._identity is None:
            return
        plan = replace(self._plan, lookback=lookback)
        try:
            self._recorder.settle()
            self.store.resize(self._buffers.sizes(plan))
        except MoECheckpointError as error:
            failed = "boundary logs of %d iterations find no room, so faults roll back all stages: %s"
            log.error(failed, lookback, error)
            self._refused = lookback  # said once
            return
        self._plan = plan
        if self._logs is not None:  # what it records stays: the window that begins now needs it
            self._logs.fit(plan)

    def park(self, cause: Cause, strategy: Json, times: Json) -> str:
        """Put aside what is whole, as far as it is worth it. Never raises.

        Args:
            cause: Why training was interrupted.
            strategy: Its state, for the manifest.
            times: What this process passed so far, for the manifest.

        Returns:
            The parts that are missing, in words; empty where none is.
        """
        self.kept = None  # where this parks nothing, what an earlier recovery parked is not what live state is
        if self._parker is None or self._logs is None:
            return "nothing was parked: training had not begun"
        decision, progress = self._guard.decide(cause), self._progress
        until_s = self._clock.now_s() + self._park_timeout_s
        missing = self._logs.drain(DRAIN_TIMEOUT_S) if cause is not Cause.OWN_ERROR else ""
        journal = progress.journal
        if decision.iteration is not None and decision.iteration != progress.iteration:
            # The step was taken, but what follows it was not reached.
            stepped = self._guard.stepped
            assert stepped is not None
            journal = replace(progress.passed, grad_norm=stepped.grad_norm, skipped=not stepped.updated)
        loss = progress.passed.lm_loss
        try:
            data, next_loss = journal.to_data(), None if loss is None else float(loss)
        except (RuntimeError, TimeoutError) as error:
            return f"nothing was parked: the outcome of the step cannot be read: {format_error(error)}"
        scalars: dict[str, Json] = {
            "journal": data,
            "strategy": strategy,
            "times": times,
            "reported": progress.reported,
            "next_loss": next_loss,
        }
        done = self._parker.park(decision, scalars, max(1.0, until_s - self._clock.now_s()))
        if done.iteration is not None:
            self.kept = KeptState(done.iteration, self._parked(done.iteration).get("timeline"))
        return "; ".join(filter(None, (done.why, missing)))

    def roll_forward(self, roll: RollForward) -> None:
        """Make the step of which this rank kept the gradients: afterwards it stands where its peers do.

        A part of the state, compute weights, is derived when all rejoin. Raises UnreadableCheckpoint.
        """
        live, read = self.live, roll.gradients.read
        roll_forward(live.optimizer, live.stepped, read, roll.journal)
        LiveBuffers(live.tensors).restore(read)
        names = [key for key in roll.gradients.manifest.by_key if key.startswith(RANDOM)]
        scalars = live.trainer.scalars()
        live.trainer.restore(scalars, {key.removeprefix(RANDOM): read(key) for key in names})
        live.trainer.restore_common(roll.trainer)
        parts, theirs = (len(dict[str, Any](one).get("grad_scalers", ())) for one in (scalars, roll.trainer))
        if roll.journal.skipped and roll.journal.grad_norm is None and theirs < parts:
            log.warning(
                "rank %d: iteration %d overflowed, maybe in dense layers only, but the loss scale of experts counts it:"
                " the rank whose trainer state is taken over has no experts",
                self._plan.rank,
                roll.iteration,
            )
        before = self._parked(roll.iteration - 1)
        self._progress.iteration = roll.iteration
        self._progress.journal = replace(roll.journal, lm_loss=before.get("next_loss"))
        self._rolled = roll.iteration, self._progress.journal

    def park_again(self, strategy: Json) -> str:
        """Park the state to which this rank has come by itself, in place of one that an earlier attempt came to: the
        next replay begins from it. What went wrong, in words."""
        assert self._parker is not None
        try:
            self._parker.keep_only(None)
        except StoreFailure as error:
            return str(error)
        return self.park(Cause.PEER_LOST, strategy, {})

    def unreported(self, iteration: int) -> StepJournal | None:
        """How an iteration came out that this rank parked before its numbers were written down."""
        if self._rolled is not None and self._rolled[0] == iteration:
            return self._rolled[1]
        scalars = self._parked(iteration)
        if scalars.get("reported", iteration) >= iteration:
            return None
        return StepJournal.from_data(scalars["journal"])

    def _parked(self, iteration: int) -> dict[str, Any]:
        """What the manifest of this rank's parked state says; nothing where there is none."""
        try:
            with self.store.open(SnapshotId(iteration, self._plan.rank, PARKED)) as reader:
                return dict(reader.manifest.facts.scalars)
        except MoECheckpointError:
            return {}

    @property
    def log_bytes(self) -> int:
        """Of the boundary logs that are kept at most, the Y of MoEvement Table 6."""
        return sum(self._plan.sizes(self._passes.microbatches))

    def parking_budget(self) -> ParkingBudget:
        """How long parking would take, while no copy is under way."""
        return ParkingBudget(
            sum(self._buffers.parked),
            self.live.capturer.bandwidth_bytes_per_s,
            checksum_bytes_per_s(HURRIED_THREADS),
            self._park_timeout_s,
        )

    @property
    def sends(self) -> tuple[str, ...]:
        """The keys of what this rank sends in an iteration, those of each direction in the order of sending."""
        return self._plan.sent(self._passes.microbatches)

    def settle(self) -> None:
        """Bring what is under way to its end."""
        if self._logs is not None:
            self._logs.abandon()
            self._logs.drain(self._timeout_s)

    def _park_ports(self, identity: Identity) -> ParkPorts:
        live, guard = self.live, self._guard
        gradients = LiveGradients(live.optimizer, live.stepped, lambda: guard.prepared)
        moving, rank = LiveBuffers(live.tensors), self._plan.rank
        return ParkPorts(
            store=self.store,
            capturer=live.capturer,
            trainer=live.trainer,
            clock=self._clock,
            rank=rank,
            facts=identity.facts,
            moving=moving,
            gradients=gradients,
        )

    def end(self, *, keep_memory: bool) -> None:
        """Training has ended: what is stored stays for another start, or is given back to the node."""
        self.settle()
        self._recorder.close()
        self._lane.shutdown(wait=False, cancel_futures=True)
        if keep_memory:
            self.store.close()
        else:
            self.store.remove()


def _marked_stream() -> torch.cuda.Event:
    """The point up to which the current stream, which waits for reductions of gradients and norm, was given work."""
    marker = torch.cuda.Event()
    marker.record()
    return marker
