"""`moe-ckpt plan recovery`: what a failure would lead to."""

from __future__ import annotations

import sys
from collections import Counter
from dataclasses import dataclass

import click

from ...errors import UsageError
from ...policy.lanes import Lane, joint_schedules
from ...policy.ordering import ORDERINGS
from ...policy.placement import Placement, place_replicas
from ...policy.recovery import plan_recovery
from ...policy.shards import owned_operators, shard_sizes
from ...types import (
    BoundaryLog,
    Copy,
    Direction,
    Inventory,
    Lost,
    OperatorId,
    OperatorSize,
    Part,
    RecoveryPlan,
    SnapshotPlan,
    Tier,
    full_plan,
)
from ..report import Columns, Fact, Report, Table
from .options import Job, plan_command

HELP = """Show what a failure would lead to (MoEvement 3.4, App. A): which stages roll back and how far, what they
replay and from whose logs, and which tier gives every rank its state.

\b
    $ moe-ckpt plan recovery --model DeepSeek-MoE --pp 12 --ep 8 --window 6 --lost-nodes 3
    $ moe-ckpt plan recovery --model Mixtral-8x7B --pp 4 --ep 8 --strategy full --interval 20 --lost-ranks 9,17

The job stood after --iteration when it failed; windows begin at multiples of their size; the newest complete one is
replicated. Lost ranks lose their process, lost nodes their memory as well; all others parked.
"""


@plan_command(HELP)
@click.option("--strategy", type=click.Choice(["sparse", "full"]), default="sparse", show_default=True)
@click.option("--window", type=int, default=4, show_default=True, metavar="N", help="Iterations of a sparse window.")
@click.option(
    "--interval", type=int, default=10, show_default=True, metavar="N", help="Iterations between full snapshots."
)
@click.option(
    "--iteration", type=int, default=None, metavar="T", help="Last finished iteration [default: the worst one]."
)
@click.option("--replicas", type=int, default=2, show_default=True, metavar="R", help="Copies in peers' memory.")
@click.option("--lost-ranks", default="", metavar="R,R-R", help="Ranks whose process was killed.")
@click.option("--lost-nodes", default="", metavar="N,N-N", help="Nodes that are gone with their memory.")
@click.option("--upstream-logging/--no-upstream-logging", "logging", default=True, show_default=True)
def recovery(
    job: Job,
    strategy: str,
    window: int,
    interval: int,
    iteration: int | None,
    replicas: int,
    lost_ranks: str,
    lost_nodes: str,
    logging: bool,
) -> Report:
    topology = job.topology
    nodes = frozenset(_numbers("--lost-nodes", lost_nodes, len(topology.ranks_by_node)))
    ranks = frozenset(_numbers("--lost-ranks", lost_ranks, topology.world_size)) | set(topology.ranks_on(nodes))
    if not ranks:
        raise UsageError("nothing is lost: name --lost-ranks or --lost-nodes")
    period = window if strategy == "sparse" else interval
    if period < 1:
        raise UsageError(f"--{'window' if strategy == 'sparse' else 'interval'} is {period}, but must be at least 1")
    target = _target(strategy, period, iteration)
    sizes = shard_sizes(job.shape, topology, job.precision)
    plans = _snapshots(job, sizes, strategy, period, target)
    inventory = _inventory(job, plans, place_replicas(topology, replicas), ranks, target, logging)
    tied = not job.shape.untie_embeddings_and_output_weights and topology.pp > 1
    plan = plan_recovery(inventory, Lost(ranks, nodes), topology, tied_embeddings=tied, target=target)
    replayed = max((len(segment.replayed) for segment in plan.segments), default=0)
    return Report(
        f"Recovery of {job.shape.name} after the loss of {len(ranks)} of {topology.world_size} ranks",
        (
            Fact("Target iteration", plan.target, "count"),
            Fact("Scope", plan.scope.value),
            Fact("Ranks that replay", sum(len(s.stages) for s in plan.segments) * topology.ranks_per_stage, "count"),
            Fact("Iterations replayed", replayed, "count"),
            Fact("Lost tokens", sum(plan.lost_tokens.values()), "count"),
        ),
        (_segments(plan), _frozen(plan, job), _tiers(plan, sizes)),
        tuple(f"{count} copies refused: {reason}" for reason, count in sorted(_refused(plan).items())),
    )


def _target(strategy: str, period: int, iteration: int | None) -> int:
    """The last finished iteration. By default the one before a newer snapshot or window would have been complete."""
    first = period - 1 if strategy == "sparse" else 0
    if iteration is None:
        return 3 * period - 2 if strategy == "sparse" else 2 * period - 1
    if iteration < first:
        raise UsageError(f"--iteration is {iteration}, but the first snapshot is complete after iteration {first}")
    return iteration


@dataclass(frozen=True)
class _Snapshots:
    """The newest complete snapshots of a lane, and its dense state at the target."""

    taken: tuple[SnapshotPlan, ...]
    parked: SnapshotPlan
    operators: frozenset[OperatorId]


def _snapshots(
    job: Job, sizes: dict[OperatorId, OperatorSize], strategy: str, period: int, target: int
) -> dict[Lane, _Snapshots]:
    owned = owned_operators(job.shape, job.topology)
    ordered = {lane: ORDERINGS["popularity"](operators, {}) for lane, operators in owned.items()}
    if strategy == "full":
        newest = target // period * period
        taken = {lane: [full_plan(newest, operators)] for lane, operators in ordered.items()}
    else:
        first = ((target + 1) // period - 1) * period
        schedules = joint_schedules(ordered, sizes, sys.maxsize, first_iteration=first, window=period)
        windows = {lane: schedule.window for lane, schedule in schedules.items()}
        taken = {lane: list(map(window.plan, range(first, first + period))) for lane, window in windows.items()}
    return {
        lane: _Snapshots(tuple(taken[lane]), full_plan(target, operators), frozenset(operators))
        for lane, operators in ordered.items()
    }


def _inventory(
    job: Job, snapshots: dict[Lane, _Snapshots], placed: Placement, lost: frozenset[int], target: int, logging: bool
) -> Inventory:
    """What would be found: every rank's own copies and replicas, the state of those that parked, and the logs."""
    required, copies, logs = {}, {}, {}
    for rank, peers in enumerate(placed.peers):
        at = job.topology.coordinates(rank)
        lane = snapshots[at.pp, at.ep]
        holders = [(Tier.OWN_MEMORY, at.node), *((Tier.PEER_MEMORY, placed.nodes[peer]) for peer in peers)]
        found = [Copy(rank, plan, tier, holder) for plan in lane.taken for tier, holder in dict.fromkeys(holders)]
        if rank not in lost:
            found.append(Copy(rank, lane.parked, Tier.PARKED, at.node))
        required[rank], copies[rank] = lane.operators, tuple(found)
        span = range(lane.taken[0].iteration + 1, target + 1) if logging else range(0)
        logs[rank] = tuple(BoundaryLog(rank, direction, span, at.node) for direction in Direction)
    return Inventory(required, copies, logs, range(target + 1))


def _segments(plan: RecoveryPlan) -> Table:
    rows = [(list(s.stages), s.base, s.target, len(s.replayed), list(s.logs_from) or "none") for s in plan.segments]
    columns: Columns = (
        ("stages", "text"),
        ("from", "count"),
        ("to", "count"),
        ("replayed", "count"),
        ("logs of stages", "text"),
    )
    return Table("Segments", columns, tuple(rows))


def _frozen(plan: RecoveryPlan, job: Job) -> Table:
    stages = job.shape.operators_of_stages(job.topology)
    rows = [
        (
            list(segment.stages),
            iteration,
            sum(len(stages[stage]) for stage in segment.stages) - len(frozen),
            len(frozen),
        )
        for segment in plan.segments
        for iteration, frozen in zip(segment.replayed, segment.frozen, strict=True)
    ]
    columns: Columns = (("stages", "text"), ("iteration", "count"), ("active", "count"), ("frozen", "count"))
    return Table("Replay", columns, tuple(rows))


def _tiers(plan: RecoveryPlan, sizes: dict[OperatorId, OperatorSize]) -> Table:
    ranks: dict[Tier, set[int]] = {}
    read: Counter[Tier] = Counter()
    for source in plan.sources:
        ranks.setdefault(source.tier, set()).add(source.rank)
        full = source.part is Part.FULL
        read[source.tier] += sum(sizes[op].full_bytes if full else sizes[op].weights_bytes for op in source.operators)
    rows = [(tier.name.lower().replace("_", " "), len(ranks[tier]), read[tier]) for tier in sorted(ranks)]
    return Table("Tiers", (("tier", "text"), ("ranks", "count"), ("read", "bytes")), tuple(rows))


def _refused(plan: RecoveryPlan) -> Counter[str]:
    return Counter(refusal.reason.value for refusal in plan.refusals)


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
