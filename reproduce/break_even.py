"""A figure of its own: where `sparse` beats `full`, and where `full` beats asynchronous torch_dist; by formula.

No Table or Fig. of a paper: none has it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise
from math import log
from typing import Any

from megatron.core.dist_checkpointing.moe.types import PRECISIONS, Topology
from moe_ckpt.report import Fact
from moe_ckpt.simulator.choices import Question
from moe_ckpt.simulator.closed_form import ettr
from moe_ckpt.simulator.clusters import cluster
from moe_ckpt.simulator.constants import THIS_PROJECT
from moe_ckpt.simulator.cost import MEGATRON_UTILISATION, iteration_cost
from moe_ckpt.simulator.events import Estimate
from moe_ckpt.simulator.inputs import GradientOverlap, TokenDispatch, TrainingJob
from moe_ckpt.simulator.models import preset
from moe_ckpt.simulator.sensitivity import STOCK, sensitivity
from moe_ckpt.simulator.systems import SYSTEMS, CheckpointSystem
from moe_ckpt.simulator.systems.links import SystemSetting

from .figure import BENCHMARKS, Figure, Rows, lines, measured
from .large_scale import META_GPU_S
from .machine import where

HOUR_S = 3600.0
RATIOS = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0)
"""Bytes of a snapshot by what a rank's link to the host carries in an iteration."""

MTBFS = (100, 1_000, 10_000)
"""Of the first table, in iterations, as `benchmarks/slow_links.py` has them."""
GPUS = (64, 256, 1024, 4096, 16384)
JOB_MTBFS_S = (HOUR_S, 3 * HOUR_S, 12 * HOUR_S, 48 * HOUR_S, 168 * HOUR_S)
WORTH = 0.005
"""Of ETTR: what has to be gained to be worth another set of checkpoints."""


def job_setting(gpus: int, comeback: str) -> SystemSetting:
    """Qwen3-235B-A22B on DGX H100: 2 stages, 8 experts' ranks, 16 samples of 4,096 tokens per GPU."""
    topology, where = Topology(gpus, pp=2, ep=8), cluster("h100-dgx")
    exchange, overlap = TokenDispatch(once_per_node=True), GradientOverlap(True, True)
    precision, batch = PRECISIONS["fp16-fp32"].exact(), 16 * gpus
    job = TrainingJob(
        preset("Qwen3-235B-A22B"), topology, precision, batch, batch // topology.dp, 4096, exchange, overlap
    )
    constants = replace(THIS_PROJECT, comeback=comeback, replicas=1)
    return SystemSetting(job, iteration_cost(job, where, MEGATRON_UTILISATION), where, constants)


@dataclass(frozen=True)
class Slow:
    """The job on links that carry so much less, with a fault every so many iterations: ETTR of both."""

    ratio: float
    mtbf: int
    window: int
    interval: int
    sparse: float
    full: float

    @property
    def gain(self) -> float:
        """Of ETTR."""
        return self.sparse - self.full


@cache
def slow_links() -> tuple[Slow, ...]:
    """`sparse` and `full`, both in place, on 64 GPUs whose links to the host and the network are slowed alike."""
    found, usual = [], job_setting(64, "in-place")
    for ratio in RATIOS:
        rate = usual.whole_bytes / (ratio * usual.iteration_s)
        links = replace(
            usual.cluster,
            host_link_bytes_per_s=rate / usual.constants.host_share,
            inter_node_bytes_per_s=rate / usual.constants.network_share,
        )
        slow = replace(usual, cluster=links)
        for mtbf in MTBFS:
            mtbf_s = mtbf * usual.iteration_s
            sparse, full = (SYSTEMS[name].behaviour(slow, mtbf_s) for name in ("moevement", "gemini"))
            ettrs = ettr(sparse, mtbf_s), ettr(full, mtbf_s)
            found.append(Slow(ratio, mtbf, sparse.window, full.interval, *ettrs))
    return tuple(found)


@cache
def on_cpus(name: str = "slow_links") -> dict[tuple[float, int], Estimate]:
    """What `sparse` gained over `full` on links of this machine that were throttled, by ratio and iterations between
    faults. name: of the run."""
    kept = _kept(name)["gains"]
    return {
        (float(ratio), int(mtbf)): Estimate(**gain) for ratio, by_mtbf in kept.items() for mtbf, gain in by_mtbf.items()
    }


def _kept(name: str = "slow_links") -> dict[str, Any]:
    return measured(f"{name}.json", "benchmarks/slow_links.py --write", BENCHMARKS)


def _against_the_prediction(name: str = "slow_links") -> str:
    """Where that run shows a loss though a gain is predicted."""
    found = on_cpus(name)
    behind = {key for key, one in found.items() if one.is_beyond() and one.mean < 0}
    both = (one for one in slow_links() if one.gain > WORTH and (one.ratio, one.mtbf) in behind)
    return ", ".join(f"{one.ratio:g} with {one.mtbf:,}" for one in both) or "none"


@dataclass(frozen=True)
class Stock:
    """A job of so many GPUs: ETTR of `full` and of asynchronous torch_dist, and the least and most that is gained where
    each fitted constant is anywhere in its band."""

    gpus: int
    mtbf_s: float
    full: float
    stock: float
    least: float
    most: float

    @property
    def gain(self) -> float:
        """Of ETTR."""
        return self.full - self.stock


@cache
def beside_stock() -> tuple[Stock, ...]:
    """All sizes and failure rates, both with new processes: what torchrun does without this project."""
    found = []
    for gpus in GPUS:
        setting = job_setting(gpus, "cold")
        found += [_stock(setting, mtbf_s) for mtbf_s in JOB_MTBFS_S]
    return tuple(found)


def _stock(setting: SystemSetting, mtbf_s: float) -> Stock:
    system: CheckpointSystem = SYSTEMS["gemini"]
    question = Question(setting.job, setting.cost, setting.cluster, mtbf_s, setting.constants)
    gains = [one.ettr - one.stock_ettr for one in sensitivity(question, system)]
    full, stock = (ettr(one.behaviour(setting, mtbf_s), mtbf_s) for one in (system, SYSTEMS[STOCK]))
    gains.append(full - stock)
    return Stock(setting.job.topology.world_size, mtbf_s, full, stock, min(gains), max(gains))


BREAK_EVENS = ("gain", "least", "most")
"""By the constants as they are, and with that one at an end of its band which makes it least or most."""


@cache
def break_even_s(gpus: int, which: str = "gain") -> float:
    """The MTBF of the job above which `full` gains less than `WORTH`, by bisection. which: of `BREAK_EVENS`."""
    setting, low, high = job_setting(gpus, "cold"), 60.0, 10_000 * HOUR_S
    for _ in range(20):
        middle = (low * high) ** 0.5
        low, high = (middle, high) if getattr(_stock(setting, middle), which) > WORTH else (low, middle)
    return low


def break_even_gpus(which: str) -> int:
    """GPUs from which on a job at Meta's rate has a fault more often than at the break-even: two digits, between the
    sizes of the table by a power law."""
    margins = [(gpus, break_even_s(gpus, which) / (META_GPU_S / gpus)) for gpus in GPUS]
    (below, less), (above, more) = next(pair for pair in pairwise(margins) if pair[0][1] < 1 <= pair[1][1])
    exact = below * (above / below) ** (log(1 / less) / log(more / less))
    return int(float(f"{exact:.1e}"))


def figure() -> Figure:
    """Both."""
    wins, found = [one.ratio for one in slow_links() if one.gain > WORTH], on_cpus()
    beyond = {key: one.mean for key, one in found.items() if one.is_beyond()}
    always = [ratio for ratio in RATIOS if wins.count(ratio) == len(MTBFS)]
    return Figure(
        "break_even",
        {
            "sparse_and_full": [vars(one) for one in slow_links()],
            "full_and_stock": [vars(one) | {"gain": one.gain} for one in beside_stock()],
            "break_even_s": {str(gpus): {which: break_even_s(gpus, which) for which in BREAK_EVENS} for gpus in GPUS},
            "break_even_gpus": {which: break_even_gpus(which) for which in BREAK_EVENS},
            "worth": WORTH,
            "least_ratio_at_which_sparse_wins": min(wins, default=None),
        },
        (
            ((f"{one.ratio:g}", one.mtbf, one.window, one.interval, f"{one.sparse:.3f}", f"{one.full:.3f}",
              _points(one.gain), _points_of(found.get((one.ratio, one.mtbf)))) for one in slow_links()),
            _table(),
            ((f"{gpus:,}", *(break_even_s(gpus, which) for which in BREAK_EVENS), META_GPU_S / gpus,
              "yes" if META_GPU_S / gpus < break_even_s(gpus) else "no") for gpus in GPUS),
        ),
        _draw,
        (
            Fact("Least ratio at which sparse gains half a point", f"{min(wins):g}" if wins else "none"),
            Fact("Ratios at which it does at each failure rate", ", ".join(f"{ratio:g}" for ratio in always) or "none"),
        ),
        # Where less is gained, larger jobs are worth it.
        {
            "iteration_s": job_setting(64, "in-place").iteration_s, "measured": len(found), "where": where(_kept()),
            "ahead": sum(mean > 0 for mean in beyond.values()), "behind": sum(mean < 0 for mean in beyond.values()),
            "opposite": _against_the_prediction(), "opposite_again": _against_the_prediction("slow_links_again"),
            "chosen": " to ".join(sorted({str(one["sparse"]["window"]) for one in _kept()["links"]["2"]})),
            "break_even_gpus": break_even_gpus("gain"), "least_gpus": break_even_gpus("most"),
            "most_gpus": break_even_gpus("least"),
        },
    )  # fmt: skip


def _table() -> Rows:
    return (
        (f"{one.gpus:,}", one.mtbf_s, f"{one.full:.3f}", f"{one.stock:.3f}", _points(one.gain),
         f"{_points(one.least)} to {_points(one.most)}") for one in beside_stock()
    )  # fmt: skip


def _points(gain: float) -> str:
    return f"{100 * gain:+.1f}"


def _points_of(gain: Estimate | None) -> str:
    return f"{Estimate(100 * gain.mean, 100 * gain.half_width, gain.runs):+.1f}" if gain else ""


def _draw(axes: list[Any]) -> None:
    series = {
        f"a fault every {mtbf:,} iterations": [100 * one.gain for one in slow_links() if one.mtbf == mtbf]
        for mtbf in MTBFS
    }
    lines(axes[0], RATIOS, series, title="sparse beside full: lines predicted, points measured", xscale="log",
          ylabel="points of ETTR gained", xlabel="bytes / (link x iteration)")  # fmt: skip
    for line, mtbf in zip(axes[0].get_lines(), MTBFS, strict=True):
        of = [(ratio, gain) for (ratio, every), gain in on_cpus().items() if every == mtbf]
        axes[0].errorbar(
            [ratio for ratio, _ in of], [100 * gain.mean for _, gain in of],
            [100 * gain.half_width for _, gain in of],
            color=line.get_color(), linestyle="none", marker="s", capsize=3,
        )  # fmt: skip
    axes[0].axhline(0, color="grey", linewidth=0.8)
    hours = {
        "break-even": [break_even_s(gpus) / HOUR_S for gpus in GPUS],
        "Meta's rate of failures": [META_GPU_S / gpus / HOUR_S for gpus in GPUS],
    }
    lines(axes[1], GPUS, hours, title="full gains half a point below the first line", xscale="log", yscale="log",
          xlabel="GPUs", ylabel="MTBF of the job (h)")  # fmt: skip
