"""The strategy `pec`: what it takes in turn, what it persists, what faults cost, and that K grows in time."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from fractions import Fraction
from typing import Any

import pytest
from effort import cases
from strategy_cases import TOKENS, World, job_of

from megatron.core.dist_checkpointing.moe.config import MoECheckpointConfig
from megatron.core.dist_checkpointing.moe.errors import UsageError
from megatron.core.dist_checkpointing.moe.extensions.lossy.ledger import TokenLedger
from megatron.core.dist_checkpointing.moe.extensions.lossy.pec import Pec
from megatron.core.dist_checkpointing.moe.policy.lifecycle import WindowState
from megatron.core.dist_checkpointing.moe.policy.partial import next_position, sequential_selection
from megatron.core.dist_checkpointing.moe.policy.tracking import TrackedWindow, all_are_protected
from megatron.core.dist_checkpointing.moe.strategies import Job, Throughput
from megatron.core.dist_checkpointing.moe.types import (
    Level,
    OperatorId,
    OperatorSize,
    Part,
    RecoveryPlan,
    Scope,
    SnapshotPlan,
    Tier,
    Topology,
    expert,
    full_plan,
)
from megatron.core.dist_checkpointing.moe.types.recovery import Taken

PEC = MoECheckpointConfig(strategy="pec", interval=1)
STORING = replace(PEC, persist_dir="/storage", persist_interval=4)
BY_LOAD = {"pec_selection": "load-aware"}
STAGES = Topology(8, pp=2, ep=2, ranks_per_node=4)
EVEN = [[10] * 8] * 3


def experts_of(plan: SnapshotPlan | None) -> set[OperatorId]:
    """Experts with their FULL state in a plan."""
    assert plan is not None
    return {operator for operator in plan.anchored if operator.is_expert}


def step(
    pec: Pec, iteration: int, *, ok: bool = True, sent: bool = True, counts: list[list[int]] = EVEN
) -> SnapshotPlan:
    """One iteration whose snapshot settles at once."""
    plan = pec.plan(iteration)
    assert plan is not None
    pec.on_token_counts(iteration, counts)
    pec.on_commit(plan, Level.SNAPSHOT, ok)
    if ok:
        pec.on_commit(plan, Level.REPLICAS, sent)
    return plan


def written(pec: Pec, iteration: int, *, ok: bool = True, counts: list[list[int]] = EVEN) -> SnapshotPlan | None:
    """One iteration, with what it persists, which settles at once too."""
    (part,) = pec.persistent(step(pec, iteration, counts=counts)) or (None,)
    if part is not None:
        pec.on_commit(part, Level.PERSIST, ok)
    return part


def run(job: Job, seed: int, steps: int, *, failing: float = 0.2, partial: bool = False, faults: float = 0.05) -> World:
    world = World(job, seed, failing, partial)
    while world.steps < steps:
        world.step()
        if world.random.random() < faults:
            world.fault(lose_node=world.random.random() < 0.4)
            report = world.strategy.report()
            assert report.lost_tokens == world.lost_tokens, f"seed {seed}"
            share = Fraction(sum(world.lost_tokens), TOKENS * job.iterations * job.topk * len(job.moe_layers))
            assert report.plt == share
    return world


def test_until_peers_have_had_all_experts_each_snapshot_has_them() -> None:
    pec = Pec(job_of(PEC, STAGES))
    for iteration, sent in enumerate((False, False, True), start=1):
        assert len(experts_of(step(pec, iteration, sent=sent))) == 24
    for iteration, sent in enumerate((False, True, False), start=4):
        assert len(experts_of(step(pec, iteration, sent=sent))) == 3  # of the others peers keep older copies


@pytest.mark.parametrize(("selection", "again"), [("sequential", 10), ("load-aware", 6)])
def test_experts_that_peers_did_not_take_count_as_unsaved(selection: str, again: int) -> None:
    pec = Pec(job_of(replace(PEC, pec_selection=selection), STAGES))
    step(pec, 1)
    taken = {iteration: experts_of(step(pec, iteration, sent=iteration != 5)) for iteration in range(2, 11)}
    assert [iteration for iteration, experts in taken.items() if experts == taken[5]] == [5, again]


@pytest.mark.parametrize(("sent", "taken"), [(True, 3), (False, 24)])
def test_experts_that_peers_do_not_take_after_a_recovery_are_taken_again(sent: bool, taken: int) -> None:
    job = job_of(PEC, STAGES)
    world = World(job, 1, 0.0, sends=True)
    for _ in range(12):
        world.step()
    world.failing = 0.0 if sent else 1.0
    assert world.fault(lose_node=False) is not None
    plan = world.strategy.plan(world.iteration + 1)
    assert len(experts_of(plan)) == taken


def is_protected(windows: list[TrackedWindow]) -> bool:
    return all_are_protected(windows) and any(window.state is WindowState.PROTECTED for window in windows)


@pytest.mark.parametrize("k", [1, 3])
def test_a_lost_node_takes_no_state_while_all_copies_are_protected(k: int) -> None:
    survived = 0
    for seed in range(6):
        world = World(job_of(replace(PEC, pec_k_snapshot=k), STAGES), seed, 0.3, sends=True, overstates=True)
        while world.steps < 60:
            world.step()
            if world.random.random() < 0.2 and all(map(is_protected, world.memory.values())):
                assert world.fault(lose_node=True) is not None, f"seed {seed}"
                survived += 1
    assert survived > 10


def test_snapshots_after_the_full_one_take_experts_as_the_sequential_selection_of_each_stage_does() -> None:
    for k in (1, 2, 3, 4):
        job = job_of(replace(PEC, pec_k_snapshot=k), STAGES, layers=6)
        pec, position = Pec(job), 0
        step(pec, 1, counts=[[1] * 8] * 5)
        for iteration in range(2, 20):
            wanted = {
                operator
                for layers in ((1, 2), (3, 4, 5))
                for operator in sequential_selection(layers, 8, k, position, ep=2)
            }
            assert experts_of(step(pec, iteration, counts=[[1] * 8] * 5)) == wanted
            position = next_position(position, k, 8)


def test_layers_are_those_of_the_ranks_of_a_stage_where_a_pipeline_is_cut_unevenly() -> None:
    """With fewer layers than chunks of the model, since the embedding and the loss have chunks of their own."""
    job = job_of(replace(PEC, pec_k_snapshot=2), Topology(4, pp=2, vpp=4, ep=2), layers=6)
    stages = ((1, 2, 4), (3, 5))
    experts = [[expert(layer, index) for layer in stages[rank // 2] for index in range(8)] for rank in (0, 2)]
    owned = {rank: dict.fromkeys(some, OperatorSize(10, 2)) for rank, some in zip((0, 2), experts, strict=True)}
    pec = Pec(replace(job, sizes=owned))
    step(pec, 1, counts=[[1] * 8] * 5)
    for iteration in range(2, 6):
        at = 2 * (iteration - 2)
        wanted = {one for layers in stages for one in sequential_selection(layers, 8, 2, at, ep=2)}
        assert experts_of(step(pec, iteration, counts=[[1] * 8] * 5)) == wanted


@pytest.mark.parametrize("k", [1, 2, 3, 5, 8])
def test_all_experts_are_in_any_full_turn_of_snapshots(k: int) -> None:
    pec = Pec(job_of(replace(PEC, pec_k_snapshot=k)))
    step(pec, 1)
    turn = -(-8 // k)
    plans = [experts_of(step(pec, iteration)) for iteration in range(2, 30)]
    for first in range(len(plans) - turn):
        assert len(set().union(*plans[first : first + turn])) == 24


def test_all_that_is_no_expert_is_in_every_snapshot() -> None:
    job = job_of(PEC)
    pec = Pec(job)
    for iteration in range(1, 6):
        plan = step(pec, iteration)
        assert all(
            plan.parts[operator] is Part.MASTER_AND_MOMENTS for operator in job.operators if not operator.is_expert
        )


def test_everything_is_taken_until_that_has_succeeded_once() -> None:
    pec = Pec(job_of(PEC))
    assert len(experts_of(step(pec, 1, ok=False))) == 24
    assert len(experts_of(step(pec, 2))) == 24
    assert len(experts_of(step(pec, 3))) == 3


def test_while_everything_is_under_way_it_is_not_taken_again() -> None:
    pec = Pec(job_of(PEC))
    first = pec.plan(1)
    assert first is not None
    pec.on_token_counts(1, EVEN)
    second = pec.plan(2)
    assert len(experts_of(second)) == 3
    pec.on_token_counts(2, EVEN)
    pec.on_commit(first, Level.SNAPSHOT, ok=False)
    assert len(experts_of(pec.plan(3))) == 24


def test_experts_of_a_failed_snapshot_come_in_the_next_turn_before_all_others() -> None:
    pec = Pec(job_of(PEC))
    step(pec, 1)
    failed = experts_of(step(pec, 2, ok=False))
    for iteration in range(3, 10):
        assert experts_of(step(pec, iteration)).isdisjoint(failed)
    assert experts_of(step(pec, 10)) == failed
    assert experts_of(step(pec, 11)).isdisjoint(failed)


def test_experts_under_way_are_not_chosen_again() -> None:
    for more in ({}, BY_LOAD):
        pec = Pec(job_of(replace(PEC, **more)))  # type: ignore[arg-type]
        step(pec, 1)
        first = experts_of(pec.plan(2))
        pec.on_token_counts(2, EVEN)
        assert experts_of(pec.plan(3)).isdisjoint(first)


def test_nothing_is_planned_between_snapshots_but_their_tokens_count() -> None:
    pec = Pec(job_of(replace(PEC, interval=3)))
    for iteration in range(1, 10):
        plan = pec.plan(iteration)
        assert (plan is not None) == (iteration % 3 == 0)
        pec.on_token_counts(iteration, EVEN)
    assert pec.to_data()["ledger"]["tokens"] == [[90] * 8] * 3


def test_the_experts_with_most_tokens_of_each_layer_are_taken_by_load() -> None:
    pec = Pec(job_of(replace(PEC, interval=2, pec_k_snapshot=2, **BY_LOAD), Topology(1)))  # type: ignore[arg-type]
    popular = {1: (0, 3), 2: (7, 1), 3: (4, 5)}  # in no two layers the same, nor neighbours in turn
    chosen = {expert(layer, index) for layer, experts in popular.items() for index in experts}
    assert pec.plan(1) is None
    pec.on_token_counts(1, EVEN)
    step(pec, 2)
    assert pec.plan(3) is None
    pec.on_token_counts(3, [[100 if index in popular[layer] else 1 for index in range(8)] for layer in popular])
    assert experts_of(step(pec, 4)) == chosen
    assert pec.plan(5) is None
    pec.on_token_counts(5, EVEN)
    assert experts_of(pec.plan(6)).isdisjoint(chosen)


def test_each_expert_is_a_piece_of_its_own_and_what_is_no_expert_another() -> None:
    pec = Pec(job_of(replace(PEC, pec_k_snapshot=2)))
    step(pec, 1)
    plan = step(pec, 2)
    dense, *alone = pec.pieces(plan)
    assert not any(operator.is_expert for operator in dense.plan.parts)
    assert {frozenset(piece.plan.parts) for piece in alone} == {frozenset({one}) for one in experts_of(plan)}
    others = {piece.kind for piece in pec.pieces(step(pec, 3))}
    assert others.isdisjoint(piece.kind for piece in alone)


@pytest.mark.parametrize("k", [1, 2, 3])
@pytest.mark.parametrize("topology", [Topology(4, ep=4), STAGES, Topology(1)])
def test_by_load_no_expert_waits_for_ever_and_each_rank_has_its_capacity(k: int, topology: Topology) -> None:
    job = job_of(replace(PEC, pec_k_snapshot=k, **BY_LOAD), topology, layers=6)  # type: ignore[arg-type]
    pec, seen = Pec(job), dict[OperatorId, int]()
    counts = [[1000, 200, *[0] * 6]] * 5
    step(pec, 1, counts=counts)
    for iteration in range(2, 120):
        chosen = experts_of(step(pec, iteration, counts=counts))
        seen |= dict.fromkeys(chosen, iteration)
        assert len(chosen) <= 5 * k
        if iteration > 40:
            assert min(seen.values()) >= iteration - 4 * -(-8 // k)
            assert len(seen) == 40


def test_the_scope_says_what_is_stored_of_experts_that_are_not_selected() -> None:
    for scope, rest in (
        ("weights", Part.MOMENTS),
        ("optimizer", Part.MASTER),
        ("both", None),
    ):
        job = job_of(replace(PEC, pec_scope=scope))
        pec = Pec(job)
        step(pec, 1)
        plan = step(pec, 2)
        parts = Counter(plan.parts.get(operator) for operator in job.operators if operator.is_expert)
        assert parts == {Part.MASTER_AND_MOMENTS: 3, rest: 21}


def test_the_first_persistent_snapshot_has_everything_and_later_ones_what_was_taken() -> None:
    pec = Pec(job_of(STORING))
    parts = {iteration: written(pec, iteration) for iteration in range(1, 13)}
    assert [iteration for iteration, part in parts.items() if part] == [4, 8, 12]
    assert [len(experts_of(parts[iteration])) for iteration in (4, 8, 12)] == [24, 3, 3]


def test_everything_is_persisted_again_when_that_has_failed() -> None:
    pec = Pec(job_of(STORING))
    for iteration in range(1, 13):
        part = written(pec, iteration, ok=iteration != 4)
        if part is not None:
            assert len(experts_of(part)) == (24 if iteration < 12 else 3)


def test_writes_that_fail_do_not_make_experts_overdue() -> None:
    pec = Pec(job_of(replace(STORING, persist_interval=1)))
    written(pec, 1)
    for iteration in range(2, 40):
        plan = step(pec, iteration)
        assert len(experts_of(plan)) == 3
        (part,) = pec.persistent(plan)
        pec.on_commit(part, Level.PERSIST, False)


def test_a_snapshot_that_was_not_planned_to_be_persisted_is_not() -> None:
    pec = Pec(job_of(STORING))
    for iteration in range(1, 4):
        step(pec, iteration)
    due, late = pec.plan(4), None
    pec.on_token_counts(4, EVEN)
    late = pec.plan(5)
    pec.on_token_counts(5, EVEN)
    assert due is not None
    assert late is not None
    pec.on_commit(due, Level.SNAPSHOT, ok=False)
    pec.on_commit(late, Level.SNAPSHOT, ok=True)
    assert pec.persistent(late) == ()
    assert len(experts_of(written(pec, 6))) == 24


@pytest.mark.parametrize(("k", "k_persist"), [(1, None), (2, None), (2, 1), (3, None), (3, 2), (4, 1), (8, 3)])
@pytest.mark.parametrize("persist_interval", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("selection", ["sequential", "load-aware"])
def test_every_expert_is_persisted_in_so_many_writes(
    k: int, k_persist: int | None, persist_interval: int, selection: str
) -> None:
    config = replace(STORING, persist_interval=persist_interval, pec_k_snapshot=k, pec_k_persist=k_persist)
    pec = Pec(job_of(replace(config, pec_selection=selection)))
    counts = [[50, 30, 20, 5, 1, 1, 0, 0]] * 3
    bound = 2 * -(-8 // k) * -(-k // (k_persist or k))
    ages: dict[OperatorId, int] = {}
    for iteration in range(1, persist_interval * (4 * bound + 4)):
        plan = step(pec, iteration, counts=counts)
        for part in pec.persistent(plan):
            pec.on_commit(part, Level.PERSIST, ok=True)
            ages = {operator: age + 1 for operator, age in ages.items()} | dict.fromkeys(experts_of(part), 0)
            assert max(ages.values()) <= bound
            if len(experts_of(part)) < 24 and selection == "sequential":
                assert len(experts_of(part)) <= 3 * (k_persist or k)


def test_experts_that_writes_keep_missing_are_rescued_however_many_there_are() -> None:
    """Every second snapshot is persisted, and of experts in turn those meet every second one only."""
    experts = 384
    pec = Pec(job_of(replace(STORING, persist_interval=2), Topology(1), layers=1, experts=experts))
    counts, missed = [[1] * experts], set[OperatorId]()
    for write in range(2 * experts + 1):
        step(pec, 2 * write + 1, counts=counts)
        part = written(pec, 2 * write + 2, counts=counts)
        missed = missed - experts_of(part) if write else experts_of(part)
        if not missed:
            break
    assert not missed


CASES = {
    "in turn": job_of(replace(STORING, persist_interval=5)),
    "by load": job_of(replace(STORING, pec_k_snapshot=2, **BY_LOAD), STAGES, layers=6),  # type: ignore[arg-type]
    "three of eight": job_of(replace(STORING, pec_k_snapshot=3, pec_k_persist=2, interval=2)),
    "weights of all": job_of(replace(STORING, pec_scope="optimizer", persist_interval=3)),
    "moments of all": job_of(replace(STORING, pec_scope="weights", persist_interval=3)),
    "memory only": job_of(replace(PEC, pec_k_snapshot=2), STAGES, layers=6),
}


@pytest.mark.parametrize("job", CASES.values(), ids=CASES.keys())
@pytest.mark.parametrize("partial", [False, True], ids=["agreed snapshots", "parts of snapshots"])
def test_lost_tokens_are_what_a_recount_gives_over_random_faults(job: Job, partial: bool) -> None:
    recoveries, old = 0, 0
    for seed in range(2):
        world = run(job, seed, 80, partial=partial, faults=0.08)
        recoveries += len(world.recoveries)
        old += sum(any(plan.lost_tokens.values()) for plan in world.recoveries)
    assert recoveries > 3
    assert old > 1


DYNAMIC = {
    name: replace(job, config=replace(job.config, plt_threshold=0.04), iterations=200) for name, job in CASES.items()
}


@pytest.mark.parametrize("sends", [False, True], ids=["", "to peers"])
@pytest.mark.parametrize("name", cases(DYNAMIC, fast=("in turn", "three of eight")))
def test_with_a_threshold_no_sequence_of_faults_costs_more(name: str, sends: bool) -> None:
    job = DYNAMIC[name]
    raised, used = 0, Fraction(0)
    for seed in range(2):
        world = World(job, seed, 0.2, sends=sends, overstates=sends)
        while world.iteration < job.iterations and world.steps < 200:
            world.step()
            raised += world.strategy.k not in (job.config.pec_k_snapshot, job.num_experts)
            if world.random.random() < 0.05:
                world.fault(lose_node=world.random.random() < 0.3)
                lost = Fraction(sum(world.lost_tokens), TOKENS * job.iterations * job.topk * len(job.moe_layers))
                assert lost <= Fraction(4, 100), f"seed {seed}"
                used = max(used, lost)
    assert raised
    assert used > Fraction(2, 100)


def test_what_was_lost_before_a_dense_checkpoint_counts_up_to_the_threshold() -> None:
    config = replace(PEC, plt_threshold=0.05)
    pecs = [Pec(job_of(config, iterations=40)) for _ in range(2)]
    most = TOKENS * 40 * 2 // 20
    pecs[1].lost_before(20, (most,) * 3)
    assert pecs[1].report().lost_tokens == (most,) * 3 and float(pecs[1].report().plt) == 0.05
    for pec in pecs:
        step(pec, 21)
        step(pec, 22)
    assert [pec.k for pec in pecs] == [1, 8], "nothing more may be lost"
    assert TokenLedger.from_data(pecs[1].to_data()["ledger"]).recovered(22, 20, {}).lost_tokens == (most,) * 3


@pytest.mark.parametrize(("k_persist", "is_raised"), [(1, True), (4, False)])
def test_k_is_raised_for_what_is_persisted_where_snapshots_alone_would_do(k_persist: int, is_raised: bool) -> None:
    config = replace(STORING, persist_interval=1, pec_k_snapshot=4, pec_k_persist=k_persist, plt_threshold=0.05)
    pec = Pec(job_of(config, iterations=40))
    parts = [written(pec, iteration) for iteration in range(1, 30)]
    assert any(len(experts_of(part)) > 3 * 4 for part in parts[1:]) == is_raised


def test_after_a_recovery_from_storage_everything_is_taken_again() -> None:
    world = run(CASES["in turn"], 1, 40, faults=0)
    world.random.random = lambda: 1.0  # type: ignore[method-assign]
    plan = world.fault(lose_node=True)
    assert plan is not None
    assert len(experts_of(world.strategy.plan(plan.target + 1))) == 24


def test_after_a_recovery_from_memory_the_turn_continues() -> None:
    world = run(CASES["in turn"], 1, 40, faults=0)
    plan = world.fault(lose_node=False)
    assert plan is not None
    assert len(experts_of(world.strategy.plan(plan.target + 1))) < 24


def resumed_with(stored: list[SnapshotPlan], *, target: int = 8) -> Pec:
    """That was killed after an iteration of which memory has all, and then finds this in storage."""
    job = job_of(replace(STORING, pec_k_snapshot=1))
    pec, resumed = Pec(job), Pec(job)
    for iteration in range(1, target + 1):
        written(pec, iteration)
    experts = frozenset(one for one in job.operators if one.is_expert)
    # From storage, as what survivors of another layout have in memory is seen.
    taken = Taken(Tier.PERSISTENT, -1, target, Part.MASTER_AND_MOMENTS, experts, "0")
    plan = RecoveryPlan(target, Scope.GLOBAL, (), (), all_taken=(taken,))
    resumed.resumed(plan, pec.to_data(), target)
    resumed.on_stored(stored)
    return resumed


def test_storage_that_turns_out_to_lack_any_expert_gets_all_of_them_again() -> None:
    everything = full_plan(4, job_of(STORING).operators)
    all_but_one = SnapshotPlan(4, {one: part for one, part in everything.parts.items() if one != expert(2, 3)})
    weights = SnapshotPlan(5, {expert(2, 3): Part.MASTER})
    for stored, is_whole in (
        ([everything], True),
        ([], False),
        ([all_but_one], False),
        ([all_but_one, weights], False),
    ):
        pec = resumed_with(stored)
        for iteration in range(9, 12):
            step(pec, iteration)
        part = written(pec, 12)
        assert (len(experts_of(part)) < 24) is is_whole, stored


def test_what_survivors_have_in_memory_does_not_count_as_a_copy_in_storage() -> None:
    pec = resumed_with([full_plan(4, job_of(STORING).operators)])
    unsaved = TokenLedger.from_data(pec.to_data()["ledger"]).unsaved(Level.PERSIST)
    assert unsaved == ((4 * 10,) * 8,) * 3, "iterations 5 to 8"


def test_impossible_numbers_name_the_flags() -> None:
    with pytest.raises(UsageError, match=r"--moe-ckpt-pec-k-snapshot 9 .* --num-experts 8"):
        Pec(job_of(replace(PEC, pec_k_snapshot=9)))
    with pytest.raises(UsageError, match=r"--moe-ckpt-pec-k-persist 3 .* --moe-ckpt-pec-k-snapshot 2"):
        Pec(job_of(replace(PEC, pec_k_snapshot=2, pec_k_persist=3)))
    with pytest.raises(UsageError, match=r"pec needs --num-experts"):
        Pec(job_of(PEC, experts=0))


def test_the_report_begins_with_nothing_lost() -> None:
    pec = Pec(job_of(PEC))
    report = pec.report()
    assert (report.layers, report.lost_tokens, report.plt, pec.k) == ((1, 2, 3), (0, 0, 0), 0, 1)


ADAPTIVE = replace(PEC, pec_adaptive=True, persist_dir="/storage", persist_interval=2)


def adaptive_job(**settings: Any) -> Job:
    """One rank has everything: experts of 10 bytes, and 100 bytes of the rest."""
    job = job_of(replace(ADAPTIVE, **settings))
    others = [operator for operator in job.operators if not operator.is_expert]
    sizes = {op: OperatorSize(10, 2) if op.is_expert else OperatorSize(0, 0) for op in job.operators}
    return replace(job, sizes={0: {**sizes, others[0]: OperatorSize(100, 0)}})


@pytest.mark.parametrize(("budget_bytes", "k"), [(0, 1), (100, 1), (100 + 10 * 7, 2), (100 + 10 * 13, 4), (10**6, 8)])
def test_an_adaptive_snapshot_has_as_many_experts_as_the_passes_have_time_for(budget_bytes: int, k: int) -> None:
    pec = Pec(adaptive_job())
    step(pec, 1)
    written(pec, 2)  # all of them
    pec.throughput_measured(Throughput(0.5, 2.0 * budget_bytes))
    plan = step(pec, 3)
    assert pec.k == k
    assert k == 8 or len(experts_of(plan)) * 10 + 100 <= max(budget_bytes, 100 + 10 * 3)


def test_an_adaptive_snapshot_fits_where_one_rank_owns_all_that_is_taken_in_a_turn() -> None:
    """As a distributed optimizer deals out buckets of a layer: experts 0 to 3 to one rank, the others to its peer."""
    job = replace(adaptive_job(), topology=Topology(2))
    (sizes,) = job.sizes.values()
    halves = {
        rank: {one: size for one, size in sizes.items() if not one.is_expert or one.expert // 4 == rank}
        for rank in range(2)
    }
    budget_bytes = 100 + 10 * 7
    pec = Pec(replace(job, sizes=halves))
    step(pec, 1)
    written(pec, 2)  # all of them
    pec.throughput_measured(Throughput(1.0, float(budget_bytes)))
    for iteration in range(3, 12):
        taken = experts_of(step(pec, iteration))
        if iteration % 2:  # the others go to storage too, and take more for it
            assert pec.k == 2
            assert max(sum(one.expert // 4 == rank for one in taken) for rank in range(2)) * 10 + 100 <= budget_bytes


def test_without_the_flag_bandwidth_changes_nothing() -> None:
    pec = Pec(adaptive_job(pec_adaptive=False))
    step(pec, 1)
    written(pec, 2)  # all of them
    pec.throughput_measured(Throughput(1.0, 10.0**9))
    step(pec, 3)
    assert not pec.needs_throughput
    assert pec.k == 1


def test_an_adaptive_snapshot_persists_one_expert_of_each_layer_unless_a_flag_says_otherwise() -> None:
    for given, persisted in ((None, 1), (2, 2)):
        pec = Pec(adaptive_job(pec_k_persist=given, pec_k_snapshot=2))
        pec.throughput_measured(Throughput(1.0, 10.0**6))
        parts = {iteration: written(pec, iteration) for iteration in range(1, 9)}
        (first, *others) = [part for part in parts.values() if part]
        assert len(experts_of(first)) == 24
        assert others
        assert {len(experts_of(part)) for part in others} == {3 * persisted}


def test_an_adaptive_k_takes_whole_experts_only() -> None:
    with pytest.raises(UsageError, match="takes a part of all of them"):
        Pec(adaptive_job(pec_scope="weights"))
