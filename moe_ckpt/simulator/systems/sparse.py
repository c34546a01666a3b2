"""MoEvement: sparse checkpoints over a window of iterations, and recoveries that replay one, of the struck stages."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import cast

from megatron.core.dist_checkpointing.moe.config import MoECheckpointConfig
from megatron.core.dist_checkpointing.moe.policy.window import Lane, Schedule
from megatron.core.dist_checkpointing.moe.strategies import Costs, Job, Throughput
from megatron.core.dist_checkpointing.moe.types import OperatorId, Part, ReplaySegment, SnapshotPlan, Topology, Window

from ..behaviour import Behaviour, Nodes, RecoveryCost
from ..cost import operator_flops
from ..driver import COPIED_AFTER, Driver, plan_bytes, strategy_job
from ..inputs import TrainingJob
from ..shards import owned_operators, shard_sizes
from .links import Replicas, SystemSetting, since

Stages = tuple[int, ...]

_NOTHING: frozenset[OperatorId] = frozenset()
SETTLED, LONGEST = 20, 400
"""Iterations without another window that make it the one that stays, and after which any does."""


@dataclass(frozen=True)
class MoEvement:
    """Every iteration snapshots a part of the operators, as many as there is time for (MoEvement 3): `sparse`.

    window: iterations; None: what the strategy itself settles on. local: logs at stage boundaries confine a replay to
    the struck stages. replicas: None as in the constants. skips_weight_gradients: frozen operators save the work that
    they can, as they do in a replay of this project.
    """

    window: int | None = None
    local: bool = True
    replicas: int | None = None
    skips_weight_gradients: bool = True
    name: str = "moevement"

    def behaviour(
        self, setting: SystemSetting, mtbf_s: float, *, popularity: Sequence[float] | None = None
    ) -> Behaviour:
        """See `CheckpointSystem`."""
        constants, count = setting.constants, self.copies(setting)
        shares = expert_shares(setting.job, popularity)
        schedules = self.schedules(setting, popularity)
        size = next(iter(schedules.values())).window.size
        stall_s = max(map(_late_bytes, schedules.values())) / setting.peer_bytes_per_s(count) / size
        replay = ReplayCost(self, setting, schedules, shares)
        recover = _Recovery(setting, replay, Replicas(setting, count), self.local)
        copied = max(sum(schedule.load_bytes) for schedule in schedules.values()) / size
        overhead_s = stall_s + setting.slowed_s(copied, count) + setting.persist_overhead_s
        joint = recover.meet if self.local and not constants.restarts_all else None
        return Behaviour(self.name, setting.iteration_s, size, size, overhead_s, recover.expected_s, recover, joint)

    def copies(self, setting: SystemSetting) -> int:
        """Peers that keep a replica of each snapshot."""
        return setting.constants.replicas if self.replicas is None else self.replicas

    def schedules(self, setting: SystemSetting, popularity: Sequence[float] | None) -> dict[Lane, Schedule]:
        """What the ranks of each lane copy in the windows that the strategy comes to plan in this job.

        Args:
            setting: The job on its cluster.
            popularity: Share of the tokens by expert, the same in each layer, in any unit; None: all alike.
        """
        asked = "lanes", self.copies(setting), self.window, popularity and tuple(popularity)
        if asked in setting.settled:
            return cast("dict[Lane, Schedule]", setting.settled[asked])
        plans, job = settled_window(setting, self.copies(setting), self.window, popularity), setting.job
        groups = tuple(
            tuple(one for one, part in plan.parts.items() if Part.MASTER_AND_MOMENTS in part) for plan in plans
        )
        sizes, budget = shard_sizes(job.shape, job.topology, job.precision), self.budget_bytes(setting)
        found = {}
        for lane, operators in owned_operators(job.shape, job.topology).items():
            own = {operator: sizes[operator] for operator in operators}
            window = Window(0, tuple(tuple(operator for operator in group if operator in own) for group in groups))
            found[lane] = Schedule(window, tuple(plan_bytes(plan, own) for plan in plans), budget)
        setting.settled[asked] = found
        return found

    def budget_bytes(self, setting: SystemSetting) -> int:
        """What moves to all peers while the NIC is not training's."""
        return max(1, int(setting.peer_bytes_per_s(self.copies(setting)) * setting.free_s))


def settled_window(
    setting: SystemSetting, replicas: int, window: int | None, popularity: Sequence[float] | None
) -> list[SnapshotPlan]:
    """The plans of one window of `sparse` in this job, once its size and order have settled.

    The strategy gets the costs that the ranks of a real job would measure: that a copy to the host has the time of an
    iteration, and that replicas of it take as long as the peers' links need while training leaves these alone.

    Args:
        setting: The job on its cluster.
        replicas: Peers that keep a copy of each snapshot.
        window: Iterations of a window; None: the strategy finds it (`auto`).
        popularity: Share of the tokens by expert, the same in each layer, in any unit; None: all alike.
    """
    asked = (replicas, window, popularity and tuple(popularity))
    if asked in setting.settled:
        return cast("list[SnapshotPlan]", setting.settled[asked])
    training = setting.job
    config = MoECheckpointConfig(strategy="sparse", window="auto" if window is None else str(window))
    job = strategy_job(training.shape, training.topology, training.precision, config, tokens=training.tokens)
    counts = token_counts(training, popularity)
    driver = Driver(
        job,
        lambda iteration: counts,
        pace=Throughput(setting.iteration_s, setting.host_bytes_per_s),
        costs=expected_costs(setting, job, replicas),
    )
    plans, since = _next_window(driver), driver.iteration
    while driver.iteration - since < SETTLED and driver.iteration < LONGEST:
        before, plans = plans, _next_window(driver)
        if [plan.parts for plan in plans] != [plan.parts for plan in before]:
            since = driver.iteration
    setting.settled[asked] = plans
    return plans


def expected_costs(setting: SystemSetting, job: Job, replicas: int) -> Callable[[SnapshotPlan], Costs]:
    """What a job measures of each snapshot: replicas take as long as links need while training leaves these alone.

    Args:
        setting: The job on its cluster.
        job: The same job as the strategy sees it; gives the bytes that each rank owns.
        replicas: Peers that keep a copy of each snapshot.
    """
    free = max(setting.free_s / setting.iteration_s, 1e-9)

    def costs(plan: SnapshotPlan) -> Costs:
        nbytes = max(plan_bytes(plan, sizes) for sizes in job.sizes.values())
        round_s = nbytes / (setting.peer_bytes_per_s(replicas) * free)
        stall_s = max(0.0, nbytes / setting.host_bytes_per_s - setting.iteration_s)
        return Costs(setting.iteration_s, stall_s, round_s, slowed_s=setting.slowed_s(nbytes, replicas))

    return costs


def _next_window(driver: Driver) -> list[SnapshotPlan]:
    """The plans of the next window that is whole."""
    plans: list[SnapshotPlan] = []
    while not plans or plans[-1].iteration < driver.strategy.pieces(plans[-1])[0].span[-1]:
        plan = driver.iterate()
        plans += [] if plan is None else [plan]
    return plans


def token_counts(job: TrainingJob, popularity: Sequence[float] | None) -> list[list[int]]:
    """Tokens of one iteration by MoE layer and expert.

    Args:
        job: The model and its batch.
        popularity: Share of the tokens by expert, the same in each layer, in any unit; None: all alike.
    """
    shares = popularity or (1.0,) * job.shape.num_experts
    routed = job.tokens * max(1, job.shape.moe_router_topk) / sum(shares) if shares else 0.0
    row = [round(routed * share) for share in shares]
    return [row] * len(job.shape.moe_layers)


def expert_shares(job: TrainingJob, popularity: Sequence[float] | None) -> dict[OperatorId, float]:
    """How often each expert of the model is chosen, in any unit.

    Args:
        job: The job whose experts are listed.
        popularity: Share of the tokens by expert, the same in each layer, in any unit; None: all alike.
    """
    if popularity is None:
        return {operator: 1.0 for operator in job.shape.operators if operator.is_expert}
    return {operator: popularity[operator.expert] for operator in job.shape.operators if operator.is_expert}


def _late_bytes(schedule: Schedule) -> int:
    """Of one window, what its iterations have no time for: copies to peers may lag within it, but not beyond."""
    return max(0, sum(schedule.load_bytes) - schedule.budget_bytes * schedule.window.size)


class ReplayCost:
    """How long stages take to replay a window, and each iteration after it."""

    def __init__(
        self,
        system: MoEvement,
        setting: SystemSetting,
        schedules: dict[Lane, Schedule],
        shares: dict[OperatorId, float],
    ) -> None:
        self.window = next(iter(schedules.values())).window.size
        self._system = system
        self._setting = setting
        self._schedules = schedules
        self._shares = shares
        self._found: dict[Stages, tuple[float, float]] = {}

    def seconds(self, stages: Stages) -> tuple[float, float]:
        """Of a whole window, and of one iteration with everything active, by these adjacent stages together."""
        if stages not in self._found:
            frozen = self._frozen(stages) if self._system.skips_weight_gradients else [_NOTHING] * self.window
            self._found[stages] = self._policy(stages, frozen), self._policy(stages, [_NOTHING])
        return self._found[stages]

    @property
    def first_bytes(self) -> int:
        """Of the largest first snapshot of a window: what has to be there before a replay begins."""
        return max(schedule.load_bytes[0] for schedule in self._schedules.values())

    def _frozen(self, stages: Stages) -> list[frozenset[OperatorId]]:
        """What has not been anchored yet when each iteration of a window is replayed (MoEvement Fig. 8)."""
        groups: list[set[OperatorId]] = [set() for _ in range(self.window)]
        for (stage, _), schedule in self._schedules.items():
            if stage in stages:
                for group, operators in zip(groups, schedule.window.groups, strict=True):
                    group.update(operators)
        return [frozenset().union(*groups[step + 1 :]) for step in range(self.window)]

    def _policy(self, stages: Stages, frozen: list[frozenset[OperatorId]]) -> float:
        segment = ReplaySegment(stages, 0, len(frozen), tuple(frozen))
        setting = self._setting
        saves = setting.constants.frozen_saves
        return replay_s(segment, setting.job.topology, setting.iteration_s, setting.job.microbatches, self._work, saves)

    @cached_property
    def _work(self) -> dict[int, dict[OperatorId, float]]:
        job = self._setting.job
        flops = operator_flops(job.shape, job.seq_length, self._shares)
        return {
            stage: {operator: flops[operator] for operator in operators}
            for stage, operators in enumerate(job.shape.operators_of_stages(job.topology))
        }


class _Recovery:
    """What a loss of nodes costs."""

    def __init__(self, setting: SystemSetting, replay: ReplayCost, replicas: Replicas, local: bool) -> None:
        self._setting = setting
        self._replay = replay
        self._replicas = replicas
        self._local = local
        self._load_s = replay.first_bytes / setting.fetch_bytes_per_s
        self._stages: dict[int, frozenset[int]] = {}

    def __call__(self, iteration: int, nodes: Nodes, down: Nodes) -> RecoveryCost:
        setting, constants = self._setting, self._setting.constants
        if not self._replicas.survive(down):
            return setting.from_storage(iteration)
        window, again = self._rewind(iteration)
        replays = [self._replay.seconds(run) for run in self._runs(nodes)]
        seconds = max(whole_s * (window > 0) + again * one_s for whole_s, one_s in replays)
        launch_s, meet_s = setting.stage_restart_s if self._local else (setting.launch_s, setting.meet_s)
        return RecoveryCost(
            constants.detect_s,
            launch_s,
            self._load_s,
            seconds,
            window + again,
            refill_s=constants.detect_s + sum(setting.stage_restart_s) + self._load_s,
            rendezvous_s=meet_s,
        )

    def meet(self, ongoing: Nodes, nodes: Nodes) -> bool:
        """Whether two faults strike the same stages or adjacent ones (MoEvement App. A)."""
        near = {stage + step for stage in self._stages_of(nodes) for step in (-1, 0, 1)}
        return bool(near & self._stages_of(ongoing))

    @property
    def expected_s(self) -> float:
        """Mean over nodes and moments, with the half iteration that is cut off."""
        setting, topology = self._setting, self._setting.job.topology
        mean_again = (self._replay.window - 1) / 2
        costs: dict[tuple[Stages, ...], float] = {}
        total_s = 0.0
        for node in topology.ranks_by_node:
            runs = tuple(self._runs(frozenset((node,))))
            if runs not in costs:
                costs[runs] = max(whole + mean_again * one for whole, one in map(self._replay.seconds, runs))
            total_s += costs[runs]
        nobody: Nodes = frozenset()
        down_s = self(0, frozenset((next(iter(topology.ranks_by_node)),)), nobody).down_s
        mean_s = down_s + total_s / len(topology.ranks_by_node) + setting.iteration_s / 2
        return self._replicas.expected_s(mean_s)

    def _rewind(self, iteration: int) -> tuple[int, int]:
        """Iterations of a window to replay, with the first after it, and the iterations after that; until there is a
        complete window, training begins again at its start."""
        again = since(iteration, self._replay.window, COPIED_AFTER)
        return (0, again) if again == iteration else (self._replay.window, again - COPIED_AFTER)

    def _stages_of(self, nodes: Nodes) -> set[int]:
        topology = self._setting.job.topology
        for node in nodes - self._stages.keys():
            ranks = topology.ranks_by_node.get(node, ())
            self._stages[node] = frozenset(map(topology.stage, ranks))
        return set().union(*(self._stages[node] for node in nodes))

    def _runs(self, nodes: Nodes) -> Iterator[Stages]:
        """The struck stages, adjacent ones together; all of them without logs."""
        stages = sorted(self._stages_of(nodes)) if self._local else list(range(self._setting.job.topology.pp))
        run: list[int] = []
        for stage in stages:
            if run and stage != run[-1] + 1:
                yield tuple(run)
                run = []
            run.append(stage)
        if run:
            yield tuple(run)


# How long a replay takes, from its plan.


def replay_s(
    segment: ReplaySegment,
    topology: Topology,
    iteration_s: float,
    microbatches: int,
    work: Mapping[int, Mapping[OperatorId, float]],
    frozen_saves: float = 1 / 3,
) -> float:
    """Seconds that a segment replays: as iterations of a pipeline of its own, without the bubbles that the other stages
    cause (MoEvement 3.4), cheaper by what is frozen.

    With M microbatches, p stages and v virtual stages an iteration takes M + (p - 1) / v turns; a segment of s stages
    that waits for nobody outside takes M + (s - 1) / v.

    Args:
        segment: What is replayed.
        topology: Of the job.
        iteration_s: Of training.
        microbatches: Of one iteration on a data-parallel rank.
        work: By stage, what an iteration costs for each operator, in any unit.
        frozen_saves: The share of an iteration that is saved where all operators are frozen (MoEvement 3.3 expects a
            third: weight gradients and the optimizer's step).
    """
    turns = [microbatches + (stages - 1) / topology.vpp for stages in (len(segment.stages), topology.pp)]
    costs = {operator: cost for stage in segment.stages for operator, cost in work[stage].items()}
    total = sum(costs.values())
    active = [1 - frozen_saves * sum(costs.get(one, 0.0) for one in frozen) / total for frozen in segment.frozen]
    return iteration_s * turns[0] / turns[1] * sum(active)
