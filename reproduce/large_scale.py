"""A figure of its own: 9,600 and 100,000 GPUs at a published failure rate, with and without recovery in place.

No Table or Fig. of a paper: none has it.
"""

from __future__ import annotations

if __name__ == "__main__":
    from _script import run

    run(__file__)

from dataclasses import asdict, dataclass, replace
from functools import cache
from typing import Any

from megatron.core.dist_checkpointing.moe.types import PRECISIONS, Topology
from moe_ckpt.report import Fact, table
from moe_ckpt.simulator.closed_form import ettr as closed_form
from moe_ckpt.simulator.clusters import cluster
from moe_ckpt.simulator.constants import COMEBACKS, THIS_PROJECT
from moe_ckpt.simulator.cost import MEGATRON_UTILISATION, iteration_cost
from moe_ckpt.simulator.events import estimate, simulate
from moe_ckpt.simulator.faults import poisson
from moe_ckpt.simulator.inputs import TokenDispatch, TrainingJob
from moe_ckpt.simulator.models import preset
from moe_ckpt.simulator.systems import SYSTEMS
from moe_ckpt.simulator.systems.links import SystemSetting

from .figure import Figure, decimals

META_GPU_S = 54 * 86400.0 / 419 * 16384
"""Seconds of one GPU between unexpected interruptions: 419 in 54 days on 16,384 GPUs (Llama 3, 3.3.4)."""

GPUS = {9600: Topology(9600, pp=15, ep=64), 100_000: Topology(99_840, pp=15, ep=64)}
"""9,600 as ByteRobust's job (arXiv:2509.16293), which reached an ETTR of 97 %; of 100,000 as many as 15 stages of
64-way expert parallelism divide."""

SAMPLES_PER_PIPELINE = 60
BYTEROBUST_ETTR = 0.97
NAMES = {"gemini": "full", "moevement": "sparse", "torch_dist_async": "torch_dist, async"}
SEEDS = range(4)
DURATION_S = 12 * 3600.0


@dataclass(frozen=True)
class LargeJob:
    """What one system makes of one size with one way to come back."""

    gpus: int
    mtbf_s: float
    system: str
    comeback: str
    iteration_s: float
    interval: int
    overhead_share: float
    recovery_s: float
    restart_s: float
    ettr: float
    ettr_by_chance: float


@cache
def outcomes() -> tuple[LargeJob, ...]:
    """All of them."""
    found = []
    for gpus, topology in GPUS.items():
        batch = SAMPLES_PER_PIPELINE * topology.dp
        exchange = TokenDispatch(overlaps=True, once_per_node=True, nodes_per_token=4)
        job = TrainingJob(
            preset("DeepSeek-V3-671B"), topology, PRECISIONS["fp16-fp32"], batch, SAMPLES_PER_PIPELINE, 4096, exchange
        )
        where, mtbf_s = cluster("h100-dgx"), META_GPU_S / topology.world_size
        cost = iteration_cost(job, where, MEGATRON_UTILISATION)
        for comeback in COMEBACKS:
            setting = SystemSetting(job, cost, where, replace(THIS_PROJECT, comeback=comeback))
            for system in NAMES:
                behaviour = SYSTEMS[system].behaviour(setting, mtbf_s)
                nodes = len(topology.ranks_by_node)
                runs = [simulate(behaviour, poisson(mtbf_s, DURATION_S, nodes, seed), DURATION_S) for seed in SEEDS]
                found.append(
                    LargeJob(
                        gpus, mtbf_s, system, comeback, cost.iteration_s, behaviour.interval,
                        behaviour.overhead_s / cost.iteration_s, behaviour.expected_recovery_s,
                        setting.launch_s + setting.meet_s, closed_form(behaviour, mtbf_s),
                        estimate([run.ettr for run in runs]).mean,
                    )
                )  # fmt: skip
    return tuple(found)


def gain(gpus: int, system: str) -> float:
    """By how much recovery in place raises ETTR over cold restarts."""
    by_mode = {one.comeback: one.ettr for one in outcomes() if (one.gpus, one.system) == (gpus, system)}
    return by_mode["in-place"] - by_mode["cold"]


def figure() -> Figure:
    """ETTR by size, system and way to come back."""
    rows = (
        (
            f"{one.gpus:,}", one.mtbf_s / 60, NAMES[one.system], one.comeback, one.restart_s, one.interval,
            one.overhead_share, one.recovery_s, decimals(one.ettr), decimals(one.ettr_by_chance),
        )
        for one in outcomes()
    )  # fmt: skip
    return Figure(
        "DeepSeek-V3 on 9,600 and 100,000 H100 GPUs at Meta's failure rate",
        {"rows": [asdict(one) for one in outcomes()], "meta_gpu_s": META_GPU_S, "byterobust_ettr": BYTEROBUST_ETTR},
        (
            table(
                "ETTR",
                "GPUs | MTBF, min:number | system | comes back | restart:seconds | interval:count | overhead:share"
                " | recovery:seconds | ETTR | by chance",
                rows,
            ),
        ),
        _draw,
        tuple(Fact(f"In place adds, full, {gpus:,} GPUs", gain(gpus, "gemini"), "share") for gpus in GPUS),
        (
            "Faults strike as often per GPU as in Llama 3's training. ByteRobust reports an ETTR of 97 % for"
            " three months"
            " on 9,600 GPUs; its failure rate is not used.",
            "A cold launch is the one that was fitted at 96 GPUs; connections grow with the ranks (MegaScale)."
            " What nodes of"
            " another size or a scheduler add is not in it: give --restart.",
        ),
        (1, 2),
        (11, 4),
    )


def _draw(axes: list[Any]) -> None:
    for axis, gpus in zip(axes, GPUS, strict=True):
        for at, comeback in enumerate(COMEBACKS):
            own = [one for one in outcomes() if (one.gpus, one.comeback) == (gpus, comeback)]
            axis.bar(
                [number + 0.25 * at for number in range(len(own))], [one.ettr for one in own], 0.25, label=comeback
            )
        axis.set_xticks([number + 0.25 for number in range(len(NAMES))], list(NAMES.values()))
        axis.set(title=f"{gpus:,} GPUs", ylabel="ETTR", ylim=(0, 1))
        axis.axhline(BYTEROBUST_ETTR, color="grey", linestyle=":", label="ByteRobust, 9,600 GPUs")
    axes[0].legend(fontsize=8)
