"""Whole simulated jobs under the real coordinator, keeper and recovery."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from megatron.core.dist_checkpointing.moe.config import MoECheckpointConfig
from megatron.core.dist_checkpointing.moe.policy.placement import place_replicas
from megatron.core.dist_checkpointing.moe.policy.strategies import STRATEGIES, Job
from megatron.core.dist_checkpointing.moe.policy.timelines import continued
from megatron.core.dist_checkpointing.moe.replicate.replicator import Replicator
from megatron.core.dist_checkpointing.moe.runtime.coordinator import Coordinator, Ports, Report
from megatron.core.dist_checkpointing.moe.runtime.keeper import Identity, Keeper
from megatron.core.dist_checkpointing.moe.runtime.persister import Persister
from megatron.core.dist_checkpointing.moe.runtime.recovery import Outcome, Recovery, RecoveryPorts
from megatron.core.dist_checkpointing.moe.simulate.job import RankPorts, SimulatedJob, Start
from megatron.core.dist_checkpointing.moe.simulate.model import FakeModel, expected_bytes, spread
from megatron.core.dist_checkpointing.moe.simulate.network import Network
from megatron.core.dist_checkpointing.moe.simulate.world import World
from megatron.core.dist_checkpointing.moe.types import OperatorId, OperatorKind, Topology, expert

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
SEGMENT_BYTES = 16_384


@dataclass
class Told:
    """What the ranks of a simulated job came to know."""

    outcomes: list[tuple[int, Outcome]] = field(default_factory=list)
    reports: dict[int, Report] = field(default_factory=dict)
    began_anew: int = 0
    unusable: int = 0
    coordinators: dict[int, Coordinator] = field(default_factory=dict)


def load_the_beginning(model: FakeModel) -> None:
    """Make the live state that of iteration 0, as an older checkpoint would."""
    model.iteration = 0
    for key, data in model.live.items():
        model.set(key, expected_bytes(model.rank, key, 0, len(data)))


@dataclass
class Simulation:
    """A job of RANKS ranks that trains to `iterations` and is protected by the real coordinator.

    between: called with the job before every start but the first, when no process lives. each: called with the job and
    a rank after each of its iterations.
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
    notice_s: float = 0.01
    max_starts: int = 12
    told: Told = field(default_factory=Told)
    job: SimulatedJob | None = None

    def run(self, seed: int, **crash: object) -> tuple[World, SimulatedJob, list[Start]]:
        """Train to the end; every restored byte is compared with what it must be."""
        world = World(seed, **crash)  # type: ignore[arg-type]
        options = {} if self.store_fails is None else {"store_fails": self.store_fails}
        job = SimulatedJob(
            world, RANKS, lambda rank: spread(OPERATORS, rank, RANKS), (SEGMENT_BYTES,) * self._segments,
            nodes=self.nodes, wipe=self.wipe, network=lambda world, ranks: self._begun(job, world, ranks),
            notice_s=self.notice_s, max_starts=self.max_starts, **options,
        )  # fmt: skip
        self.job = job
        starts = job.run(self._make)
        for rank, model in job.models.items():
            assert model.iteration == self.iterations, f"rank {rank} ended at {model.iteration}\n{world.story()}"
            assert not model.wrong() or self._ended_at_once, f"rank {rank}: {model.wrong()}\n{world.story()}"
        return world, job, starts

    @property
    def _segments(self) -> int:
        """As many as a session takes."""
        job = Job(self.config, OPERATORS, Topology(RANKS, ep=2, nodes=self.nodes(0)), 64, self.iterations, topk=2)
        rooms = STRATEGIES[self.config.strategy](job).rooms()
        return sum(room.own + room.replica * (self.config.replicas or 0) for room in rooms)

    @property
    def _ended_at_once(self) -> bool:
        """Whether the last start lost tokens and had no iteration left in which all state would be new again."""
        _, last = self.told.outcomes[-1] if self.told.outcomes else (0, None)
        return last is not None and bool(last.plan.lost_tokens) and last.plan.target == self.iterations

    def _begun(self, job: SimulatedJob, world: World, ranks: int) -> Network:
        self.told.coordinators.clear()
        if job.starts and self.between is not None:
            self.between(job)
        return self.network(world, ranks)

    def _make(self, rank: int, ports: RankPorts) -> Callable[[], None]:
        def main() -> None:
            control, data = ports.transport("control", 20.0), ports.transport("data", 5.0)
            topology = Topology(RANKS, ep=2, nodes=self.nodes(ports.start))
            job = Job(self.config, OPERATORS, topology, 64, self.iterations, topk=2)
            strategy = STRATEGIES[self.config.strategy](job)
            placement = place_replicas(topology, self.config.replicas or 0)
            owners = placement.kept_by[rank]
            identity = Identity("job", {"world_size": RANKS}, ports.capturer.operators)
            persistent = ports.persistent if self.config.persist_dir else None
            recovery = Recovery(
                job,
                strategy,
                RecoveryPorts(ports.memory, persistent, data, ports.restorer, ports.trainer, ports.clock),
                identity,
                owners,
            )
            planned = recovery.look() is not None
            outcome = recovery.carry_out() if planned else None
            if outcome is None:
                assert ports.model.iteration == 0 or planned
                if planned:  # live state is not usable then: an older checkpoint is loaded
                    self.told.unusable += rank == 0
                    load_the_beginning(ports.model)
                recovery.discard()
                strategy = STRATEGIES[self.config.strategy](job)
                self.told.began_anew += rank == 0
            else:
                ports.model.iteration = outcome.plan.target
                self.told.outcomes.append((rank, outcome))
                versions = ports.model.versions()
                assert None not in versions.values(), (rank, outcome.plan.target, versions)
                if not outcome.plan.lost_tokens:
                    assert not ports.model.wrong(), (rank, outcome.plan.target, ports.model.wrong())
            replicator = Replicator(data, placement.peers[rank], owners) if self.config.replicas else None
            before = outcome.timeline if outcome is not None else ()
            attempt = f"{ports.start:06d}"
            identity = replace(identity, timeline=continued(before, attempt, ports.model.iteration))
            keeper = Keeper(ports.memory, replicator, data, ports.clock, identity, owners=owners)
            persister = None
            if persistent is not None:
                persister = Persister(
                    ports.memory, persistent, rank, identity,
                    lambda piece, index: ports.capturer.layout(piece.plan, trainer=index == 0),
                    clock=ports.clock,
                )  # fmt: skip
            coordinator = Coordinator(
                job,
                strategy,
                Ports(ports.memory, ports.capturer, ports.trainer, control, ports.lane, ports.clock),
                keeper,
                persister,
            )
            self.told.coordinators[rank] = coordinator
            if outcome is not None:
                coordinator.resume(outcome)
            for iteration in range(ports.model.iteration + 1, self.iterations + 1):
                ports.model.forward_backward()
                coordinator.before_optimizer()
                ports.model.step()
                coordinator.step_end(iteration, self.counts(rank, iteration) if self.counts else None)
                if self.each is not None and self.job is not None:
                    self.each(self.job, rank)
            coordinator.shutdown()
            self.told.reports[rank] = coordinator.report()

        return main
