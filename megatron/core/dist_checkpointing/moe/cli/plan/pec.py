"""`moe-ckpt plan pec`: which experts partial checkpoints hold."""

from __future__ import annotations

from pathlib import Path

import click

from moe_ckpt.report import Fact, Report, Table

from ...errors import UsageError
from ...policy.partial import (
    PEC_SCOPES,
    checkpoint_bytes,
    load_aware_selection,
    next_position,
    pec_plan,
    persist_selection,
    sequential_selection,
)
from ...policy.sharding import shard_checkpoint
from ...types import ModelShape, OperatorId, Part, Topology
from . import counts_file
from .options import Job, number, plan_command

HELP = """Show partial experts checkpointing (MoC 3, PEC 3.1): the experts that successive checkpoints hold, what they
weigh, and how evenly the ranks share the work.

\b
    $ moe-ckpt plan pec --model GPT-350M-16E --ep 8 --world-size 16 --pec-k-snapshot 4 --pec-k-persist 1

Bytes are counted as the papers do: compute weights, master weights and moments.
"""

Ages = dict[int, list[int]]


@plan_command(HELP)
@number("--pec-k-snapshot", "k", default=1, show_default=True, metavar="K", help="Experts per MoE layer.")
@number("--pec-k-persist", "k_persist", default=1, show_default=True, metavar="K", help="Of these, to storage.")
@click.option("--pec-selection", "selection", type=click.Choice(["sequential", "load-aware"]), default="sequential")
@click.option("--pec-scope", "scope", type=click.Choice(list(PEC_SCOPES)), default="both", show_default=True)
@click.option("--shard", type=click.Choice(["none", "equal", "adaptive"]), default="adaptive", show_default=True)
@number("--checkpoints", default=None, maximum=10_000, help="How many to show [default: all experts once].")
@click.option("--counts", type=click.Path(path_type=Path), default=None, metavar="FILE", help=counts_file.HELP)
def pec(
    job: Job,
    k: int,
    k_persist: int,
    selection: str,
    scope: str,
    shard: str,
    checkpoints: int | None,
    counts: Path | None,
) -> Report:
    shape, topology = job.shape, job.topology
    if not shape.moe_layers:
        raise UsageError(f"--model {shape.name} has no MoE layers: partial experts need experts")
    check_experts(shape, k, k_persist)
    partial = checkpoint_bytes(shape, job.precision, k, PEC_SCOPES[scope])
    full = checkpoint_bytes(shape, job.precision, shape.num_experts)
    rotation = -(-shape.num_experts // k)
    shown = rotation if checkpoints is None else checkpoints
    rows, covered, worst = [], set[OperatorId](), 0
    selector = _Selector(shape, topology, k, selection, counts_file.load_counts(counts, shape))
    ages = {layer: [0] * shape.num_experts for layer in shape.moe_layers}
    for index in range(shown):
        selected = selector.next()
        covered |= set(selected)
        persisted = _persisted(shape, topology, selected, k_persist, ages)
        plan = pec_plan(index, shape.operators, selected, PEC_SCOPES[scope], Part.EVERYTHING)
        shards = shard_checkpoint(shard, shape, topology, job.precision, plan.parts)
        worst = max(worst, shards.bottleneck_bytes)
        rows += [(index, layer, _of(selected, layer), _of(persisted, layer)) for layer in shape.moe_layers]
    whole = shard_checkpoint(shard, shape, topology, job.precision)
    return Report(
        f"Partial experts checkpoints of {shape.name}: {k} of {shape.num_experts} experts per MoE layer",
        (
            Fact("Checkpoint", partial.total_bytes, "bytes"),
            Fact("Full checkpoint", full.total_bytes, "bytes"),
            Fact("Share of the full checkpoint", partial.total_bytes / full.total_bytes, "share"),
            Fact("Most bytes of a rank", worst, "bytes"),
            Fact("Most bytes of a rank, full", whole.bottleneck_bytes, "bytes"),
            *(
                (Fact("Checkpoints until all experts are saved", rotation, "count"),)
                if selection == "sequential"
                else ()
            ),
            Fact("Experts covered by those shown", len(covered) / (len(shape.moe_layers) * shape.num_experts), "share"),
        ),
        (
            Table(
                "Selections",
                (("checkpoint", "count"), ("layer", "count"), ("snapshot", "text"), ("persist", "text")),
                tuple(rows),
            ),
        ),
    )


def check_experts(shape: ModelShape, k: int, k_persist: int = 1) -> None:
    """Raise UsageError for more experts than there are."""
    if k > shape.num_experts:
        raise UsageError(f"--pec-k-snapshot is {k}, but must be from 1 to num_experts = {shape.num_experts}")
    if k_persist > k:
        raise UsageError(f"--pec-k-persist is {k_persist}, but must be from 1 to --pec-k-snapshot = {k}")


def selected_experts(shape: ModelShape, topology: Topology, k: int, position: int) -> frozenset[OperatorId]:
    """The experts of one checkpoint by sequential selection, each pipeline stage for its own layers."""
    moe = set(shape.moe_layers)
    stages = ([layer for layer in stage if layer in moe] for stage in topology.layers_of_stages(shape.num_layers))
    at = position % shape.num_experts
    return frozenset(
        operator
        for layers in stages
        if layers
        for operator in sequential_selection(layers, shape.num_experts, k, at, ep=topology.ep)
    )


class _Selector:
    """Successive selections, each pipeline stage for its own layers."""

    def __init__(
        self, shape: ModelShape, topology: Topology, k: int, selection: str, counts: dict[OperatorId, int]
    ) -> None:
        self.shape, self.topology, self.k, self.selection, self.counts = shape, topology, k, selection, counts
        self.unsaved, self.position = dict(counts), 0
        self.ages = {operator: 0 for operator in counts}
        moe = set(shape.moe_layers)
        stages = topology.layers_of_stages(shape.num_layers)
        self.stages = [tuple(layer for layer in stage if layer in moe) for stage in stages]

    def next(self) -> tuple[OperatorId, ...]:
        """The next checkpoint's experts; every expert then gets its tokens again."""
        selected = [operator for layers in self.stages if layers for operator in self._select(layers)]
        self.position = next_position(self.position, self.k, self.shape.num_experts)
        for operator, count in self.counts.items():
            self.unsaved[operator] += count
            self.ages[operator] += 1
        for operator in selected:
            self.unsaved[operator], self.ages[operator] = self.counts[operator], 0
        return tuple(selected)

    def _select(self, layers: tuple[int, ...]) -> tuple[OperatorId, ...]:
        experts, ep = self.shape.num_experts, self.topology.ep
        if self.selection == "sequential":
            return sequential_selection(layers, experts, self.k, self.position, ep=ep)
        by_layer = [[operator for operator in self.unsaved if operator.layer == layer] for layer in layers]
        unsaved = [[self.unsaved[operator] for operator in row] for row in by_layer]
        ages = [[self.ages[operator] for operator in row] for row in by_layer]
        return load_aware_selection(layers, unsaved, self.k, ep, ages=ages)


def _persisted(
    shape: ModelShape, topology: Topology, selected: tuple[OperatorId, ...], k: int, ages: Ages
) -> tuple[OperatorId, ...]:
    chosen = persist_selection(shape.moe_layers, selected, k, [ages[layer] for layer in shape.moe_layers], topology.ep)
    for row in ages.values():
        row[:] = [age + 1 for age in row]
    for operator in chosen:
        ages[operator.layer][operator.expert] = 0
    return chosen


def _of(operators: tuple[OperatorId, ...], layer: int) -> list[int]:
    return [operator.expert for operator in operators if operator.layer == layer]
