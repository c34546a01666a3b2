"""MoEvement: sparse checkpoints over a window of iterations, and recoveries that replay one, of the struck stages."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from ....policy.lanes import Lane, joint_schedules
from ....policy.ordering import hard_count
from ....policy.prediction import Figures, replay_s
from ....policy.shards import owned_operators, shard_sizes
from ....policy.window import Schedule, paper_schedule, paper_window
from ....types import OperatorId, Segment
from ..behaviour import Behaviour, Nodes, Recovery, Steady
from ..cost import operator_flops
from ..inputs import TrainingJob
from .links import Replicas, Setting

Stages = tuple[int, ...]

_NOTHING: frozenset[OperatorId] = frozenset()


@dataclass(frozen=True)
class MoEvement:
    """Every iteration snapshots a part of the operators, as many as there is time for (MoEvement 3).

    window: iterations; None: the smallest that does not stall training. skip_weight_gradients: frozen operators save
    the work that they can. reorder: popular experts are anchored last. local: logs at stage boundaries confine a replay
    to the struck stages. replicas: None as in the constants. Fig. 13 turns the three off.
    """

    window: int | None = None
    skip_weight_gradients: bool = True
    reorder: bool = True
    local: bool = True
    replicas: int | None = None
    name: str = "moevement"

    def behaviour(self, setting: Setting, mtbf_s: float, *, popularity: Sequence[float] | None = None) -> Behaviour:
        """See `System`."""
        constants = setting.constants
        count = constants.replicas if self.replicas is None else self.replicas
        shares = expert_shares(setting.job, popularity)
        rate = setting.peer_bytes_per_s(count)
        schedules = sparse_schedules(setting, shares if self.reorder else None, rate, self.window)
        size = next(iter(schedules.values())).window.size
        stall_s = max(_late_bytes(schedule) for schedule in schedules.values()) / rate / size
        replay = Replay(self, setting, schedules, shares)
        recover = _Recover(setting, replay, Replicas(setting, count), self.local)
        overhead_s = stall_s + constants.copy_slowdown * setting.iteration_s
        joint = recover.meet if self.local and not constants.restarts_all else None
        return Steady(self.name, setting.iteration_s, size, size, overhead_s, recover.expected_s, recover, joint)


def expert_shares(job: TrainingJob, popularity: Sequence[float] | None) -> dict[OperatorId, float]:
    """How often each expert of the model is chosen, in any unit; None: all alike."""
    if popularity is None:
        return {operator: 1.0 for operator in job.shape.operators if operator.is_expert}
    return {operator: popularity[operator.expert] for operator in job.shape.operators if operator.is_expert}


def sparse_schedules(
    setting: Setting, shares: dict[OperatorId, float] | None, bytes_per_s: float, window: int | None = None
) -> dict[Lane, Schedule]:
    """The window's schedule of each lane, as this project's policy makes it or as MoEvement's Alg. 1 does.

    shares: of the experts' tokens, to anchor popular ones last; None: operators in the order of the model. What an
    iteration has time for is what moves at `bytes_per_s` while the NIC is not training's.
    """
    job = setting.job
    sizes = shard_sizes(job.shape, job.topology, job.precision)
    budget = max(1, int(bytes_per_s * setting.free_s))
    lanes = {
        lane: operators if shares is None else hard_count(operators, shares)
        for lane, operators in owned_operators(job.shape, job.topology).items()
    }
    if not setting.constants.window_by_count or window is not None:
        return joint_schedules(lanes, sizes, budget, window=window)
    found: dict[tuple[tuple[int, int], ...], int] = {}
    for operators in lanes.values():
        own = {operator: sizes[operator] for operator in operators}
        key = tuple((size.full_bytes, size.weights_bytes) for size in own.values())
        found.setdefault(key, paper_window(own, budget)[0])
    needed = max(found.values())
    counted = {lane: paper_schedule(operators, sizes, budget) for lane, operators in lanes.items()}
    if all(schedule.window.size == needed for schedule in counted.values()):
        return counted
    return joint_schedules(lanes, sizes, budget, window=needed)


def _late_bytes(schedule: Schedule) -> int:
    """Of one window, what its iterations have no time for: copies to peers may lag within it, but not beyond."""
    return max(0, sum(schedule.load_bytes) - schedule.budget_bytes * schedule.window.size)


class Replay:
    """How long stages take to replay a window, and each iteration after it."""

    def __init__(
        self, system: MoEvement, setting: Setting, schedules: dict[Lane, Schedule], shares: dict[OperatorId, float]
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
            frozen = self._frozen(stages) if self._system.skip_weight_gradients else [_NOTHING] * self.window
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
        segment = Segment(stages, 0, len(frozen), tuple(frozen))
        return replay_s(segment, self._setting.job.topology, self._figures, self._work)

    @cached_property
    def _figures(self) -> Figures:
        setting = self._setting
        return Figures(
            setting.iteration_s,
            setting.job.microbatches,
            memory_bytes_per_s=setting.host_bytes_per_s,
            peer_bytes_per_s=setting.fetch_bytes_per_s,
            storage_bytes_per_s=setting.cluster.storage_bytes_per_s,
            frozen_saves=setting.constants.frozen_saves,
        )

    @cached_property
    def _work(self) -> dict[int, dict[OperatorId, float]]:
        job = self._setting.job
        flops = operator_flops(job.shape, job.seq_length, self._shares)
        return {
            stage: {operator: flops[operator] for operator in operators}
            for stage, operators in enumerate(job.shape.operators_of_stages(job.topology))
        }


class _Recover:
    """What a loss of nodes costs."""

    def __init__(self, setting: Setting, replay: Replay, replicas: Replicas, local: bool) -> None:
        self._setting = setting
        self._replay = replay
        self._replicas = replicas
        self._local = local
        self._load_s = replay.first_bytes / setting.fetch_bytes_per_s
        self._stages: dict[int, frozenset[int]] = {}

    def __call__(self, iteration: int, nodes: Nodes, down: Nodes) -> Recovery:
        setting, constants = self._setting, self._setting.constants
        if not self._replicas.survive(down):
            return setting.from_storage(iteration)
        window, again = self._rewind(iteration)
        replays = [self._replay.seconds(run) for run in self._runs(nodes)]
        seconds = max(whole_s * (window > 0) + again * one_s for whole_s, one_s in replays)
        restart_s = constants.stage_restart_s if self._local else constants.global_restart_s
        refill_s = constants.detect_s + constants.stage_restart_s + self._load_s
        return Recovery(constants.detect_s, restart_s, self._load_s, seconds, window + again, refill_s=refill_s)

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
        return down_s + total_s / len(topology.ranks_by_node) + setting.iteration_s / 2

    def _rewind(self, iteration: int) -> tuple[int, int]:
        """Iterations of a window to replay, and iterations after it. The last snapshot of a window is on its way to the
        peers for one iteration more; until there is a whole window, training begins again at its start."""
        if iteration <= self._replay.window:
            return 0, iteration
        return self._replay.window, (iteration - 1) % self._replay.window

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
