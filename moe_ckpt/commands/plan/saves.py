"""`moe-ckpt plan saves`: which experts dense checkpoints with some of them hold."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import click

from megatron.core.dist_checkpointing.moe.errors import UsageError
from megatron.core.dist_checkpointing.moe.policy.partial import PEC_SCOPES, SELECTIONS, pec_plan
from megatron.core.dist_checkpointing.moe.policy.sharding import shard_checkpoint
from megatron.core.dist_checkpointing.moe.types import Part
from moe_ckpt.dense.chain import Chain
from moe_ckpt.dense.partial_saves import PartialSaves
from moe_ckpt.report import Fact, Report, Table, table

from . import counts_file
from .options import PlannedJob, number, plan_command, shown_checkpoints

HELP = """Show the checkpoints of a job with --save-experts: the experts that each --save holds, and what it weighs.

\b
    $ moe-ckpt plan saves --model GPT-350M-16E --ep 8 --save-experts 4 --save-experts-selection load-aware \\
          --counts run/metrics.jsonl --save-interval 100

The first checkpoint has all experts, as that of a job; the facts are about those after it. Bytes are those of
checkpoints: weights as they are computed with, master weights and moments.
"""


@plan_command(HELP)
@number("--save-experts", "k", default=1, show_default=True, metavar="K", help="Experts per MoE layer.")
@click.option("--save-experts-selection", "selection", type=click.Choice(SELECTIONS), default=SELECTIONS[0])
@click.option(
    "--save-experts-scope",
    "scope",
    type=click.Choice(list(PEC_SCOPES)),
    default="both",
    show_default=True,
    help="What is left out of the other experts: weights, optimizer (moments), or both.",
)
@number("--save-interval", "interval", default=1, show_default=True, help="Iterations between checkpoints.")
@shown_checkpoints
@counts_file.option
def saves(
    job: PlannedJob,
    k: int,
    selection: str,
    scope: str,
    interval: int,
    checkpoints: int | None,
    counts: Path | None,
) -> Report:
    shape = job.shape
    if not shape.moe_layers:
        raise UsageError(f"--model {shape.name} has no MoE layers: there are no experts to leave out")
    if k > shape.num_experts:
        raise UsageError(f"--save-experts is {k}, but must be from 1 to num_experts = {shape.num_experts}")
    moe = set(shape.moe_layers)
    stages = tuple(
        tuple(layer for layer in stage if layer in moe) for stage in job.topology.layers_of_stages(shape.num_layers)
    )
    choice = PartialSaves(stages, shape.num_experts, None, job.topology.ep, "", k, selection, scope)
    rotation = -(-shape.num_experts // k)
    shown = 1 + rotation if checkpoints is None else checkpoints
    chains = list(_chains(choice, counts_file.load_counts(counts, shape), interval, shown))
    largest = max(_nbytes(job, chain, scope) for chain in chains[1:] or chains)
    whole = _nbytes(job, chains[0], scope)
    covered = {operator for chain in chains[1:] for operator in chain.held_by(chain.iteration)}
    return Report(
        f"Checkpoints of {shape.name} with {k} of {shape.num_experts} experts per MoE layer",
        (
            Fact("Checkpoint", largest, "bytes"),
            Fact("Full checkpoint", whole, "bytes"),
            Fact("Share of the full checkpoint", largest / whole, "share"),
            Fact("Experts covered by those after the first", len(covered) / len(chains[0].experts), "share"),
            Fact("Checkpoints that the last one needs", len(chains[-1].iterations), "count"),
        ),
        (_selections(chains),),
    )


def _chains(choice: PartialSaves, tokens: counts_file.Counts, interval: int, shown: int) -> Iterator[Chain]:
    chain = None
    for iteration in range(interval, (shown + 1) * interval, interval):
        if chain is None:
            chain = choice.complete(iteration, "0" * 16)
        else:
            since = [tokens.of(at) for at in range(iteration - interval + 1, iteration + 1)]
            counted = {
                layer: tuple(map(sum, zip(*(rows[at] for rows in since), strict=True)))
                for at, layer in enumerate(tokens.layers)
            }
            chain = choice.following(chain, iteration, "0" * 16, counted)
        yield chain


def _nbytes(job: PlannedJob, chain: Chain, scope: str) -> int:
    plan = pec_plan(0, job.shape.operators, chain.held_by(chain.iteration), PEC_SCOPES[scope], Part.EVERYTHING)
    stored = shard_checkpoint("none", job.shape, job.topology, job.precision, plan.parts, optimizer_sharded=True)
    return stored.total_bytes


def _selections(chains: list[Chain]) -> Table:
    """A row for each checkpoint and layer: its experts, and the tokens of the others since their newest copies."""
    rows = (
        (
            chain.iteration,
            layer,
            [index for index, holder in enumerate(row) if holder == chain.iteration],
            sum(chain.unsaved.get(layer, ())) if chain.unsaved else None,
        )
        for chain in chains
        for layer, row in sorted(chain.holders.items())
    )
    return table("Selections", "iteration:count | layer:count | experts | unsaved tokens:count", rows)
