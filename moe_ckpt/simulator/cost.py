"""What an iteration costs: compute from the model's shape, collectives by an affine law, the pipeline's formula."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from megatron.core.dist_checkpointing.moe.errors import UsageError
from megatron.core.dist_checkpointing.moe.policy.checks import not_negative, positive
from megatron.core.dist_checkpointing.moe.policy.rollback import sends
from megatron.core.dist_checkpointing.moe.types import Direction, ModelShape, OperatorId, OperatorKind

from .inputs import Cluster, IterationCost, TrainingJob
from .roofline import SIXTEEN_BITS, GroupSpread, Links, Rates, Work, attention_width, works


@dataclass(frozen=True)
class Utilisation:
    """How much of a cluster's published rates training reaches: one set for all models on it.

    gemm_share: of peak FLOPS, by matrix products on a cluster that does not say it; where the rate of GPU memory is not
    known, by the whole of a stage's computation. memory_share: of the rate of GPU memory, by all other kernels.
    hidden_share: of an all-to-all that overlaps with computation, what it takes no time for. nic_share, nvlink_share:
    of a GPU's share of the node's NICs, and of its links within the node, by collectives. latency_s: of a collective,
    for each step of a ring. optimizer_bytes_per_s: of GPU memory, while the optimizer reads and writes its state.
    imbalance: how much of the difference between the slowest stage and the mean one stays; 1 where stages have equal
    numbers of layers, as Megatron-Core places them, 0 where all are equally slow. source: where these stand.
    Raises UsageError for rates that are not above 0 and shares above 1.
    """

    gemm_share: float
    nic_share: float
    nvlink_share: float
    latency_s: float
    optimizer_bytes_per_s: float
    imbalance: float
    source: str
    memory_share: float = 1.0
    hidden_share: float = 0.0

    def __post_init__(self) -> None:
        for name in ("gemm_share", "nic_share", "nvlink_share", "optimizer_bytes_per_s", "memory_share"):
            positive(name, getattr(self, name))
        for name in ("latency_s", "imbalance", "hidden_share"):
            not_negative(name, getattr(self, name))
        for name in ("gemm_share", "memory_share", "hidden_share", "nic_share", "nvlink_share", "imbalance"):
            if getattr(self, name) > 1:
                raise UsageError(f"{name} is {getattr(self, name)}, but a share is at most 1")


MOEVEMENT_UTILISATION = Utilisation(
    gemm_share=0.72,
    memory_share=0.53,
    nic_share=0.77,
    nvlink_share=0.70,
    latency_s=10e-6,
    optimizer_bytes_per_s=1.5e12,
    imbalance=0.35,
    source="MoEvement 5.1: DeepSpeed on 96 A100; one value is fitted, to one iteration time",
)
"""MoEvement 5.1: DeepSpeed on 96 A100. Samples of 2,048 tokens for all models: that of MoE-LLaVa is not published."""

MEGATRON_UTILISATION = replace(
    MOEVEMENT_UTILISATION,
    memory_share=0.85,
    hidden_share=0.27,
    optimizer_bytes_per_s=2.0e12,
    imbalance=1.0,
    source="published efficiencies of tuned kernels, with Megatron-Core's equal numbers of layers per stage",
)
"""Where nothing was measured."""


def operator_flops(
    shape: ModelShape, seq_length: int, popularity: Mapping[OperatorId, float] | None = None
) -> dict[OperatorId, float]:
    """FLOPs of each operator for one input token, forward and backward, averaged over tokens.

    Two per parameter and multiplication, of which there are three: forward, input gradients, weight gradients. With
    attention come the scores of a sequence, of which causal kernels compute half (6 s h), with the output layer its
    multiplication also where it shares the embedding's weights; the embedding is a look-up.

    Args:
        shape: The model.
        seq_length: Tokens of a sequence.
        popularity: How often each expert is chosen, in any unit; None: all alike.
    """
    chosen, found = _chosen(shape, popularity or {}), {}
    for operator, parameters in shape.parameters.items():
        if operator.kind is OperatorKind.EMBEDDING:
            found[operator] = 0.0
        elif operator.kind is OperatorKind.HEAD:
            found[operator] = 6.0 * shape.vocab_size * shape.hidden_size
        elif operator.is_expert:
            found[operator] = 6.0 * parameters * shape.moe_router_topk * chosen(operator)
        elif operator.kind is OperatorKind.NON_EXPERT:
            found[operator] = 6.0 * parameters + 6.0 * seq_length * attention_width(shape)
        else:
            found[operator] = 6.0 * parameters
    return found


def _chosen(shape: ModelShape, popularity: Mapping[OperatorId, float]) -> Callable[[OperatorId], float]:
    """The share of a layer's routed tokens that an expert receives; an equal one where its layer has no counts."""
    of_layer: dict[int, float] = {}
    for operator, count in popularity.items():
        of_layer[operator.layer] = of_layer.get(operator.layer, 0.0) + count

    def share(operator: OperatorId) -> float:
        total = of_layer.get(operator.layer, 0.0)
        return popularity.get(operator, 0.0) / total if total else 1 / shape.num_experts

    return share


def iteration_cost(job: TrainingJob, cluster: Cluster, utilisation: Utilisation) -> IterationCost:
    """Seconds of one iteration without checkpoints and faults (MoEvement App. C).

    Counted: the FLOPs of each stage, the all-to-all of its experts, tensor parallelism's sums; gradients and parameters
    of the distributed optimizer, as far as they are not overlapped; the optimizer's step. Stage boundaries
    hide behind other microbatches, context parallelism's exchange behind attention; no activations are recomputed.
    Raises UsageError for a job whose layers cannot fill its stages, and a cluster without a rate for its element size.

    Args:
        job: The model, its layout, batch and precision.
        cluster: Rates of the GPUs and of the links between them.
        utilisation: Shares of these rates that training reaches.
    """
    parts = _Parts(job, cluster, utilisation)
    seconds = [parts.stage_s(stage) for stage in parts.stages]
    mean_s = sum(seconds) / len(seconds)
    return IterationCost(
        tuple(mean_s + utilisation.imbalance * (stage_s - mean_s) for stage_s in seconds),
        job.microbatches,
        job.topology.vpp,
        max(parts.sync_s(stage) for stage in parts.stages),
        parts.update_s,
        network_busy_s(job, cluster, utilisation),
    )


def network_busy_s(job: TrainingJob, cluster: Cluster, utilisation: Utilisation) -> float:
    """Seconds of an iteration in which the busiest rank's share of the NICs carries training's own traffic.

    Stage boundaries, expert parallelism over nodes, gradients and parameters, whether or not computation hides them:
    what checkpoints send to other nodes has to wait. Raises UsageError as `iteration_cost`.

    Args:
        job: The model, its layout, batch and precision.
        cluster: Rates of the GPUs and of the links between them.
        utilisation: Shares of these rates that training reaches.
    """
    parts = _Parts(job, cluster, utilisation)
    return max(parts.network_s(number, stage) for number, stage in enumerate(parts.stages))


@dataclass(frozen=True)
class _Stage:
    """What a stage has: the work of one token; layers, and how many of them have experts; parameters."""

    work: tuple[tuple[OperatorId, Work], ...]
    layers: int
    moe_layers: int
    expert_parameters: int
    other_parameters: int


@dataclass(frozen=True)
class _Parts:
    """What one iteration of a job is made of."""

    job: TrainingJob
    cluster: Cluster
    utilisation: Utilisation

    @cached_property
    def stages(self) -> tuple[_Stage, ...]:
        width = self.cluster.width(self.job.precision.compute_bytes)
        work = dict(works(self.job.shape, self.job.seq_length, width))
        parameters = self.job.shape.parameters
        return tuple(
            _Stage(
                tuple((one, work[one]) for one in operators),
                sum(one.kind is OperatorKind.NON_EXPERT for one in operators),
                sum(one.kind is OperatorKind.ROUTER for one in operators),
                sum(parameters[one] for one in operators if one.is_expert),
                sum(parameters[one] for one in operators if not one.is_expert),
            )
            for operators in self.job.shape.operators_of_stages(self.job.topology)
        )

    @cached_property
    def links(self) -> Links:
        return Links(
            self.cluster.intra_node_bytes_per_s * self.utilisation.nvlink_share,
            self.cluster.inter_node_bytes_per_s * self.utilisation.nic_share,
            self.utilisation.latency_s,
        )

    @property
    def tokens(self) -> float:
        """Tokens of one microbatch for which one rank does all the work of its stage."""
        return self.job.tokens / self.job.microbatches / self.job.topology.ranks_per_stage

    @property
    def travelling_bytes(self) -> int:
        """Bytes of an element of activations and gradients on their way: not even fp8 training sends 8 bits."""
        return max(2, self.job.precision.compute_bytes)

    @property
    def token_bytes(self) -> int:
        return self.job.shape.hidden_size * self.travelling_bytes

    @property
    def joined(self) -> int:
        """Ranks that NVLink joins: those of a node, or of several."""
        return max(self.cluster.nvlink_gpus, self.job.topology.ranks_per_node)

    @property
    def expert_spread(self) -> GroupSpread:
        topology = self.job.topology
        return GroupSpread.of(topology.ep, topology.expert_tp, self.joined)

    def stage_s(self, stage: _Stage) -> float:
        """t_s: forward and backward of one microbatch."""
        compute_s, exchange_s = self.compute_s(stage), self.exchange_s(stage)
        if self.job.exchange.overlaps:
            exchange_s -= self.utilisation.hidden_share * min(compute_s, exchange_s)
        return compute_s + exchange_s + self.tensor_s(stage)

    def compute_s(self, stage: _Stage) -> float:
        """What the GPU computes in a microbatch, by the roofline."""
        topology = self.job.topology
        seconds = 0.0
        for operator, work in stage.work:
            ranks = topology.ep * topology.expert_tp if operator.is_expert else topology.tp
            seconds += work.seconds(self.tokens, self.rates, ranks)
        return seconds

    @cached_property
    def rates(self) -> Rates:
        """What a GPU reaches."""
        width, reached = self.job.precision.compute_bytes, self.utilisation
        known = self.cluster.gpu_memory_bytes_per_s
        return Rates(
            self._product_flops(width),
            self._product_flops(max(width, SIXTEEN_BITS)),
            known * reached.memory_share if known else math.inf,
        )

    def _product_flops(self, element_bytes: int) -> float:
        width = self.cluster.width(element_bytes)
        return self.cluster.peak_flops[width] * self.cluster.gemm_shares.get(width, self.utilisation.gemm_share)

    def exchange_s(self, stage: _Stage) -> float:
        """The experts' all-to-all: out and back, forward and backward."""
        local_s = self.links.all_to_all_s(self.routed_bytes, replace(self.expert_spread, copies=self.copies))
        return 4 * stage.moe_layers * local_s

    @property
    def copies(self) -> float | None:
        """Share of what is routed that crosses between nodes: where a token goes to a node once, however many of its
        experts are there, that of the nodes that its experts lie on; None: as many as experts."""
        exchange, nodes = self.job.exchange, self.expert_spread.nodes
        topk = max(1, self.job.shape.moe_router_topk)
        if not exchange.once_per_node:
            return None
        reached = min(nodes * (1 - (1 - 1 / nodes) ** topk), exchange.nodes_per_token or nodes)
        return reached * (nodes - 1) / nodes / topk

    @property
    def routed_bytes(self) -> float:
        """What a rank sends to experts for one microbatch in one layer, itself included."""
        return self.tokens * self.job.shape.moe_router_topk * self.token_bytes

    def tensor_s(self, stage: _Stage) -> float:
        """Tensor parallelism's sums, each a reduce-scatter and an all-gather: 2 per layer, forward and backward."""
        ways = self.job.topology.tp
        spread = GroupSpread.of(ways, 1, self.joined)
        return 4 * stage.layers * 2 * self.links.ring_s(self.tokens * ways * self.token_bytes, spread)

    def sync_s(self, stage: _Stage) -> float:
        """Reduce-scatter of gradients and all-gather of parameters: of experts, then of all else.

        With Megatron's overlap they hide behind a backward and a forward pass, which take two thirds and one third of a
        microbatch, but for the bucket that comes last, here that of one layer.
        """
        both_s = sum(self.links.ring_s(size, spread) for size, spread in self._state(stage))
        reduced_s = both_s * self.travelling_bytes / (self.travelling_bytes + self.job.precision.compute_bytes)
        overlap, pass_s = self.job.overlap, self.stage_s(stage)
        return self._exposed_s(stage, reduced_s, 2 / 3 * pass_s * overlap.overlap_grad_reduce) + self._exposed_s(
            stage, both_s - reduced_s, 1 / 3 * pass_s * overlap.overlap_param_gather
        )

    def _exposed_s(self, stage: _Stage, exchange_s: float, hidden_s: float) -> float:
        """What training waits for of an exchange that computation of so many seconds may hide; 0: nothing hides it."""
        last_s = exchange_s / max(1, stage.layers)
        return max(exchange_s - hidden_s, last_s if hidden_s else 0.0)

    def network_s(self, number: int, stage: _Stage) -> float:
        """See `network_busy_s`."""
        sync = sum(self.links.ring_network_s(size, spread) for size, spread in self._state(stage))
        spread = replace(self.expert_spread, copies=self.copies)
        exchange = 4 * stage.moe_layers * self.links.all_to_all_network_s(self.routed_bytes, spread)
        return sync + exchange * self.job.microbatches + self._boundary_network_s(number)

    @property
    def update_s(self) -> float:
        """The optimizer reads gradients and state, and writes state and weights."""
        precision = self.job.precision
        size = 2 * (precision.master_bytes + precision.moments_bytes) + precision.compute_bytes + self.travelling_bytes
        return self.job.busiest_rank_parameters * size / self.utilisation.optimizer_bytes_per_s

    def _boundary_network_s(self, number: int) -> float:
        """Seconds that sending to neighbouring stages keeps the NIC busy; the same stage may receive meanwhile."""
        topology = self.job.topology
        count = sum(len(sends(topology, number, self.job.microbatches, direction)) for direction in Direction)
        here, there = (topology.stage_ranks(one % topology.pp).start for one in (number, number + 1))
        if here // self.joined == there // self.joined:
            return 0.0
        return count * (self.utilisation.latency_s + self.tokens * self.token_bytes / self.links.inter_bytes_per_s)

    def _state(self, stage: _Stage) -> tuple[tuple[float, GroupSpread], ...]:
        """Bytes of gradients and parameters of a rank's experts, and of all else; and who shares them."""
        topology = self.job.topology
        both = self.travelling_bytes + self.job.precision.compute_bytes
        block = topology.ep * topology.expert_tp
        return (
            (stage.expert_parameters / block * both, GroupSpread.of(topology.edp, block, self.joined)),
            (
                stage.other_parameters / topology.tp * both,
                GroupSpread.of(topology.dp * topology.cp, topology.tp, self.joined),
            ),
        )
