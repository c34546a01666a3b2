"""What a recovery asks of the control plane by the number of ranks: calls, messages, bytes, connections and CPU of one.

The real code runs over a network that is played: one rank of a job of N after the other is real, the others are what
the same code made of their stores before. Stores are synthetic: windows of DeepSeek-V3 with two replicas, one node
lost. Times are CPU of the real rank, and what its messages take on a network of a given latency and bandwidth.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from operator import or_
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
from bucket_shards import BucketShards
from harness import Benchmark, row, rule, start, where
from played_collectives import (
    Came,
    CollectiveRecorder,
    Exchanged,
    Merged,
    MergedBytes,
    PlayedNumbers,
    PlayedTransport,
    Stopped,
    following,
)

from megatron.core.dist_checkpointing.moe.config import MoECheckpointConfig
from megatron.core.dist_checkpointing.moe.errors import UsageError
from megatron.core.dist_checkpointing.moe.policy.availability import Survey
from megatron.core.dist_checkpointing.moe.policy.lineage import Identity
from megatron.core.dist_checkpointing.moe.policy.placement import place_replicas
from megatron.core.dist_checkpointing.moe.ports import SnapshotId
from megatron.core.dist_checkpointing.moe.recovery.findings import Digest, Overview, digest
from megatron.core.dist_checkpointing.moe.recovery.inventory import InventoryRow, OperatorPart
from megatron.core.dist_checkpointing.moe.recovery.local_inventory import Findings, LocalInventory
from megatron.core.dist_checkpointing.moe.recovery.timeline import Milestone, Timestamps, gather_timeline
from megatron.core.dist_checkpointing.moe.replication.agreement import merged, of_first, raise_on_all_ranks
from megatron.core.dist_checkpointing.moe.runtime.opening import JobPlaces
from megatron.core.dist_checkpointing.moe.snapshot.memory_limit import NodeMemory, gathered_sizes
from megatron.core.dist_checkpointing.moe.strategies import STRATEGIES, Job
from megatron.core.dist_checkpointing.moe.strategies.sparse.windows import timetable
from megatron.core.dist_checkpointing.moe.types import (
    LOG,
    PARKED,
    Lost,
    OperatorId,
    OperatorSize,
    Part,
    RecoveryPlan,
    SnapshotPlan,
    Tier,
    Topology,
    Window,
)
from megatron.core.dist_checkpointing.moe.types.recovery import Scope
from moe_ckpt.simulator.models import PRESETS
from moe_ckpt.simulator.shards import owned_operators

BENCHMARK = Benchmark("control_plane", 5, "control-plane.md")
MOST_CPU_S, MOST_BYTES, LARGE = 0.05, 200_000, 512
"""Of an inventory and its plan, on any rank."""
SIZES = {8: (2, 4), 64: (4, 16), 512: (8, 64), 4096: (16, 64), 16384: (16, 64)}
"""Pipeline stages and expert-parallel ranks, by the number of ranks."""
WINDOW, FIRST, REPLICAS = 6, 100, 2
COUNTS = {"statuses": 0, "statuses, tokens of 58 layers with 256 experts": 58 * 256}
"""Numbers that an iteration adds up, beside what it says of copies and pieces."""
REAL = (
    "`tests/process/test_eight_nodes.py` loses one of eight played nodes, with its memory, under `full` with a replica."
    " 28 of 32 ranks keep their processes, and the checkpoint at the end has every bit of an undisturbed job's.",
    "Measured once on 2 cores (AMD EPYC) at a one-minute load of 19 to 55, 59 processes with 12.2 GB in all: 25.0 s"
    " from detection to rejoin, of which detect 2.04, restart 16.28 (5 s of it until the heartbeats of the lost node"
    " expire), rendezvous 3.43, build 1.86, inventory 0.44, plan 0.09, fetch 0.24, rejoin 0.67.",
    "",
    "One of two played nodes with two ranks each, of which a spare takes the place with its standby, in the stock loop"
    " (`tests/process/lost_node.py` under `moe-ckpt-run --nnodes 2`, `full` with a replica), three times at a load of"
    " 21 to 31: 2.57 to 2.74 s from detection to rejoin while nodes that trained were given up after 2 s, 1.98 to"
    " 2.19 s since that is 1.5 s; 1.52 to 1.67 s of it are `restart`.",
)
"""Of a run of that test, with torch 2.14.1."""
BEFORE = {
    8: (413, 117, 1827),
    64: (486, 126, 2504),
    512: (1246, 235, 5604),
    4096: (6677, 367, 31945),
    16384: (38516, 704, 128267),
}
"""By ranks: CPU of inventory and plan in ms, kB received."""
BEFORE_AGREEMENTS = {
    "a failure, of no rank": ("131.1", "3.72"),
    "a failure, of all ranks": ("1376.3", "5.08"),
    "timeline of a recovery": ("4210.7", "238.78"),
    "room on the tightest node": ("802.8", "669.25"),
    "names of nodes": ("294.9", "624.50"),
    "sizes of operators, alike on replicas": ("9520.4", "1980.66"),
}
"""Of the largest job: kB received and CPU in ms, of each rank, at 0ee52bef."""


class PlayedInventory(LocalInventory):
    """Of a rank whose stores have these rows.

    Args:
        rows: All that it finds.
        operators: Of the rank.
        transport: To all ranks.
    """

    def __init__(self, rows: list[InventoryRow], operators: Collection[OperatorId], transport: Any) -> None:
        identity = Identity("job", {}, frozenset(operators))
        super().__init__(cast("Any", None), None, transport, identity)
        self._found = rows

    def rows(self) -> list[InventoryRow]:
        return self._found


class PlayedJob:
    """A job of N ranks that lost a node; all others have parked, and every snapshot has two replicas."""

    def __init__(self, ranks: int) -> None:
        stages, experts = SIZES[ranks]
        self.topology = topology = Topology(ranks, pp=stages, ep=experts, ranks_per_node=min(8, ranks // 4))
        self.shape = shape = PRESETS["DeepSeek-V3-671B"]
        self.owned = owned_operators(shape, topology)
        config = MoECheckpointConfig(strategy="full", interval=1, replicas=REPLICAS, timeout_s=60.0)
        self.job = Job(config, tuple(sorted(shape.operators)), topology, 4096, 1000, topk=8)
        self.strategy = STRATEGIES["full"](self.job)
        self.kept_by = place_replicas(topology, REPLICAS).kept_by
        self.lost = set(topology.ranks_by_node[topology.node(ranks // 2)])
        self.windows: dict[tuple[int, int], list[tuple[OperatorPart, ...]]] = {}
        for lane, operators in self.owned.items():
            window = Window(FIRST, tuple(operators[at::WINDOW] for at in range(WINDOW)))
            plans = [window.plan(FIRST + at) for at in range(WINDOW)]
            self.windows[lane] = [
                tuple(
                    OperatorPart(one.layer, one.kind.value, one.expert, part.value) for one, part in plan.parts.items()
                )
                for plan in plans
            ]
        self.timeline = (("00000000000000000001-a", 0),)

    def lane(self, rank: int) -> tuple[int, int]:
        """The stage, and the expert-parallel rank."""
        at = self.topology.coordinates(rank)
        return at.pp, at.ep

    def operators(self, rank: int) -> tuple[OperatorId, ...]:
        """Of which a rank owns a part."""
        return self.owned[self.lane(rank)]

    def rows(self, rank: int) -> list[InventoryRow]:
        """All that a rank finds: windows of its own and of those that it keeps, logs, and its parked state."""
        if rank in self.lost:
            return []
        made = partial(
            InventoryRow, tier=Tier.OWN_MEMORY, timeline=self.timeline, job="job", window=(FIRST, FIRST + WINDOW - 1)
        )
        found = []
        for owner in (rank, *self.kept_by[rank]):
            for at, operators in enumerate(self.windows[self.lane(owner)]):
                snapshot = SnapshotId(FIRST + at, owner)
                found.append(
                    made(snapshot, operators=operators, digest="d" * 32, has_journal=True, has_strategy=not at)
                )
        last = FIRST + 2 * WINDOW - 2
        for iteration in range(FIRST, last + 1):
            found.append(made(SnapshotId(iteration, rank, LOG), has_journal=True, has_fingerprints=True))
        full = Part.MASTER_AND_MOMENTS.value
        parked = tuple(OperatorPart(one.layer, one.kind.value, one.expert, full) for one in self.operators(rank))
        found.append(made(SnapshotId(last, rank, PARKED), operators=parked, has_journal=True, has_strategy=True))
        return found

    def findings(self, rank: int, transport: Any) -> Findings:
        """As a recovery has them."""
        return PlayedInventory(self.rows(rank), self.operators(rank), transport).gather(self.job)

    def planned(self, rank: int, found: Findings, everywhere: Callable[[Digest], Digest]) -> RecoveryPlan:
        """The plan of a rank, as a recovery makes it."""
        usable = found.catalogue.within(self.timeline)

        def all_(survey: Survey) -> Survey:
            last = self.topology.stage_ranks(self.topology.pp - 1)
            return everywhere(digest(rank, survey, usable, found.own, (), last)).survey

        return self.strategy.recover(usable.inventory(), Lost(), self.topology, all_)


class Played:
    """A recovery of a job, all of whose ranks have given what they have."""

    def __init__(self, ranks: int) -> None:
        self.job, self.size = PlayedJob(ranks), ranks
        reader = msgspec.msgpack.Decoder(Overview)
        self._overviews = Merged([reader.decode(one) for one in self._left([])], or_)
        seen = msgspec.msgpack.encode(self._overviews.of(0, ranks))
        self._exchanged = Exchanged(dict(enumerate(self._left([seen]))))
        came: dict[int, list[tuple[int, bytes]]] = {rank: [] for rank in range(ranks)}
        for source, held in self._exchanged.sent.items():
            for to, data in held.items():
                came[to].append((source, data))
        self._digests = Merged(list(self._left([seen, came])), or_)

    def _left(self, known: Sequence[Any]) -> Iterator[Any]:
        for rank in range(self.size):
            transport = CollectiveRecorder(rank, self.size, known)
            try:
                self.job.planned(rank, self.job.findings(rank, transport), partial(self._leave, transport))
            except Stopped:
                yield transport.left

    @staticmethod
    def _leave(transport: CollectiveRecorder, own: Digest) -> Digest:
        transport.left = own
        raise Stopped

    def real(self, rank: int, turns: int) -> dict[str, Any]:
        """One rank: the CPU of the fastest of some turns, for others use the machine too."""
        times = list[tuple[float, float]]()
        for _ in range(turns + 1):  # the first one makes what arrives
            transport = PlayedTransport(rank, self.size, [self._overviews, self._exchanged, self._digests])
            inventory = PlayedInventory(self.job.rows(rank), self.job.operators(rank), transport)
            begun_s = time.thread_time()
            found = inventory.gather(self.job.job)
            found_s = time.thread_time()
            self.job.planned(rank, found, partial(_together, transport))
            times.append((found_s - begun_s, time.thread_time() - found_s))
        traffic = transport.traffic
        return {
            "rank": rank, "inventory_s": min(one for one, _ in times[1:]), "plan_s": min(one for _, one in times[1:]),
            "messages": traffic.messages, "bytes": traffic.received_bytes, "peers": len(traffic.peers),
            "network_s": traffic.seconds,
        }  # fmt: skip


def _together(transport: PlayedTransport, own: Digest) -> Digest:
    return merged(transport, own, Digest, or_)


class Shards:
    """Of a rank, as a capturer has them: the bytes of its operators."""

    def __init__(self, sizes: Mapping[OperatorId, OperatorSize]) -> None:
        self.operators, self._sizes = frozenset(sizes), sizes

    def layout(self, plan: SnapshotPlan, *, trainer: bool = False) -> Any:
        """A field for each operator."""
        return SimpleNamespace(
            fields=[SimpleNamespace(operator=one, nbytes=self._bytes(one, part)) for one, part in plan.parts.items()]
        )

    def _bytes(self, operator: OperatorId, part: Part) -> int:
        size = self._sizes[operator]
        return size.weights_bytes if part is Part.COMPUTE else size.full_bytes


def agreements(job: PlayedJob) -> dict[str, Callable[[int, Any], Any]]:
    """What all ranks agree on beside inventory and plan, by its name on the page: what a rank calls for it."""
    topology, size = job.topology, job.topology.world_size
    names = [(f"node-{topology.node(rank):05d}", "") for rank in range(size)]
    marks = [one for one in Milestone if one.value not in ("detected", "parked")]
    left = [{"attempt": "00000000000000000001-a", "times": {"detected": 1.0, "parked": 2.0}}]

    def fails() -> None:
        raise UsageError("the folder of --moe-ckpt-memory-dir cannot be used: No such file or directory")

    def failing(rank: int, transport: Any) -> None:
        with suppress(UsageError):
            raise_on_all_ranks(transport, fails)

    def timeline(rank: int, transport: Any) -> None:
        timestamps = Timestamps(lambda: 100.0, lambda: 100.0)
        for at_s, mark in enumerate(marks):
            timestamps.mark(mark, 10.0 + at_s)
        gather_timeline(transport, timestamps, left, RecoveryPlan(7, Scope.NONE, (), ()), topology)

    def sizes(rank: int, nbytes: int, transport: Any) -> None:
        gather(dict.fromkeys(job.operators(rank), OperatorSize(nbytes, nbytes)), transport)

    def gather(own: Mapping[OperatorId, OperatorSize], transport: Any) -> None:
        gathered_sizes(cast("Any", Shards(own)), transport, of_all=True)

    cut = {overlaps: BucketShards(job.shape, topology, overlaps=overlaps) for overlaps in (False, True)}

    def room(rank: int, transport: Any) -> None:
        here = topology.ranks_by_node[topology.node(rank)]
        NodeMemory(here, None, 1 << 40, Path("/dev/shm"), lambda: 0).room(transport)

    def places(rank: int, transport: Any) -> None:
        of_first(transport, JobPlaces.of(names if rank == 0 else ()), JobPlaces)

    return {
        "a failure, of no rank": lambda rank, transport: raise_on_all_ranks(transport, lambda: None),
        "a failure, of all ranks": failing,
        "timeline of a recovery": timeline,
        "room on the tightest node": room,
        "names of nodes": places,
        "sizes of operators, alike on replicas": lambda rank, transport: sizes(rank, 1 << 20, transport),
        "sizes of operators, different on each rank": lambda rank, transport: sizes(rank, (1 << 20) + rank, transport),
        "sizes of operators, of ranks that share a bucket": lambda rank, transport: gather(
            cut[False].sizes(rank), transport
        ),
        "sizes of operators, of ranks that share many buckets": lambda rank, transport: gather(
            cut[True].sizes(rank), transport
        ),
    }  # fmt: skip


def agreement(ranks: int, work: Callable[[int, Any], Any], turns: int) -> dict[str, Any]:
    """What one of them asks of rank 0, the root of the tree.

    Args:
        ranks: Of the job.
        work: What a rank calls.
        turns: How often it is measured.
    """
    collectives, known = list[Any](), list[Any]()
    while (last := following(ranks, work, known)) is not None:
        collectives.append(last)
        known.append(last.of(0, ranks) if isinstance(last, MergedBytes) else Came(last))
    times = list[float]()
    for _ in range(turns + 1):  # the first one makes what arrives
        transport = PlayedTransport(0, ranks, collectives)
        begun_s = time.thread_time()
        work(0, transport)
        times.append(time.thread_time() - begun_s)
    traffic = transport.traffic
    return {"cpu_s": min(times[1:]), "messages": traffic.messages, "bytes": traffic.received_bytes}


def iteration(rank: int, ranks: int, counts: int) -> dict[str, Any]:
    """What the one message of an iteration asks of a rank.

    Args:
        rank: The real one.
        ranks: How many there are.
        counts: Token counts that are added up, beside what is said of copies and pieces.
    """
    transport = PlayedTransport(rank, ranks, [PlayedNumbers(16, counts)])
    begun_s = time.thread_time()
    transport.least_and_total([0] * 16, [0] * counts)
    traffic = transport.traffic
    return {"cpu_s": time.thread_time() - begun_s, "messages": traffic.messages, "bytes": traffic.received_bytes}


def window_of(played: PlayedJob, *, overlaps: bool) -> dict[str, Any]:
    """What it takes a rank to plan a window of `sparse`, from the sizes of all.

    Args:
        played: The job.
        overlaps: Whether buckets are many.
    """
    shards = BucketShards(played.shape, played.topology, overlaps=overlaps)
    sizes = {rank: shards.sizes(rank) for rank in range(played.topology.world_size)}
    full = max(sum(size.full_bytes for size in own.values()) for own in sizes.values())
    planned, found = replace(played.job, sizes=sizes), dict[str, Any](buckets="many" if overlaps else "one")
    drawn = random.Random(played.topology.world_size)  # so that lanes have their experts in orders of their own
    counts = {one: drawn.randrange(1, 100_000) for one in planned.changing if one.is_expert}
    for name, window, budget in (("fixed", 2, 0), ("budget", None, full // 6 + 1)):
        begun_s = time.thread_time()
        table = timetable(planned, counts, window=window, budget_bytes=budget)
        found |= {f"{name}_s": time.thread_time() - begun_s, f"{name}_size": table.size}
    return found


def is_within(result: dict[str, Any]) -> bool:
    """Whether no rank of a large job takes more CPU or bytes than it may; in a small one it has much of the model."""
    ranks = [one for job in result["jobs"] for one in job["ranks"] if job["size"] >= LARGE]
    return all(one["inventory_s"] + one["plan_s"] <= MOST_CPU_S and one["bytes"] <= MOST_BYTES for one in ranks)


def measured(turns: int, quick: bool) -> dict[str, Any]:
    """All sizes; quick: the two smallest."""
    return {"jobs": [job(ranks, turns) for ranks in (list(SIZES)[:2] if quick else SIZES)]}


def job(ranks: int, turns: int) -> dict[str, Any]:
    """The rank at the root of the tree, one half way down, the last one, and one that is new.

    Args:
        ranks: Of the job.
        turns: How often each is measured.
    """
    played = Played(ranks)
    chosen = (0, ranks // 4, ranks // 2, ranks - 1)
    messages = {name: iteration(0, ranks, counts) for name, counts in COUNTS.items()}
    agreed = {name: agreement(ranks, work, turns) for name, work in agreements(played.job).items()}
    return {
        "size": ranks, "ranks": [played.real(rank, turns) for rank in chosen], "iteration": messages,
        "agreements": agreed, "windows": [window_of(played.job, overlaps=overlaps) for overlaps in (False, True)],
    }  # fmt: skip


def report(result: dict[str, Any]) -> list[str]:
    """The page."""
    lines = [
        *BENCHMARK.head("The control plane by the number of ranks", ""),
        f"Measured {where(result)}.",
        "",
        "A node of a DeepSeek-V3 job is lost; all other ranks have parked, and keep a window of 6 iterations with 2"
        " replicas, and logs. The real code of a rank runs, from the rows of its stores to its plan; what the other"
        " ranks give was made by the same code before. Rank 0 is the root of the tree of collectives, the third of each"
        " job is one of the lost. CPU: the fastest of its turns,"
        " of each part by itself. Messages: sent and received. Network: of what comes in, 50 us per value and 3 GB/s.",
        "",
        "## Inventory and plan",
        "",
        row("ranks", "rank", "CPU inventory, ms", "CPU plan, ms", "messages", "kB received", "peers", "network, ms"),
        rule(8),
    ]
    for one in result["jobs"]:
        for rank in one["ranks"]:
            times = (f"{1e3 * rank[name]:.1f}" for name in ("inventory_s", "plan_s"))
            kilobytes, network = f"{rank['bytes'] / 1e3:.1f}", f"{1e3 * rank['network_s']:.2f}"
            lines.append(row(one["size"], rank["rank"], *times, rank["messages"], kilobytes, rank["peers"], network))
    allowed = f"{1e3 * MOST_CPU_S:.0f} ms of CPU and {MOST_BYTES / 1e3:.0f} kB"
    lines += ["", f"Allowed: {allowed} on a rank of {LARGE} or more.", ""]
    lines += [
        "## Before",
        "",
        "At 25f9a56c each rank got the rows of all, parsed them, and planned for all: the same rows, in the same way.",
        "",
        row("ranks", "CPU inventory, ms", "CPU plan, ms", "kB received"),
        rule(4),
    ]
    lines += [row(ranks, *(f"{figure:.0f}" for figure in figures)) for ranks, figures in BEFORE.items()]
    lines += ["", "## The message of an iteration", "", "On rank 0, which has the most of it.", ""]
    lines += [row("ranks", "message", "messages", "kB received", "CPU, ms"), rule(5)]
    for one in result["jobs"]:
        for name, told in one["iteration"].items():
            figures = f"{told['bytes'] / 1e3:.1f}", f"{1e3 * told['cpu_s']:.2f}"
            lines.append(row(one["size"], name, told["messages"], *figures))
    lines += [
        "",
        "## What ranks agree on beside them",
        "",
        "On rank 0, the root of the tree. Room and names once for each start of a process, and sizes where a strategy"
        " plans from them, which `full` does not; a failure some ten times then, and once for each iteration that is"
        " run again; the timeline once a recovery. `before`: at 0ee52bef, where each rank got and parsed what all"
        " others have.",
        "",
        row("ranks", "", "messages", "kB received", "CPU, ms", "kB before", "CPU before, ms"),
        rule(7),
    ]
    for one in result["jobs"]:
        for name, told in one["agreements"].items():
            figures = f"{told['bytes'] / 1e3:.1f}", f"{1e3 * told['cpu_s']:.2f}"
            before = BEFORE_AGREEMENTS.get(name, ("", "")) if one["size"] == max(SIZES) else ("", "")
            lines.append(row(one["size"], name, told["messages"], *figures, *before))
    lines += [
        "",
        "Sizes that differ on each rank are proportional to what all ranks own. Where the distributed optimizer cuts"
        " buckets into ranges, a rank owns parts of few operators, but no two ranks the same. A window of `sparse` is"
        " planned from them, on each rank: at the start, and when operators are ordered again. Names come from"
        " rank 0: every other rank receives some 20 bytes of each node.",
    ]
    planned = [(one["size"], told) for one in result["jobs"] for told in one.get("windows", ())]
    if planned:
        lines += [
            "",
            "## The window of `sparse`",
            "",
            "CPU of one rank, experts in an order by tokens. The next window is planned on another thread, beside the"
            " last iteration of this one: a fixed size where experts are ordered again; and by the budget, a sixth of"
            " what the largest rank owns here, where that changes by a fifth; the first one beside the iteration after"
            " three were measured. Training waits for it where it takes longer. With the sizes where no two ranks have"
            " the same, which take rank 0 a second, it is the part of the control plane that takes a rank longest, and"
            " more with each rank of the job: with thousands of them give `--moe-ckpt-window` a number.",
        ]
        lines += ["", row("ranks", "buckets", "2 iterations, s", "by budget, s", "iterations"), rule(5)]
    for ranks, told in planned:
        times = f"{told['fixed_s']:.2f}", f"{told['budget_s']:.2f}"
        lines.append(row(ranks, told["buckets"], *times, told["budget_size"]))
    calls = "`tests/unit/pretrain/test_store_calls.py`"
    lines += ["", f"What nodes and ranks ask of the store while they meet is counted by {calls}."]
    return [*lines, "", "## 32 processes", "", *REAL]


def main() -> int:
    """Exit code 1 where a rank takes more than it may."""
    return BENCHMARK.run(__doc__, measured, report, is_within)


if __name__ == "__main__":
    start(main)
