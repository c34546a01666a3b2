"""An iteration of MoC-System's simulations (6.2.4): passes, snapshots and what goes to storage."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, cached_property

from megatron.core.dist_checkpointing.moe.policy.partial import BOTH, pec_plan
from megatron.core.dist_checkpointing.moe.types import FP16_FP32, ModelShape, Part, Topology
from moe_ckpt.megatron_core import load_megatron_core
from moe_ckpt.simulator.clusters import cluster
from moe_ckpt.simulator.cost import operator_flops
from moe_ckpt.simulator.ettr import moc_save_overhead_s
from moe_ckpt.simulator.paper_sizes import checkpoint_bytes

from .figure import published
from .moc_fig10 import selected_experts

load_megatron_core()  # the package of this extension brings torch along

from megatron.core.dist_checkpointing.moe.extensions.shard.assignment import shard_checkpoint  # noqa: E402

SEQ_LENGTH = 2048
"""Tokens that a data-parallel rank trains per iteration, one sample: not published, assumed."""

TOPK = 2
VOCABULARY = 32_000
"""Not published: those of Mixtral, a LLaMA-like MoE model of the time."""

NIC_SHARE = 0.8
"""Of a node's NICs, reached by collectives: assumed."""


@dataclass(frozen=True)
class MocMachine:
    """A GPU as 6.2.4 configures it, and the links between GPUs and between nodes, which it does not give.

    flops: that GEMMs reach. snapshot_bytes_per_s: of one GPU. nvlink_bytes_per_s: of one GPU, one way.
    node_bytes_per_s: of all NICs of a node of 8, one way.
    """

    flops: float
    snapshot_bytes_per_s: float
    nvlink_bytes_per_s: float
    node_bytes_per_s: float


@cache
def machines() -> dict[str, MocMachine]:
    """A800 nodes are taken to have NICs of 400 Gb/s together, H100 nodes those of a DGX, 8 times 400 Gb/s."""
    given = published("moc")["fig13"]
    return {
        name: MocMachine(
            given[name]["peak_flops"] * given[name]["utilisation"],
            given[name]["snapshot_bytes_per_s"],
            cluster(preset).intra_node_bytes_per_s,
            node_bytes_per_s,
        )
        for name, preset, node_bytes_per_s in (("a800", "a800", 50e9), ("h100", "h100-dgx", 400e9))
    }


@dataclass(frozen=True)
class MocIteration:
    """One group of bars: as many experts per layer as GPUs, and one data-parallel rank per `tp` GPUs."""

    machine: str
    gpus: int
    tp: int = 1
    hidden_size: int = 2048
    seq_length: int = SEQ_LENGTH

    @property
    def shape(self) -> ModelShape:
        """The LLaMA-like model of 6.2.4."""
        return _shape(self.gpus, self.hidden_size)

    @cached_property
    def topology(self) -> Topology:
        """Expert parallelism over all data-parallel ranks."""
        return Topology(self.gpus, tp=self.tp, ep=self.gpus // self.tp)


@cache
def _shape(experts: int, hidden_size: int) -> ModelShape:
    given = published("moc")["fig13"]
    return ModelShape(
        name=f"LLaMA-like-{experts}E",
        num_layers=given["num_layers"],
        hidden_size=hidden_size,
        num_attention_heads=hidden_size // given["kv_channels"],
        vocab_size=VOCABULARY,
        ffn_hidden_size=given["ffn_per_hidden"] * hidden_size,
        num_experts=experts,
        moe_router_topk=TOPK,
        gated_linear_unit=True,
        untie_embeddings_and_output_weights=True,
    )


@dataclass(frozen=True)
class MocIterationCost:
    """Seconds of one iteration with a checkpoint, and the bytes that go to storage.

    exchange_s is the part of forward_backward_s in which experts exchange tokens between nodes.
    """

    forward_backward_s: float
    exchange_s: float
    base_snapshot_s: float
    moc_snapshot_s: float
    base_persist_bytes: int
    moc_persist_bytes: int

    @property
    def baseline_s(self) -> float:
        """Training waits for the whole snapshot. It waits for storage too, whose rate is not published."""
        return self.forward_backward_s + self.base_snapshot_s

    @property
    def base_async_s(self) -> float:
        """The snapshot runs beside the passes; what outlasts them is waited for (eq. 10)."""
        return self.forward_backward_s + moc_save_overhead_s(self.base_snapshot_s, self.forward_backward_s)

    @property
    def moc_async_s(self) -> float:
        """The same with an eighth of the experts and full sharding."""
        return self.forward_backward_s + moc_save_overhead_s(self.moc_snapshot_s, self.forward_backward_s)


def compute_s(setting: MocIteration) -> float:
    """Forward and backward passes of one sample over the tensor-parallel ranks, at the published share of the peak."""
    flops = sum(operator_flops(setting.shape, setting.seq_length).values()) * setting.seq_length
    return flops / setting.tp / machines()[setting.machine].flops


def exchanges_s(setting: MocIteration) -> tuple[float, float]:
    """All-to-all of the experts of all layers, out and back, forward and backward: (within nodes, between nodes).

    As ASTRA-SIM's ring has it: each of n members passes (n - 1) n / 2 messages of 1 / n of the data, (n - 1) / 2 times
    the data, first along NVLink, then along the nodes. A rank of tensor parallelism sends all tokens over its own NIC.
    """
    machine, topology = machines()[setting.machine], setting.topology
    data_bytes = setting.seq_length * TOPK * setting.hidden_size * FP16_FP32.compute_bytes
    times = 4 * len(setting.shape.moe_layers)
    nodes = setting.gpus // topology.ranks_per_node
    members = topology.ranks_per_node // setting.tp
    rate = machine.node_bytes_per_s * NIC_SHARE / topology.ranks_per_node
    within = times * data_bytes * (members - 1) / 2 / machine.nvlink_bytes_per_s
    return within, times * data_bytes * (nodes - 1) / 2 / rate


@cache
def _shards(gpus: int, tp: int, hidden_size: int) -> tuple[int, int, int, int]:
    """Bytes of the rank that saves most, with Base-Async and with MoC-Async, and of all ranks, with either.

    By the real selection and sharding; machine and sequence play no part. MoC-Async saves an eighth of the experts.
    """
    setting = MocIteration("", gpus, tp, hidden_size)
    shape, topology = setting.shape, setting.topology
    k = max(1, int(gpus * published("moc")["fig13"]["moc_expert_share"]))
    parts = pec_plan(0, shape.operators, selected_experts(shape, topology, k, 0), BOTH, Part.EVERYTHING).parts
    return (
        shard_checkpoint("none", shape, topology, FP16_FP32).bottleneck_bytes,
        shard_checkpoint("adaptive", shape, topology, FP16_FP32, parts).bottleneck_bytes,
        checkpoint_bytes(shape, FP16_FP32, shape.num_experts).total_bytes,
        checkpoint_bytes(shape, FP16_FP32, k).total_bytes,
    )


@cache
def cost_of(setting: MocIteration) -> MocIterationCost:
    """All of one setting."""
    base_bytes, moc_bytes, *persisted = _shards(setting.gpus, setting.tp, setting.hidden_size)
    within_s, between_s = exchanges_s(setting)
    rate = machines()[setting.machine].snapshot_bytes_per_s
    passes_s = compute_s(setting) + within_s + between_s
    return MocIterationCost(passes_s, between_s, base_bytes / rate, moc_bytes / rate, *persisted)
