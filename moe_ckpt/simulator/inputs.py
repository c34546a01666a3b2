"""What a simulation is asked about: a cluster, a training job, and what an iteration of it costs."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property

from megatron.core.dist_checkpointing.moe.errors import UsageError
from megatron.core.dist_checkpointing.moe.policy.checks import not_negative, positive, whole
from megatron.core.dist_checkpointing.moe.types import ModelShape, Precision, Topology

from .shards import owned_operators, sharing_ranks


@dataclass(frozen=True)
class Cluster:
    """Machines of one kind. Bandwidths are in bytes per second and, but for storage, those of one GPU.

    peak_flops: dense, by bytes per element of what is multiplied (2: fp16 or bf16, 1: fp8). gpu_memory: that of the GPU
    itself; 0 where it is not known, so that nothing waits for it. gemm_shares: of the peak, by bytes per element, what
    tuned matrix products reach there; empty where it is not known. host_link: GPU to host memory. intra_node: NVLink
    or alike; nvlink_gpus: how many it joins where these are more than a node has. inter_node: its share of the node's
    NICs. storage: of the whole cluster. host_memory_bytes: of one node. source: where the figures stand. Raises
    UsageError for figures no cluster has.
    """

    name: str
    gpus_per_node: int
    peak_flops: dict[int, float]
    host_link_bytes_per_s: float
    intra_node_bytes_per_s: float
    inter_node_bytes_per_s: float
    storage_bytes_per_s: float
    host_memory_bytes: int
    source: str
    gpu_memory_bytes_per_s: float = 0.0
    gemm_shares: dict[int, float] = field(default_factory=dict)
    nvlink_gpus: int = 0

    def __post_init__(self) -> None:
        whole("gpus_per_node", self.gpus_per_node, 1)
        whole("nvlink_gpus", self.nvlink_gpus, 0)
        for name in (
            "host_link_bytes_per_s",
            "intra_node_bytes_per_s",
            "inter_node_bytes_per_s",
            "storage_bytes_per_s",
            "host_memory_bytes",
        ):
            positive(f"cluster {self.name}: {name}", getattr(self, name))
        not_negative(f"cluster {self.name}: gpu_memory_bytes_per_s", self.gpu_memory_bytes_per_s)
        for width, flops in self.peak_flops.items():
            positive(f"cluster {self.name}: peak_flops[{width}]", flops)
        for width, share in self.gemm_shares.items():
            if positive(f"cluster {self.name}: gemm_shares[{width}]", share) > 1:
                raise UsageError(f"cluster {self.name}: gemm_shares[{width}] is {share}, but a share is at most 1")

    def flops(self, compute_bytes: int) -> float:
        """Peak operations per second with this element size; a wider type where it has none so narrow.

        Raises UsageError when it has none.
        """
        return self.peak_flops[self.width(compute_bytes)]

    def width(self, compute_bytes: int) -> int:
        """Bytes per element with which such elements are multiplied here. Raises UsageError as `flops`."""
        for width in sorted(self.peak_flops):
            if width >= compute_bytes:
                return width
        raise UsageError(f"cluster {self.name} has no peak_flops for elements of {compute_bytes} bytes")


@dataclass(frozen=True)
class TokenDispatch:
    """How tokens come to their experts.

    overlaps: computation of another microbatch continues meanwhile (Megatron's --overlap-moe-expert-parallel-comm).
    once_per_node: a token crosses to a node once for all of its experts there (DeepEP). nodes_per_token: at most;
    None: any number. Raises UsageError for a limit below 1.
    """

    overlaps: bool = False
    once_per_node: bool = False
    nodes_per_token: int | None = None

    def __post_init__(self) -> None:
        if self.nodes_per_token is not None:
            whole("nodes_per_token", self.nodes_per_token, 1)


@dataclass(frozen=True)
class GradientOverlap:
    """What of the distributed optimizer's exchange runs during computation (Megatron's flags of these names).

    overlap_grad_reduce: gradients, bucket by bucket, during the last microbatch's backward pass. overlap_param_gather:
    parameters, during the first microbatch's forward pass.
    """

    overlap_grad_reduce: bool = False
    overlap_param_gather: bool = False


@dataclass(frozen=True)
class TrainingJob:
    """A model, where it runs, and its batch.

    global_batch: samples per iteration. microbatches: of one pipeline in one iteration (M). seq_length: tokens per
    sample. Raises UsageError for values below 1.
    """

    shape: ModelShape
    topology: Topology
    precision: Precision
    global_batch: int
    microbatches: int
    seq_length: int
    exchange: TokenDispatch = TokenDispatch()
    overlap: GradientOverlap = GradientOverlap()

    def __post_init__(self) -> None:
        for name in ("global_batch", "microbatches", "seq_length"):
            whole(name, getattr(self, name), 1)

    @property
    def tokens(self) -> int:
        """Input tokens of one iteration."""
        return self.global_batch * self.seq_length

    @cached_property
    def rank_parameters(self) -> dict[tuple[int, int], float]:
        """Parameters whose state a rank owns with the distributed optimizer, by stage and expert-parallel rank."""
        parameters = self.shape.parameters
        return {
            lane: sum(parameters[one] / sharing_ranks(one, self.topology) for one in operators)
            for lane, operators in owned_operators(self.shape, self.topology).items()
        }

    @property
    def busiest_rank_parameters(self) -> float:
        """Parameters of the rank that owns most: it is the one that training waits for."""
        return max(self.rank_parameters.values())


@dataclass(frozen=True)
class IterationCost:
    """Seconds of one iteration without checkpoints (MoEvement App. C).

    stage_s: t_s, forward and backward of one microbatch, by stage. pipeline_s: (M + (S - 1) / v) max t_s. sync_s: of
    gradients, as far as it is not hidden. update_s: optimizer. network_busy_s: in which a rank's share of the NIC
    belongs to training itself, hidden or not, so that copies of checkpoints have to wait.
    """

    stage_s: tuple[float, ...]
    microbatches: int
    vpp: int
    sync_s: float
    update_s: float
    network_busy_s: float = 0.0

    def __post_init__(self) -> None:
        if not self.stage_s:
            raise UsageError("stage_s names no stages: a pipeline has at least 1")
        for seconds in self.stage_s:
            positive("stage_s", seconds)
        whole("microbatches", self.microbatches, 1)
        whole("vpp", self.vpp, 1)
        not_negative("sync_s", self.sync_s)
        not_negative("update_s", self.update_s)
        not_negative("network_busy_s", self.network_busy_s)

    @property
    def pipeline_s(self) -> float:
        """Forward and backward of all microbatches, with bubbles."""
        return (self.microbatches + (len(self.stage_s) - 1) / self.vpp) * max(self.stage_s)

    @property
    def iteration_s(self) -> float:
        """T_iter."""
        return self.pipeline_s + self.sync_s + self.update_s

    def lasting(self, iteration_s: float) -> IterationCost:
        """The same with an iteration of this length, all of its parts stretched alike, but for what goes over the
        network: that takes as long as before, and leaves copies no less than half of the share of time that it left.

        Raises UsageError for a length that is not above 0.
        """
        scale = positive("iteration_s", iteration_s) / self.iteration_s
        # Where an iteration is measured that is shorter than its estimated traffic, that is what was estimated wrongly.
        most = 1 - max(0.0, 1 - self.network_busy_s / self.iteration_s) / 2
        return replace(
            self,
            stage_s=tuple(seconds * scale for seconds in self.stage_s),
            sync_s=self.sync_s * scale,
            update_s=self.update_s * scale,
            network_busy_s=min(self.network_busy_s, most * iteration_s),
        )
