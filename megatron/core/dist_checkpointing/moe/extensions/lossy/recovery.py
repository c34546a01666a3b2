"""Lossy recovery: the newest copies merged, and every lost token counted."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from fractions import Fraction
from functools import partial
from math import lcm

from ...errors import UsageError
from ...policy.availability import (
    Everywhere,
    OperatorOrder,
    RankState,
    Record,
    StageState,
    copy_sources,
    rank_states,
    refusals,
    surveyed,
    whole,
)
from ...policy.recovery import impossible, order_of
from ...types import Inventory, Level, Lost, OperatorId, Part, RecoveryPlan, ReplaySegment, Scope, Topology
from .ledger import LossRecord, TokenLedger

PARTS = (Part.MASTER, Part.MOMENTS)
Newest = Mapping[Part, Mapping[OperatorId, int]]


def plan_lossy_recovery(
    inventory: Inventory,
    lost: Lost,
    topology: Topology,
    tokens_between: Callable[[OperatorId, int, int], int],
    *,
    target: int | None = None,
    order: OperatorOrder | None = None,
    everywhere: Everywhere | None = None,
) -> RecoveryPlan:
    """Plan a recovery under `pec` or `selective` (MoC 5.1, MOETION 6).

    All ranks go to the newest iteration at which every operator that is no expert can be had in full. Each expert takes
    the newest master weights and the newest moments up to there, from the preferred tier, the same iteration on all
    ranks that own a shard of it. An update counts as lost when either part lacks it.

    Args:
        inventory: What was found of all ranks; of some, with `everywhere`: then sources and refusals are theirs alone.
        lost: Ranks and nodes that failed.
        topology: The rank layout.
        tokens_between: Counts, from (expert, after, upto), the tokens routed to an expert in iterations after +
            1..upto.
        target: The newest iteration to go to; None: any.
        order: Of all operators; of those of the inventory by default.
        everywhere: Makes of what these ranks can rebuild what all can.

    Raises:
        RecoveryImpossible: There is no such iteration, or an expert has no copy at all.
        UsageError: The inventory leaves out a rank.
    """
    states, order = rank_states(inventory, lost, topology, PARTS), order or order_of(inventory)
    survey = surveyed(states, inventory, lost, topology, order)
    stages = whole(survey if everywhere is None else everywhere(survey), topology)
    reached = _newest_iteration(stages, target, order)
    found: list[Newest] = [{part: _newest(stage, part, reached, order) for part in PARTS} for stage in stages]
    for number, (stage, newest) in enumerate(zip(stages, found, strict=True)):
        if missing := order.named(stage.required) - (newest[Part.MASTER].keys() & newest[Part.MOMENTS].keys()):
            raise impossible(f"iteration {reached}", number, missing)
    oldest = {
        operator: min(newest[part][operator] for part in PARTS) for newest in found for operator in newest[Part.MASTER]
    }
    stale = sorted(operator for operator, iteration in oldest.items() if iteration < reached)
    return RecoveryPlan(
        reached,
        Scope.GLOBAL,
        (ReplaySegment(tuple(range(topology.pp)), reached, reached),),
        tuple(
            source
            for stage, newest in enumerate(found)
            for source in copy_sources(
                states, filter(states.__contains__, topology.stage_ranks(stage)), partial(_records, newest=newest)
            )
        ),
        tuple(refusals(states, reached)),
        lost_tokens={operator: tokens_between(operator, oldest[operator], reached) for operator in stale},
        lost=lost,
    )


def _newest(stage: StageState, part: Part, limit: int, order: OperatorOrder) -> dict[OperatorId, int]:
    """The newest iteration up to `limit` at which each operator's `part` can be had; operators without one lack."""
    return {one: iteration for iteration, there in stage.newest(part, limit) for one in order.listed(there)}


def _newest_iteration(stages: Sequence[StageState], target: int | None, order: OperatorOrder) -> int:
    """The newest iteration with all that is no expert; experts may be older."""
    where = "any iteration" if target is None else f"iteration {target} or one before it"
    candidates: set[int] | None = None
    for number, stage in enumerate(stages):
        named = frozenset(operator for operator in order.named(stage.required) if not operator.is_expert)
        dense = order.bits(named)
        complete = {
            iteration
            for iteration in stage.lacks[Part.MASTER]
            if (target is None or iteration <= target)
            and not any(dense & stage.lacking(part, iteration) for part in PARTS)
        }
        candidates = complete if candidates is None else candidates & complete
        if not candidates:
            raise impossible(where, number, named)
    return max(candidates or ())


def _records(state: RankState, newest: Newest) -> Iterator[Record]:
    """Which copy, by its index, gives which part of which operators; preferred tiers first."""
    wanted = {part: {operator: newest[part][operator] for operator in state.required} for part in PARTS}
    for index, copy in enumerate(state.copies):
        given = {
            part: frozenset(
                operator
                for operator in (copy.plan.giving(part) & wanted[part].keys()) - copy.corrupt
                if wanted[part][operator] == copy.plan.iteration
            )
            for part in PARTS
        }
        both = given[Part.MASTER] & given[Part.MOMENTS]
        for part, operators in ((Part.MASTER_AND_MOMENTS, both), *((part, given[part] - both) for part in PARTS)):
            if operators:
                yield index, part, operators
        for part in PARTS:
            for operator in given[part]:
                del wanted[part][operator]


# The proportion of tokens that faults lost, as each paper defines it, and the ledger that counts them.

__all__ = ["Level", "LossRecord", "TokenLedger", "mlt", "plt_moc", "plt_pec"]


def plt_moc(lost_tokens: Sequence[int], tokens: int | Sequence[int], topk: int | Sequence[int]) -> Fraction:
    """Proportion of lost tokens after MoC eq. 7: the mean over MoE layers of lost_i / (T_i x TopK_i).

    Args:
        lost_tokens: lost_i per MoE layer, of one fault or of all.
        tokens: T_i, input tokens of the planned training; one value or one per layer.
        topk: TopK_i, experts per token; one value or one per layer.

    Raises:
        UsageError: Negative losses, tokens or topk below 1.
    """
    return mlt(lost_tokens, tokens, topk) / len(lost_tokens)


def plt_pec(lost_tokens: Sequence[int], tokens: int | Sequence[int], topk: int | Sequence[int]) -> Fraction:
    """Portion of lost tokens after PEC eq. 4: all lost tokens / sum over MoE layers of T_j x TopK_j; see `plt_moc`.

    Args:
        lost_tokens: Lost tokens per MoE layer, of one fault or of all.
        tokens: T_j, input tokens of the planned training; one value or one per layer.
        topk: TopK_j, experts per token; one value or one per layer.
    """
    return Fraction(sum(lost_tokens), sum(_processed(lost_tokens, tokens, topk)))


def mlt(lost_tokens: Sequence[int], tokens: int | Sequence[int], topk: int | Sequence[int]) -> Fraction:
    """Momentary lost tokens after MOETION eq. 6: the sum over MoE layers of lost_l / (N_tokens_l x TopK_l).

    `plt_moc`, whose errors it shares, is this divided by the number of MoE layers.

    Args:
        lost_tokens: lost_l per MoE layer, of one fault or of all.
        tokens: N_tokens_l, input tokens; one value or one per layer.
        topk: TopK_l, experts per token; one value or one per layer.
    """
    processed = _processed(lost_tokens, tokens, topk)
    common = lcm(*processed)
    return Fraction(sum(lost * (common // all_) for lost, all_ in zip(lost_tokens, processed, strict=True)), common)


def _processed(lost_tokens: Sequence[int], tokens: int | Sequence[int], topk: int | Sequence[int]) -> list[int]:
    layers = len(lost_tokens)
    if not layers or min(lost_tokens) < 0:
        raise UsageError(f"lost_tokens is {list(lost_tokens)}, but must be one number per MoE layer, at least 0")
    values = []
    for name, value in (("tokens", tokens), ("topk", topk)):
        row = [value] * layers if isinstance(value, int) else list(value)
        if len(row) != layers or min(row) < 1:
            raise UsageError(f"{name} is {value}, but must be at least 1, one value or one for each of {layers} layers")
        values.append(row)
    return [count * experts for count, experts in zip(*values, strict=True)]
