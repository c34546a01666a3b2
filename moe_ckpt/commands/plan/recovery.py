"""`moe-ckpt plan recovery`: what a failure would lead to."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any

import click

from megatron.core.dist_checkpointing.moe.config import MoECheckpointConfig
from megatron.core.dist_checkpointing.moe.errors import UsageError
from megatron.core.dist_checkpointing.moe.policy.placement import Placement, place_replicas
from megatron.core.dist_checkpointing.moe.policy.recovery import plan_recovery
from megatron.core.dist_checkpointing.moe.strategies import STRATEGIES, Piece, owners_of
from megatron.core.dist_checkpointing.moe.types import (
    BoundaryLog,
    Copy,
    Direction,
    Inventory,
    Lost,
    OperatorId,
    OperatorSize,
    RecoveryPlan,
    SnapshotPlan,
    Tier,
    full_plan,
)
from moe_ckpt.report import Fact, Report, Table, table

from ...simulator.driver import Driver, Taken, tied_embeddings
from ...simulator.shards import owned_operators, shard_sizes
from . import counts_file
from .drive import job_of
from .options import PlannedJob, duration, number, plan_command, rate
from .timeline import predicted, source_bytes, taken, timelines_table, without_survivors

LONGEST = 10_000  # iterations; each is a row
LAST = 100_000  # iterations that a strategy is driven through, at most

HELP = """Show what a failure would lead to (MoEvement 3.4, App. A): which stages roll back and how far, what they
replay and from whose logs, and which tier gives every rank its state.

\b
    $ moe-ckpt plan recovery --model DeepSeek-MoE --pp 12 --ep 8 --window 6 --lost-nodes 3
    $ moe-ckpt plan recovery --model Mixtral-8x7B --pp 4 --ep 8 --strategy full --interval 20 --lost-ranks 9,17
    $ moe-ckpt plan recovery --model QWen-MoE --pp 6 --ep 4 --strategy pec --pec-k-snapshot 6 --lost-nodes 1

The strategy runs as in a job from iteration 1 to --iteration, after which the job failed; every snapshot was replicated
before the next iteration. Lost ranks lose their process, lost nodes their memory as well; all others parked. Under pec,
--counts are the tokens of each iteration.

The timeline predicts how long each part takes, beside a rollback of all stages of the same strategy without boundary
logs and parked state. A job logs the same parts after each recovery: give what they were there.
"""


@plan_command(HELP)
@click.option("--strategy", type=click.Choice(list(STRATEGIES)), default="sparse", show_default=True)
@number("--window", default=4, maximum=LONGEST, show_default=True, help="Iterations of a sparse window.")
@number("--interval", default=10, maximum=LONGEST, show_default=True, help="Iterations between full or pec snapshots.")
@number("--pec-k-snapshot", "k", default=1, show_default=True, metavar="K", help="Experts per MoE layer under pec.")
@counts_file.option
@number(
    "--iteration",
    default=None,
    minimum=0,
    maximum=LAST,
    metavar="T",
    help="Last finished iteration [default: the worst one].",
)
@number("--replicas", default=2, minimum=0, show_default=True, metavar="R", help="Copies in peers' memory.")
@click.option("--lost-ranks", default="", metavar="R,R-R", help="Ranks whose process was killed.")
@click.option("--lost-nodes", default="", metavar="N,N-N", help="Nodes that are gone with their memory.")
@click.option("--upstream-logging/--no-upstream-logging", "logging", default=True, show_default=True)
@duration("--iteration-time", "Of one iteration.", default="1s")
@number("--microbatches", default=None, help="Of one iteration on a data-parallel rank [default: 4 per stage].")
@rate("--memory-gbps", "How fast a rank reads and parks state in its node's memory.", default=5.0)
@rate("--peer-gbps", "How fast a rank reads from another node's memory.", default=2.0)
@duration("--restart", "From parked state to a model that is built anew, on the slowest rank.", default="10s")
def recovery(
    job: PlannedJob,
    strategy: str,
    lost_ranks: str,
    lost_nodes: str,
    replicas: int,
    logging: bool,
    counts: Path | None,
    **given: Any,
) -> Report:
    topology = job.topology
    figures = taken(job, given)
    nodes = frozenset(_numbers("--lost-nodes", lost_nodes, len(topology.ranks_by_node)))
    ranks = frozenset(_numbers("--lost-ranks", lost_ranks, topology.world_size)) | set(topology.ranks_on(nodes))
    if not ranks:
        raise UsageError("nothing is lost: name --lost-ranks or --lost-nodes")
    tokens = counts_file.load_counts(counts, job.shape)
    config = _config(strategy, given["window"], given["interval"], given["k"])
    history = _history(Driver(job_of(job, config), tokens.of), given["iteration"])
    lost = Lost(ranks, nodes)
    sizes = shard_sizes(job.shape, topology, job.precision)
    inventory = _inventory(job, history, place_replicas(topology, replicas), ranks, logging)
    started_again = Driver(job_of(job, config)).strategy
    plan = started_again.recover(inventory, lost, topology)
    if plan.target in history.data:
        plan = started_again.resumed(plan, history.data[plan.target], history.target)
    is_exact = started_again.plt is None
    timelines = [predicted(plan, job, figures, sizes, parks=is_exact and logging)]
    if is_exact:
        ties = tied_embeddings(job.shape, topology)
        whole = plan_recovery(without_survivors(inventory), lost, topology, tied_embeddings=ties, target=plan.target)
        timelines.append(predicted(whole, job, figures, sizes, parks=False))
    refused = Counter(refusal.reason.value for refusal in plan.refusals)
    return Report(
        f"Recovery of {job.shape.name} after the loss of {len(ranks)} of {topology.world_size} ranks",
        _facts(plan, history.target, topology.ranks_per_stage),
        (_segments(plan), _frozen(plan, job), _tiers(plan, sizes), timelines_table(timelines), _losses(plan)),
        tuple(f"{count} copies refused: {reason}" for reason, count in sorted(refused.items())),
    )


def _facts(plan: RecoveryPlan, failed_after: int, ranks_per_stage: int) -> tuple[Fact, ...]:
    return (
        Fact("Iteration of the failure", failed_after, "count"),
        Fact("Recovered iteration", plan.target, "count"),
        Fact("Scope", plan.scope.value),
        Fact("Ranks that go back", sum(len(segment.stages) for segment in plan.segments) * ranks_per_stage, "count"),
        Fact("Iterations replayed", max((len(segment.replayed) for segment in plan.segments), default=0), "count"),
        Fact("Iterations trained again", failed_after - plan.target, "count"),
        Fact("Lost tokens", sum(plan.lost_tokens.values()), "count"),
    )


def _config(name: str, window: int, interval: int, k: int) -> MoECheckpointConfig:
    """The settings of a job with this strategy; those that only other strategies know are left out."""
    kind = STRATEGIES[name]
    given: dict[str, Any] = {"window": str(window), "pec_k_snapshot": k}
    own = {setting: value for setting, value in given.items() if name in owners_of(setting)}
    return MoECheckpointConfig(strategy=name, interval=interval if kind.at_intervals else 1, **own)


@dataclass
class _History:
    """What a job has in memory when it fails: of each kind of piece the newest ones that together restore a state.

    target: the last iteration that ended. data: what the strategy had to remember, by iteration of a snapshot.
    """

    target: int = 0
    kept: dict[str, list[Piece]] = field(default_factory=dict)
    data: dict[int, Mapping[str, Any]] = field(default_factory=dict)
    states: int = 0
    under_way: dict[str, list[Piece]] = field(default_factory=dict)

    def take(self, snapshot: Taken) -> None:
        """One more snapshot, which all ranks have sealed and replicated."""
        for piece in snapshot.pieces:
            pieces = [other for other in self.under_way.get(piece.kind, ()) if other.span == piece.span]
            self.under_way[piece.kind] = [*pieces, piece]
            if len(pieces) + 1 == len(piece.span):
                self.kept[piece.kind] = self.under_way.pop(piece.kind)
        self.states += snapshot.pieces[0].kind not in self.under_way
        self.data[snapshot.plan.iteration] = snapshot.stored.to_data()
        oldest = min((piece.plan.iteration for pieces in self.kept.values() for piece in pieces), default=0)
        self.data = {iteration: data for iteration, data in self.data.items() if iteration >= oldest}

    @property
    def pieces(self) -> list[Piece]:
        """All that is kept, oldest first."""
        return sorted(chain.from_iterable(self.kept.values()), key=lambda piece: piece.plan.iteration)


def _history(driver: Driver, iteration: int | None) -> _History:
    """What there is after `iteration`; None takes the worst one.

    That is the one before another state would be whole, when every kind of piece has been there once more than at the
    start: the first checkpoint of `pec` has all experts, and only after a whole turn are the others as old as they get.
    """
    history, turn = _History(), 0
    for snapshot in driver.snapshots(LAST if iteration is None else iteration):
        turn = turn or len(snapshot.pieces)
        completes = snapshot.plan.iteration == snapshot.pieces[0].span[-1]
        if iteration is None and completes and history.states == turn:
            return replace(history, target=snapshot.plan.iteration - 1)
        history.take(snapshot)
    if iteration is not None and history.states:
        return replace(history, target=iteration)
    for snapshot in driver.snapshots(LAST):
        first = snapshot.pieces[0].span[-1]
        raise UsageError(f"--iteration is {iteration}, but the first snapshot is complete after iteration {first}")
    raise UsageError(f"nothing can be recovered: the strategy restores no state within {LAST} iterations")


def _inventory(job: PlannedJob, history: _History, placed: Placement, lost: frozenset[int], logging: bool) -> Inventory:
    """What would be found: every rank's own copies and replicas, the state of those that parked, and the logs."""
    target, pieces = history.target, history.pieces
    lanes = {}
    for lane, operators in owned_operators(job.shape, job.topology).items():
        own = frozenset(operators)
        shares = [
            (
                SnapshotPlan(piece.plan.iteration, {op: part for op, part in piece.plan.parts.items() if op in own}),
                piece.replicated,
            )
            for piece in pieces
        ]
        lanes[lane] = own, [share for share in shares if share[0].parts], full_plan(target, operators)
    span = range(pieces[0].plan.iteration + 1, target + 1) if logging else range(0)
    required, copies, logs = {}, {}, {}
    for rank, peers in enumerate(placed.peers):
        at = job.topology.coordinates(rank)
        required[rank], shares, parked = lanes[at.pp, at.ep]
        own_node = [(Tier.OWN_MEMORY, at.node)]
        everywhere = dict.fromkeys([*own_node, *((Tier.PEER_MEMORY, placed.nodes[peer]) for peer in peers)])
        found = [
            Copy(rank, plan, tier, holder)
            for plan, replicated in shares
            for tier, holder in (everywhere if replicated else own_node)
        ]
        if rank not in lost:
            found.append(Copy(rank, parked, Tier.PARKED, at.node))
        copies[rank] = tuple(found)
        logs[rank] = tuple(BoundaryLog(rank, direction, span, at.node) for direction in Direction)
    return Inventory(required, copies, logs, frozenset(range(target + 1)))


def _segments(plan: RecoveryPlan) -> Table:
    rows = [(list(s.stages), s.base, s.target, len(s.replayed), list(s.logs_from) or "none") for s in plan.segments]
    return table("Segments", "stages | from:count | to:count | replayed:count | logs of stages", rows)


def _frozen(plan: RecoveryPlan, job: PlannedJob) -> Table:
    stages = job.shape.operators_of_stages(job.topology)
    rows = []
    for segment in plan.segments:
        count = sum(len(stages[stage]) for stage in segment.stages)
        for iteration, frozen in zip(segment.replayed, segment.frozen, strict=True):
            rows.append((list(segment.stages), iteration, count - len(frozen), len(frozen)))
    return table("Replay", "stages | iteration:count | active:count | frozen:count", rows)


def _tiers(plan: RecoveryPlan, sizes: dict[OperatorId, OperatorSize]) -> Table:
    ranks: dict[Tier, set[int]] = {}
    read: Counter[Tier] = Counter()
    for source in plan.sources:
        ranks.setdefault(source.tier, set()).add(source.rank)
        read[source.tier] += source_bytes(source, sizes)
    rows = [(tier.name.lower().replace("_", " "), len(ranks[tier]), read[tier]) for tier in sorted(ranks)]
    return table("Tiers", "tier | ranks:count | read:bytes", rows)


def _losses(plan: RecoveryPlan) -> Table:
    by_layer: Counter[int] = Counter()
    experts: Counter[int] = Counter()
    for operator, tokens in plan.lost_tokens.items():
        by_layer[operator.layer] += tokens
        experts[operator.layer] += 1
    rows = ((layer, experts[layer], by_layer[layer]) for layer in sorted(by_layer))
    return table("Losses", "layer:count | stale experts:count | lost tokens:count", rows)


def _numbers(flag: str, text: str, below: int) -> list[int]:
    """Numbers and ranges such as 3,8-11."""
    found: list[int] = []
    for item in filter(None, text.split(",")):
        first, dash, last = item.partition("-")
        bounds = [first, last] if dash else [first, first]
        if not all(bound.isascii() and bound.isdigit() and len(bound) < 10 for bound in bounds):
            raise UsageError(f"{flag} has {item!r}, but must be numbers and ranges such as 3,8-11")
        if not int(bounds[0]) <= int(bounds[1]) < below:
            raise UsageError(f"{flag} has {item!r}, but must be ascending and from 0 to {below - 1}")
        found += range(int(bounds[0]), int(bounds[1]) + 1)
    return found
