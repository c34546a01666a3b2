"""A table of its own: iteration times that the simulator estimates, beside public reports of H100 and H800."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from functools import cache
from typing import Any

from megatron.core.dist_checkpointing.moe.types import PRECISIONS, Topology
from moe_ckpt.report import Fact
from moe_ckpt.simulator.advise import Advice, advise
from moe_ckpt.simulator.choices import Question
from moe_ckpt.simulator.clusters import cluster
from moe_ckpt.simulator.cost import MEGATRON_UTILISATION, iteration_cost, operator_flops
from moe_ckpt.simulator.flags import flags_of
from moe_ckpt.simulator.inputs import TokenDispatch, TrainingJob
from moe_ckpt.simulator.models import preset

from .figure import Figure

TOLERANCE = 0.25
MTBF_S = 12 * 3600.0
SYSTEMS = ("gemini", "moevement", "torch_dist_async")


ALL_TO_ALL = TokenDispatch()


@dataclass(frozen=True)
class Reported:
    """A job that somebody reported: its layout, and tokens per second and GPU. report: what they are or follow from."""

    name: str
    model: str
    cluster: str
    topology: Topology
    global_batch: int
    micro_batch: int
    tokens_per_s_and_gpu: float
    report: str
    precision: str = "fp16-fp32"
    exchange: TokenDispatch = ALL_TO_ALL
    asked_for: bool = False

    @property
    def job(self) -> TrainingJob:
        """As the simulator takes it; samples have 4,096 tokens in all of these."""
        microbatches = self.global_batch // (self.micro_batch * self.topology.dp)
        precision = PRECISIONS[self.precision].exact()
        shape = preset(self.model)
        return TrainingJob(shape, self.topology, precision, self.global_batch, microbatches, 4096, self.exchange)

    @property
    def reported_s(self) -> float:
        """Seconds of an iteration."""
        return self.job.tokens / self.tokens_per_s_and_gpu / self.topology.world_size

    @property
    def estimated_s(self) -> float:
        """The same, as the simulator estimates it."""
        return iteration_cost(self.job, cluster(self.cluster), MEGATRON_UTILISATION).iteration_s

    @property
    def error(self) -> float:
        """By which share the estimate is longer."""
        return self.estimated_s / self.reported_s - 1


def _mixtral_rate() -> float:
    """Tokens per second and GPU at 49.3 % of 989 TFLOPS, counting attention whole as Megatron-LM does."""
    shape = preset("Mixtral-8x22B")
    whole = 2 * sum(operator_flops(shape, 4096).values()) - sum(operator_flops(shape, 0).values())
    return 0.493 * 989e12 / whole


_DEEP_EP = TokenDispatch(once_per_node=True)
_AUTOMODEL = "NeMo AutoModel, performance summary, DGX H100, BF16"

REPORTS = (
    Reported(
        "Mixtral-8x22B, 256 H100", "Mixtral-8x22B", "h100-dgx", Topology(256, tp=2, pp=8, ep=8, etp=1), 512, 1,
        _mixtral_rate(), "MoE Parallel Folding (arXiv:2504.14960): 49.3 % MFU, up to; samples per GPU kept",
        asked_for=True,
    ),
    Reported(
        "Qwen3-30B-A3B, 128 H100", "Qwen3-30B-A3B", "h100-dgx", Topology(128, ep=8), 8192, 4, 12040.0,
        f"{_AUTOMODEL}: 12,040 tokens/s/GPU on 8 GPUs; samples per GPU kept", exchange=_DEEP_EP, asked_for=True,
    ),
    Reported(
        "DeepSeek-V3, 2,048 H800", "DeepSeek-V3-671B", "h800-dgx", Topology(2048, pp=16, ep=64, vpp=2), 15360, 1,
        1e12 / (180e3 * 3600), "DeepSeek-V3 Technical Report: 180 K H800 hours for a trillion tokens; batch of 15,360",
        "fp8-fp32", TokenDispatch(overlaps=True, once_per_node=True, nodes_per_token=4), asked_for=True,
    ),
    Reported(
        "DeepSeek-V3, 256 H100", "DeepSeek-V3-671B", "h100-dgx", Topology(256, pp=4, ep=64, vpp=8), 512, 1, 1002.0,
        f"{_AUTOMODEL}: 8.18 s", exchange=_DEEP_EP,
    ),
    Reported(
        "DeepSeek-V3, 1,024 H100", "DeepSeek-V3-671B", "h100-dgx", Topology(1024, pp=4, ep=64, vpp=8), 8192, 1, 865.0,
        f"{_AUTOMODEL}: 37.87 s; parameters sharded over 256 GPUs", exchange=_DEEP_EP,
    ),
    Reported(
        "Qwen3-30B-A3B, 16 H100, FP8", "Qwen3-30B-A3B", "h100-dgx", Topology(16, pp=2, ep=8, vpp=24), 512, 2, 5275.0,
        "Megatron-Bridge 25.11, performance summary, DGX H100, FP8", "fp8-fp32", _DEEP_EP,
    ),
)  # fmt: skip
"""The three that are asked for first. Nothing of the simulator is fitted to any of them."""


@cache
def advices() -> dict[str, tuple[Question, Advice]]:
    """What `moe-ckpt advise` says of those that are asked for, with a fault every 12 hours."""
    found = {}
    for one in REPORTS:
        if one.asked_for:
            where = cluster(one.cluster)
            question = Question(one.job, iteration_cost(one.job, where, MEGATRON_UTILISATION), where, MTBF_S, seeds=4)
            found[one.name] = question, advise(question, SYSTEMS)
    return found


def figure() -> Figure:
    """All reports beside estimates, and the advice for the three."""
    rows = [
        asdict(one) | {"topology": str(asdict(one)["topology"]), "reported_s": one.reported_s,
                       "estimated_s": one.estimated_s, "error": one.error}
        for one in REPORTS
    ]  # fmt: skip
    advised: dict[str, Any] = {}
    for name, (question, advice) in advices().items():
        assert advice.recommended is not None
        advised[name] = {"flags": flags_of(question, advice.recommended), "why": list(advice.explanation)}
    near = [one for one in REPORTS if abs(one.error) <= TOLERANCE]

    def draw(axes: list[Any]) -> None:
        for one in REPORTS:
            axes[0].scatter(one.reported_s, one.estimated_s, marker="o" if one.asked_for else "x", label=one.name)
        ends = [min(one.reported_s for one in REPORTS) / 2, 2 * max(one.reported_s for one in REPORTS)]
        axes[0].plot(ends, ends, color="grey")
        axes[0].fill_between(ends, [0.75 * end for end in ends], [1.25 * end for end in ends], color="grey", alpha=0.2)
        axes[0].set(xscale="log", yscale="log", xlabel="reported iteration (s)", ylabel="estimated (s)")
        axes[0].legend(fontsize=7)

    return Figure(
        "public_reports",
        {"rows": rows, "advice": advised, "tolerance": TOLERANCE},
        (
            ((one.name, one.reported_s, one.estimated_s, one.error, "yes" if one in near else "NO", one.report)
                 for one in REPORTS),
            ((name, str(one["flags"]), " ".join(one["why"])) for name, one in advised.items()),
        ),
        draw,
        (Fact("Within 25 %", f"{len(near)} of {len(REPORTS)}, of the three that are asked for"
              f" {sum(one.asked_for for one in near)}"),),
    )  # fmt: skip
