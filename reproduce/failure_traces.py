"""A figure of its own: failures that hang together beside failures by chance, with confidence intervals.

No Table or Fig. of a paper: none has it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from moe_ckpt.report import Fact
from moe_ckpt.simulator.events import Estimate, SimulatedRun, estimate, simulate
from moe_ckpt.simulator.faults import FailureMix, Fault, correlated, poisson
from moe_ckpt.simulator.sensitivity import STOCK
from moe_ckpt.simulator.systems import SYSTEMS, CheckpointSystem, Gemini, MoEvement
from moe_ckpt.simulator.systems.links import SystemSetting

from .break_even import HOUR_S, job_setting
from .figure import Figure, bars

GPUS, SEEDS, FAULTS_PER_RUN = 256, 20, 40
MTBFS_S = (3 * HOUR_S, 12 * HOUR_S)
KINDS: dict[str, Callable[[float, float, int, int], tuple[Fault, ...]]] = {
    "by chance": poisson,
    "correlated": correlated,
}
BY_UNIT = "full, r = 1, --moe-ckpt-unit of a rack"
CONTESTANTS: dict[str, tuple[CheckpointSystem, float]] = {
    "full, r = 1": (Gemini(replicas=1, shortest=True), 3 * HOUR_S),
    BY_UNIT: (Gemini(replicas=1, shortest=True), 3 * HOUR_S),
    "full, r = 2": (Gemini(replicas=2, shortest=True), 3 * HOUR_S),
    "full, r = 1, storage every 30 min": (Gemini(replicas=1, shortest=True), HOUR_S / 2),
    "sparse, r = 1": (MoEvement(replicas=1), 3 * HOUR_S),
    "torch_dist, async": (SYSTEMS[STOCK], 3 * HOUR_S),
}
"""Systems, and seconds between the states that they put into storage where they keep them in memory."""


@dataclass(frozen=True)
class Traced:
    """A system under faults of a kind: ETTR, what it has over torch_dist under the same faults, and which share of the
    recoveries came from storage because memory had lost a copy."""

    kind: str
    mtbf_s: float
    system: str
    ettr: Estimate
    over_stock: Estimate
    from_storage: float


@cache
def traced() -> tuple[Traced, ...]:
    """All kinds, failure rates and systems; each seed has the same faults for all systems."""
    setting, found = job_setting(GPUS, "in-place"), []
    nodes = len(setting.job.topology.ranks_by_node)
    for kind, faults_of in KINDS.items():
        for mtbf_s in MTBFS_S:
            run_s = FAULTS_PER_RUN * mtbf_s
            faults = [faults_of(mtbf_s, run_s, nodes, seed) for seed in range(SEEDS)]
            runs: dict[str, list[SimulatedRun]] = {}
            for name, (system, stored_s) in CONTESTANTS.items():
                usual = _by_rack(setting) if name == BY_UNIT else setting
                asked = replace(usual, constants=replace(setting.constants, persist_every_s=stored_s))
                behaviour = system.behaviour(asked, mtbf_s)
                runs[name] = [simulate(behaviour, one, run_s) for one in faults]
            stock = [run.ettr for run in runs["torch_dist, async"]]
            found += [_traced(kind, mtbf_s, name, own, stock) for name, own in runs.items()]
    return tuple(found)


def _by_rack(setting: SystemSetting) -> SystemSetting:
    """With each replica in another rack than its owner, as `--moe-ckpt-unit` places them."""
    topology = setting.job.topology
    units = tuple(topology.node(rank) // FailureMix().rack_nodes for rank in range(topology.world_size))
    return replace(setting, job=replace(setting.job, topology=replace(topology, units=units)))


def _traced(kind: str, mtbf_s: float, name: str, runs: list[SimulatedRun], stock: list[float]) -> Traced:
    over = estimate([run.ettr - there for run, there in zip(runs, stock, strict=True)])
    struck = sum(run.faults for run in runs)
    share = sum(run.from_storage for run in runs) / max(1, struck)
    return Traced(kind, mtbf_s, name, estimate([run.ettr for run in runs]), over, share)


def figure() -> Figure:
    """ETTR of all, and what is lost to correlation."""

    def draw(axes: list[Any]) -> None:
        for axis, mtbf_s in zip(axes, MTBFS_S, strict=True):
            series = {
                kind: [one.ettr.mean for one in traced() if (one.kind, one.mtbf_s) == (kind, mtbf_s)] for kind in KINDS
            }
            bars(axis, list(CONTESTANTS), series, title=f"MTBF {mtbf_s / HOUR_S:g} h", ylabel="ETTR", ylim=(0.8, 1))

    worst, by_unit = (
        max(one.from_storage for one in traced() if one.system == system and one.kind == "correlated")
        for system in ("full, r = 1", BY_UNIT)
    )
    return Figure(
        "failure_traces",
        {
            "rows": [
                {"kind": one.kind, "mtbf_s": one.mtbf_s, "system": one.system, "ettr": vars(one.ettr),
                 "over_stock": vars(one.over_stock), "from_storage": one.from_storage} for one in traced()
            ]
        },
        (
            ((one.kind, one.mtbf_s, one.system, f"{one.ettr:.4f}", f"{one.over_stock:+.4f}", one.from_storage)
             for one in traced()),
        ),
        draw,
        (
            Fact("Recoveries of full, r = 1, from storage where failures are correlated", worst, "share"),
            Fact("With --moe-ckpt-unit, so that no replica lies in the rack of its owner", by_unit, "share"),
        ),
        {"gpus": GPUS, "seeds": SEEDS, "faults": FAULTS_PER_RUN},
    )  # fmt: skip
