"""What each checkpoint system brings in a job, with the settings that suit it best there."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, cast

from megatron.core.dist_checkpointing.moe.policy.checks import positive, whole

from .behaviour import Behaviour
from .closed_form import ettr as closed_form_ettr
from .constants import THIS_PROJECT, Constants
from .events import Estimate, SimulatedRun, estimate, simulate
from .faults import Fault, poisson
from .footprint import node_bytes
from .inputs import Cluster, IterationCost, TrainingJob
from .systems import SYSTEMS, CheckpointSystem
from .systems.links import SystemSetting

MEMORY_SHARE = 0.5
"""Of a node's host memory, what checkpoints may take unless it is said: a tmpfs has no more until it is remounted."""

LEAST_NOISE = 0.005
"""ETTRs that are closer than this count as equal however many runs there are: the model itself is not exacter."""

TRIED: dict[str, tuple[Any, ...]] = {"replicas": (0, 1, 2), "local": (True, False)}
"""Values that are tried for a setting where a system has it; all else is chosen by the system's own policy. On one node
there are no replicas, on more at least one."""

FAULTS_PER_RUN = 40


@dataclass(frozen=True)
class Question:
    """What advice is asked for.

    mtbf_s: of the whole job. memory_bytes: of host memory on one node that checkpoints may take; None: `MEMORY_SHARE`
    of it. duration_s: of each simulated run; None: 12 hours, or as long as 40 faults take. popularity: as
    `CheckpointSystem` has it. replicas: peers with a copy of each snapshot; None: those of `TRIED`. Raises UsageError
    for values that are not above 0.
    """

    job: TrainingJob
    cost: IterationCost
    cluster: Cluster
    mtbf_s: float
    constants: Constants = THIS_PROJECT
    memory_bytes: int | None = None
    duration_s: float | None = None
    seeds: int = 20
    popularity: tuple[float, ...] | None = None
    replicas: int | None = None

    def __post_init__(self) -> None:
        positive("mtbf_s", self.mtbf_s)
        whole("seeds", self.seeds, 1)
        if self.memory_bytes is not None:
            whole("memory_bytes", self.memory_bytes, 1)
        if self.duration_s is not None:
            positive("duration_s", self.duration_s)

    @property
    def limit_bytes(self) -> int:
        """Host memory of a node for checkpoints."""
        return int(MEMORY_SHARE * self.cluster.host_memory_bytes) if self.memory_bytes is None else self.memory_bytes

    @property
    def run_s(self) -> float:
        """Length of a simulated run."""
        return (
            max(self.constants.planned_s, FAULTS_PER_RUN * self.mtbf_s) if self.duration_s is None else self.duration_s
        )

    @property
    def nodes(self) -> int:
        """Nodes of the job."""
        return len(self.job.topology.ranks_by_node)

    @cached_property
    def setting(self) -> SystemSetting:
        """The job on the cluster, over a training of the length of a run."""
        return SystemSetting(self.job, self.cost, self.cluster, replace(self.constants, planned_s=self.run_s))

    @cached_property
    def faults(self) -> tuple[tuple[Fault, ...], ...]:
        """Of each seed: the same for all systems, so that they differ by nothing else."""
        return tuple(poisson(self.mtbf_s, self.run_s, self.nodes, seed) for seed in range(self.seeds))

    @cached_property
    def behaviours(self) -> dict[CheckpointSystem, Behaviour]:
        """Those that were asked for so far."""
        return {}

    def behaviour(self, system: CheckpointSystem) -> Behaviour:
        """What a system does in this job. Raises UsageError as the system."""
        if system not in self.behaviours:
            self.behaviours[system] = system.behaviour(self.setting, self.mtbf_s, popularity=self.popularity)
        return self.behaviours[system]


@dataclass(frozen=True)
class Choice:
    """A system with its best settings, and what they bring.

    settings: replicas and the like, as far as it has them. interval: iterations between states to return to. never:
    whether a run ends before the first of these. window: W. exact: whether a recovery gives back every update. ettr: of
    the simulated runs, `ettrs`; closed_form_ettr: by formula. overhead_share: of an iteration, at first;
    last_overhead_share: the most that faults make of it. recovery_s: mean of one fault. memory_bytes: of host memory on
    the fullest node. worst_s, worst_iterations: of a fault of one node at the worst moment, with the iteration that it
    cuts off. k_share: of the experts in a snapshot, at first. lost_share: of the tokens of a run whose updates are
    lost, in the worst run. budget: lost_share that the system allows itself, None where it has no limit. refused: why
    it cannot be used; empty where it can. parts_s: of a mean fault of one node, by the parts of a recovery's timeline;
    what training does again is replay. tried: the system with these settings.
    """

    system: str
    settings: dict[str, Any]
    interval: int
    never: bool
    window: int
    exact: bool
    ettr: Estimate
    closed_form_ettr: float
    overhead_share: float
    recovery_s: float
    memory_bytes: int
    worst_s: float
    worst_iterations: int
    k_share: float
    lost_share: float
    last_overhead_share: float
    budget: float | None = None
    refused: str = ""
    ettrs: tuple[float, ...] = field(default=(), repr=False)
    parts_s: dict[str, float] = field(default_factory=dict)
    tried: CheckpointSystem | None = field(default=None, repr=False)


def best_of(question: Question, name: str) -> Choice:
    """The best setting of one system among those that fit the memory.

    That is the highest ETTR, and of equal ones the one that takes least memory: a second replica has to gain something.
    Where none fits, it is the one that takes least, refused. Raises UsageError as the system.

    Args:
        question: The job, its cluster, the mean time between faults and the memory limit.
        name: Name of the system, a key of `SYSTEMS`.
    """
    systems = list(variants(SYSTEMS[name], question.nodes, question.replicas))
    tried = [(one, node_bytes(question.setting, one, question.behaviour(one))) for one in systems]
    fitting = [(system, taken) for system, taken in tried if taken <= question.limit_bytes]
    if not fitting:
        system, taken = min(tried, key=lambda one: one[1])
        return _choice(question, system, taken, too_much(question, taken))
    found = [_choice(question, system, taken) for system, taken in fitting]
    best = max(found, key=lambda one: one.ettr.mean)
    equal = [one for one in found if best.ettr.mean - one.ettr.mean <= noise(best, one)]
    return min(equal, key=lambda one: one.memory_bytes)


def too_much(question: Question, taken_bytes: int) -> str:
    """The refusal of what does not fit.

    Args:
        question: Gives the memory limit of a node.
        taken_bytes: Host memory that the setting needs on a node, in bytes.
    """
    return (
        f"needs {taken_bytes / 1e9:,.1f} GB of host memory on a node, but {question.limit_bytes / 1e9:,.1f} GB are"
        " allowed"
    )


def variants(system: CheckpointSystem, nodes: int, replicas: int | None = None) -> Iterator[CheckpointSystem]:
    """The system with every combination of values in `TRIED`; a node has replicas on others, at most on all of them.

    Args:
        system: The system whose fields named in `TRIED` are varied; its other fields stay.
        nodes: Nodes of the job.
        replicas: The one number of replicas that is tried; None: as many as `TRIED` and the nodes allow.
    """
    counts = [count for count in TRIED["replicas"] if min(1, nodes - 1) <= count <= nodes - 1]
    tried = TRIED | {"replicas": counts if replicas is None else (replicas,)}
    names = [name for name in TRIED if hasattr(system, name)]
    for values in itertools.product(*(tried[name] for name in names)):
        given = dict(zip(names, values, strict=True))
        yield cast("CheckpointSystem", replace(cast("Any", system), **given)) if given else system


def noise(one: Choice, other: Choice) -> float:
    """By how much two ETTRs of the same faults may differ by chance: half the 95 % interval of their difference.

    Args:
        one: A choice with its simulated ETTRs.
        other: Another choice, simulated with the same faults in the same order.
    """
    differences = [mine - theirs for mine, theirs in zip(one.ettrs, other.ettrs, strict=True)]
    return max(LEAST_NOISE, estimate(differences).half_width)


def _choice(question: Question, system: CheckpointSystem, taken_bytes: int, refused: str = "") -> Choice:
    behaviour = question.behaviour(system)
    runs = [simulate(behaviour, faults, question.run_s) for faults in question.faults]
    tokens = question.job.tokens
    lost = max(lost_share(run, tokens) for run in runs)
    worst_s, worst_iterations = worst_case(behaviour, question)
    return Choice(
        system=system.name,
        settings={name: getattr(system, name) for name in TRIED if hasattr(system, name)},
        interval=behaviour.interval,
        never=behaviour.interval * behaviour.iteration_s > question.run_s,
        window=behaviour.window,
        exact=not lost and behaviour.k_share == 1,
        ettr=estimate([run.ettr for run in runs]),
        closed_form_ettr=closed_form_ettr(behaviour, question.mtbf_s, question.run_s),
        overhead_share=behaviour.overhead_s / behaviour.iteration_s,
        recovery_s=behaviour.expected_recovery_s,
        memory_bytes=taken_bytes,
        worst_s=worst_s,
        worst_iterations=worst_iterations,
        k_share=behaviour.k_share,
        lost_share=lost,
        last_overhead_share=max(1 / slowest_goodput(run) - 1 for run in runs),
        budget=_budget(question, system),
        refused=refused,
        ettrs=tuple(run.ettr for run in runs),
        parts_s=mean_parts(behaviour),
        tried=system,
    )


def mean_parts(behaviour: Behaviour) -> dict[str, float]:
    """Seconds of a mean fault of one node by the parts of its timeline, which add up to the mean recovery."""
    parts = behaviour.fresh().strike(max(1, 2 * behaviour.interval), nodes=frozenset((0,))).parts
    down_s = sum(seconds for name, seconds in parts.items() if name != "replay")
    return parts | {"replay": max(0.0, behaviour.expected_recovery_s - down_s)}


def lost_share(run: SimulatedRun, tokens: int) -> float:
    """PLT of a run: tokens whose updates are lost, of all that were trained.

    Args:
        run: The simulated run.
        tokens: Tokens of one iteration of the job.
    """
    return run.lost_tokens / (run.iterations * tokens) if run.iterations else 0.0


def slowest_goodput(run: SimulatedRun) -> float:
    """The least goodput of a run while it trains."""
    return min(moment.goodput for moment in run.timeline if moment.goodput > 0)


def worst_case(behaviour: Behaviour, question: Question) -> tuple[float, int]:
    """(seconds, iterations trained again) of the dearest fault of one node in the second half of a run.

    Args:
        behaviour: The system in this job; it is copied for each fault and stays as it was.
        question: Gives the length of a run in seconds, and the number of nodes.
    """
    iterations = max(1, int(question.run_s / behaviour.iteration_s))
    span = min(2 * behaviour.interval, iterations)
    moments = {*range(iterations // 2, iterations // 2 + span, -(-span // 200)), iterations}
    recoveries = [
        behaviour.fresh().strike(moment, nodes=frozenset((node,)))
        for moment in moments
        for node in {0, question.nodes // 2, question.nodes - 1}
    ]
    cut_off_s = behaviour.iteration_s + behaviour.overhead_s
    return cut_off_s + max(one.total_s for one in recoveries), max(one.iterations_again for one in recoveries)


def _budget(question: Question, system: CheckpointSystem) -> float | None:
    """What Dynamic-K keeps to, as a share of all tokens."""
    if not hasattr(system, "lost_per_hour"):
        return None
    per_hour = system.lost_per_hour
    iterations = question.constants.pec_lost_per_hour if per_hour is None else float(per_hour)
    return min(1.0, iterations * question.cost.iteration_s / 3600)
