"""MoC Fig. 15: lost tokens by K of memory and of storage with two-level recovery, and with Dynamic-K.

(a) drives the strategy `pec` itself; where a node is lost, its experts come from storage and the others from memory.
(b) is real training with SIGKILLs: docs/results/pec_accuracy.json of `python benchmarks/pec_accuracy.py --write`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from typing import Any

from megatron.core.dist_checkpointing.moe.types import Copy, Inventory, Lost, SnapshotPlan, Tier, Topology
from moe_ckpt.simulator.driver import Driver, layer_job

from .figure import Figure, bars, lines, measured
from .machine import where
from .moc_fig5 import COMMAND, EXPERTS, FILE, ITERATIONS, TOKENS, TOPK

INTERVAL = 32
"""Iterations between checkpoints."""

NODES = 2
"""Of the paper's Case 2: a fault takes one, with half of the experts."""

COMBINATIONS = ((1, 1), (2, 1), (4, 1), (8, 1), (4, 2), (4, 4))
"""(K of memory, K of storage)."""


@dataclass(frozen=True)
class DynamicRun:
    """A real run: after each fault, the share of tokens lost so far."""

    seed: int
    name: str
    plt: tuple[float, ...]
    first_snapshot: float
    last_snapshot: float


@cache
def lost(k_memory: int, k_storage: int, *, nodes_lost: int) -> float:
    """Share of all tokens lost by a fault in the middle; 0 nodes lost: processes only, so memory has everything."""
    job = layer_job(
        EXPERTS, TOPK, TOKENS, ITERATIONS,
        strategy="pec", pec_k_snapshot=k_memory, pec_k_persist=k_storage, interval=INTERVAL,
        persist_dir="storage", persist_interval=1,
    )  # fmt: skip
    counts = [[TOKENS * TOPK // EXPERTS] * EXPERTS]
    driver = Driver(job, lambda iteration: counts)
    memory: list[SnapshotPlan] = []
    storage: list[SnapshotPlan] = []
    for taken in driver.snapshots(ITERATIONS // 2):
        memory.append(taken.plan)
        storage += taken.persisted
    share = Fraction(nodes_lost, NODES)
    tokens = (1 - share) * _lost_tokens(driver, memory, Tier.PEER_MEMORY)
    if nodes_lost:
        tokens += share * _lost_tokens(driver, storage, Tier.PERSISTENT)
    return float(tokens / (TOKENS * TOPK * ITERATIONS))


def _lost_tokens(driver: Driver, plans: Sequence[SnapshotPlan], tier: Tier) -> int:
    """If all experts of the layer came from these copies: what each has been given since its own."""
    operators = frozenset(one for plan in plans for one in plan.parts)
    inventory = Inventory({0: operators}, {0: tuple(Copy(0, plan, tier, 0) for plan in plans)})
    plan = driver.strategy.recover(inventory, Lost(), Topology(1))
    iterations = sum(
        (plan.target - source.iteration) * sum(one.is_expert for one in source.operators) for source in plan.sources
    )
    return iterations * (TOKENS * TOPK // EXPERTS)


@cache
def runs() -> tuple[DynamicRun, ...]:
    """Those with faults, with Dynamic-K and with one expert per layer whatever is lost."""
    return tuple(
        DynamicRun(
            run["seed"],
            run["name"],
            tuple(recovery["plt"] for recovery in run["recoveries"]),
            run["snapshots"][0][1],
            run["snapshots"][-1][1],
        )
        for run in measured(FILE, COMMAND)["runs"]
        if run["recoveries"]
    )


def figure() -> Figure:
    """Both panels as tables."""
    by_nodes = {pair: [lost(*pair, nodes_lost=nodes) for nodes in (NODES, 1, 0)] for pair in COMBINATIONS}

    def draw(axes: list[Any]) -> None:
        shares = {"": [100 * found[1] for found in by_nodes.values()]}
        label = "lost tokens, one node of two (%)"
        bars(axes[0], list(map(str, COMBINATIONS)), shares, xlabel="K of memory, K of storage", ylabel=label)
        series = {f"{one.name}, {one.seed}": [100 * share for share in one.plt] for one in runs()}
        at = range(1, 1 + len(runs()[0].plt))
        lines(axes[1], at, series, xlabel="faults", ylabel="lost tokens so far (%)")
        axes[1].axhline(3.75, color="tab:red", linestyle=":")

    return Figure(
        "moc_fig15",
        {
            "two_level": [
                {"k_memory": memory, "k_storage": storage, "storage_only": found[0], "two_level": found[1]}
                for (memory, storage), found in by_nodes.items()
            ],
            "runs": [vars(one) for one in runs()],
        },
        (
            ((*pair, *found) for pair, found in by_nodes.items()),
            ((one.seed, one.name, " ".join(f"{100 * share:.2f}" for share in one.plt), one.first_snapshot,
                  one.last_snapshot) for one in runs()),
        ),
        draw,
        values={
            "where": where(measured(FILE, COMMAND)), "experts": EXPERTS, "interval": INTERVAL,
            "iterations": ITERATIONS,
        },
    )  # fmt: skip
