"""Each rank plans from what it has to know: the same as from all that all ranks found."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import reduce
from operator import or_
from typing import Any, cast

import msgspec
import pytest
from effort import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from thread_ranks import ThreadTransport, Together

from megatron.core.dist_checkpointing.moe.config import MoECheckpointConfig
from megatron.core.dist_checkpointing.moe.errors import RecoveryImpossible
from megatron.core.dist_checkpointing.moe.policy.availability import rank_states, surveyed
from megatron.core.dist_checkpointing.moe.policy.lineage import (
    RECENT_ATTEMPTS,
    Identity,
    Lineage,
    continued,
    newest_first,
    past,
    shortened,
)
from megatron.core.dist_checkpointing.moe.ports import SnapshotId, StoreFailure
from megatron.core.dist_checkpointing.moe.recovery.exactness import Divergence
from megatron.core.dist_checkpointing.moe.recovery.findings import (
    Judge,
    StageDigest,
    Summary,
    overview,
    packed,
    unpacked,
)
from megatron.core.dist_checkpointing.moe.recovery.inventory import (
    Catalogue,
    CopyLocation,
    InventoryRow,
    OperatorPart,
    SentRows,
    catalogue,
)
from megatron.core.dist_checkpointing.moe.recovery.local_inventory import LocalInventory
from megatron.core.dist_checkpointing.moe.recovery.recovery import Recovery
from megatron.core.dist_checkpointing.moe.recovery.restoring import RecoveryPorts
from megatron.core.dist_checkpointing.moe.recovery.sources import logs_and_gradients, needs, with_trainer_states
from megatron.core.dist_checkpointing.moe.strategies import STRATEGIES, Job, Strategy
from megatron.core.dist_checkpointing.moe.types import (
    GRADIENTS,
    LOG,
    PARKED,
    Inventory,
    Lost,
    OperatorId,
    OperatorKind,
    Part,
    RecoveryPlan,
    Tier,
    Topology,
    Window,
    expert,
    taken_of,
)

FIRST, SECOND, OTHER = (("one", 0),), (("one", 0), ("two", 12)), (("else", 0),)
TOPOLOGIES = (
    Topology(3, pp=3, ranks_per_node=1),
    Topology(4, pp=2, ep=2, ranks_per_node=1),
    Topology(4, pp=2, vpp=2, ep=2, ranks_per_node=2),
    Topology(4, ep=2, nodes=(0, 1, 1, 2)),
)
CONFIGS = {
    "full": MoECheckpointConfig(strategy="full", interval=1, timeout_s=60.0),
    "pec": MoECheckpointConfig(strategy="pec", interval=1, timeout_s=60.0),
}


@dataclass
class World:
    """What ranks find, drawn by a seed."""

    strategy: str
    seed: int
    topology: Topology = field(init=False)
    owned: dict[int, tuple[OperatorId, ...]] = field(init=False)
    rows: dict[int, list[InventoryRow]] = field(init=False)
    intact: float = field(init=False)
    notes: dict[int, tuple[Divergence, ...]] = field(init=False)
    damaged: set[CopyLocation] = field(default_factory=set)

    def __post_init__(self) -> None:
        draw = random.Random(self.seed)
        self.topology = topology = draw.choice(TOPOLOGIES)
        ranks = range(topology.world_size)
        self.owned = {}
        for rank in ranks:
            at = topology.coordinates(rank)
            layers = topology.layers_of_stages(topology.pp * topology.vpp)[at.pp]
            rest = [OperatorId(one, kind) for one in layers for kind in (OperatorKind.NON_EXPERT, OperatorKind.ROUTER)]
            experts = [expert(one, 2 * at.ep + index) for one in layers for index in range(2)]
            self.owned[rank] = (*rest, *experts)
        self.rows = {rank: [] for rank in ranks}
        often, logged = draw.choice((0.6, 0.9, 1.0)), draw.choice((0.9, 1.0, 1.0))
        self.intact = draw.choice((0.95, 1.0))
        for owner in ranks:
            self._snapshots(draw, owner, often)
            for iteration in range(8, 17):
                self._row(draw, logged, owner, iteration, LOG, (), self._holders(draw, owner)[:1])
            if draw.random() < 0.8:
                iteration = draw.choice((15, 16, 16, 16))
                self._row(draw, 1.0, owner, iteration, PARKED, self._full(owner), [owner])
                self._row(draw, 0.4, owner, iteration + 1, GRADIENTS, (), [owner])
        replayed = Divergence(11, 11, tuple(range(topology.pp)), draw.random() < 0.5, 10, 11, FIRST, "other loss")
        self.notes = {rank: (replayed,) if draw.random() < 0.1 else () for rank in ranks}
        places = [(rank, row.snapshot, row.tier) for rank in ranks for row in self.rows[rank]]
        self.damaged = set(draw.sample(places, min(len(places), draw.choice((0, 0, 2)))))

    def _full(self, owner: int) -> tuple[OperatorPart, ...]:
        return tuple(self._part(one, Part.MASTER_AND_MOMENTS) for one in self.owned[owner])

    @staticmethod
    def _part(one: OperatorId, part: Part) -> OperatorPart:
        return OperatorPart(one.layer, one.kind.value, one.expert, part.value)

    def _holders(self, draw: random.Random, owner: int) -> list[int]:
        return [owner, draw.randrange(self.topology.world_size)]

    def _snapshots(self, draw: random.Random, owner: int, often: float) -> None:
        operators = self.owned[owner]
        for first in (8, 11, 14):
            window = Window(first, (operators[:2], operators[2:3], operators[3:]))
            for iteration in range(first, first + 3):
                plan = window.plan(iteration)
                held = tuple(self._part(one, part) for one, part in plan.parts.items())
                if self.strategy == "pec":
                    rest, full = 2 * self.topology.vpp, self._full(owner)
                    held = (*full[:rest], *draw.sample(full[rest:], draw.choice((0, 1, 2))))
                elif draw.random() < 0.3:
                    held = self._full(owner)
                span = (first, first + 2)
                self._row(draw, often, owner, iteration, "window", held, self._holders(draw, owner), span)

    def _row(
        self, draw: random.Random, often: float, owner: int, iteration: int, kind: str,
        held: tuple[OperatorPart, ...], finders: list[int], span: tuple[int, int] | None = None,
    ) -> None:  # fmt: skip
        for finder in dict.fromkeys(finders):
            if draw.random() > often:
                continue
            tier = Tier.PERSISTENT if finder == owner and kind == "window" and draw.random() < 0.3 else Tier.OWN_MEMORY
            why = "its manifest is damaged" if draw.random() > self.intact else ""
            job = "elder" if tier is Tier.PERSISTENT and draw.random() < 0.1 else "job"
            line = draw.choice((SECOND, SECOND, SECOND, OTHER)) if iteration > 12 and draw.random() < 0.1 else FIRST
            self.rows[finder].append(
                InventoryRow(
                    SnapshotId(iteration, owner, kind), tier, why, bool(why), "d", held, line, job, span,
                    draw.random() <= self.intact, kind != LOG and draw.random() < 0.5,
                    kind == LOG and draw.random() <= self.intact,
                )
            )  # fmt: skip

    @property
    def job(self) -> Job:
        operators = tuple(sorted({one for held in self.owned.values() for one in held}))
        return Job(CONFIGS[self.strategy], operators, self.topology, 64, 100, topk=1)


class DrawnInventory(LocalInventory):
    """Of one rank of a world."""

    def __init__(self, world: World, transport: Any) -> None:
        identity = Identity("job", {}, frozenset(world.owned[transport.rank]))
        super().__init__(cast("Any", None), None, transport, identity)
        self._drawn = world.rows[transport.rank]

    def rows(self) -> list[InventoryRow]:
        return self._drawn


@dataclass
class Everything:
    """The rule before: all ranks have all rows."""

    world: World
    is_local: bool
    timeline: Lineage = ()
    usable: Catalogue | None = None

    def plan(self, strategy: Strategy) -> RecoveryPlan | None:
        world, ranks = self.world, range(self.world.topology.world_size)
        rows = [row for rank in ranks for row in world.rows[rank]]
        judge = Judge(overview(rows, [note for rank in ranks for note in world.notes[rank]]), "job", lambda job: False)
        sent = [(rank, SentRows.of(map(judge.judged, world.rows[rank]))) for rank in ranks]
        required = {rank: frozenset(world.owned[rank]) for rank in ranks}
        known = catalogue(sent, required, tuple(map(world.topology.node, ranks)))
        usable = [found for found in known.found if not found.why]
        for timeline in newest_first((found.timeline, found.snapshot.iteration) for found in usable):
            self.timeline, self.usable = timeline, known.within(timeline)
            self.usable = self.usable if self.is_local else self.usable.without_standby()
            try:
                plan = strategy.recover(self._inventory(self.usable), Lost(), world.topology)
            except RecoveryImpossible:
                continue
            if self.is_local and any(note.alone and note.is_of(plan.target, timeline) for note in judge.diverged):
                self.is_local = False
                return self.plan(strategy)
            return plan
        return None

    def _inventory(self, known: Catalogue) -> Inventory:
        ranks: dict[int, set[int]] = {}
        for found in known.without(self.world.damaged).found:
            if found.has_journal and not found.why:
                told = known.required if found.snapshot.kind in (LOG, PARKED) else (found.snapshot.rank,)
                ranks.setdefault(found.snapshot.iteration, set()).update(told)
        journal = frozenset(iteration for iteration, told in ranks.items() if told >= known.required.keys())
        return replace(known.inventory(self.world.damaged), journal=journal)


def by_need(world: World, is_local: bool) -> list[tuple[Recovery, RecoveryPlan | None]]:
    """The plan of each rank, with its recovery."""
    together = Together(world.topology.world_size)

    def looked(rank: int) -> tuple[Recovery, RecoveryPlan | None]:
        transport: Any = ThreadTransport(rank, together)
        job, standby = world.job, cast("Any", object()) if is_local else None
        none = cast("Any", None)
        ports = RecoveryPorts(
            memory=none, persistent=none, transport=transport, restorer=none, trainer=none, clock=none, standby=standby
        )
        for note in world.notes[rank]:
            ports.notes.add(note)
        identity = Identity("job", {}, frozenset(world.owned[rank]))
        recovery = Recovery(job, STRATEGIES[world.strategy](job), ports, identity, ())
        recovery._local, recovery._damaged = DrawnInventory(world, transport), dict.fromkeys(world.damaged, "bad")
        return recovery, recovery.look()

    with ThreadPoolExecutor(together.size) as threads:
        return list(threads.map(looked, range(together.size)))


def compared(world: World, is_local: bool) -> RecoveryPlan | None:
    """Fails where any rank plans or takes anything else than it would if it knew everything."""
    rule = Everything(world, is_local)
    wanted = rule.plan(STRATEGIES[world.strategy](world.job))
    found = by_need(world, is_local)
    summaries = []
    for rank, (recovery, plan) in enumerate(found):
        if wanted is None or plan is None:
            assert plan is wanted
            continue
        assert recovery.timeline == past(rule.timeline, wanted.target)
        same = ("target", "scope", "segments", "roll_forward", "lost_tokens")
        assert [getattr(plan, name) for name in same] == [getattr(wanted, name) for name in same]
        assert plan.wider == wanted.wider
        assert plan.sources == tuple(one for one in wanted.sources if one.rank == rank)
        assert plan.refusals == tuple(one for one in wanted.refusals if one.rank == rank)
        shared, known = recovery._digest, rule.usable
        assert known is not None and shared is not None
        everything = known.without(world.damaged)
        logs = {one.snapshot.iteration for one in everything.found if one.snapshot.kind == LOG and one.has_journal
                and not one.why}  # fmt: skip
        assert shared.logged == logs
        own = recovery._usable(rule.timeline)
        assert taken(world, plan, own.inventory(world.damaged), own.without(world.damaged), logs) == [
            need for need in taken(world, wanted, known.inventory(world.damaged), everything, logs) if need[0] == rank
        ]
        summaries.append(Summary.of(plan, world.job.order))
    if wanted is not None:
        told = reduce(or_, summaries).added_to(wanted, world.job.order)
        assert set(told.taken) == set(taken_of(wanted.sources))
        assert set(told.refused) == set(wanted.refused)
    return wanted


def taken(
    world: World, plan: RecoveryPlan, inventory: Inventory, known: Catalogue, logs: set[int]
) -> list[tuple[Any, ...]]:
    """All that ranks read, and from where, by rank."""
    sources = with_trainer_states(needs(plan, inventory, known), plan, known, world.topology, logs)
    needed = (*sources, *logs_and_gradients(plan, known, world.topology))
    return sorted((one.rank, one.found.place, str(one.parts), str(one.feeds)) for one in needed)


@settings(max_examples=examples(300))
@given(st.sampled_from(("full", "pec")), st.booleans(), st.integers(0, 10**9))
def test_each_rank_plans_from_its_own_as_it_would_from_everything(strategy: str, is_local: bool, seed: int) -> None:
    compared(World(strategy, seed), is_local and strategy == "full")


def test_what_is_drawn_leads_to_all_kinds_of_recoveries() -> None:
    plans = [compared(World("full", seed), True) for seed in range(120)]
    assert {plan.scope.value for plan in plans if plan} >= {"local", "global"} and None in plans
    assert any(plan.roll_forward for plan in plans if plan)


@pytest.mark.parametrize("what", ["rows", "timelines"])
def test_a_rank_that_cannot_list_its_stores_ends_the_recovery_of_all(what: str) -> None:
    world, together = World("full", 1), Together(World("full", 1).topology.world_size)

    def fails() -> None:
        raise StoreFailure("the disk is gone")

    def gather(rank: int) -> None:
        own = DrawnInventory(world, ThreadTransport(rank, together))
        if rank == 1:
            setattr(own if what == "rows" else own._older, what, fails)
        with pytest.raises(StoreFailure, match=r"^rank 1: the disk is gone$"):
            own.gather(world.job)

    with ThreadPoolExecutor(together.size) as threads:
        list(threads.map(gather, range(together.size)))


def test_a_copy_that_is_made_once_stays_of_the_past_of_any_number_of_attempts() -> None:
    """As that of frozen experts is, of the first attempt; each attempt takes one snapshot of the rest."""
    once = InventoryRow(SnapshotId(1, 0, "constant"), Tier.PERSISTENT, timeline=FIRST, job="job")
    gone = InventoryRow(SnapshotId(3, 0, "constant"), Tier.PERSISTENT, timeline=(("else", 0),), job="job")
    timeline: Lineage = FIRST
    for number in range(1, 3 * RECENT_ATTEMPTS):
        at = SnapshotId(4 * number, 0, "snapshot")
        newest = InventoryRow(at, Tier.PERSISTENT, timeline=timeline, job="job")
        judge = Judge(overview([once, gone, newest]), "job", lambda job: False)
        assert judge.timelines[0] == timeline
        judged = {row.snapshot for row in map(judge.judged, [once, gone, newest]) if row.may_be_of(timeline)}
        assert judged == {once.snapshot, at}, number
        timeline = continued(shortened(timeline, judge.left_of(timeline)), f"{number:03}", 4 * number)
    assert len(timeline) < RECENT_ATTEMPTS + 4


@given(st.integers(0, 1 << 4000))
def test_sets_come_back_from_their_bytes(bits: int) -> None:
    assert unpacked(packed(bits)) == bits
    assert unpacked(packed(bits << 3000)) == bits << 3000
    assert len(packed(1 << 30000)) < 10


def test_what_ranks_can_rebuild_is_united_on_its_way_as_it_is_by_the_planner() -> None:
    for seed in range(20):
        world = World("full", seed)
        ranks = range(world.topology.world_size)
        rows = {
            rank: [row for held in world.rows.values() for row in held if row.snapshot.rank == rank] for rank in ranks
        }
        states = []
        for rank in ranks:
            sent = SentRows.of(map(Judge(overview(rows[rank]), "job", lambda job: True).judged, rows[rank]))
            known = catalogue([(rank, sent)], {rank: frozenset(world.owned[rank])}, tuple(ranks)).inventory()
            held = rank_states(known, Lost(), world.topology, (Part.MASTER_AND_MOMENTS, Part.COMPUTE), constants=True)
            (state,) = surveyed(held, known, Lost(), world.topology, world.job.order).stages.values()
            states += [state, replace(state, lacks={part: dict(lacks) for part, lacks in state.lacks.items()})]
        told = [StageDigest.of(state, frozenset({1}), frozenset()) for state in states]
        assert reduce(or_, told).state == reduce(or_, states)


def test_rows_of_one_attempt_travel_with_its_timeline_once() -> None:
    long: Lineage = tuple((f"{at:020d}-attempt", at) for at in range(64))
    rows = [InventoryRow(SnapshotId(at, 0), Tier.OWN_MEMORY, timeline=long, job="job") for at in range(12)]
    judge = Judge(overview(rows), "job", lambda job: False)
    sent = SentRows.of(map(judge.judged, rows))
    assert len(msgspec.msgpack.encode(sent)) < len(msgspec.msgpack.encode(long)) + 12 * 60
    assert [row.timeline for row in sent.judged] == [long] * 12
