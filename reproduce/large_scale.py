"""A figure of its own: 9,600 and 100,000 GPUs at a published failure rate, with and without recovery in place.

No Table or Fig. of a paper: none has it.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

from megatron.core.dist_checkpointing.moe.types import PRECISIONS, Topology
from moe_ckpt.report import Fact
from moe_ckpt.simulator.closed_form import ettr as closed_form
from moe_ckpt.simulator.clusters import cluster
from moe_ckpt.simulator.constants import COMEBACKS, THIS_PROJECT
from moe_ckpt.simulator.cost import MEGATRON_UTILISATION, iteration_cost
from moe_ckpt.simulator.inputs import TokenDispatch, TrainingJob
from moe_ckpt.simulator.models import preset
from moe_ckpt.simulator.systems import SYSTEMS
from moe_ckpt.simulator.systems.links import SystemSetting

from .evaluation import SEEDS, by_chance
from .figure import Figure, bars, decimals

META_GPU_S = 54 * 86400.0 / 419 * 16384
"""Seconds of one GPU between unexpected interruptions: 419 in 54 days on 16,384 GPUs (Llama 3, 3.3.4)."""

GPUS = {9600: Topology(9600, pp=15, ep=64), 100_000: Topology(99_840, pp=15, ep=64)}
"""9,600 as ByteRobust's job (arXiv:2509.16293), which reached an ETTR of 97 %; of 100,000 as many as 15 stages of
64-way expert parallelism divide."""

SAMPLES_PER_PIPELINE = 60
BYTEROBUST_ETTR = 0.97
NAMES = {"gemini": "full", "moevement": "sparse", "torch_dist_async": "torch_dist, async"}
FAULTS_PER_RUN = 40


@cache
def outcomes() -> tuple[dict[str, Any], ...]:
    """What each system makes of each size with each way to come back."""
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
                struck = by_chance(behaviour, job, mtbf_s, duration_s=FAULTS_PER_RUN * mtbf_s)
                found.append({
                    "gpus": gpus, "mtbf_s": mtbf_s, "system": system, "comeback": comeback,
                    "iteration_s": cost.iteration_s, "interval": behaviour.interval,
                    "overhead_share": behaviour.overhead_s / cost.iteration_s,
                    "recovery_s": behaviour.expected_recovery_s, "restart_s": setting.launch_s + setting.meet_s,
                    "ettr": closed_form(behaviour, mtbf_s),
                    "ettr_by_chance": struck,
                })  # fmt: skip
    return tuple(found)


def gain(gpus: int, system: str) -> float:
    """By how much recovery in place raises ETTR over cold restarts."""
    by_mode = {one["comeback"]: one["ettr"] for one in outcomes() if (one["gpus"], one["system"]) == (gpus, system)}
    return float(by_mode["in-place"] - by_mode["cold"])


def figure() -> Figure:
    """ETTR by size, system and way to come back."""

    def draw(axes: list[Any]) -> None:
        for axis, gpus in zip(axes, GPUS, strict=True):
            own = [one for one in outcomes() if one["gpus"] == gpus]
            series = {mode: [one["ettr"] for one in own if one["comeback"] == mode] for mode in COMEBACKS}
            axis.axhline(BYTEROBUST_ETTR, color="grey", linestyle=":", label="ByteRobust, 9,600 GPUs")
            bars(axis, list(NAMES.values()), series, title=f"{gpus:,} GPUs", ylabel="ETTR", ylim=(0, 1))

    return Figure(
        "large_scale",
        {
            "rows": [one | {"ettr_by_chance": vars(one["ettr_by_chance"])} for one in outcomes()],
            "meta_gpu_s": META_GPU_S, "byterobust_ettr": BYTEROBUST_ETTR,
        },
        (
            ((f"{one['gpus']:,}", one["mtbf_s"] / 60, NAMES[one["system"]], one["comeback"], one["restart_s"],
              one["interval"], one["overhead_share"], one["recovery_s"], decimals(one["ettr"]),
              f"{one['ettr_by_chance']:.3f}") for one in outcomes()),
        ), draw,
        tuple(Fact(f"In place adds, full, {gpus:,} GPUs", f"{100 * gain(gpus, 'gemini'):.1f} points of ETTR")
              for gpus in GPUS),
        {"seeds": len(SEEDS), "faults": FAULTS_PER_RUN},
    )  # fmt: skip
