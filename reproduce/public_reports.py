"""A table of its own: iteration times that the simulator estimates, beside public reports of H100 and H800."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from functools import cache
from typing import Any

from megatron.core.dist_checkpointing.moe.types import PRECISIONS, Topology
from moe_ckpt.report import Fact
from moe_ckpt.simulator.advise import Advice, advise
from moe_ckpt.simulator.choices import Question
from moe_ckpt.simulator.clusters import cluster
from moe_ckpt.simulator.cost import MEGATRON_UTILISATION, iteration_cost
from moe_ckpt.simulator.flags import flags_of
from moe_ckpt.simulator.inputs import GradientOverlap, TokenDispatch, TrainingJob
from moe_ckpt.simulator.models import preset

from .figure import Figure, published

TOLERANCE = 0.25
SECONDS = (2, 5, 10, 20, 50, 100)
MTBF_S = 12 * 3600.0
SYSTEMS = ("gemini", "moevement", "torch_dist_async")


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
    exchange: TokenDispatch = field(default_factory=TokenDispatch)
    overlap: GradientOverlap = field(default_factory=GradientOverlap)
    seq_length: int = 4096
    num_layers: int | None = None
    asked_for: bool = False

    @property
    def job(self) -> TrainingJob:
        """As the simulator takes it."""
        microbatches = self.global_batch // (self.micro_batch * self.topology.dp)
        precision = PRECISIONS[self.precision].exact()
        shape = preset(self.model)
        shape = shape if self.num_layers is None else replace(shape, num_layers=self.num_layers)
        batch = self.global_batch, microbatches, self.seq_length
        return TrainingJob(shape, self.topology, precision, *batch, self.exchange, self.overlap)

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


def _read(row: dict[str, Any]) -> Reported:
    exchange = TokenDispatch(**row.get("exchange", {}))
    overlap = GradientOverlap(**row.get("overlap", {}))
    return Reported(**row | {"topology": Topology(**row["topology"]), "exchange": exchange, "overlap": overlap})


REPORTS = tuple(map(_read, published("reports")))
"""Nothing of the simulator is fitted to them. Mixtral's rate is 49.3 % of 989 TFLOPS, counting attention whole as
Megatron-LM does; DeepSeek's on H800 a trillion tokens in 180,000 hours."""


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
    undivided = replace(REPORTS[-1], topology=replace(REPORTS[-1].topology, vpp=1))
    near = [one for one in REPORTS if abs(one.error) <= TOLERANCE]

    def draw(axes: list[Any]) -> None:
        for one in REPORTS:
            axes[0].scatter(one.reported_s, one.estimated_s, marker="o" if one.asked_for else "x", label=one.name)
        ends = [min(one.reported_s for one in REPORTS) / 2, 2 * max(one.reported_s for one in REPORTS)]
        axes[0].plot(ends, ends, color="grey")
        axes[0].fill_between(ends, [0.75 * end for end in ends], [1.25 * end for end in ends], color="grey", alpha=0.2)
        axes[0].set(xscale="log", yscale="log", xlabel="reported iteration (s)", ylabel="estimated (s)")
        for axis in (axes[0].xaxis, axes[0].yaxis):
            axis.set_ticks([], minor=True)
            axis.set_ticks(SECONDS, labels=map(str, SECONDS))
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
        {"undivided": f"{100 * undivided.error:.0f} %"},
    )  # fmt: skip
