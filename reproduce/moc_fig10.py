"""MoC-System Fig. 10: bytes of a checkpoint, and of the rank that saves most of it, by K and sharding."""

from __future__ import annotations

if __name__ == "__main__":
    from _script import run

    run(__file__)

from functools import cache
from typing import Any

from megatron.core.dist_checkpointing.moe.policy.partial import (
    BOTH,
    pec_plan,
    sequential_selection,
)
from megatron.core.dist_checkpointing.moe.policy.sharding import shard_checkpoint
from megatron.core.dist_checkpointing.moe.types import FP16_FP32, ModelShape, OperatorId, Part, Topology
from moe_ckpt.report import Fact, Table, table
from moe_ckpt.simulator.models import preset
from moe_ckpt.simulator.paper_sizes import TABLE_3_SCOPES, checkpoint_bytes

from .figure import Figure, published

EXPERTS_SAVED = (1, 2, 4, 8, 16)
"""K of the figure's bars; the last saves all experts of GPT-350M-16E."""

SERIES = {"none": "baseline", "EE": "EE", "EN": "EN", "equal": "EE + EN", "adaptive": "EE + AN"}
"""Strategies of `policy.sharding` and what the figure calls them."""

(SCOPE,) = (scope for scope in TABLE_3_SCOPES if scope.name == "both")
"""What the paper's implementation leaves out of experts that are not selected: with it K = 1 gives the published 42.3 %
(weights and moments; eq. 6, which leaves the master weights out as well, gives 19.0 %)."""


ALL_TECHNIQUES = "adaptive K = 1 against baseline of all"


def selected_experts(shape: ModelShape, topology: Topology, k: int, position: int) -> frozenset[OperatorId]:
    """The experts of one checkpoint by the real sequential selection, for a job without pipeline parallelism."""
    return frozenset(sequential_selection(shape.moe_layers, shape.num_experts, k, position, ep=topology.ep))


def bottleneck_bytes(strategy: str, shape: ModelShape, topology: Topology, k: int) -> int:
    """Most bytes that one rank saves in any checkpoint of a rotation over all experts."""
    return max(
        shard_checkpoint(
            strategy,
            shape,
            topology,
            FP16_FP32,
            pec_plan(0, shape.operators, selected_experts(shape, topology, k, position), SCOPE, Part.EVERYTHING).parts,
        ).bottleneck_bytes
        for position in range(0, shape.num_experts, k)
    )


def total_shares() -> dict[str, dict[int, float]]:
    """Bytes of a checkpoint by scope and K, as shares of the full checkpoint (panel a)."""
    shape = preset(published("moc")["fig10"]["model"])
    full = checkpoint_bytes(shape, FP16_FP32, shape.num_experts).total_bytes
    return {
        scope.name: {k: checkpoint_bytes(shape, FP16_FP32, k, scope).total_bytes / full for k in EXPERTS_SAVED}
        for scope in TABLE_3_SCOPES
    }


@cache
def bottlenecks() -> dict[str, dict[int, dict[str, int]]]:
    """Bytes of the bottleneck rank by case, K and strategy (panels b to d)."""
    shape = preset(published("moc")["fig10"]["model"])
    cases = {name: case for name, case in published("moc")["cases"].items() if name != "where"}
    return {
        name: {
            k: {
                strategy: bottleneck_bytes(strategy, shape, Topology(case["gpus"], ep=case["ep"]), k)
                for strategy in SERIES
            }
            for k in EXPERTS_SAVED
        }
        for name, case in cases.items()
    }


def reductions() -> dict[str, dict[str, float]]:
    """By case, what sharding saves of the bottleneck rank: shares of the baseline, and of equal sharding."""

    def saved(of: dict[str, int], less: str, more: str) -> float:
        return 1 - of[less] / of[more]

    everything, one = EXPERTS_SAVED[-1], EXPERTS_SAVED[0]
    return {
        case: {
            "equal, all experts": saved(by_k[everything], "equal", "none"),
            "equal, K = 1": saved(by_k[one], "equal", "none"),
            "adaptive beyond equal, K = 1": saved(by_k[one], "adaptive", "equal"),
            ALL_TECHNIQUES: 1 - by_k[one]["adaptive"] / by_k[everything]["none"],
        }
        for case, by_k in bottlenecks().items()
    }


@cache
def pec_reductions() -> dict[str, float]:
    """What the PEC preprint's 4.2 gives for K = 1, by the names in published_moc.json: shares that are saved.

    Of the whole checkpoint without duplicates (eq. 6), and of the bottleneck rank against a baseline in which each
    data-parallel rank saves all it holds: with adaptive sharding of everything, and without sharding.
    """
    shape = preset(published("moc")["pec"]["model"])
    topology = Topology(shape.num_experts, ep=shape.num_experts)
    each = FP16_FP32.bytes_per_parameter(Part.EVERYTHING)
    expert_bytes = each * shape.expert_parameters // (shape.num_experts * len(shape.moe_layers))
    others = each * (shape.total_parameters - shape.expert_parameters)
    whole = checkpoint_bytes(shape, FP16_FP32, shape.num_experts).total_bytes
    experts_of_a_rank = -(-len(shape.moe_layers) // topology.ep)
    parts = pec_plan(0, shape.operators, selected_experts(shape, topology, 1, 0), BOTH, Part.EVERYTHING).parts
    adaptive = shard_checkpoint("adaptive", shape, topology, FP16_FP32, parts, optimizer_sharded=False)
    baseline = others + len(shape.moe_layers) * expert_bytes
    return {
        "total_reduction_k1": 1 - checkpoint_bytes(shape, FP16_FP32, 1).total_bytes / whole,
        "rank_reduction_k1": 1 - adaptive.bottleneck_bytes / baseline,
        "rank_reduction_without_sharding_k1": 1 - (others + experts_of_a_rank * expert_bytes) / baseline,
    }


def figure() -> Figure:
    """Fig. 10 beside what the text says of it (MoC 6.2.1, Fig. 2, Table 3)."""
    fall = [of_case[ALL_TECHNIQUES] for of_case in reductions().values()]
    given = published("moc")["fig10"]
    return Figure(
        "MoC-System Fig. 10: checkpoint size of GPT-350M-16E",
        {
            "figure": "MoC-System Fig. 10",
            "total_share_of_full": total_shares(),
            "bottleneck_bytes": bottlenecks(),
            "reductions": reductions(),
            "pec_reductions": pec_reductions(),
            "published": given,
        },
        (_composition(), _totals(), _bottlenecks(), _reductions(), _pec()),
        _draw,
        (
            Fact("Share of the full checkpoint, K = 1", total_shares()[SCOPE.name][1], "share"),
            Fact("Published share, K = 1", given["total_share_of_full_k1"], "share"),
        ),
        (
            "Bytes of a rank are the most that it saves in any checkpoint of a rotation over all experts. The optimizer"
            " state is sharded by ZeRO-2 in all series, as in the paper.",
            "The published figure has no numbers for the bars; their sizes are predicted. That sharding of experts"
            " alone helps only with several EP groups (Case 3) and that adaptive sharding goes below equal sharding at"
            " K = 1 comes out as the text says.",
            "The text has checkpoints become up to about 50 % shorter (6.2.2, all techniques); the bottleneck rank's"
            f" bytes fall by {100 * min(fall):.0f} to {100 * max(fall):.0f} %. Time has a part that does not depend on"
            " bytes (serialisation, files), which bytes alone cannot show.",
        ),
        (1, 4),
        (16, 3.6),
    )


def _composition() -> Table:
    shape = preset(published("moc")["fig10"]["model"])
    parts = checkpoint_bytes(shape, FP16_FP32, shape.num_experts)
    rows = (
        (name.replace("_", " "), getattr(parts, f"{name}_bytes") / parts.total_bytes, given)
        for name, given in published("moc")["composition"].items()
        if name != "where"
    )
    return table("Composition (Fig. 2)", "part | ours:share | published:share", rows)


def _totals() -> Table:
    given = published("moc")["total_share_by_scope"] | {"both": published("moc")["fig10"]["total_share_of_full_k1"]}
    rows = ((name, *by_k.values(), given.get(name)) for name, by_k in total_shares().items())
    shares = " | ".join(f"K = {k}:share" for k in EXPERTS_SAVED)
    return table("Total (a)", f"left out of the others | {shares} | published, K = 1:share", rows)


def _bottlenecks() -> Table:
    rows = ((case, k, *by_strategy.values()) for case, by_k in bottlenecks().items() for k, by_strategy in by_k.items())
    series = " | ".join(f"{label}:bytes" for label in SERIES.values())
    return table("Bottleneck rank (b to d)", f"case | K:count | {series}", rows)


def _reductions() -> Table:
    found, given = reductions(), published("moc")["fig10"]
    given_shares = {
        "equal, all experts": given["equal_sharding_reduction_full"],
        "equal, K = 1": given["equal_sharding_reduction_pec"],
        "adaptive beyond equal, K = 1": given["adaptive_further_reduction_k1"],
    }
    rows = (
        (what, *(found[case][what] for case in found), given_shares.get(what)) for what in next(iter(found.values()))
    )
    cases = " | ".join(f"{case}:share" for case in found)
    return table("Reductions", f"reduction | {cases} | published:share", rows)


def _pec() -> Table:
    given = published("moc")["pec"]
    rows = ((name.replace("_k1", "").replace("_", " "), ours, given[name]) for name, ours in pec_reductions().items())
    title = f"PEC preprint, 4.2: {given['model']} with K = 1"
    return table(title, "reduction | ours:share | published:share", rows)


def _draw(axes: list[Any]) -> None:
    labels = [str(k) for k in EXPERTS_SAVED]
    axes[0].bar(labels, [100 * share for share in total_shares()[SCOPE.name].values()])
    axes[0].set_title("(a) total")
    axes[0].set_ylabel("% of the full checkpoint")
    for panel, axis, (case, by_k) in zip("bcd", axes[1:], bottlenecks().items(), strict=True):
        for strategy, label in SERIES.items():
            axis.plot(labels, [by_k[k][strategy] / 1e9 for k in EXPERTS_SAVED], marker="o", label=label)
        axis.set_title(f"({panel}) bottleneck rank, {case}")
        axis.set_ylabel("GB")
        axis.set_ylim(bottom=0)
    axes[1].legend()
    for axis in axes:
        axis.set_xlabel("K")
