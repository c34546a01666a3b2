"""Time that decisions take at the scale of the largest models and clusters.

Each section plans something from its inputs to the value that the system would use, and gives one row per size. Nothing
here needs torch or more than one process. Medians are printed; with --write they are kept as data.
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from megatron.core.dist_checkpointing.moe.policy.ordering import ORDERINGS
from megatron.core.dist_checkpointing.moe.policy.placement import place_replicas
from megatron.core.dist_checkpointing.moe.policy.recovery import plan_recovery
from megatron.core.dist_checkpointing.moe.policy.window import Schedule, joint_schedules
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

RESULT = Path(__file__).resolve().parent / "results" / "planning.json"


@dataclass(frozen=True)
class Row:
    """What was planned, how long that took in seconds, and how long it may take (None: no limit was set)."""

    name: str
    median_s: float
    quartiles_s: tuple[float, float]
    runs: int
    allowed_s: float | None = None

    def __str__(self) -> str:
        low, high = self.quartiles_s
        allowed = "" if self.allowed_s is None else f"; allowed {self.allowed_s * 1e3:.0f} ms"
        return (
            f"{self.name}: median {self.median_s * 1e3:.1f} ms, quartiles {low * 1e3:.1f} to {high * 1e3:.1f} ms,"
            f" {self.runs} runs{allowed}"
        )


def main() -> int:
    """Run the sections that were asked for; exit code 1 if a median is above what is allowed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--section", action="append", choices=list(SECTIONS), help="run this one (default: all)")
    parser.add_argument("--runs", type=int, default=20, help="runs of which the median is taken (default: 20)")
    parser.add_argument("--write", action="store_true", help=f"keep the results in benchmarks/results/{RESULT.name}")
    arguments = parser.parse_args()
    if arguments.runs < 2:
        parser.error(f"--runs is {arguments.runs}, but must be at least 2")
    found: dict[str, list[Row]] = {}
    for section in arguments.section or SECTIONS:
        found[section] = SECTIONS[section](arguments.runs)
        for row in found[section]:
            print(f"{section}: {row}")
    if arguments.write:
        kept = json.loads(RESULT.read_text()) if RESULT.exists() else {}
        kept |= {section: [asdict(row) for row in rows] for section, rows in found.items()}
        RESULT.parent.mkdir(exist_ok=True)
        RESULT.write_text(json.dumps(kept, indent=1) + "\n")
    slow = [
        row for rows in found.values() for row in rows if row.allowed_s is not None and row.median_s > row.allowed_s
    ]
    return 1 if slow else 0


def timed(name: str, plan: Callable[[], object], runs: int, allowed_s: float | None = None) -> Row:
    """Run `plan` once to warm up, then `runs` times."""
    plan()
    times = []
    for _ in range(runs):
        started = time.perf_counter()
        plan()
        times.append(time.perf_counter() - started)
    low, median, high = statistics.quantiles(times, n=4)
    return Row(name, median, (low, high), runs, allowed_s)


def schedule(runs: int) -> list[Row]:
    """Order all operators of DeepSeek-V3 by popularity and schedule them, in windows of a few sizes."""
    shape = PRESETS["DeepSeek-V3-671B"]
    sizes = shape.sizes(FP16_FP32)
    counts = {operator: operator.expert * 7919 % 1009 for operator in shape.operators if operator.is_expert}
    total = sum(size.full_bytes for size in sizes.values())

    def row(budget: int) -> Row:
        def plan() -> Schedule:
            order = ORDERINGS["popularity"](shape.operators, counts)
            return joint_schedules({(0,): order}, sizes, budget)[(0,)]

        name = f"{shape.name}, {len(sizes)} operators, window of {plan().window.size}"
        return timed(name, plan, runs, allowed_s=0.050)

    return [row(int(total * share)) for share in (0.6, 0.25, 0.18)]


def recovery(runs: int) -> list[Row]:
    """Plan recoveries: one stage from its neighbours' logs while the others are parked, and all stages together."""
    rows = []
    for ranks, stages in ((1024, 16), (4096, 32), (16384, 64)):
        topology = Topology(ranks, pp=stages, ep=8)
        failed = topology.stage_ranks(stages // 2)
        parked, nobody = _inventories(topology, frozenset(failed))
        lost = Lost(frozenset(failed[:8]), frozenset({topology.node(failed[0])}))
        for name, inventory in (("one stage", parked), ("all stages", nobody)):
            plan = functools.partial(plan_recovery, inventory, lost, topology)
            rows.append(timed(f"{ranks} ranks, {stages} stages, {name} back", plan, runs, allowed_s=1.0))
    return rows


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


def placement(runs: int) -> list[Row]:
    """Place two replicas on nodes that groups fill regularly, and on nodes that straddle stages: a search."""
    rows = []
    for ranks, stages in ((1024, 16), (4096, 32), (16384, 64)):
        for name, per_node in (("regular nodes of 8", 8), ("straddling nodes of 12", 12)):
            plan = functools.partial(place_replicas, Topology(ranks, pp=stages, ep=8, ranks_per_node=per_node), 2)
            rows.append(timed(f"{ranks} ranks, {stages} stages, {name}", plan, runs, allowed_s=1.0))
    return rows


SECTIONS: dict[str, Callable[[int], list[Row]]] = {
    "schedule": schedule,
    "placement": placement,
    "recovery": recovery,
}
"""Rows of each section by its name, given the number of runs."""


if __name__ == "__main__":
    sys.exit(main())
