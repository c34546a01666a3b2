"""`moe-ckpt plan`: what the checkpoints of a job will be, before a GPU hour is spent."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import click

from megatron.core.dist_checkpointing.moe.config import MoECheckpointConfig
from megatron.core.dist_checkpointing.moe.contradictions import contradictions
from megatron.core.dist_checkpointing.moe.errors import MoECheckpointError, UsageError
from megatron.core.dist_checkpointing.moe.policy.placement import place_replicas
from megatron.core.dist_checkpointing.moe.types import Lost, OperatorId, Part, RecoveryPlan, Tier
from moe_ckpt.report import Fact, Report, Table, table

from ..simulator.behaviour import Behaviour
from ..simulator.choices import MEMORY_SHARE
from ..simulator.closed_form import ettr
from ..simulator.constants import predicted_seconds
from ..simulator.planned_loss import recovery_of
from ..simulator.planning import LAST, PlannedJob, log_bytes, planned_job
from ..simulator.replicas import ReplicaCoverage, coverage
from . import counts_file
from .job_flags import JobFlags, checked_mtbf, job_command, number
from .values import Duration

ONE_DAY_S = 86400.0
"""Between faults, where nobody says it: of what is shown then, nothing depends on it."""

HELP = """Show what the checkpoints of a job will be: what they take of memory and time, where replicas lie, and what a
fault leads to. No GPU, no torch, no job needed.

Give the flags of the job, as they are: those of Megatron-LM that say what the model, the layout and the batch are, and
--moe-ckpt-*; all others change nothing. --model names a published model in place of its flags.

\b
    $ moe-ckpt plan --model Qwen3-30B-A3B --ep 8 --world-size 128 --cluster h100-dgx --moe-ckpt-strategy full --mtbf 12h
    $ moe-ckpt plan --model DeepSeek-MoE --pp 12 --ep 8 --moe-ckpt-strategy sparse --host-gbps 0.5 --lost-nodes 3
    $ moe-ckpt plan --model GPT-350M-16E --ep 8 --world-size 16 --moe-ckpt-strategy pec --moe-ckpt-pec-k-snapshot 4

The strategy runs as in the job, from iteration 1 until it has settled. Bytes are those of one rank with the distributed
optimizer. Lost ranks lose their process, lost nodes their memory as well; without either, the first node is lost, at
the worst moment. What does not fit is listed with the way out.

Exit codes: 0 printed; 1 a file cannot be read; 2 wrong usage.
"""


@job_command(HELP)
@counts_file.option
@click.option("--lost-ranks", default="", metavar="R,R-R", help="Ranks whose process was killed.")
@click.option("--lost-nodes", default="", metavar="N,N-N", help="Nodes that are gone with their memory.")
@number("--iteration", default=None, minimum=0, maximum=LAST, metavar="T", help="Last one before [default: the worst].")
@click.option("--mtbf", "mtbf_s", type=Duration(), metavar="TIME", help="Between faults of the job, for its ETTR.")
def plan(
    flags: JobFlags, counts: Path | None, lost_ranks: str, lost_nodes: str, iteration: int | None, mtbf_s: float | None
) -> Report:
    """See `HELP`; the option above each parameter explains it."""
    if mtbf_s is not None:
        checked_mtbf(flags.setting, mtbf_s)
    config = _config(flags)
    lost, is_asked = _lost(flags, lost_ranks, lost_nodes)
    tokens = counts_file.load_counts(counts, flags.shape)
    found = planned_job(
        flags.setting, config, tokens.of, limit_bytes=flags.limit_bytes, frozen_experts=flags.frozen_experts
    )
    way_out = f"more than --moe-ckpt-memory-limit {config.memory_limit}"
    problems = [(one, way_out) for one in found.given_up]
    recovery, why = None, ""
    try:
        recovery = recovery_of(found, lost, iteration)
    except MoECheckpointError as error:
        if is_asked or isinstance(error, UsageError):
            raise
        why = str(error)
    placed = coverage(place_replicas(found.job.topology, found.replicas))
    problems += _problems(found, placed, why)
    behaviour = found.behaviour(mtbf_s or ONE_DAY_S)
    facts = (*_what(found), *_cost(found, behaviour), *_memory(found), *_replicas(found, placed))
    if recovery is not None:
        facts += tuple(_recovery(found, *recovery))
    if behaviour is not None and mtbf_s is not None and (config.persist_dir or placed.fatal_nodes > 1):
        facts += (Fact("ETTR", ettr(behaviour, mtbf_s), "share"),)
    tables = [table("Does not fit", "what | way out", problems), _snapshots(found)]
    tables += [] if found.exact else [_experts(found)]
    tables += [_parts(found, behaviour, lost, recovery), *(_segments(found, recovery[0]) if recovery else ())]
    return Report(
        f"Checkpoints of {flags.shape.name} on {flags.topology.world_size} ranks by strategy {config.strategy}",
        facts,
        (*tables, _ranks(found), _peers(found)),
        (
            f"Rates: {flags.setting.cluster.source}.",
            f"Seconds of the timeline: {predicted_seconds(flags.setting.constants)}.",
            *flags.model_note,
            *flags.left_out(),
        ),
    )


def _config(flags: JobFlags) -> MoECheckpointConfig:
    """The settings of the job; `full` where it names no strategy."""
    config = flags.config
    if config.strategy == "none":
        config = replace(config, strategy="full")
    wrong = contradictions(
        config,
        world_size=flags.topology.world_size,
        num_experts=flags.shape.num_experts,
        use_distributed_optimizer=True,
        stages=flags.topology.pp,
    )
    if sentences := "; ".join(wrong):
        raise UsageError(sentences)
    return config


def _lost(flags: JobFlags, ranks: str, nodes: str) -> tuple[Lost, bool]:
    """What is lost, and whether somebody said so."""
    topology = flags.topology
    gone = frozenset(_numbers("--lost-nodes", nodes, len(topology.ranks_by_node)))
    killed = frozenset(_numbers("--lost-ranks", ranks, topology.world_size))
    is_asked = bool(gone or killed)
    gone = gone if is_asked else frozenset((0,))
    return Lost(killed | frozenset(topology.ranks_on(gone)), gone), is_asked


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


def _what(found: PlannedJob) -> Iterator[Fact]:
    yield Fact("Parameters", found.setting.job.shape.total_parameters, "count")
    yield Fact("Iteration", found.setting.iteration_s, "seconds")
    yield Fact("Iterations between snapshots", found.interval, "count")
    yield Fact("Window", found.window, "count")
    if not found.exact:
        yield Fact("Snapshots until all experts are saved", len(found.turn), "count")


def _cost(found: PlannedJob, behaviour: Behaviour | None) -> Iterator[Fact]:
    lanes, steps = tuple(found.lanes), range(len(found.turn))
    copied, sent = (max(map(max, of_lanes.values())) for of_lanes in (found.copied, found.sent))
    yield Fact("Largest snapshot of a rank", copied, "bytes")
    yield Fact("Copy to host memory", copied / found.setting.host_bytes_per_s, "seconds")
    yield Fact("Send to peers", sent / found.setting.fetch_bytes_per_s, "seconds")
    # All ranks wait for the one that copies most in an iteration.
    stall_s = math.fsum(max(found.stall_s(lane, step) for lane in lanes) for step in steps)
    yield Fact("Stall per snapshot", stall_s / len(steps), "seconds")
    yield Fact("Lag of replicas", max(found.lag_s(lane, step) for lane in lanes for step in steps), "seconds")
    if behaviour is not None:
        yield Fact("Checkpoints add to an iteration", behaviour.overhead_s / behaviour.iteration_s, "share")


def _memory(found: PlannedJob) -> Iterator[Fact]:
    topology = found.job.topology
    node = found.node_bytes()
    yield Fact(
        "State of a rank", max(sum(one.full_bytes for one in own.values()) for own in found.lanes.values()), "bytes"
    )
    yield Fact("Memory of a rank", node // min(topology.ranks_per_node, topology.world_size), "bytes")
    if found.logs:
        yield Fact("Boundary logs of a rank, of it", log_bytes(found.job, found.setting, found.strategy), "bytes")
    yield Fact("Memory of a node", node, "bytes")
    yield Fact("Share of the node's memory", node / found.setting.cluster.host_memory_bytes, "share")


def _replicas(found: PlannedJob, placed: ReplicaCoverage) -> Iterator[Fact]:
    yield Fact("Replicas of a snapshot", found.replicas, "count")
    yield Fact("Nodes that may be lost at once", placed.fatal_nodes - 1, "count")
    yield Fact("Sets of nodes whose loss is fatal", placed.fatal_sets, "count")


def _recovery(found: PlannedJob, plan: RecoveryPlan, failed_after: int) -> Iterator[Fact]:
    yield Fact("Iteration of the failure", failed_after, "count")
    yield Fact("Recovered iteration", plan.target, "count")
    yield Fact("Scope", plan.scope.value)
    ranks = sum(len(segment.stages) for segment in plan.segments) * found.job.topology.ranks_per_stage
    yield Fact("Ranks that go back", ranks, "count")
    yield Fact("Iterations replayed", max((len(segment.replayed) for segment in plan.segments), default=0), "count")
    yield Fact("Iterations trained again", failed_after - plan.target, "count")
    if not found.exact:
        yield Fact("Lost tokens", sum(plan.lost_tokens.values()), "count")


def _problems(found: PlannedJob, placed: ReplicaCoverage, why: str) -> Iterator[tuple[str, str]]:
    """What does not fit, and what to do."""
    setting, lanes, steps = found.setting, tuple(found.lanes), range(len(found.turn))
    node, has = found.node_bytes(), setting.cluster.host_memory_bytes
    if node > has:
        yield (
            f"checkpoints take {node / 1e9:,.0f} GB of a node, which has {has / 1e9:,.0f} GB",
            "more nodes, fewer --moe-ckpt-replicas, or --moe-ckpt-memory-limit, with which a job takes less",
        )
    elif node > MEMORY_SHARE * has:
        yield (
            f"checkpoints take {node / 1e9:,.0f} GB of a node, and a tmpfs has half of its {has / 1e9:,.0f} GB",
            "mount -o remount,size=... /dev/shm",
        )
    stall_s = max(found.stall_s(lane, step) for lane in lanes for step in steps)
    if stall_s:
        longer = {
            "sparse": "a longer --moe-ckpt-window, or auto",
            "selective": "a smaller --moe-ckpt-budget-local, or auto",
            "pec": "a larger --moe-ckpt-interval, or a smaller --moe-ckpt-pec-k-snapshot",
        }.get(found.job.config.strategy, "a larger --moe-ckpt-interval, or --moe-ckpt-strategy sparse")
        yield f"training waits up to {stall_s:.3g} s for a copy that an iteration has no time for", longer
    if found.is_late:
        yield "replicas take longer than there is until the next snapshot", "a larger interval, or fewer replicas"
    if placed.same_node:
        yield (
            f"{placed.same_node} replicas lie on their owner's own node and do not protect from its loss",
            "more nodes",
        )
    if why:
        stored = "the state in --moe-ckpt-persist-dir, which is older"
        way_out = stored if found.job.config.persist_dir else "--moe-ckpt-replicas 1, or --moe-ckpt-persist-dir"
        yield f"after the loss of a node {why}", way_out


def _snapshots(found: PlannedJob) -> Table:
    """Of the ranks that copy most."""
    lane = found.busiest
    own, rows = found.lanes[lane], []
    for step, taken in enumerate(found.turn):
        parts = {one: part for one, part in taken.plan.parts.items() if one in own}
        full = sorted(one for one in taken.plan.anchored if one in own)
        ends = (str(full[0]), str(full[-1])) if full else ("", "")
        weights = sum(part is Part.COMPUTE for part in parts.values())
        size, stall_s = found.copied[lane][step], found.stall_s(lane, step)
        experts = sum(one.is_expert for one in full)
        rows.append((taken.plan.iteration, len(full), experts, weights, size, found.sent[lane][step], stall_s, *ends))
    counts, of_link = "saved:count | experts:count | weights only:count", "copied:bytes | sent:bytes | stall:seconds"
    return table("Snapshots", f"iteration:count | {counts} | {of_link} | first | last", rows)


def _experts(found: PlannedJob) -> Table:
    """A row for each snapshot and layer: its experts, those that peers are sent, and those that continued to
    storage."""
    rows = (
        (taken.plan.iteration, layer, *([one.expert for one in sorted(kind) if one.layer == layer] for kind in kinds))
        for taken in found.turn
        for kinds in [(_full_experts(taken.plan.anchored), _persisted(taken.persisted))]
        for layer in found.job.moe_layers
    )
    return table("Experts", "iteration:count | layer:count | experts | persisted", rows)


def _persisted(plans: tuple[object, ...]) -> frozenset[OperatorId]:
    return frozenset().union(*(_full_experts(plan.anchored) for plan in plans))  # type: ignore[attr-defined]


def _full_experts(operators: frozenset[OperatorId]) -> frozenset[OperatorId]:
    return frozenset(one for one in operators if one.is_expert)


def _parts(
    found: PlannedJob, behaviour: Behaviour | None, lost: Lost, recovery: tuple[RecoveryPlan, int] | None
) -> Table:
    """Where the time of this fault goes, named as in the timeline of a job's recovery."""
    rows: list[tuple[str, float]] = []
    if behaviour is not None and recovery is not None:
        topology = found.job.topology
        nodes = frozenset(topology.node(rank) for rank in lost.ranks)
        parts = behaviour.fresh().strike(recovery[1], nodes=nodes, down=lost.nodes).parts
        rows = [*parts.items(), ("all", sum(parts.values()))]
    return table("Timeline", "part | predicted:seconds", rows)


def _segments(found: PlannedJob, plan: RecoveryPlan) -> Iterator[Table]:
    rows = [(list(s.stages), s.base, s.target, len(s.replayed), list(s.logs_from) or "none") for s in plan.segments]
    yield table("Segments", "stages | from:count | to:count | replayed:count | logs of stages", rows)
    ranks: dict[Tier, set[int]] = {}
    read: Counter[Tier] = Counter()
    lanes = {rank: found.lanes[at.pp, at.ep] for rank in range(found.job.topology.world_size)
             for at in [found.job.topology.coordinates(rank)]}  # fmt: skip
    for source in plan.sources:
        ranks.setdefault(source.tier, set()).add(source.rank)
        sizes, is_full = lanes[source.rank], source.part is Part.MASTER_AND_MOMENTS
        read[source.tier] += sum(
            sizes[one].full_bytes if is_full else sizes[one].weights_bytes for one in source.operators
        )
    of_tiers = [(tier.name.lower().replace("_", " "), len(ranks[tier]), read[tier]) for tier in sorted(ranks)]
    yield table("Read from", "tier | ranks:count | read:bytes", of_tiers)
    stale, tokens = Counter[int](), Counter[int]()
    for operator, count in plan.lost_tokens.items():
        stale[operator.layer] += 1
        tokens[operator.layer] += count
    losses = ((layer, stale[layer], tokens[layer]) for layer in sorted(stale))
    yield table("Losses", "layer:count | stale experts:count | lost tokens:count", losses)


def _ranks(found: PlannedJob) -> Table:
    rows = (
        (*lane, len(own), max(found.copied[lane]), max(found.sent[lane]), sum(one.full_bytes for one in own.values()))
        for lane, own in found.lanes.items()
    )
    columns = "stage:count | ep rank:count | operators:count | largest snapshot:bytes | sent:bytes | state:bytes"
    return table("Ranks by what they own", columns, rows)


def _peers(found: PlannedJob) -> Table:
    placed = place_replicas(found.job.topology, found.replicas)
    rows = (
        (rank, placed.nodes[rank], list(peers), sorted({placed.nodes[peer] for peer in peers}))
        for rank, peers in enumerate(placed.peers)
        if peers
    )
    return table("Where replicas lie", "rank:count | node:count | peers | their nodes", rows)
