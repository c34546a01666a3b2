"""Time that decisions take at the scale of the largest models and clusters.

Each section plans something from its inputs to the value that the system would use, and gives one row per size. Nothing
here needs torch or more than one process.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from harness import Benchmark, quartiles, row, rule, spread, start

from megatron.core.dist_checkpointing.moe.policy.placement import place_replicas
from megatron.core.dist_checkpointing.moe.policy.recovery import plan_recovery
from megatron.core.dist_checkpointing.moe.policy.window import ORDERINGS, Schedule, joint_schedules
from megatron.core.dist_checkpointing.moe.types import (
    FP16_FP32,
    BoundaryLog,
    Copy,
    Direction,
    Inventory,
    Lost,
    Tier,
    Topology,
    Window,
    full_plan,
)
from moe_ckpt.simulator.models import PRESETS
from moe_ckpt.simulator.shards import owned_operators

BENCHMARK = Benchmark("planning", 20)


def main() -> int:
    """Exit code 1 if a median is above what is allowed."""
    return BENCHMARK.run(
        __doc__, measured, report,
        lambda result: all(quartiles(one["seconds"])[1] <= one["allowed_s"] for one in result["rows"]),
    )  # fmt: skip


def measured(turns: int, quick: bool) -> dict[str, Any]:
    """Each plan so many times; quick: at the smallest scale."""
    scales = SCALES[:1] if quick else SCALES
    plans = [*schedules(), *(one for scale in scales for one in (*placements(*scale), *recoveries(*scale)))]
    return {"rows": [timed(*one, turns) for one in plans]}


def report(result: dict[str, Any]) -> list[str]:
    """Medians and quartiles."""
    lines = [row("plan", "ms", "allowed, ms"), rule(3)]
    for one in result["rows"]:
        shown = spread([1e3 * seconds for seconds in one["seconds"]], 1)
        lines.append(row(one["name"], shown, f"{1e3 * one['allowed_s']:.0f}"))
    return lines


Plan = tuple[str, Callable[[], object], float]
"""What is planned, how, and how many seconds that may take."""
SCALES = ((1024, 16), (4096, 32), (16384, 64))
"""Ranks and pipeline stages."""


def timed(name: str, plan: Callable[[], object], allowed_s: float, runs: int) -> dict[str, Any]:
    """Run `plan` once to warm up, then `runs` times."""
    plan()
    times = []
    for _ in range(runs):
        started = time.perf_counter()
        plan()
        times.append(time.perf_counter() - started)
    return {"name": name, "seconds": times, "allowed_s": allowed_s}


def schedules() -> list[Plan]:
    """Order all operators of DeepSeek-V3 by popularity and schedule them, in windows of a few sizes."""
    shape = PRESETS["DeepSeek-V3-671B"]
    sizes = shape.sizes(FP16_FP32)
    counts = {operator: operator.expert * 7919 % 1009 for operator in shape.operators if operator.is_expert}
    total = sum(size.full_bytes for size in sizes.values())

    def plan(budget: int) -> Schedule:
        order = ORDERINGS["popularity"](shape.operators, counts)
        return joint_schedules({(0,): order}, sizes, budget)[(0,)]

    found = []
    for share in (0.6, 0.25, 0.18):
        own = functools.partial(plan, int(total * share))
        name = f"schedule {shape.name}, {len(sizes)} operators, window of {own().window.size}"
        found.append((name, own, 0.050))
    return found


def recoveries(ranks: int, stages: int) -> list[Plan]:
    """Plan recoveries: one stage from its neighbours' logs while the others are parked, and all stages together."""
    topology = Topology(ranks, pp=stages, ep=8)
    failed = topology.stage_ranks(stages // 2)
    parked, nobody = _inventories(topology, frozenset(failed))
    lost = Lost(frozenset(failed[:8]), frozenset({topology.node(failed[0])}))
    cases = {"one stage": parked, "all stages": nobody}
    return [
        (
            f"recovery of {name}, {ranks} ranks, {stages} stages",
            functools.partial(plan_recovery, one, lost, topology),
            1.0,
        )
        for name, one in cases.items()
    ]


def _inventories(topology: Topology, failed: frozenset[int]) -> tuple[Inventory, Inventory]:
    """Windows of 6 iterations with two replicas, of 64 layers with 64 experts; with and without parked survivors."""
    shape = replace(PRESETS["Mixtral-8x7B"], num_layers=64, num_experts=64)
    taken, dense, required = {}, {}, {}
    for lane, operators in owned_operators(shape, topology).items():
        groups = tuple(operators[step::6] for step in range(6))
        taken[lane] = [Window(100, groups).plan(iteration) for iteration in range(100, 106)]
        dense[lane], required[lane] = full_plan(110, operators), frozenset(operators)
    placed = place_replicas(topology, 2)
    needs, copies, parked, logs = {}, {}, {}, {}
    for rank, peers in enumerate(placed.peers):
        at = topology.coordinates(rank)
        lane, node = (at.pp, at.ep), at.node
        holders = [(Tier.OWN_MEMORY, node), *((Tier.PEER_MEMORY, placed.nodes[peer]) for peer in peers)]
        needs[rank] = required[lane]
        copies[rank] = tuple(Copy(rank, plan, tier, holder) for plan in taken[lane] for tier, holder in holders)
        parked[rank] = copies[rank] + ((Copy(rank, dense[lane], Tier.PARKED, node),) if rank not in failed else ())
        logs[rank] = tuple(BoundaryLog(rank, direction, range(101, 111), node) for direction in Direction)
    journal = frozenset(range(111))
    return Inventory(needs, parked, logs, journal), Inventory(needs, copies, logs, journal)


def placements(ranks: int, stages: int) -> list[Plan]:
    """Place two replicas on nodes that groups fill regularly, and on nodes that straddle stages: a search."""
    nodes = {"regular nodes of 8": 8, "straddling nodes of 12": 12}
    return [
        (f"placement on {name}, {ranks} ranks, {stages} stages",
         functools.partial(place_replicas, Topology(ranks, pp=stages, ep=8, ranks_per_node=per_node), 2), 1.0)
        for name, per_node in nodes.items()
    ]  # fmt: skip


if __name__ == "__main__":
    start(main)
