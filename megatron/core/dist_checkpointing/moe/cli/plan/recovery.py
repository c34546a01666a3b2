"""`moe-ckpt plan recovery`: what a failure would lead to."""

from __future__ import annotations

import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from moe_ckpt.report import Columns, Fact, Report, Table

from ...errors import UsageError
from ...policy.lanes import Lane, joint_schedules
from ...policy.lossy_recovery import plan_lossy_recovery
from ...policy.ordering import ORDERINGS
from ...policy.partial import PEC_SCOPES, pec_plan
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
from . import counts_file
from .options import Job, number, plan_command, positive
from .pec import check_experts, selected_experts
from .timeline import predicted, taken, timelines_table, without_survivors

LONGEST = 10_000  # iterations; each is a row
Ordered = dict[Lane, tuple[OperatorId, ...]]

HELP = """Show what a failure would lead to (MoEvement 3.4, App. A): which stages roll back and how far, what they
replay and from whose logs, and which tier gives every rank its state.

\b
    $ moe-ckpt plan recovery --model DeepSeek-MoE --pp 12 --ep 8 --window 6 --lost-nodes 3
    $ moe-ckpt plan recovery --model Mixtral-8x7B --pp 4 --ep 8 --strategy full --interval 20 --lost-ranks 9,17
    $ moe-ckpt plan recovery --model QWen-MoE --pp 6 --ep 4 --strategy pec --pec-k-snapshot 6 --lost-nodes 1

The job stood after --iteration when it failed; windows begin at multiples of their size; the newest complete one is
replicated. Lost ranks lose their process, lost nodes their memory as well; all others parked. Under pec, --counts are
the tokens of each iteration.

The timeline predicts how long each part takes, beside a rollback of all stages of the same strategy without boundary
logs and parked state. A job logs the same parts after each recovery: give what they were there.
"""


@plan_command(HELP)
@click.option("--strategy", type=click.Choice(["sparse", "full", "pec"]), default="sparse", show_default=True)
@number("--window", default=4, maximum=LONGEST, show_default=True, help="Iterations of a sparse window.")
@number("--interval", default=10, maximum=LONGEST, show_default=True, help="Iterations between full or pec snapshots.")
@number("--pec-k-snapshot", "k", default=1, show_default=True, metavar="K", help="Experts per MoE layer under pec.")
@click.option("--counts", type=click.Path(path_type=Path), default=None, metavar="FILE", help=counts_file.HELP)
@number("--iteration", default=None, minimum=0, metavar="T", help="Last finished iteration [default: the worst one].")
@number("--replicas", default=2, minimum=0, show_default=True, metavar="R", help="Copies in peers' memory.")
@click.option("--lost-ranks", default="", metavar="R,R-R", help="Ranks whose process was killed.")
@click.option("--lost-nodes", default="", metavar="N,N-N", help="Nodes that are gone with their memory.")
@click.option("--upstream-logging/--no-upstream-logging", "logging", default=True, show_default=True)
@positive("--iteration-time", "S", "Seconds of one iteration.", default=1.0)
@number("--microbatches", default=None, help="Of one iteration on a data-parallel rank [default: 4 per stage].")
@positive("--memory-gbps", "GB/S", "How fast a rank reads and parks state in its node's memory.", default=5.0)
@positive("--peer-gbps", "GB/S", "How fast a rank reads from another node's memory.", default=2.0)
@positive("--restart-s", "S", "From parked state to a model that is built anew, on the slowest rank.", default=10.0)
def recovery(
    job: Job, lost_ranks: str, lost_nodes: str, replicas: int, logging: bool, counts: Path | None, **given: Any
) -> Report:
    topology = job.topology
    figures = taken(job, given)
    nodes = frozenset(_numbers("--lost-nodes", lost_nodes, len(topology.ranks_by_node)))
    ranks = frozenset(_numbers("--lost-ranks", lost_ranks, topology.world_size)) | set(topology.ranks_on(nodes))
    if not ranks:
        raise UsageError("nothing is lost: name --lost-ranks or --lost-nodes")
    tokens = counts_file.load_counts(counts, job.shape)
    history = _History(**given)
    target = history.target
    sizes = shard_sizes(job.shape, topology, job.precision)
    snapshots = _snapshots(job, sizes, history)
    inventory = _inventory(job, snapshots, place_replicas(topology, replicas), ranks, target, logging)
    if history.strategy == "pec":
        plan = plan_lossy_recovery(
            inventory, Lost(ranks, nodes), topology, lambda operator, after, upto: tokens[operator] * (upto - after)
        )
        timelines = [predicted(plan, job, figures, sizes, parks=False)]
    else:
        tied = not job.shape.untie_embeddings_and_output_weights and topology.pp > 1
        plan = plan_recovery(inventory, Lost(ranks, nodes), topology, tied_embeddings=tied, target=target)
        whole = plan_recovery(
            without_survivors(inventory), Lost(ranks, nodes), topology, tied_embeddings=tied, target=target
        )
        timelines = [
            predicted(plan, job, figures, sizes, parks=logging),
            predicted(whole, job, figures, sizes, parks=False),
        ]
    going_back = sum(len(segment.stages) for segment in plan.segments) * topology.ranks_per_stage
    return Report(
        f"Recovery of {job.shape.name} after the loss of {len(ranks)} of {topology.world_size} ranks",
        (
            Fact("Iteration of the failure", target, "count"),
            Fact("Recovered iteration", plan.target, "count"),
            Fact("Scope", plan.scope.value),
            Fact("Ranks that go back", going_back, "count"),
            Fact("Iterations replayed", max((len(one.replayed) for one in plan.segments), default=0), "count"),
            Fact("Iterations trained again", target - plan.target, "count"),
            Fact("Lost tokens", sum(plan.lost_tokens.values()), "count"),
        ),
        (_segments(plan), _frozen(plan, job), _tiers(plan, sizes), timelines_table(timelines), _losses(plan)),
        tuple(f"{count} copies refused: {reason}" for reason, count in sorted(_refused(plan).items())),
    )


@dataclass(frozen=True)
class _History:
    """What was snapshotted when, up to the failure."""

    strategy: str
    window: int
    interval: int
    k: int
    iteration: int | None

    @property
    def target(self) -> int:
        """The last finished iteration. By default the one before a newer snapshot or window would be complete."""
        first = self.window - 1 if self.strategy == "sparse" else 0
        if self.iteration is None:
            return 3 * self.window - 2 if self.strategy == "sparse" else 2 * self.interval - 1
        if self.iteration < first:
            raise UsageError(
                f"--iteration is {self.iteration}, but the first snapshot is complete after iteration {first}"
            )
        return self.iteration


@dataclass(frozen=True)
class _Snapshots:
    """The newest complete snapshots of a lane, and its dense state at the target."""

    taken: tuple[SnapshotPlan, ...]
    parked: SnapshotPlan
    operators: frozenset[OperatorId]


def _snapshots(job: Job, sizes: dict[OperatorId, OperatorSize], history: _History) -> dict[Lane, _Snapshots]:
    owned = owned_operators(job.shape, job.topology)
    ordered = {lane: ORDERINGS["popularity"](operators, {}) for lane, operators in owned.items()}
    taken = {"sparse": _windows, "full": _full, "pec": _partial}[history.strategy](job, ordered, sizes, history)
    return {
        lane: _Snapshots(tuple(taken[lane]), full_plan(history.target, operators), frozenset(operators))
        for lane, operators in ordered.items()
    }


def _windows(
    job: Job, ordered: Ordered, sizes: dict[OperatorId, OperatorSize], history: _History
) -> dict[Lane, list[SnapshotPlan]]:
    size, target = history.window, history.target
    first = ((target + 1) // size - 1) * size
    schedules = joint_schedules(ordered, sizes, sys.maxsize, first_iteration=first, window=size)
    return {lane: list(map(one.window.plan, range(first, first + size))) for lane, one in schedules.items()}


def _full(
    job: Job, ordered: Ordered, sizes: dict[OperatorId, OperatorSize], history: _History
) -> dict[Lane, list[SnapshotPlan]]:
    newest = history.target // history.interval * history.interval
    return {lane: [full_plan(newest, operators)] for lane, operators in ordered.items()}


def _partial(
    job: Job, ordered: Ordered, sizes: dict[OperatorId, OperatorSize], history: _History
) -> dict[Lane, list[SnapshotPlan]]:
    """As many checkpoints as it takes to save all experts, or back to a full one of iteration 0."""
    check_experts(job.shape, history.k)
    newest = history.target // history.interval
    found: dict[Lane, list[SnapshotPlan]] = {lane: [] for lane in ordered}
    for index in range(max(0, newest - (-(-job.shape.num_experts // history.k) - 1)), newest + 1):
        selected = selected_experts(job.shape, job.topology, history.k, index * history.k)
        for lane, operators in ordered.items():
            own = selected & set(operators) if index else {one for one in operators if one.is_expert}
            found[lane].append(pec_plan(index * history.interval, operators, own, PEC_SCOPES["all"]))
    return found


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
    return Inventory(required, copies, logs, frozenset(range(target + 1)))


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


def _losses(plan: RecoveryPlan) -> Table:
    by_layer: Counter[int] = Counter()
    experts: Counter[int] = Counter()
    for operator, tokens in plan.lost_tokens.items():
        by_layer[operator.layer] += tokens
        experts[operator.layer] += 1
    rows = tuple((layer, experts[layer], by_layer[layer]) for layer in sorted(by_layer))
    return Table("Losses", (("layer", "count"), ("stale experts", "count"), ("lost tokens", "count")), rows)


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
