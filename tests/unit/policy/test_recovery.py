"""Plans of exact recoveries: what they use, how far they reach, and that they find a way whenever there is one."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Iterator

import pytest
from effort import examples
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from megatron.core.dist_checkpointing.moe.errors import RecoveryImpossible, UsageError
from megatron.core.dist_checkpointing.moe.policy.recovery import plan_recovery
from megatron.core.dist_checkpointing.moe.types import (
    BoundaryLog,
    Copy,
    Direction,
    Inventory,
    Lost,
    OperatorId,
    OperatorKind,
    Part,
    RecoveryPlan,
    RefusalReason,
    Scope,
    SnapshotPlan,
    Tier,
    Topology,
    Window,
    expert,
    full_plan,
)


def operators_of(stage: int) -> tuple[OperatorId, ...]:
    """Two experts, a router and the rest of one layer per stage, in the order in which windows anchor them."""
    router, rest = OperatorId(stage, OperatorKind.ROUTER), OperatorId(stage, OperatorKind.NON_EXPERT)
    return expert(stage, 0), expert(stage, 1), router, rest


@dataclasses.dataclass
class Cluster:
    """A job with a layer per stage, a rank per node, and windows of three iterations: experts, router, the rest."""

    topology: Topology
    copies: dict[int, list[Copy]] = dataclasses.field(default_factory=dict)
    logs: dict[int, list[BoundaryLog]] = dataclasses.field(default_factory=dict)
    journal: range | frozenset[int] = range(100)
    rolling: frozenset[int] = frozenset()

    def window(self, first: int, *tiers: Tier) -> Cluster:
        for rank in range(self.topology.world_size):
            one, two, router, rest = operators_of(self.topology.stage(rank))
            window = Window(first, ((one, two), (router,), (rest,)))
            for iteration in range(first, first + 3):
                self.add(rank, window.plan(iteration), *tiers)
        return self

    def dense(self, iteration: int, *tiers: Tier, ranks: Iterable[int] | None = None) -> Cluster:
        for rank in range(self.topology.world_size) if ranks is None else ranks:
            self.add(rank, full_plan(iteration, operators_of(self.topology.stage(rank))), *tiers)
        return self

    def park(self, iteration: int, *ranks: int) -> Cluster:
        return self.dense(iteration, Tier.PARKED, ranks=ranks)

    def add(self, rank: int, plan: SnapshotPlan, *tiers: Tier) -> None:
        for tier in tiers:
            peer = (rank + self.topology.ranks_per_stage) % self.topology.world_size
            holder = {Tier.PEER_MEMORY: peer, Tier.PERSISTENT: None}.get(tier, rank)
            self.copies.setdefault(rank, []).append(Copy(rank, plan, tier, holder))

    def logged(self, iterations: range) -> Cluster:
        for rank, direction in itertools.product(range(self.topology.world_size), Direction):
            self.logs.setdefault(rank, []).append(BoundaryLog(rank, direction, iterations, rank))
        return self

    def change(self, rank: int, iteration: int, tier: Tier, **changes: object) -> Cluster:
        self.copies[rank] = [
            dataclasses.replace(copy, **changes) if (copy.plan.iteration, copy.tier) == (iteration, tier) else copy
            for copy in self.copies[rank]
        ]
        return self

    @property
    def inventory(self) -> Inventory:
        ranks = range(self.topology.world_size)
        return Inventory(
            {rank: frozenset(operators_of(self.topology.stage(rank))) for rank in ranks},
            {rank: tuple(copies) for rank, copies in self.copies.items()},
            {rank: tuple(logs) for rank, logs in self.logs.items()},
            frozenset(self.journal),
            self.rolling,
        )

    def recover(self, ranks: Iterable[int] = (), nodes: Iterable[int] = (), **options: object) -> RecoveryPlan:
        return plan_recovery(self.inventory, Lost(frozenset(ranks), frozenset(nodes)), self.topology, **options)


def pipeline(stages: int, **degrees: int) -> Topology:
    return Topology(stages, pp=stages, ranks_per_node=1, **degrees)


def sources(plan: RecoveryPlan, rank: int) -> list[tuple[int, Tier, Part, frozenset[OperatorId]]]:
    return [(s.iteration, s.tier, s.part, s.operators) for s in plan.sources if s.rank == rank]


def reasons(plan: RecoveryPlan, rank: int) -> set[tuple[int, Tier, RefusalReason]]:
    return {(r.iteration, r.tier, r.reason) for r in plan.refusals if r.rank == rank}


def failed_stage(stage: int, stages: int = 3) -> Cluster:
    """A window of iterations 10..12 in the memory tiers; all stages but one parked after iteration 14."""
    cluster = Cluster(pipeline(stages)).window(10, Tier.OWN_MEMORY, Tier.PEER_MEMORY).logged(range(10, 15))
    return cluster.park(14, *(other for other in range(stages) if other != stage))


def test_only_the_failed_stage_replays_and_the_others_wait_in_their_parked_state() -> None:
    plan = failed_stage(1).recover(ranks=[1])
    assert plan.scope is Scope.LOCAL
    assert [(s.stages, s.base, s.target, s.logs_from) for s in plan.segments] == [((1,), 10, 14, (0, 2))]
    assert sources(plan, 0) == [(14, Tier.PARKED, Part.MASTER_AND_MOMENTS, frozenset(operators_of(0)))]


def test_operators_thaw_in_the_order_of_the_window() -> None:
    (segment,) = failed_stage(1).recover(ranks=[1]).segments
    _, _, router, rest = operators_of(1)
    assert list(zip(segment.replayed, segment.frozen, strict=True)) == [
        (11, {router, rest}),
        (12, {rest}),
        (13, frozenset()),
        (14, frozenset()),
    ]


def test_each_snapshot_of_the_window_gives_full_state_and_the_weights_still_needed() -> None:
    one, two, router, rest = operators_of(1)
    assert sources(failed_stage(1).recover(ranks=[1]), 1) == [
        (10, Tier.OWN_MEMORY, Part.MASTER_AND_MOMENTS, frozenset({one, two})),
        (10, Tier.OWN_MEMORY, Part.COMPUTE, frozenset({router, rest})),
        (11, Tier.OWN_MEMORY, Part.MASTER_AND_MOMENTS, frozenset({router})),
        (11, Tier.OWN_MEMORY, Part.COMPUTE, frozenset({rest})),
        (12, Tier.OWN_MEMORY, Part.MASTER_AND_MOMENTS, frozenset({rest})),
    ]


def test_a_lost_node_is_recovered_from_the_memory_of_its_peer() -> None:
    plan = failed_stage(1).recover(ranks=[1], nodes=[1])
    assert {tier for _, tier, _, _ in sources(plan, 1)} == {Tier.PEER_MEMORY}
    assert (10, Tier.OWN_MEMORY, RefusalReason.HOLDER_LOST) in reasons(plan, 1)


def test_a_damaged_record_comes_from_the_next_tier_and_the_intact_ones_beside_it_stay() -> None:
    one, two, _, _ = operators_of(1)
    cluster = failed_stage(1).change(1, 10, Tier.OWN_MEMORY, corrupt=frozenset({one}))
    plan = cluster.recover(ranks=[1])
    full = [
        (tier, operators) for i, tier, part, operators in sources(plan, 1) if (i, part) == (10, Part.MASTER_AND_MOMENTS)
    ]
    assert full == [(Tier.OWN_MEMORY, {two}), (Tier.PEER_MEMORY, {one})]
    assert (10, Tier.OWN_MEMORY, RefusalReason.CORRUPT) in reasons(plan, 1)


def test_a_torn_snapshot_in_every_tier_sends_the_stage_to_the_window_before() -> None:
    cluster = failed_stage(1).window(7, Tier.OWN_MEMORY).logged(range(7, 11))
    for tier in (Tier.OWN_MEMORY, Tier.PEER_MEMORY):
        cluster.change(1, 11, tier, sealed=False)
    plan = cluster.recover(ranks=[1])
    assert [(segment.stages, segment.base) for segment in plan.segments] == [((1,), 7)]
    assert (11, Tier.PEER_MEMORY, RefusalReason.TORN) in reasons(plan, 1)
    assert (12, Tier.OWN_MEMORY, RefusalReason.INCOMPLETE) in reasons(plan, 1)


def test_a_snapshot_newer_than_the_target_is_refused() -> None:
    plan = failed_stage(1).dense(15, Tier.OWN_MEMORY, ranks=[1]).recover(ranks=[1], target=14)
    assert (15, Tier.OWN_MEMORY, RefusalReason.NEWER) in reasons(plan, 1)
    assert all(iteration <= 14 for iteration, _, _, _ in sources(plan, 1))


def test_contiguous_failed_stages_recover_jointly_and_disjoint_ones_separately() -> None:
    cluster = Cluster(pipeline(6)).window(10, Tier.OWN_MEMORY).logged(range(10, 15)).park(14, 0, 3, 5)
    plan = cluster.recover(ranks=[1, 2, 4])
    assert [(s.stages, s.logs_from) for s in plan.segments] == [((1, 2), (0, 3)), ((4,), (3, 5))]


def test_virtual_stages_make_the_last_stage_a_neighbour_of_the_first() -> None:
    cluster = Cluster(pipeline(4, vpp=2)).window(10, Tier.OWN_MEMORY).logged(range(10, 15)).park(14, 1, 2)
    (segment,) = cluster.recover(ranks=[0, 3]).segments
    assert (set(segment.stages), segment.logs_from) == ({0, 3}, (1, 2))


def test_tied_embeddings_bring_the_last_stage_into_the_recovery_of_the_first() -> None:
    (segment,) = failed_stage(0, stages=4).recover(ranks=[0], tied_embeddings=True).segments
    assert (segment.stages, segment.logs_from) == ((0, 3), (1, 2))


def test_tied_embeddings_do_not_concern_a_failure_in_the_middle() -> None:
    (segment,) = failed_stage(1, stages=4).recover(ranks=[1], tied_embeddings=True).segments
    assert segment.stages == (1,)


def test_logs_that_do_not_reach_back_widen_the_scope_to_the_neighbour_that_lacks_them() -> None:
    cluster = failed_stage(1, stages=4)
    cluster.logs[2] = [BoundaryLog(2, direction, range(12, 15), 2) for direction in Direction]
    (segment,) = cluster.recover(ranks=[1]).segments
    assert (segment.stages, segment.logs_from) == ((1, 2), (0, 3))


def test_logs_with_a_gap_count_from_after_the_gap() -> None:
    cluster = failed_stage(1, stages=4)
    cluster.logs[2] = [BoundaryLog(2, way, span, 2) for way in Direction for span in (range(10, 12), range(13, 15))]
    (segment,) = cluster.recover(ranks=[1]).segments
    assert segment.stages == (1, 2)


def test_without_logs_all_stages_roll_back() -> None:
    cluster = failed_stage(1)
    cluster.logs.clear()
    plan = cluster.recover(ranks=[1])
    assert (plan.scope, plan.segments[0].stages, plan.segments[0].logs_from) == (Scope.GLOBAL, (0, 1, 2), ())


def test_without_the_journal_of_an_iteration_nothing_is_replayed_alone() -> None:
    cluster = failed_stage(1)
    cluster.journal = range(13)
    assert cluster.recover(ranks=[1]).scope is Scope.GLOBAL


def test_without_any_journal_a_window_is_worthless_and_a_dense_checkpoint_serves() -> None:
    cluster = failed_stage(1).dense(3, Tier.PERSISTENT)
    cluster.journal = range(0)
    plan = cluster.recover(ranks=[1])
    assert [(segment.base, segment.target) for segment in plan.segments] == [(3, 3)]


def test_one_stage_has_no_neighbours_and_rolls_back_whole() -> None:
    plan = Cluster(pipeline(1)).window(10, Tier.OWN_MEMORY).recover(ranks=[0])
    assert [(s.stages, s.base, s.target, s.logs_from) for s in plan.segments] == [((0,), 10, 12, ())]


def test_all_ranks_of_a_stage_roll_back_when_one_of_them_is_lost() -> None:
    topology = Topology(4, pp=2, ep=2, ranks_per_node=1)
    cluster = Cluster(topology).window(10, Tier.OWN_MEMORY).logged(range(10, 15)).park(14, 0, 1, 2)
    plan = cluster.recover(ranks=[3])
    assert {source.rank for source in plan.sources if source.iteration < 14} == {2, 3}


def test_survivors_one_step_behind_roll_forward_with_their_gradients() -> None:
    cluster = failed_stage(2).park(13, 0)
    cluster.copies[0] = [copy for copy in cluster.copies[0] if copy.plan.iteration != 14]
    cluster.rolling = frozenset({0})
    plan = cluster.recover(ranks=[2])
    assert plan.roll_forward == (0,)
    assert [segment.stages for segment in plan.segments] == [(2,)]
    assert sources(plan, 0) == [(13, Tier.PARKED, Part.MASTER_AND_MOMENTS, frozenset(operators_of(0)))]


def test_nobody_rolls_forward_without_the_journaled_norm() -> None:
    cluster = Cluster(pipeline(2)).park(14, 0).park(13, 1).dense(13, Tier.OWN_MEMORY)
    cluster.rolling, cluster.journal = frozenset({1}), range(14)
    assert cluster.recover(target=14).roll_forward == ()
    cluster.journal = range(15)
    assert cluster.recover(target=14).roll_forward == (1,)


def test_a_survivor_one_step_behind_without_gradients_replays_one_iteration_from_its_parked_state() -> None:
    cluster = failed_stage(2)
    cluster.copies[0] = [copy for copy in cluster.copies[0] if copy.tier is not Tier.PARKED]
    plan = cluster.park(13, 0).recover(ranks=[2])
    assert [(segment.stages, segment.base) for segment in plan.segments] == [((0,), 13), ((2,), 10)]


def test_stale_parked_state_of_an_earlier_failure_does_not_hold_the_job_back() -> None:
    cluster = Cluster(pipeline(2)).park(4, 0, 1).window(10, Tier.OWN_MEMORY)
    assert cluster.recover(ranks=[0, 1]).target == 12


def test_a_parked_iteration_that_nobody_else_can_reach_gives_way_to_the_one_before() -> None:
    cluster = Cluster(pipeline(2)).park(15, 0).dense(12, Tier.OWN_MEMORY, ranks=[0]).park(14, 1).logged(range(12, 15))
    plan = cluster.recover()
    assert (plan.target, [segment.stages for segment in plan.segments]) == (14, [(0,)])


def test_dense_snapshots_at_the_target_need_no_replay() -> None:
    plan = Cluster(pipeline(2)).dense(20, Tier.OWN_MEMORY).recover(ranks=[0, 1])
    assert (plan.target, plan.scope) == (20, Scope.GLOBAL)
    assert all(not segment.frozen for segment in plan.segments)


def test_a_second_failure_apart_from_the_first_is_a_segment_of_its_own() -> None:
    cluster = Cluster(pipeline(5)).window(10, Tier.OWN_MEMORY).logged(range(10, 15)).park(14, 0, 2, 3, 4)
    cluster.copies[4] = [copy for copy in cluster.copies[4] if copy.tier is not Tier.PARKED]
    assert [segment.stages for segment in cluster.recover(ranks=[1, 4]).segments] == [(1,), (4,)]


def test_a_second_failure_beside_the_first_is_recovered_jointly() -> None:
    cluster = Cluster(pipeline(5)).window(10, Tier.OWN_MEMORY).logged(range(10, 15)).park(14, 0, 2, 3, 4)
    cluster.copies[2] = [copy for copy in cluster.copies[2] if copy.tier is not Tier.PARKED]
    (segment,) = cluster.recover(ranks=[1, 2]).segments
    assert segment.stages == (1, 2)


def test_what_cannot_be_recovered_is_named() -> None:
    cluster = failed_stage(1)
    rest = operators_of(1)[3]
    for tier in (Tier.OWN_MEMORY, Tier.PEER_MEMORY):
        cluster.change(1, 12, tier, corrupt=frozenset({rest}))
    with pytest.raises(
        RecoveryImpossible, match=r"^iteration 14 cannot be reached: .* of stage 1 suffice for layer1\.non_expert;"
    ):
        cluster.recover(ranks=[1])


def why_wider(cluster: Cluster, **options: object) -> str:
    return cluster.recover(**options).wider


def test_where_all_stages_roll_back_together_nothing_runs_again_beyond_their_windows() -> None:
    cluster = failed_stage(1)
    cluster.logs.clear()
    plan = cluster.recover(ranks=[1])
    assert (plan.scope, plan.target) == (Scope.GLOBAL, 12)
    assert cluster.recover(ranks=[1], target=14).target == 14, "unless it is asked for"


def test_an_older_iteration_that_leaves_stages_alone_is_better_than_to_roll_all_back() -> None:
    cluster = Cluster(pipeline(3)).window(10, Tier.OWN_MEMORY).logged(range(10, 15)).park(15, 0).park(14, 2)
    plan = cluster.recover(ranks=[1])
    assert (plan.target, plan.scope) == (14, Scope.LOCAL)
    assert [segment.stages for segment in plan.segments] == [(0, 1)]


def test_a_local_recovery_was_not_widened() -> None:
    assert why_wider(failed_stage(1)) == ""


def test_the_reason_for_a_wider_scope_is_told() -> None:
    without_logs, without_journal = failed_stage(1, stages=4), failed_stage(1)
    without_logs.logs[2] = [BoundaryLog(2, direction, range(12, 15), 2) for direction in Direction]
    without_journal.journal = range(13)
    assert "logs of stage 2 begin with iteration 12" in why_wider(without_logs)
    assert "nobody knows how iteration 13 came out" in why_wider(without_journal)
    assert "tied embeddings" in why_wider(failed_stage(0, stages=4), tied_embeddings=True)
    assert "no rank has parked" in why_wider(Cluster(pipeline(2)).window(10, Tier.OWN_MEMORY))
    assert "logs of stage 0 do not reach" in why_wider(failed_stage(1).park(15, 0, 2))


def test_an_inventory_that_leaves_out_a_rank_is_refused() -> None:
    with pytest.raises(UsageError, match="what 1 of 2 ranks require"):
        plan_recovery(Inventory({0: frozenset()}, {}), Lost(), pipeline(2))


# Random failures, compared with trying everything.

LAST = 5


@st.composite
def clusters(draw: st.DrawFn) -> tuple[Cluster, Lost, bool]:
    """Small jobs with windows and dense snapshots of which much is gone, torn or damaged."""
    stages, per_stage = draw(st.integers(1, 3)), draw(st.integers(1, 2))
    vpp = draw(st.integers(1, 2)) if stages > 1 else 1
    topology = Topology(stages * per_stage, pp=stages, vpp=vpp, ranks_per_node=1)
    cluster = Cluster(topology)
    world = range(topology.world_size)
    for first in draw(st.sets(st.integers(0, 5), max_size=2)):
        cluster.window(first, Tier.OWN_MEMORY, *draw(st.sampled_from([(), (Tier.PEER_MEMORY,)])))
    for iteration in draw(st.sets(st.integers(0, LAST), max_size=1)):
        cluster.dense(iteration, Tier.PERSISTENT)
    for rank in world:
        if draw(st.booleans()):
            cluster.park(draw(st.sampled_from([4, 5, 5])), rank)
        for copy in cluster.copies.get(rank, []):
            harm = draw(st.sampled_from([None, None, None, None, "torn", "corrupt"]))
            operators = operators_of(topology.stage(rank))
            changes = (
                {"sealed": False}
                if harm == "torn"
                else {"corrupt": frozenset(draw(st.sets(st.sampled_from(operators))))}
            )
            if harm:
                cluster.change(rank, copy.plan.iteration, copy.tier, **changes)
        for direction in Direction:
            since = draw(st.sampled_from([0, 0, 2, 3, 5, 6]))
            cluster.logs.setdefault(rank, []).append(BoundaryLog(rank, direction, range(since, 6), rank))
    cluster.journal = range(draw(st.sampled_from([0, 0, 2, 4])), draw(st.sampled_from([6, 6, 4])))
    cluster.rolling = frozenset(draw(st.sets(st.sampled_from(world), max_size=2)))
    return cluster, Lost(nodes=frozenset(draw(st.sets(st.sampled_from(world), max_size=1)))), draw(st.booleans())


def intact(cluster: Cluster, lost: Lost, rank: int) -> Iterator[Copy]:
    for copy in cluster.copies.get(rank, []):
        if copy.sealed and copy.holder not in lost.nodes:
            yield copy


def gives(cluster: Cluster, lost: Lost, rank: int, operator: OperatorId, iteration: int, part: Part) -> bool:
    enough = {part, Part.MASTER} if part is Part.COMPUTE else {part}
    return any(
        any(one in copy.plan.parts.get(operator, Part.NOTHING) for one in enough) and operator not in copy.corrupt
        for copy in intact(cluster, lost, rank)
        if copy.plan.iteration == iteration
    )


def dense_at(cluster: Cluster, lost: Lost, stage: int, base: int, target: int) -> int | None:
    """By definition: the iteration at which the last operator gets its full state, if all have weights until theirs."""
    ranks, dense = cluster.topology.stage_ranks(stage), base
    for operator in operators_of(stage):
        full = [
            i
            for i in range(base, target + 1)
            if all(gives(cluster, lost, rank, operator, i, Part.MASTER_AND_MOMENTS) for rank in ranks)
        ]
        if not full:
            return None
        for i in range(base, full[0]):
            if not all(gives(cluster, lost, rank, operator, i, Part.COMPUTE) for rank in ranks):
                return None
        dense = max(dense, full[0])
    return dense


def stands_at(cluster: Cluster, lost: Lost, stage: int, target: int) -> bool:
    def parked(rank: int, iteration: int) -> bool:
        return any(
            copy.tier is Tier.PARKED and copy.plan.iteration == iteration and not copy.corrupt
            for copy in intact(cluster, lost, rank)
        )

    return all(
        parked(rank, target) or (rank in cluster.rolling and target in cluster.journal and parked(rank, target - 1))
        for rank in cluster.topology.stage_ranks(stage)
    )


def fewest_replaying_stages(cluster: Cluster, lost: Lost, tied: bool, target: int) -> int | None:
    """Try every base for every stage."""
    stages = cluster.topology.pp
    dense = [
        {b: d for b in range(target + 1) if (d := dense_at(cluster, lost, s, b, target)) is not None}
        for s in range(stages)
    ]
    options = [
        sorted({*dense[stage], *([target] if stands_at(cluster, lost, stage, target) else [])})
        for stage in range(stages)
    ]
    works = [
        sum(base < target for base in bases)
        for bases in itertools.product(*options)
        if is_possible(cluster, lost, tied, target, bases, dense)
    ]
    return min(works, default=None)


def is_possible(
    cluster: Cluster, lost: Lost, tied: bool, target: int, bases: tuple[int, ...], dense: list[dict[int, int]]
) -> bool:
    stages = len(bases)
    if tied and bases[0] != bases[-1]:
        return False
    together = len(set(bases)) == 1
    for stage, base in enumerate(bases):
        until = max(found[base] for found in dense) if together and base < target else target
        if any(i not in cluster.journal for i in range(base + 1, until + 1)):
            return False
        beside = [(stage - 1, Direction.FORWARD), (stage + 1, Direction.BACKWARD)]
        for neighbour, direction in beside:
            if cluster.topology.vpp == 1 and neighbour not in range(stages):
                continue
            neighbour %= stages
            if bases[neighbour] != base and not logged(
                cluster, lost, neighbour, direction, range(base + 1, target + 1)
            ):
                return False
    return True


def logged(cluster: Cluster, lost: Lost, stage: int, direction: Direction, iterations: range) -> bool:
    return not iterations or all(
        any(
            log.direction is direction and log.holder not in lost.nodes and set(iterations) <= set(log.iterations)
            for log in cluster.logs[rank]
        )
        for rank in cluster.topology.stage_ranks(stage)
    )


@settings(max_examples=examples(300))
@given(clusters())
def test_a_way_is_found_whenever_there_is_one_and_no_stage_replays_without_need(
    case: tuple[Cluster, Lost, bool],
) -> None:
    cluster, lost, tied = case
    expected = fewest_replaying_stages(cluster, lost, tied, LAST)
    if expected is None:
        with pytest.raises(RecoveryImpossible):
            cluster.recover(nodes=lost.nodes, tied_embeddings=tied, target=LAST)
        return
    plan = cluster.recover(nodes=lost.nodes, tied_embeddings=tied, target=LAST)
    assert sum(len(segment.stages) for segment in plan.segments if segment.base < LAST) == expected


@settings(max_examples=examples(300))
@given(clusters())
def test_carrying_out_a_plan_brings_every_operator_to_the_target_from_intact_copies_only(
    case: tuple[Cluster, Lost, bool],
) -> None:
    cluster, lost, tied = case
    try:
        plan = cluster.recover(nodes=lost.nodes, tied_embeddings=tied)
    except RecoveryImpossible:
        assume(False)
    for source in plan.sources:
        assert source.iteration <= plan.target
        assert any(
            (copy.tier, copy.holder, copy.plan.iteration) == (source.tier, source.holder, source.iteration)
            and serves(copy, source.part, source.operators)
            for copy in intact(cluster, lost, source.rank)
        )
    replaying = {stage: segment for segment in plan.segments for stage in segment.stages}
    for rank in range(cluster.topology.world_size):
        segment = replaying.get(cluster.topology.stage(rank))
        if segment is None:
            (iteration, tier, _, operators) = sources(plan, rank)[0]
            assert tier is Tier.PARKED
            assert iteration + (rank in plan.roll_forward) == plan.target
            assert operators == set(operators_of(cluster.topology.stage(rank)))
        else:
            replay(plan, rank, segment.base, segment.frozen, operators_of(cluster.topology.stage(rank)))


def serves(copy: Copy, part: Part, operators: frozenset[OperatorId]) -> bool:
    enough = Part.MASTER if part is Part.COMPUTE else part
    held = [copy.plan.parts.get(operator, Part.NOTHING) for operator in operators - copy.corrupt]
    return not copy.corrupt & operators and all(part in one or enough in one for one in held)


def replay(
    plan: RecoveryPlan,
    rank: int,
    base: int,
    frozen: tuple[frozenset[OperatorId], ...],
    operators: tuple[OperatorId, ...],
) -> None:
    """Load and replay, iteration by iteration, knowing only what the sources gave."""
    loaded = {(i, part, operator) for i, _, part, found in sources(plan, rank) for operator in found}
    trained: dict[OperatorId, int] = {}
    for iteration in range(base, plan.target + 1):
        if iteration > base:
            for operator in operators:
                if operator not in frozen[iteration - base - 1]:
                    assert trained[operator] == iteration - 1, "an active operator has its state of the step before"
                    trained[operator] = iteration
        for operator in operators:
            if (iteration, Part.MASTER_AND_MOMENTS, operator) in loaded:
                assert operator not in trained, "nothing is loaded over trained state"
                trained[operator] = iteration
            elif operator not in trained:
                assert (iteration, Part.COMPUTE, operator) in loaded, (
                    "a frozen operator has its weights at each iteration"
                )
    assert trained == dict.fromkeys(operators, plan.target)


@settings(max_examples=examples(150))
@given(clusters())
def test_without_a_target_some_reachable_iteration_is_found_whenever_there_is_one(
    case: tuple[Cluster, Lost, bool],
) -> None:
    cluster, lost, tied = case
    reachable = [t for t in range(9) if fewest_replaying_stages(cluster, lost, tied, t) is not None]
    parked = {copy.plan.iteration for rank in cluster.copies for copy in intact(cluster, lost, rank)}
    if not reachable:
        with pytest.raises(RecoveryImpossible):
            cluster.recover(nodes=lost.nodes, tied_embeddings=tied)
        return
    target = cluster.recover(nodes=lost.nodes, tied_embeddings=tied).target
    assert target in reachable
    assert target in parked


@settings(max_examples=examples(150))
@given(clusters())
def test_no_parked_iteration_is_given_up_to_which_some_stage_need_not_roll_back(
    case: tuple[Cluster, Lost, bool],
) -> None:
    cluster, lost, tied = case
    try:
        plan = cluster.recover(nodes=lost.nodes, tied_embeddings=tied)
    except RecoveryImpossible:
        assume(False)
    ranks = range(cluster.topology.world_size)
    found = [copy for rank in ranks for copy in intact(cluster, lost, rank) if copy.tier is Tier.PARKED]
    # One that is damaged in part counts as a snapshot does, whose iteration may be newer than all stages have one of.
    for iteration in {copy.plan.iteration for copy in found if not copy.corrupt}:
        replaying = fewest_replaying_stages(cluster, lost, tied, iteration)
        if replaying is not None and replaying < cluster.topology.pp:
            assert plan.target >= iteration
    for segment in plan.segments:
        if len(segment.stages) == cluster.topology.pp:
            assert all(segment.frozen), "where all roll back, nothing runs again beyond the window"


@settings(max_examples=examples(60))
@given(clusters(), st.randoms(use_true_random=False))
def test_the_order_in_which_copies_were_found_does_not_matter(case: tuple[Cluster, Lost, bool], random) -> None:  # type: ignore[no-untyped-def]
    cluster, lost, tied = case

    def outcome() -> RecoveryPlan | str:
        try:
            return cluster.recover(nodes=lost.nodes, tied_embeddings=tied)
        except RecoveryImpossible as error:
            return str(error)

    before = outcome()
    for found in (*cluster.copies.values(), *cluster.logs.values()):
        random.shuffle(found)
    cluster.copies = dict(reversed(cluster.copies.items()))
    assert outcome() == before
