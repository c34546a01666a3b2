"""MoC Fig. 15: lost tokens by K of memory and of storage with two-level recovery, and with Dynamic-K.

(a) drives the strategy `pec` itself; where a node is lost, its experts come from storage and the others from memory.
(b) is real training with SIGKILLs: docs/results/pec_accuracy.json of `python benchmarks/pec_accuracy.py`.
"""

from __future__ import annotations

if __name__ == "__main__":
    from _script import run

    run(__file__)

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from typing import Any

from megatron.core.dist_checkpointing.moe.types import Copy, Inventory, Lost, SnapshotPlan, Tier, Topology
from moe_ckpt.report import Table, table
from moe_ckpt.simulator.driver import Driver, layer_job

from .figure import Figure, measured

EXPERTS, TOPK, TOKENS, ITERATIONS, INTERVAL = 16, 1, 16_384, 1024, 32
"""Of a layer, tokens of an iteration, iterations of the training and between checkpoints; experts are alike."""

NODES = 2
"""Of the paper's Case 2: a fault takes one, with half of the experts."""

COMBINATIONS = ((1, 1), (2, 1), (4, 1), (8, 1), (4, 2), (4, 4))
"""(K of memory, K of storage)."""

FILE, COMMAND = "pec_accuracy.json", "python benchmarks/pec_accuracy.py"


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
    return Figure(
        "MoC Fig. 15: lost tokens with two-level recovery and with Dynamic-K",
        {
            "two_level": [
                {"k_memory": memory, "k_storage": storage, "storage_only": lost(memory, storage, nodes_lost=NODES),
                 "two_level": lost(memory, storage, nodes_lost=1)}
                for memory, storage in COMBINATIONS
            ],
            "runs": [vars(one) for one in runs()],
        },
        (_levels(), _dynamic()),
        _draw,
        (),
        (
            f"(a): {EXPERTS} experts, a checkpoint every {INTERVAL} iterations, a fault in the middle of {ITERATIONS}.",
            "(b): the paper raises K from 1 to 4 and stays below 3.75 %, where K = 1 rises with each fault. Here K"
            " grows before the fault that would break the threshold.",
        ),
        (1, 2),
        (10, 4),
    )  # fmt: skip


def _levels() -> Table:
    rows = (
        (memory, storage, *(lost(memory, storage, nodes_lost=nodes) for nodes in (NODES, 1, 0)))
        for memory, storage in COMBINATIONS
    )
    return table(
        "(a) lost tokens of one fault",
        "K of memory | K of storage | from storage only:share | one node of two lost:share | processes only:share",
        rows,
    )


def _dynamic() -> Table:
    rows = (
        (one.seed, one.name, " ".join(f"{100 * share:.2f}" for share in one.plt), one.first_snapshot, one.last_snapshot)
        for one in runs()
    )
    columns = "seed | run | lost after each fault, % | first snapshot:share | last snapshot:share"
    return table("(b) real runs", columns, rows)


def _draw(axes: list[Any]) -> None:
    labels = [f"({memory}, {storage})" for memory, storage in COMBINATIONS]
    axes[0].bar(labels, [100 * lost(memory, storage, nodes_lost=1) for memory, storage in COMBINATIONS])
    axes[0].set(xlabel="K of memory, K of storage", ylabel="lost tokens, one node of two (%)")
    for one in runs():
        axes[1].plot(range(1, len(one.plt) + 1), [100 * share for share in one.plt], label=f"{one.name}, {one.seed}")
    axes[1].axhline(3.75, color="tab:red", linestyle=":")
    axes[1].set(xlabel="faults", ylabel="lost tokens so far (%)")
    axes[1].legend()
