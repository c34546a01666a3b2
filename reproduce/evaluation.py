"""What each system makes of a job: one set of constants for all of MoEvement's tables and figures."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache

from megatron.core.dist_checkpointing.moe.policy.window import Lane, hard_count
from megatron.core.dist_checkpointing.moe.types import Window
from moe_ckpt.simulator.behaviour import Behaviour
from moe_ckpt.simulator.closed_form import ettr as closed_form
from moe_ckpt.simulator.clusters import cluster
from moe_ckpt.simulator.constants import MOEVEMENT
from moe_ckpt.simulator.cost import MOEVEMENT_UTILISATION, Utilisation, iteration_cost
from moe_ckpt.simulator.events import Estimate, SimulatedRun, estimate, simulate
from moe_ckpt.simulator.faults import Fault, poisson
from moe_ckpt.simulator.inputs import Cluster, IterationCost, TrainingJob
from moe_ckpt.simulator.paper_window import paper_schedule
from moe_ckpt.simulator.shards import owned_operators, shard_sizes
from moe_ckpt.simulator.systems import CheckpointSystem
from moe_ckpt.simulator.systems.links import SystemSetting

from .paper_systems import PAPER_SYSTEMS

SYSTEMS = ("checkfreq", "gemini", "moc", "moevement")

AZURE = "azure-nc96ads-a100"
H100 = "h100-private"

DURATION_S = 12 * 3600.0
SEEDS = range(20)
"""Runs with faults by chance; the same seeds, and so the same faults, for every system."""

H100_STORAGE_BYTES_PER_S = 7e9
"""Of the private cluster: the one figure of Table 7 that is fitted."""


@dataclass(frozen=True)
class SystemOutcome:
    """What a system makes of 12 hours of a job. Seconds; shares of 1.

    overhead_s, overhead_share: per iteration, mean over the run, and recovery_s of all its recoveries, with controlled
    failures at equal distances. ettr: by the closed form of App. C. k_share: experts in a snapshot at the end.
    """

    iteration_s: float
    interval: int
    window: int
    overhead_s: float
    overhead_share: float
    recovery_s: float
    ettr: float
    k_share: float


def evaluate(
    job: TrainingJob, cluster_name: str, mtbf_s: float, systems: Iterable[str] = SYSTEMS
) -> dict[str, SystemOutcome]:
    """Each system's outcome with this mean time between failures."""
    return {name: outcome(behaviour_of(name, job, cluster_name, mtbf_s), job, mtbf_s) for name in systems}


def outcome(behaviour: Behaviour, job: TrainingJob, mtbf_s: float) -> SystemOutcome:
    """What comes of 12 hours."""
    run = simulate(behaviour, controlled(mtbf_s, len(job.topology.ranks_by_node)), DURATION_S)
    share = run.overhead_s / run.useful_s
    return SystemOutcome(
        iteration_s=behaviour.iteration_s,
        interval=behaviour.interval,
        window=behaviour.window,
        overhead_s=share * behaviour.iteration_s,
        overhead_share=share,
        recovery_s=run.recovery_s,
        ettr=closed_form(behaviour, mtbf_s, DURATION_S),
        k_share=run.timeline[-1].k_share,
    )


def controlled(mtbf_s: float, nodes: int) -> tuple[Fault, ...]:
    """Faults of 12 hours at equal distances, one in the middle of each, on one node after the other (5.2)."""
    count = int(DURATION_S / mtbf_s + 0.5)
    return tuple(Fault((number + 0.5) * mtbf_s, frozenset((number % nodes,))) for number in range(count))


@cache
def cluster_of(name: str) -> Cluster:
    """The cluster; the storage of MoEvement 5.7's, which is not published, as its CheckFreq interval of 227 asks."""
    found = cluster(name)
    return replace(found, storage_bytes_per_s=H100_STORAGE_BYTES_PER_S) if name == H100 else found


def by_chance(
    behaviour: Behaviour,
    job: TrainingJob,
    mtbf_s: float,
    seeds: Iterable[int] = SEEDS,
    duration_s: float = DURATION_S,
) -> Estimate:
    """Mean ETTR with faults of a Poisson process, which strike recoveries as well as training."""
    return estimate([one_run(behaviour, job, mtbf_s, seed, duration_s).ettr for seed in seeds])


def one_run(
    behaviour: Behaviour, job: TrainingJob, mtbf_s: float, seed: int, duration_s: float = DURATION_S
) -> SimulatedRun:
    """So long, by default 12 hours, with the faults of this seed."""
    return simulate(behaviour, poisson(mtbf_s, duration_s, len(job.topology.ranks_by_node), seed), duration_s)


def behaviour_of(
    system: str | CheckpointSystem,
    job: TrainingJob,
    cluster_name: str,
    mtbf_s: float,
    popularity: Sequence[float] | None = None,
) -> Behaviour:
    """What a system, by name or with its own settings, does in this job. popularity: of each layer's experts."""
    chosen = PAPER_SYSTEMS[system] if isinstance(system, str) else system
    return chosen.behaviour(setting_of(job, cluster_name), mtbf_s, popularity=popularity)


def setting_of(job: TrainingJob, cluster_name: str) -> SystemSetting:
    """The job on its cluster."""
    return SystemSetting(job, cost_of(job, cluster_name), cluster_of(cluster_name), MOEVEMENT)


@cache
def cost_of(job: TrainingJob, cluster_name: str) -> IterationCost:
    """An iteration of the job."""
    return iteration_cost(job, cluster_of(cluster_name), utilisation_of(cluster_name))


def utilisation_of(cluster_name: str) -> Utilisation:
    """What training reaches on A100; on H100 with that one's matrix products, and the same share of its memory."""
    if cluster_name != H100:
        return MOEVEMENT_UTILISATION
    return replace(
        MOEVEMENT_UTILISATION,
        optimizer_bytes_per_s=0.75 * cluster(H100).gpu_memory_bytes_per_s,
        source="MoEvement's software on H100: the share of memory's rate that was fitted on A100",
    )


def windows_of(job: TrainingJob, cluster_name: str) -> dict[Lane, Window]:
    """MoEvement's window of each lane by its Alg. 1 alone: ranks with less to copy need fewer iterations for it."""
    setting = setting_of(job, cluster_name)
    budget = max(1, int(setting.peer_bytes_per_s(setting.constants.replicas) * setting.free_s))
    return windows_by_count(job, budget)


def windows_by_count(job: TrainingJob, budget_bytes: int) -> dict[Lane, Window]:
    """The window that MoEvement's Alg. 1 gives each lane: that of the paper's own footprints.

    budget_bytes: what one rank has time to copy in an iteration. Raises UsageError for a budget below 1.
    """
    sizes = shard_sizes(job.shape, job.topology, job.precision)
    return {
        lane: paper_schedule(hard_count(operators, {}), sizes, budget_bytes).window
        for lane, operators in owned_operators(job.shape, job.topology).items()
    }
