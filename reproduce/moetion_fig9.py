"""MOETION Fig. 9: bytes and seconds of a checkpoint by the number of experts, MOETION's and Gemini's."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from megatron.core.dist_checkpointing.moe.extensions.lossy.selection import Budgets, SelectivePlan, selective_plan
from megatron.core.dist_checkpointing.moe.types import FP16_FP32, ModelShape, OperatorId, OperatorSize, Topology
from moe_ckpt.report import Fact
from moe_ckpt.simulator.clusters import cluster
from moe_ckpt.simulator.cost import MOEVEMENT_UTILISATION, iteration_cost
from moe_ckpt.simulator.inputs import Cluster, TrainingJob
from moe_ckpt.simulator.models import preset
from moe_ckpt.simulator.shards import owned_operators, sharing_ranks

from .figure import Figure, lines, published


def shape(experts: int) -> ModelShape:
    """MoE-GPT-3.8B with so many experts per layer.

    The paper gives no layers and widths, but 46.7 G parameters with 8 experts and, at 10 bytes each, 182 G with 32:
    both are exactly those of Mixtral-8x7B's layers (MoE-GPT-3.8B-8E has Mixtral's published total). Top-1 routing.
    """
    return replace(
        preset("Mixtral-8x7B"), name=f"MoE-GPT-3.8B-{experts}E", num_experts=experts, moe_router_topk=1, note=""
    )


@cache
def machines() -> Cluster:
    """The 16 nodes with 4 GPUs each.

    Their network carries 80 Gb/s per node, as MoEvement 5.1 says of the same machines and as their data sheet does;
    MOETION 7.1 says 320. With 320 a checkpoint of 8.5 s could not be well within an iteration, as 7.4 has it.
    """
    same = cluster("azure-nc96ads-a100")
    per_node = published("moetion")["cluster"]["gpus_per_node"]
    network = same.inter_node_bytes_per_s * same.gpus_per_node / per_node
    return replace(same, name="MOETION 7.1", gpus_per_node=per_node, inter_node_bytes_per_s=network)


def job(experts: int) -> TrainingJob:
    """8 stages and 8 data-parallel ranks (7.1). 16 samples of one microbatch each are 2 microbatches per pipeline."""
    stages, data, ep = published("moetion")["models"]["MoE-GPT-3.8B-8E"]["layout"]
    batch, length = published("moetion")["batch"]["global_batch"], published("moetion")["batch"]["seq_length"]
    topology = Topology(stages * data * ep, pp=stages, ep=ep, ranks_per_node=machines().gpus_per_node)
    return TrainingJob(shape(experts), topology, FP16_FP32, batch, batch // data, length)


@cache
def lanes(experts: int) -> dict[tuple[int, int], dict[OperatorId, OperatorSize]]:
    """Bytes of each operator's shard by stage: weights and optimizer state, 10 bytes per parameter (2.3)."""
    model, topology = shape(experts), job(experts).topology
    each = published("moetion")["bytes_per_parameter"]
    state, weights = each["weights"] + each["optimizer"], each["weights"]

    def size(operator: OperatorId) -> OperatorSize:
        parameters, ways = model.parameters[operator], sharing_ranks(operator, topology)
        return OperatorSize(-(-parameters * state // ways), -(-parameters * weights // ways))

    return {
        lane: {operator: size(operator) for operator in operators}
        for lane, operators in owned_operators(model, topology).items()
    }


@cache
def bytes_per_s() -> float:
    """At which a rank's checkpoint reaches its peers: the one published time of Gemini over the busiest rank's bytes.

    All other seconds of the figure follow from it.
    """
    given = published("moetion")["fig9"]
    return _busiest_bytes(given["experts"][-1]) / float(given["gemini_s"]["32"])


def _busiest_bytes(experts: int) -> int:
    return max(sum(size.full_bytes for size in sizes.values()) for sizes in lanes(experts).values())


@cache
def iteration_s(experts: int) -> float:
    """Seconds of an iteration.

    That with 8 experts follows from the published budget of 109 GB: B_local over the rate of the host's link. With more
    or fewer, the cost model says by how much gradients, parameters and the optimizer's step take longer or shorter.
    """
    anchor = published("moetion")["budget"]["local_bytes"] / machines().host_link_bytes_per_s

    def modelled(count: int) -> float:
        return iteration_cost(job(count), machines(), MOEVEMENT_UTILISATION).iteration_s

    return float(anchor + modelled(experts) - modelled(8))


@cache
def plans(experts: int) -> tuple[SelectivePlan, ...]:
    """What MOETION saves in an iteration, by stage: Alg. 1 within both budgets, all experts equally popular."""
    budgets = Budgets(machines().host_link_bytes_per_s, bytes_per_s(), iteration_s(experts))
    found = []
    for sizes in lanes(experts).values():
        tokens = {operator: 1 for operator in sizes if operator.is_expert}
        found.append(selective_plan(0, sizes, tokens, tokens, budgets))
    return tuple(found)


@dataclass(frozen=True)
class CheckpointSize:
    """Both systems with one number of experts. Bytes are those of all ranks; share is that of experts that are sent."""

    experts: int
    iteration_s: float
    gemini_bytes: int
    moetion_bytes: int
    moetion_share: float
    gemini_s: float
    moetion_s: float


@cache
def point(experts: int) -> CheckpointSize:
    """One x of the figure."""
    model = shape(experts)
    topology = job(experts).topology
    remote = [plan.remote for plan in plans(experts)]
    each = published("moetion")["bytes_per_parameter"]
    return CheckpointSize(
        experts,
        iteration_s(experts),
        model.total_parameters * (each["weights"] + each["optimizer"]),
        sum(one.snapshot_bytes for one in remote) * topology.ranks_per_stage,
        sum(sum(one.experts_per_layer.values()) for one in remote) / (experts * len(model.moe_layers)),
        _busiest_bytes(experts) / bytes_per_s(),
        max(one.snapshot_bytes for one in remote) / bytes_per_s(),
    )


def points() -> tuple[CheckpointSize, ...]:
    """All numbers of experts of the figure."""
    return tuple(point(experts) for experts in published("moetion")["fig9"]["experts"])


def figure() -> Figure:
    """Fig. 9 beside what the text says of it (MOETION 7.4), and the time of Fig. 10 at 8 experts (7.5)."""
    paper, last, eight = published("moetion"), points()[-1], point(8)
    given, rate = paper["fig9"], bytes_per_s()
    pairs = (
        ("parameters with 8 experts, G", shape(8).total_parameters / 1e9,
         paper["models"]["MoE-GPT-3.8B-8E"]["parameters"] / 1e9),
        ("Gemini with 32 experts, GB", last.gemini_bytes / 1e9, given["gemini_bytes"]["32"] / 1e9),
        ("Gemini with 32 experts, s (fitted)", last.gemini_s, given["gemini_s"]["32"]),
        ("MOETION with 32 experts, s", last.moetion_s, given["moetion_s"]["32"]),
        ("MOETION with 8 experts, s (Fig. 10)", eight.moetion_s, paper["fig10"]["full_s"]),
    )  # fmt: skip
    compared = [(what, f"{ours:.4g}", f"{there:.4g}", ours / there - 1) for what, ours, there in pairs]
    columns = ("what", "ours", "published", "difference")
    # The 587 GB of MoE-GPT-1.6B-64E, if all ranks have the same bytes.
    largest_s = float(paper["fig4"]["full_bytes"]) / int(paper["cluster"]["gpus"]) / rate
    return Figure(
        "moetion_fig9",
        {
            "figure": "MOETION Fig. 9",
            "rank_bytes_per_s": rate,
            "points": [vars(one) for one in points()],
            "compared": [dict(zip(columns, row, strict=True)) for row in compared],
            "published": given,
        },
        ((tuple(vars(one).values()) for one in points()), compared),
        _draw,
        (
            Fact("Checkpoint traffic of a rank, from Gemini's 74.9 s", f"{rate / 1e9:.3f} GB/s"),
            Fact("Iteration with 8 experts, from B_local = 109 GB", iteration_s(8), "seconds"),
        ),
        {"largest_s": largest_s},
    )


def _draw(axes: list[Any]) -> None:
    names, labels = {"gemini": "Gemini", "moetion": "MOETION"}, [str(one.experts) for one in points()]
    for axis, unit, scale, title in ((axes[0], "bytes", 1e9, "(a) size, GB"), (axes[1], "s", 1.0, "(b) time, s")):
        series = {label: [getattr(one, f"{name}_{unit}") / scale for one in points()] for name, label in names.items()}
        if unit == "s":
            series["iteration"] = [one.iteration_s for one in points()]
        lines(axis, labels, series, title=f"{title} (x: published)", xlabel="experts per layer")
        for name in names:
            known = published("moetion")["fig9"][f"{name}_{unit}"].items()
            for label, value in known:
                if value is not None:
                    axis.plot([label], [value / scale], "kx", markersize=9)
