"""Whole simulated jobs under the real coordinator, tracker and recovery."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial

from simulated_world.job import RankPorts, SimulatedJob, Start
from simulated_world.model import FakeModel, expected_bytes, spread
from simulated_world.network import Network
from simulated_world.rank import FakeExecution
from simulated_world.world import World

from megatron.core.dist_checkpointing.moe.config import MoECheckpointConfig
from megatron.core.dist_checkpointing.moe.policy.lifecycle import ProtectionState, WindowState
from megatron.core.dist_checkpointing.moe.policy.lineage import Identity, Lineage, attempt_name, continued
from megatron.core.dist_checkpointing.moe.policy.placement import place_replicas
from megatron.core.dist_checkpointing.moe.recovery.recovery import Recovery, RecoveryOutcome
from megatron.core.dist_checkpointing.moe.recovery.restoring import RecoveryPorts
from megatron.core.dist_checkpointing.moe.replay.densify import Replay
from megatron.core.dist_checkpointing.moe.replication.replicator import Replicator
from megatron.core.dist_checkpointing.moe.snapshot.coordinator import Coordinator, Ports, ProtectionReport, TokenCounts
from megatron.core.dist_checkpointing.moe.snapshot.memory_limit import fit_memory, gathered_sizes, segment_sizes
from megatron.core.dist_checkpointing.moe.snapshot.persister import Persister
from megatron.core.dist_checkpointing.moe.snapshot.workers import ReplicationWorker
from megatron.core.dist_checkpointing.moe.strategies import STRATEGIES, BufferSpec, Job
from megatron.core.dist_checkpointing.moe.types import OperatorId, OperatorKind, StepJournal, Topology, expert

LAYERS, EXPERTS, RANKS = 2, 4, 4
OPERATORS = tuple(
    sorted(
        [OperatorId(-1, OperatorKind.EMBEDDING), OperatorId(LAYERS, OperatorKind.HEAD)]
        + [
            OperatorId(layer, kind)
            for layer in range(LAYERS)
            for kind in (OperatorKind.NON_EXPERT, OperatorKind.ROUTER)
        ]
        + [expert(layer, index) for layer in range(LAYERS) for index in range(EXPERTS)]
    )
)
SMALL = (1,)
"""Segments before a rank knows what its strategy needs."""


@dataclass
class Told:
    """What the ranks of a simulated job came to know."""

    outcomes: list[tuple[int, RecoveryOutcome]] = field(default_factory=list)
    recovered: set[int] = field(default_factory=set)
    reports: dict[int, ProtectionReport] = field(default_factory=dict)
    began_again: int = 0
    unusable: int = 0
    replayed: list[tuple[int, range]] = field(default_factory=list)
    coordinators: dict[int, Coordinator] = field(default_factory=dict)


def load_the_beginning(model: FakeModel) -> None:
    """Make the live state that of iteration 0, as an older checkpoint would."""
    model.iteration = 0
    for key, data in model.live.items():
        model.set(key, expected_bytes(model.rank, key, 0, len(data)))


def protected(coordinator: Coordinator) -> list[int]:
    """The iterations whose state a rank knows to be whole in memory, with all replicas."""
    windows = coordinator._tracker.windows.values()
    return [window.span[-1] for window in windows if window.state is WindowState.PROTECTED]


def journal_of(rank: int, iteration: int) -> StepJournal:
    """How the step of an iteration came out; the last rank knows the loss."""
    return StepJournal(iteration / 8, iteration % 7 == 3, 1 / iteration if rank == RANKS - 1 else None)


@dataclass
class Simulation:
    """A job of RANKS ranks that trains to `iterations` and is protected by the real coordinator.

    between: called with the job before every start but the first, when no process lives. each: called with the job and
    a rank after each of its iterations. recovered: called once per recovery, with the number of the start.
    """

    config: MoECheckpointConfig
    iterations: int = 8
    nodes: Callable[[int], tuple[int, ...]] = lambda start: (0, 0, 1, 1)
    wipe: bool = False
    network: Callable[[World, int], Network] = Network
    store_fails: Callable[[int, bool, int, str], bool] | None = None
    counts: Callable[[int, int], Mapping[int, tuple[int, ...]]] | None = None
    between: Callable[[SimulatedJob], None] | None = None
    each: Callable[[SimulatedJob, int], None] | None = None
    recovered: Callable[[int, RecoveryOutcome], None] | None = None
    notice_s: float = 0.01
    data_timeout_s: float = 5.0
    max_starts: int = 12
    told: Told = field(default_factory=Told)
    job: SimulatedJob | None = None

    def run(self, seed: int, **crash: object) -> tuple[World, SimulatedJob, list[Start]]:
        """Train to the end; every restored byte is compared with what it must be."""
        world = World(seed, **crash)  # type: ignore[arg-type]
        options = {} if self.store_fails is None else {"store_fails": self._fails}
        job = SimulatedJob(
            world, RANKS, lambda rank: spread(OPERATORS, rank, RANKS), SMALL,
            nodes=self.nodes, wipe=self.wipe, network=lambda world, ranks: self._begun(job, world, ranks),
            notice_s=self.notice_s, max_starts=self.max_starts, **options,
        )  # fmt: skip
        self.job = job
        starts = job.run(self._make)
        for rank, model in job.models.items():
            assert model.iteration == self.iterations, f"rank {rank} ended at {model.iteration}\n{world.story()}"
            assert not model.wrong() or self._ended_at_once, f"rank {rank}: {model.wrong()}\n{world.story()}"
        return world, job, starts

    def _fails(self, rank: int, persistent: bool, number: int, name: str) -> bool:
        """Without its first segments a job does not begin."""
        assert self.store_fails is not None
        return number > 1 and self.store_fails(rank, persistent, number, name)

    @property
    def _ended_at_once(self) -> bool:
        """Whether the last start lost tokens and had no iteration left in which all state would be new again."""
        _, last = self.told.outcomes[-1] if self.told.outcomes else (0, None)
        return last is not None and bool(last.plan.lost_tokens) and last.plan.target == self.iterations

    def _begun(self, job: SimulatedJob, world: World, ranks: int) -> Network:
        if job.starts and self.between is not None:
            self.between(job)
        self.told.coordinators.clear()
        return self.network(world, ranks)

    def _make(self, rank: int, ports: RankPorts) -> Callable[[], None]:
        return Rank(self, rank, ports).main


class Rank:
    """One rank of a simulation in one start of its job."""

    def __init__(self, simulation: Simulation, rank: int, ports: RankPorts) -> None:
        self._simulation, self._rank, self._ports = simulation, rank, ports
        self._config, self._told = simulation.config, simulation.told
        self._control, self._data = ports.transport("control", 20.0), ports.transport("data", simulation.data_timeout_s)
        topology = Topology(RANKS, ep=2, nodes=simulation.nodes(ports.start))
        kind = STRATEGIES[self._config.strategy]
        sizes = gathered_sizes(ports.capturer, self._control, of_all=kind.plans_by_sizes)
        self._job = Job(self._config, OPERATORS, topology, 64, simulation.iterations, topk=2, sizes=sizes)
        self._strategy = kind(self._job)
        placement = place_replicas(topology, self._config.replicas or 0)
        self._peers, self._owners = placement.peers[rank], placement.kept_by[rank]
        self._persistent = ports.persistent if self._config.persist_dir else None
        self._identity = Identity("job", {"world_size": RANKS}, ports.capturer.operators)
        self._rooms: tuple[BufferSpec, ...] | None = None
        self._make_room()

    def main(self) -> None:
        """Recover or begin again, then train to the end."""
        ports, simulation = self._ports, self._simulation
        outcome = self._recovered()
        before = outcome.timeline if outcome is not None else ()
        coordinator = self._coordinator(continued(before, self._attempt, ports.model.iteration))
        self._told.coordinators[self._rank] = coordinator
        if outcome is not None:
            coordinator.resume(outcome.restored)
            is_protected = coordinator.report().protection.state is not ProtectionState.UNPROTECTED
            assert is_protected == bool(outcome.restored.kept), "what was restored from memory has copies there"
        for iteration in range(ports.model.iteration + 1, simulation.iterations + 1):
            ports.model.forward_backward()
            coordinator.before_optimizer()
            ports.model.step()
            coordinator.step_end(iteration, journal_of(self._rank, iteration))
            if simulation.each is not None and simulation.job is not None:
                simulation.each(simulation.job, self._rank)
        coordinator.shutdown()
        self._told.reports[self._rank] = coordinator.report()

    def _recovered(self) -> RecoveryOutcome | None:
        ports, told, simulation, model = self._ports, self._told, self._simulation, self._ports.model
        recovery = Recovery(
            self._job,
            self._strategy,
            RecoveryPorts(
                memory=ports.memory, persistent=self._persistent, transport=self._data, restorer=ports.restorer,
                trainer=ports.trainer, clock=ports.clock,
                execution=FakeExecution(model, ports.world), make_room=self._make_room,
            ),
            self._identity,
            self._owners,
        )  # fmt: skip
        planned = recovery.look() is not None
        self._attempt = attempt_name(recovery.next_attempt, str(ports.start))
        outcome = self._carried_out(recovery) if planned else None
        if outcome is None:
            assert model.iteration == 0 or planned
            if planned:  # live state is not usable then: an older checkpoint is loaded
                told.unusable += self._rank == 0
                load_the_beginning(model)
            recovery.discard()
            self._strategy = STRATEGIES[self._config.strategy](self._job)
            told.began_again += self._rank == 0
            return None
        model.iteration = outcome.plan.target
        if simulation.recovered is not None and ports.start not in told.recovered:
            simulation.recovered(ports.start, outcome)
        told.recovered.add(ports.start)
        told.outcomes.append((self._rank, outcome))
        versions = model.versions()
        assert None not in versions.values(), (self._rank, outcome.plan.target, versions)
        if not outcome.plan.lost_tokens:
            assert not model.wrong(), (self._rank, outcome.plan.target, model.wrong())
        return outcome

    def _carried_out(self, recovery: Recovery) -> RecoveryOutcome | None:
        """Restore, and run again what has to be."""
        done, model = recovery.carry_out(), self._ports.model
        if not isinstance(done, Replay):
            return done
        done.begin()
        for iteration in done.iterations:
            assert model.frozen is not None, "an iteration is replayed as if all of its state were there"
            model.forward_backward()
            model.step()
            assert model.iteration == iteration
            done.stepped(journal_of(self._rank, iteration))
        assert model.frozen is None
        self._told.replayed.append((self._rank, done.iterations))
        return recovery.finish(done)

    def _coordinator(self, timeline: Lineage) -> Coordinator:
        ports, identity = self._ports, replace(self._identity, timeline=timeline)
        replicator = Replicator(self._data, self._peers, self._owners) if self._config.replicas else None
        worker = ReplicationWorker(
            ports.memory, replicator, self._data, ports.clock, identity,
            patience_s=self._simulation.data_timeout_s / 2, owners=self._owners,
        )  # fmt: skip
        persister = None
        if self._persistent is not None:
            persister = Persister(
                ports.memory, self._persistent, self._rank, identity,
                lambda piece, index: ports.capturer.layout(piece.plan, trainer=index == 0),
                clock=ports.clock,
            )  # fmt: skip
        count = self._simulation.counts

        def counts() -> Callable[[], TokenCounts]:
            assert count is not None
            return partial(count, self._rank, ports.model.iteration)

        used = Ports(
            memory=ports.memory, capturer=ports.capturer, trainer=ports.trainer, control=self._control,
            executor=ports.lane, clock=ports.clock, owners=self._owners, buffer_specs=self._rooms,
            counts=counts if count else None,
        )  # fmt: skip
        return Coordinator(self._job, self._strategy, used, worker, persister)

    def _make_room(self) -> None:
        """Segments as large as a session takes them, and not one more."""
        rooms = self._strategy.buffer_specs()
        if rooms != self._rooms:
            sizes = segment_sizes(rooms, self._ports.capturer, self._control, self._owners)
            done, _ = fit_memory(self._ports.memory, sizes, self._control)
            assert done or self._simulation.store_fails is not None
            self._rooms = rooms if done else self._rooms
