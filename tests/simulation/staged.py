"""Simulated jobs with pipeline stages: boundary logs, parked survivors, and recoveries of the failed stages alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from simulated import SMALL, journal_of
from simulated_world.job import RankPorts, SimulatedJob, Start
from simulated_world.pipeline import TENSOR_BYTES, FakeBuffers, FakeFeed, FakeGradients, FakeRecorder, FakeStage
from simulated_world.rank import FakeExecution
from simulated_world.world import World

from megatron.core.dist_checkpointing.moe.config import MoECheckpointConfig
from megatron.core.dist_checkpointing.moe.local_recovery.boundary_logs import BoundaryLogs, LogPlan, LogPorts
from megatron.core.dist_checkpointing.moe.local_recovery.park import Parker, ParkPorts
from megatron.core.dist_checkpointing.moe.policy.lineage import Identity, Lineage, attempt_name, continued
from megatron.core.dist_checkpointing.moe.policy.parking import Cause, StepPhase, decide
from megatron.core.dist_checkpointing.moe.policy.placement import place_replicas
from megatron.core.dist_checkpointing.moe.ports import RANDOM, PeerLost
from megatron.core.dist_checkpointing.moe.recovery.recovery import Recovery, RecoveryOutcome, Waiting
from megatron.core.dist_checkpointing.moe.recovery.restoring import RecoveryPorts
from megatron.core.dist_checkpointing.moe.recovery.sources import KeptState
from megatron.core.dist_checkpointing.moe.replay.densify import Replay
from megatron.core.dist_checkpointing.moe.replication.replicator import Replicator
from megatron.core.dist_checkpointing.moe.snapshot.coordinator import Coordinator, Ports
from megatron.core.dist_checkpointing.moe.snapshot.memory_limit import fit_memory, gathered_sizes, segment_sizes
from megatron.core.dist_checkpointing.moe.snapshot.workers import ReplicationWorker
from megatron.core.dist_checkpointing.moe.strategies import STRATEGIES, BufferSpec, Job
from megatron.core.dist_checkpointing.moe.types import OperatorId, OperatorKind, Scope, StepJournal, Topology, expert

MICROBATCHES, PER_STAGE = 2, 2


def operators_of(stage: int) -> list[OperatorId]:
    """A layer with two experts."""
    kinds = (OperatorKind.NON_EXPERT, OperatorKind.ROUTER)
    return [*(OperatorId(stage, kind) for kind in kinds), expert(stage, 0), expert(stage, 1)]


def shards(rank: int) -> dict[OperatorId, int]:
    """Every rank of a stage has one of its experts, and a part of all else."""
    stage, within = divmod(rank, PER_STAGE)
    owned = [one for one in operators_of(stage) if not one.is_expert or one.expert == within]
    return {operator: 8 + at for at, operator in enumerate(owned)}


@dataclass
class Seen:
    """What happened in the recoveries of a job: by start, what each rank did. iterations: each one that a rank ran
    again. refused: starts at which too many copies
    proved damaged."""

    outcomes: list[tuple[int, int, RecoveryOutcome]] = field(default_factory=list)
    replayed: list[tuple[int, int, range]] = field(default_factory=list)
    waited: list[tuple[int, int]] = field(default_factory=list)
    rolled: list[tuple[int, int]] = field(default_factory=list)
    again: list[int] = field(default_factory=list)
    refused: list[int] = field(default_factory=list)
    parked: list[tuple[int, int, int | None, str]] = field(default_factory=list)
    iterations: list[tuple[int, int, int]] = field(default_factory=list)

    def scopes(self) -> list[Scope]:
        """Of each recovery, in order."""
        return [outcome.plan.scope for _, rank, outcome in self.outcomes if rank == 0]


@dataclass
class Staged:
    """A job with `stages` pipeline stages of two ranks each under sparse windows; `between` as in Simulation."""

    stages: int = 2
    window: int = 3
    iterations: int = 12
    recovery: str = "auto"
    clips: bool = True
    nodes: Callable[[int], tuple[int, ...]] = lambda start: ()
    wipe: bool = False
    replicas: int = 1
    between: Callable[[SimulatedJob], None] | None = None
    notice_s: float = 0.05
    seen: Seen = field(default_factory=Seen)
    job: SimulatedJob | None = None

    @property
    def ranks(self) -> int:
        return self.stages * PER_STAGE

    @property
    def config(self) -> MoECheckpointConfig:
        return MoECheckpointConfig(
            strategy="sparse", window=str(self.window), replicas=self.replicas, timeout_s=60.0, recovery=self.recovery
        )

    def topology(self, start: int) -> Topology:
        nodes = self.nodes(start) or tuple(rank % 2 for rank in range(self.ranks))
        return Topology(self.ranks, pp=self.stages, ep=PER_STAGE, nodes=nodes)

    def run(self, seed: int, **crash: object) -> tuple[World, list[Start]]:
        """Train to the end; all state is compared with what it must be after each recovery, and at the end."""
        world = World(seed, **crash)  # type: ignore[arg-type]
        job = self.job = SimulatedJob(
            world, self.ranks, shards, SMALL,
            nodes=lambda start: self.topology(start).nodes or (), wipe=self.wipe, notice_s=self.notice_s, max_starts=14,
        )  # fmt: skip
        starts = job.run(self._make)
        for rank, model in job.models.items():
            assert model.iteration == self.iterations, f"rank {rank} ended at {model.iteration}\n{world.story()}"
            assert not model.wrong(), f"rank {rank}: {model.wrong()}\n{world.story()}"
        return world, starts

    def _make(self, rank: int, ports: RankPorts) -> Callable[[], None]:
        if self.between is not None and rank == 0 and ports.start and self.job is not None:
            self.between(self.job)
        return StagedRank(self, rank, ports).main


class StagedRank:
    """One rank in one start, as Session and the training loop go about it."""

    def __init__(self, job: Staged, rank: int, ports: RankPorts) -> None:
        self._of, self._rank, self._ports, self._seen = job, rank, ports, job.seen
        self._control, self._data = ports.transport("control", 20.0), ports.transport("data", 5.0)
        self._train = ports.transport("train", 30.0)
        topology = self._topology = job.topology(ports.start)
        operators = tuple(sorted(one for stage in range(job.stages) for one in operators_of(stage)))
        sizes = gathered_sizes(ports.capturer, self._control, of_all=True)
        self._job = Job(job.config, operators, topology, 64, job.iterations, topk=2, sizes=sizes)
        self._strategy = STRATEGIES["sparse"](self._job)
        placement = place_replicas(topology, job.replicas)
        self._peers, self._owners = placement.peers[rank], placement.kept_by[rank]
        self._identity = Identity("job", {"world_size": job.ranks}, ports.capturer.operators, "sparse")
        self._rooms: tuple[BufferSpec, ...] | None = None
        self._make_room()
        self._recorder = FakeRecorder(ports.world)
        self._stage = FakeStage(ports.model, topology, self._train, self._recorder)
        self._lookback = max(self._strategy.lookback, 1)
        plan = LogPlan(topology, rank, (TENSOR_BYTES,), "uint8", self._lookback)
        self._log_plan, self._logs_lane = plan, ports.lane("logs")
        self._gradients, self._buffers = FakeGradients(ports.model), FakeBuffers(ports.model)
        self._phase, self._coordinator = StepPhase.IDLE, None
        self._whole, self._journal = 0, StepJournal()
        self._attend(())
        ports.standby.resize([*self._parker.sizes(), *plan.sizes(MICROBATCHES)])

    def main(self) -> None:
        """Recover or begin again, then train to the end; park when a peer is lost."""
        try:
            self._train_on(self._recovered())
        except PeerLost:
            self._park()
            raise

    def _attend(self, timeline: Lineage) -> None:
        ports, identity = self._ports, replace(self._identity, timeline=timeline)
        self._logs = BoundaryLogs(
            self._log_plan, identity,
            LogPorts(store=ports.standby, lane=self._logs_lane, recorder=self._recorder, clock=ports.clock),
            timeout_s=10.0,
        )  # fmt: skip
        self._parker = Parker(
            ParkPorts(
                store=ports.standby, capturer=ports.capturer, trainer=ports.trainer, clock=ports.clock,
                rank=self._rank, facts=identity.facts, moving=self._buffers,
                gradients=self._gradients,
            )
        )  # fmt: skip

    def _train_on(self, outcome: RecoveryOutcome | None) -> None:
        ports, model, train = self._ports, self._ports.model, self._train
        timeline = continued(outcome.timeline if outcome else (), self._attempt, model.iteration)
        coordinator = self._coordinator = self._protected(timeline)
        if outcome is not None:
            coordinator.resume(outcome.restored)
        self._attend(timeline)
        self._stands(model.iteration, self._journal)
        for iteration in range(model.iteration + 1, self._of.iterations + 1):
            self._logs.begins(iteration, MICROBATCHES)
            self._phase = StepPhase.PASSES
            self._stage.run(MICROBATCHES)
            self._with_stage(b"gradients")
            self._phase = StepPhase.REDUCED
            coordinator.before_optimizer()
            if self._of.clips:
                train.total([1])  # the norm of all gradients
            self._phase = StepPhase.UPDATING
            model.step()
            self._phase, self._journal = StepPhase.UPDATED, journal_of(self._rank, iteration)
            self._with_stage(b"weights")
            self._stands(iteration, self._journal)
            coordinator.step_end(iteration, self._journal)
            self._logs.on_commit(iteration, self._journal, ports.trainer.scalars(), coordinator.oldest_base)
            self._parker.keep_only(None)
        coordinator.shutdown()

    def _with_stage(self, data: bytes) -> None:
        """What data-parallel ranks exchange: gradients before a step, weights after it."""
        for other in self._topology.stage_ranks(self._topology.stage(self._rank)):
            if other != self._rank:
                mine = self._train.send(other, data)
                self._train.receive(other, memoryview(bytearray(len(data)))).wait()
                mine.wait()

    def _stands(self, iteration: int, journal: StepJournal) -> None:
        self._whole, self._journal, self._phase = iteration, journal, StepPhase.IDLE
        self._parker.note(iteration)

    def _park(self) -> None:
        if self._coordinator is not None:
            self._coordinator.failure()
        self._train.drop("this rank hangs up")
        decision = decide(self._phase, Cause.PEER_LOST, self._whole)
        self._logs.drain(5.0)
        scalars = {"journal": self._journal.to_data(), "strategy": self._strategy.to_data()}
        done = self._parker.park(decision, scalars, 5.0)
        self._seen.parked.append((self._ports.start, self._rank, done.iteration, done.why))

    def _recovered(self) -> RecoveryOutcome | None:
        ports, model = self._ports, self._ports.model
        self._execution = FakeExecution(model, ports.world)
        recovery = Recovery(
            self._job,
            self._strategy,
            RecoveryPorts(
                memory=ports.memory, persistent=None, transport=self._data, restorer=ports.restorer,
                trainer=ports.trainer, clock=ports.clock,
                execution=self._execution, make_room=self._make_room, standby=ports.standby, boundary=FakeFeed,
                kept=ports.kept,
            ),
            self._identity,
            self._owners,
        )  # fmt: skip
        planned = recovery.look() is not None
        self._attempt = attempt_name(recovery.next_attempt, str(ports.start))
        outcome = self._carried_out(recovery) if planned else None
        if outcome is None:
            if planned:
                self._seen.refused.append(ports.start)
            assert planned or (model.iteration == 0 and not model.wrong())
            model.build_again()
            recovery.discard()
            self._strategy = STRATEGIES["sparse"](self._job)
            self._seen.again.append(ports.start)
            return None
        model.iteration = outcome.plan.target
        assert not model.wrong(), (self._rank, outcome.plan, model.wrong(), ports.world.story())
        self._seen.outcomes.append((ports.start, self._rank, outcome))
        self._journal = journal_of(self._rank, outcome.plan.target)
        return outcome

    def _carried_out(self, recovery: Recovery) -> RecoveryOutcome | None:
        done, model, target = recovery.carry_out(), self._ports.model, recovery.plan.target if recovery.plan else 0
        if done is None or isinstance(done, RecoveryOutcome):
            return done
        self._attend(recovery.timeline)
        if isinstance(done, Waiting):
            self._seen.waited.append((self._ports.start, self._rank))
            if done.roll is not None:
                self._roll(done)
        else:
            self._replay(done, recovery)
        assert model.iteration == target
        self._stands(target, journal_of(self._rank, target))
        self._phase = StepPhase.REJOINING
        return recovery.finish(done if isinstance(done, Replay) else None)

    def _roll(self, waiting: Waiting) -> None:
        roll = waiting.roll
        assert roll is not None and roll.journal.grad_norm == journal_of(self._rank, roll.iteration).grad_norm
        self._phase = StepPhase.ROLLING_FORWARD
        keys = [one.key for one in roll.gradients.manifest.layout.fields if one.key != FakeGradients.KEY]
        assert any(key.startswith(RANDOM) for key in keys)
        self._gradients.roll_forward(roll.gradients.read, keys)
        self._ports.trainer.restore_common(roll.trainer)
        self._seen.rolled.append((self._ports.start, self._rank))

    def _replay(self, replay: Replay, recovery: Recovery) -> None:
        self._phase, model, job = StepPhase.REPLAYING, self._ports.model, self._of.job
        assert job is not None
        if replay.alone:
            job.finishing.add(self._rank)
        replay.begin()
        for iteration in replay.iterations:
            assert (replay.iteration, replay.journal.grad_norm) == (iteration, iteration / 8)
            logs_again = iteration in replay.unlogged
            if logs_again:
                self._logs.begins(iteration, MICROBATCHES)
            feed = replay.boundary
            assert feed is None or isinstance(feed, FakeFeed)
            self._stage.run(MICROBATCHES, feed)
            model.step()
            recorded = replay.journal
            replay.stepped(journal_of(self._rank, iteration))
            if logs_again:
                self._logs.on_commit(iteration, recorded, self._ports.trainer.scalars(), None)
            self._seen.iterations.append((self._ports.start, self._rank, iteration))
            if replay.is_interrupted(job.is_called_off):
                self._execution.thaw()
                job.kept[self._rank] = model, KeptState(replay=recovery.interrupted(replay))
                raise PeerLost("other stages lost a rank")
        job.finishing.discard(self._rank)
        self._logs.drain(5.0)
        self._seen.replayed.append((self._ports.start, self._rank, replay.iterations))

    def _protected(self, timeline: Lineage) -> Coordinator:
        ports, identity = self._ports, replace(self._identity, timeline=timeline)
        replicator = Replicator(self._data, self._peers, self._owners) if self._of.replicas else None
        worker = ReplicationWorker(
            ports.memory, replicator, self._data, ports.clock, identity, patience_s=2.5, owners=self._owners
        )
        used = Ports(
            memory=ports.memory, capturer=ports.capturer, trainer=ports.trainer, control=self._control,
            executor=ports.lane, clock=ports.clock, owners=self._owners, buffer_specs=self._rooms,
        )  # fmt: skip
        return Coordinator(self._job, self._strategy, used, worker, None)

    def _make_room(self) -> None:
        rooms = self._strategy.buffer_specs()
        if rooms != self._rooms:
            sizes = segment_sizes(rooms, self._ports.capturer, self._control, self._owners)
            done, _ = fit_memory(self._ports.memory, sizes, self._control)
            assert done
            self._rooms = rooms
