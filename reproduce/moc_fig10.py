"""MoC-System Fig. 10: bytes of a checkpoint, and of the rank that saves most of it, by K and sharding."""

from __future__ import annotations

from functools import cache
from typing import Any

from megatron.core.dist_checkpointing.moe.policy.partial import BOTH, pec_plan, sequential_selection
from megatron.core.dist_checkpointing.moe.types import FP16_FP32, ModelShape, OperatorId, Part, Topology
from moe_ckpt.megatron_core import load_megatron_core
from moe_ckpt.report import Fact
from moe_ckpt.simulator.models import preset
from moe_ckpt.simulator.paper_sizes import TABLE_3_SCOPES, checkpoint_bytes

from .figure import Figure, bars, lines, published

load_megatron_core()  # the package of this extension brings torch along

from megatron.core.dist_checkpointing.moe.extensions.shard.assignment import shard_checkpoint  # noqa: E402

EXPERTS_SAVED = (1, 2, 4, 8, 16)
"""K of the figure's bars; the last saves all experts of GPT-350M-16E."""

SERIES = {"none": "baseline", "EE": "EE", "EN": "EN", "equal": "EE + EN", "adaptive": "EE + AN"}
"""Strategies of `extensions.shard.assignment` and what the figure calls them."""

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
    paper, found, totals = published("moc"), reductions(), total_shares()
    given, pec = paper["fig10"], paper["pec"]
    fall = [of_case[ALL_TECHNIQUES] for of_case in found.values()]
    shape = preset(given["model"])
    parts = checkpoint_bytes(shape, FP16_FP32, shape.num_experts)
    scopes = paper["total_share_by_scope"] | {"both": given["total_share_of_full_k1"]}
    said = {
        "equal, all experts": given["equal_sharding_reduction_full"],
        "equal, K = 1": given["equal_sharding_reduction_pec"],
        "adaptive beyond equal, K = 1": given["adaptive_further_reduction_k1"],
    }
    return Figure(
        "moc_fig10",
        {
            "figure": "MoC-System Fig. 10",
            "total_share_of_full": totals,
            "bottleneck_bytes": bottlenecks(),
            "reductions": found,
            "pec_reductions": pec_reductions(),
            "published": given,
        },
        (
            ((name.replace("_", " "), getattr(parts, f"{name}_bytes") / parts.total_bytes, share)
                 for name, share in paper["composition"].items() if name != "where"),
            ((name, *by_k.values(), scopes.get(name)) for name, by_k in totals.items()),
            ((case, k, *of.values()) for case, by_k in bottlenecks().items() for k, of in by_k.items()),
            ((what, *(found[case][what] for case in found), said.get(what)) for what in next(iter(found.values()))),
            ((name.replace("_k1", "").replace("_", " "), ours, pec[name])
                 for name, ours in pec_reductions().items()),
        ),
        _draw,
        (
            Fact("Share of the full checkpoint, K = 1", totals[SCOPE.name][1], "share"),
            Fact("Published share, K = 1", given["total_share_of_full_k1"], "share"),
        ),
        {"least": 100 * min(fall), "most": 100 * max(fall)},
    )  # fmt: skip


def _draw(axes: list[Any]) -> None:
    labels = [str(k) for k in EXPERTS_SAVED]
    shares = {"": [100 * share for share in total_shares()[SCOPE.name].values()]}
    bars(axes[0], labels, shares, title="(a) total", xlabel="K", ylabel="% of the full checkpoint")
    for panel, axis, (case, by_k) in zip("bcd", axes[1:], bottlenecks().items(), strict=True):
        series = {label: [by_k[k][name] / 1e9 for k in EXPERTS_SAVED] for name, label in SERIES.items()}
        lines(axis, labels, series, title=f"({panel}) bottleneck rank, {case}", xlabel="K", ylabel="GB")
