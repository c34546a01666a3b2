"""Snapshots cut into pieces that are freed one by one: each expert's full state, and all the rest together."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from string import ascii_lowercase

from ...strategies.base import Job
from ...types import OperatorId, OperatorKind, Part, Piece, SnapshotPlan

DENSE = "dense"
_PREFIX = "expert"


def kinds_of(job: Job) -> dict[OperatorId, str]:
    """The kind of each expert's piece: `expert` and its number in the model, in letters."""
    experts = sorted(operator for operator in job.operators if operator.is_expert)
    return {operator: _PREFIX + _letters(number) for number, operator in enumerate(experts)}


def expert_pieces(
    plan: SnapshotPlan, kinds: Mapping[OperatorId, str], sent: Collection[OperatorId] | None = None
) -> tuple[Piece, ...]:
    """`dense` with all that is not the full state of an expert, then each expert of which the plan has that.

    Args:
        plan: The snapshot to cut.
        kinds: The kind of each expert's piece.
        sent: Experts whose pieces peers get too; None: all.
    """
    alone = sorted(op for op, part in plan.parts.items() if op.is_expert and Part.MASTER_AND_MOMENTS in part)
    rest = plan.parts.keys() - alone
    dense = {operator: part for operator, part in plan.parts.items() if operator in rest}
    return (
        Piece(DENSE, SnapshotPlan(plan.iteration, dense)),
        *(
            Piece(
                kinds[operator],
                SnapshotPlan(plan.iteration, {operator: plan.parts[operator]}),
                replicated=sent is None or operator in sent,
            )
            for operator in alone
        ),
    )


def moe_layers_of_stages(job: Job) -> list[list[int]]:
    """The layers with experts of each pipeline stage.

    Its ranks own them: a pipeline may be cut in uneven pieces, and embedding and loss count in some as layers. Where
    sizes are not known, each stage has as many layers.
    """
    if job.sizes:
        stages: list[set[int]] = [set() for _ in range(job.topology.pp)]
        for rank, own in job.sizes.items():
            stages[job.topology.stage(rank)].update(operator.layer for operator in own if operator.is_expert)
        return [sorted(layers) for layers in stages]
    heads = [operator.layer for operator in job.operators if operator.kind is OperatorKind.HEAD]
    num_layers = heads[0] if heads else 1 + job.operators[-1].layer
    moe = set(job.moe_layers)
    return [[layer for layer in layers if layer in moe] for layers in job.topology.layers_of_stages(num_layers)]


def _letters(number: int) -> str:
    """a to z, then ba to zz, and so on: digits of base 26."""
    higher, digit = divmod(number, 26)
    return (_letters(higher) if higher else "") + ascii_lowercase[digit]
