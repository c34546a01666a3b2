"""What layers of a model took on the machine at hand, and what iterations of it take by that."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any

from megatron.core.dist_checkpointing.moe.errors import UsageError
from megatron.core.dist_checkpointing.moe.policy.checks import not_negative
from megatron.core.dist_checkpointing.moe.types import ModelShape, OperatorKind

from .inputs import IterationCost, TrainingJob

DEPTH = ("name", "num_layers", "moe_layer_freq", "note")
"""Of a model's shape, what does not change one layer of it."""


@dataclass(frozen=True)
class Line:
    """Seconds by a count: fixed_s + count * each_s."""

    fixed_s: float
    each_s: float

    def __post_init__(self) -> None:
        not_negative("fixed_s", self.fixed_s)
        not_negative("each_s", self.each_s)

    def seconds(self, count: float) -> float:
        """Of so many."""
        return self.fixed_s + count * self.each_s

    @classmethod
    def through(cls, points: Iterable[tuple[float, float]]) -> Line:
        """The straight line nearest to these (least squares); one that would fall below zero is made to begin there."""
        known = sorted(points)
        count, mean_x = len(known), sum(x for x, _ in known) / len(known)
        mean_y = sum(y for _, y in known) / count
        spread = sum((x - mean_x) ** 2 for x, _ in known)
        each = sum((x - mean_x) * (y - mean_y) for x, y in known) / spread if spread else 0.0
        if each <= 0:
            return cls(max(0.0, mean_y), 0.0)
        fixed = mean_y - each * mean_x
        if fixed < 0:
            return cls(0.0, max(0.0, sum(x * y for x, y in known) / sum(x * x for x, _ in known)))
        return cls(fixed, each)


@dataclass(frozen=True)
class LayerTimes:
    """What Megatron-Core's layers took, forward and backward, in jobs of one layout; all ranks computed at once.

    shape: of the model, without its depth. ranks, tp, pp, ep, seq_length: of those jobs. moe, dense: of one layer, by
    samples of a microbatch; None where the model has no such layer. ends: of embedding, output layer and loss, which
    the last stage has; likewise. reduce, step: of the reduction of gradients and of the optimizer, by parameters of a
    rank. restart_s: from the kill of a rank until the launcher had all of them back, and what the first iteration took
    longer then. contention: as in the constants.
    """

    shape: Mapping[str, Any]
    ranks: int
    tp: int
    pp: int
    ep: int
    seq_length: int
    moe: Line | None
    dense: Line | None
    ends: Line
    reduce: Line
    step: Line
    restart_s: float
    contention: float

    def fits(self, job: TrainingJob) -> bool:
        """Whether layers of this job are the measured ones, on as many ranks: depth, stages and replicas may differ."""
        topology = job.topology
        return (
            dict(self.shape) == layer_shape(job.shape)
            and (self.tp, self.ep, self.seq_length) == (topology.tp, topology.ep, job.seq_length)
            and topology.cp == topology.vpp == 1
        )

    def same_layout(self, job: TrainingJob) -> bool:
        """Whether also gradients are reduced among as many ranks, and as many share the machine."""
        return self.fits(job) and (self.ranks, self.pp) == (job.topology.world_size, job.topology.pp)

    def cost(self, job: TrainingJob, estimated: IterationCost) -> IterationCost:
        """What an iteration takes by these; what was not measured for such a job, as `estimated`.

        Raises UsageError for a job that has layers of a kind that was not measured.
        """
        if not self.fits(job):
            return estimated
        samples = job.global_batch / job.microbatches / job.topology.dp
        stages, last = job.shape.operators_of_stages(job.topology), job.topology.pp - 1
        moe_layers = set(job.shape.moe_layers)
        seconds, parameters = [], job.shape.parameters
        owned = []
        for number, operators in enumerate(stages):
            layers = [one.layer for one in operators if one.kind is OperatorKind.NON_EXPERT]
            kinds = [self._line(layer in moe_layers) for layer in layers]
            ends_s = self.ends.seconds(samples) if number == last else 0.0
            seconds.append(sum(kind.seconds(samples) for kind in kinds) + ends_s)
            block = job.topology.ep * job.topology.expert_tp
            owned.append(sum(parameters[one] / (block if one.is_expert else job.topology.tp) for one in operators))
        if not self.same_layout(job):
            return IterationCost(
                tuple(seconds), job.microbatches, 1, estimated.sync_s, estimated.update_s, estimated.network_busy_s
            )
        sync_s, update_s = self.reduce.seconds(max(owned)), self.step.seconds(max(owned))
        return IterationCost(tuple(seconds), job.microbatches, 1, sync_s, update_s, estimated.network_busy_s)

    def _line(self, is_moe: bool) -> Line:
        line = self.moe if is_moe else self.dense
        if line is None:
            raise UsageError(
                f"the profile has no layer {'with' if is_moe else 'without'} experts, which this model has"
            )
        return line


def layer_shape(shape: ModelShape) -> dict[str, Any]:
    """What layers of two models have in common if they are the same."""
    return {field.name: getattr(shape, field.name) for field in fields(shape) if field.name not in DEPTH}


def fitted(rows: list[dict[str, Any]], stages: int) -> dict[str, Line | None]:
    """The lines of `LayerTimes` through what jobs of one layout took.

    rows: layers of a stage (1 with experts, 0 without), micro_batch_size, microbatch_s, fewest_s, step_s, parameters.
    The first jobs have one layer of the commoner kind, then two; a third one adds a layer of the other kind.
    """
    first, second = rows[0]["layers"], next(row["layers"] for row in rows if len(row["layers"]) == 2)
    common = first[0]
    one, two = (_by_size(rows, layers) for layers in (first, second))
    layer = Line.through((size, two[size] - one[size]) for size in one)
    ends = Line.through((size, max(0.0, one[size] - layer.seconds(size))) for size in one)
    other = next((row["layers"] for row in rows if len(set(row["layers"])) == 2), None)
    extra = None
    if other is not None:
        mixed = _by_size(rows, other)
        extra = Line.through((size, max(0.0, mixed[size] - one[size])) for size in one)
    reduced = [(row["parameters"], max(0.0, row["fewest_s"] - stages * row["microbatch_s"])) for row in rows]
    steps = [(row["parameters"], row["step_s"]) for row in rows]
    kinds = {"moe": layer, "dense": extra} if common else {"moe": extra, "dense": layer}
    return {**kinds, "ends": ends, "reduce": Line.through(reduced), "step": Line.through(steps)}


def _by_size(rows: list[dict[str, Any]], layers: list[int]) -> dict[int, float]:
    return {row["micro_batch_size"]: row["microbatch_s"] for row in rows if row["layers"] == layers}
