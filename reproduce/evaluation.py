"""What each system makes of a job: one set of constants for all of MoEvement's tables and figures."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache

from megatron.core.dist_checkpointing.moe.policy.ordering import hard_count
from megatron.core.dist_checkpointing.moe.policy.window import Lane
from megatron.core.dist_checkpointing.moe.types import Window
from moe_ckpt.simulator.behaviour import Behaviour
from moe_ckpt.simulator.closed_form import ettr as closed_form
from moe_ckpt.simulator.clusters import cluster
from moe_ckpt.simulator.constants import MOEVEMENT, Constants
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
AZURE_GPUS = 96

DURATION_S = 12 * 3600.0
SEEDS = range(20)
"""Runs with faults by chance; the same seeds, and so the same faults, for every system."""

GEMM_SHARE = 0.8
"""Of peak FLOPS that large matrix multiplications alone reach on A100 and H100: assumed, not measured here."""

A100_MEMORY_BYTES_PER_S, H100_MEMORY_BYTES_PER_S = 2.04e12, 3.35e12
"""Of GPU memory: data sheets of A100 80 GB and H100 SXM."""


H100_STORAGE_BYTES_PER_S = 8e9
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


def by_chance(behaviour: Behaviour, job: TrainingJob, mtbf_s: float, seeds: Iterable[int] = SEEDS) -> Estimate:
    """Mean ETTR of 12 hours with faults of a Poisson process, which strike recoveries as well as training."""
    return estimate([one_run(behaviour, job, mtbf_s, seed).ettr for seed in seeds])


def one_run(behaviour: Behaviour, job: TrainingJob, mtbf_s: float, seed: int) -> SimulatedRun:
    """12 hours with the faults of this seed."""
    return simulate(behaviour, poisson(mtbf_s, DURATION_S, len(job.topology.ranks_by_node), seed), DURATION_S)


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
    return SystemSetting(job, cost_of(job, cluster_name), cluster_of(cluster_name), constants_of(job, cluster_name))


def constants_of(job: TrainingJob, cluster_name: str) -> Constants:
    """Those of Table 3. How long training's own traffic keeps the NIC busy was found for its jobs and network.

    With another network it takes less by the rate of the NIC; for jobs of another size it is counted from what they
    send.
    """
    busy_s = MOEVEMENT.network_busy_s
    if busy_s is None or (cluster_name == AZURE and job.topology.world_size == AZURE_GPUS):
        return MOEVEMENT
    if cluster_name != H100:
        return replace(MOEVEMENT, network_busy_s=None)
    rates = [cluster(name).inter_node_bytes_per_s for name in (AZURE, H100)]
    return replace(MOEVEMENT, network_busy_s=busy_s * rates[0] / rates[1])


@cache
def cost_of(job: TrainingJob, cluster_name: str) -> IterationCost:
    """An iteration of the job."""
    return iteration_cost(job, cluster_of(cluster_name), utilisation_of(job, cluster_name))


def utilisation_of(job: TrainingJob, cluster_name: str) -> Utilisation:
    """What Table 3's iteration times show of A100; for H100, on which nothing is published, what follows from it.

    Where an A100 reaches less of its peak than matrix multiplications alone do, it waits for memory. On another GPU the
    multiplications take less by its FLOPS, and the rest by the rate of its memory, which FP8 does not change. Of the
    peak in FP16 an H100 then reaches 0.43, in FP8 0.29.
    """
    if cluster_name != H100:
        return MOEVEMENT_UTILISATION
    faster = cluster(H100).flops(job.precision.compute_bytes) / cluster(AZURE).flops(2)
    waiting = 1 / MOEVEMENT_UTILISATION.gemm_share - 1 / GEMM_SHARE
    time = 1 / GEMM_SHARE / faster + waiting * A100_MEMORY_BYTES_PER_S / H100_MEMORY_BYTES_PER_S
    return replace(
        MOEVEMENT_UTILISATION,
        gemm_share=1 / faster / time,
        optimizer_bytes_per_s=0.75 * H100_MEMORY_BYTES_PER_S,
        source="follows from MoEvement's A100 by FLOPS and rate of memory",
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
