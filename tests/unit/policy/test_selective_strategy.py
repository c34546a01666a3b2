"""The strategy `selective`: which experts it copies and sends within which budgets, and what faults cost."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from fractions import Fraction

import pytest
from strategy_cases import TOKENS, World, job_of, owned

from megatron.core.dist_checkpointing.moe.config import MoECheckpointConfig
from megatron.core.dist_checkpointing.moe.errors import UsageError
from megatron.core.dist_checkpointing.moe.extensions.lossy.ledger import TokenLedger
from megatron.core.dist_checkpointing.moe.extensions.lossy.pec import Pec
from megatron.core.dist_checkpointing.moe.extensions.lossy.selective import Selective
from megatron.core.dist_checkpointing.moe.extensions.lossy.strategy import Lossy
from megatron.core.dist_checkpointing.moe.strategies import Job, Throughput
from megatron.core.dist_checkpointing.moe.types import Level, OperatorId, OperatorSize, SnapshotPlan, Topology, expert

SELECTIVE = MoECheckpointConfig(strategy="selective", replicas=1)
EXPERT, DENSE = 100, 10
"""Bytes of an expert, and of any other operator."""
EVEN = [[10] * 8] * 3


def sized(config: MoECheckpointConfig = SELECTIVE, topology: Topology | None = None, **model: int) -> Job:
    job = job_of(config, topology or Topology(2, ep=2, ranks_per_node=1), **model)
    sizes = {
        rank: {one: OperatorSize(EXPERT if one.is_expert else DENSE, 1) for one in operators}
        for rank, operators in owned(job).items()
    }
    return replace(job, sizes=sizes)


def budget(job: Job, experts: int) -> str:
    """Of a snapshot with so many experts of a rank."""
    dense = max(sum(not one.is_expert for one in sizes) for sizes in job.sizes.values())
    return str(dense * DENSE + experts * EXPERT)


def with_budgets(local: int, remote: int, **flags: object) -> Job:
    """A job whose ranks copy and send so many experts in each snapshot."""
    job = sized()
    config = replace(SELECTIVE, budget_local=budget(job, local), budget_remote=budget(job, remote), **flags)  # type: ignore[arg-type]
    return replace(job, config=config)


def experts_of(plan: SnapshotPlan | None) -> set[OperatorId]:
    assert plan is not None
    return {operator for operator in plan.anchored if operator.is_expert}


def sent_of(strategy: Selective, plan: SnapshotPlan) -> set[OperatorId]:
    return {one for piece in strategy.pieces(plan)[1:] for one in piece.plan.parts if piece.replicated}


def ledger_of(strategy: Lossy) -> TokenLedger:
    return TokenLedger.from_data(strategy.to_data()["ledger"])


def step(
    strategy: Selective,
    iteration: int,
    counts: list[list[int]] = EVEN,
    *,
    sent: bool = True,
    noting: dict[int, set[OperatorId]] | None = None,
) -> SnapshotPlan:
    """One iteration whose snapshot settles at once; `noting` is told what peers were sent."""
    plan = strategy.plan(iteration)
    assert plan is not None
    if noting is not None:
        noting[iteration] = sent_of(strategy, plan)
    strategy.on_token_counts(iteration, counts)
    strategy.on_commit(plan, Level.SNAPSHOT, ok=True)
    strategy.on_commit(plan, Level.REPLICAS, ok=sent)
    return plan


def test_the_first_snapshot_has_everything_and_later_ones_what_the_budgets_hold() -> None:
    strategy = Selective(with_budgets(4, 2))
    first = strategy.plan(1)
    assert first is not None
    assert (
        experts_of(first)
        == sent_of(strategy, first)
        == {expert(layer, index) for layer in (1, 2, 3) for index in range(8)}
    )
    strategy.on_token_counts(1, EVEN)
    strategy.on_commit(first, Level.SNAPSHOT, ok=True)
    strategy.on_commit(first, Level.REPLICAS, ok=True)
    for iteration in range(2, 12):
        plan = strategy.plan(iteration)
        assert plan is not None
        for half in (range(4), range(4, 8)):
            assert sum(one.expert in half for one in experts_of(plan)) == 4
            assert sum(one.expert in half for one in sent_of(strategy, plan)) == 2
        assert sent_of(strategy, plan) <= experts_of(plan)
        assert all(one in plan.anchored for one in sized().operators if not one.is_expert)
        strategy.on_token_counts(iteration, EVEN)
        strategy.on_commit(plan, Level.SNAPSHOT, ok=True)
        strategy.on_commit(plan, Level.REPLICAS, ok=True)


def test_experts_with_the_most_tokens_since_their_last_copy_are_taken_from_the_layers_with_the_most() -> None:
    strategy = Selective(with_budgets(2, 2, interval=2))
    assert strategy.plan(1) is None
    strategy.on_token_counts(1, EVEN)
    step(strategy, 2)
    assert strategy.plan(3) is None
    strategy.on_token_counts(3, [[1, 1, 1, 1, 9, 9, 1, 1], [90, 80, 1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 99, 1, 1, 70]])
    chosen = experts_of(strategy.plan(4))
    assert chosen == {expert(2, 0), expert(2, 1), expert(3, 4), expert(3, 7)}


def test_peers_are_sent_those_with_the_most_tokens_since_they_were_last_sent() -> None:
    strategy = Selective(with_budgets(4, 1))
    step(strategy, 1)
    sent: dict[int, set[OperatorId]] = {}
    for iteration in range(2, 40):
        step(strategy, iteration, noting=sent)
    ages = {one: iteration for iteration, experts in sent.items() for one in experts}
    assert {len(experts) for experts in sent.values()} == {2}
    assert len(ages) == 24, "even load: each is sent in turn"
    assert min(ages.values()) >= 40 - 2 * 12


def test_what_peers_did_not_acknowledge_counts_as_not_sent() -> None:
    strategy = Selective(with_budgets(1, 1))
    step(strategy, 1)
    step(strategy, 2, [[100, *[1] * 7]] * 3)
    plan = step(strategy, 3, [[1] * 8] * 3, sent=False)
    taken = experts_of(plan)
    assert {one.expert for one in taken} >= {0}
    unsent, unsaved = (ledger_of(strategy).unsaved(level) for level in (Level.REPLICAS, Level.SNAPSHOT))
    assert all(unsent[one.layer - 1][0] >= 100 for one in taken if one.expert == 0)
    assert all(unsaved[one.layer - 1][one.expert] < 100 for one in taken)


def test_budgets_are_what_the_measured_links_carry_in_an_iteration() -> None:
    strategy = Selective(sized())
    step(strategy, 1)
    dense = int(budget(sized(), 0))
    strategy.throughput_measured(Throughput(2.0, (dense + 3 * EXPERT) / 2, (dense + 1 * EXPERT) / 2))
    sent: dict[int, set[OperatorId]] = {}
    assert len(experts_of(step(strategy, 2, noting=sent))) == 6
    assert len(sent[2]) == 2
    strategy.throughput_measured(Throughput(1.0, 1.0, 1.0))
    assert len(experts_of(step(strategy, 3, noting=sent))) == 2, "one of each lane, however slow the links"
    assert len(sent[3]) == 2
    two = Selective(replace(sized(), config=replace(SELECTIVE, replicas=2)))
    two.throughput_measured(Throughput(1.0, math.inf, 100.0))
    assert two.budgets.remote_bytes == 50, "two peers share the link"


def test_a_budget_above_what_the_link_carries_holds_and_is_told_once() -> None:
    strategy = Selective(with_budgets(4, 4))
    step(strategy, 1)
    for _ in range(2):
        strategy.throughput_measured(Throughput(1.0, float(budget(sized(), 2)), math.inf))
    (note,) = strategy.take_notes()
    given, carried = budget(sized(), 4), budget(sized(), 2)
    assert note.startswith(f"--moe-ckpt-budget-local {given} is more than the {carried} bytes")
    assert strategy.take_notes() == ()
    assert len(experts_of(strategy.plan(2))) == 8


def test_without_peers_nothing_is_told_apart() -> None:
    strategy = Selective(replace(with_budgets(2, 1), config=replace(with_budgets(2, 1).config, replicas=0)))
    step(strategy, 1)
    plan = strategy.plan(2)
    assert plan is not None
    assert all(piece.replicated for piece in strategy.pieces(plan))
    assert strategy.places == 3


def test_after_a_failed_sending_of_everything_all_is_sent_again() -> None:
    strategy = Selective(with_budgets(1, 1))
    step(strategy, 1, sent=False)
    sent: dict[int, set[OperatorId]] = {}
    step(strategy, 2, noting=sent)
    assert len(sent[2]) == 24
    assert len(experts_of(step(strategy, 3))) == 2


def test_a_persistent_snapshot_has_the_experts_with_the_most_tokens_since_they_were_persisted() -> None:
    job = with_budgets(2, 2, persist_dir="/storage", persist_interval=3)
    strategy, stored = Selective(job), []
    for iteration in range(1, 100):
        plan = step(strategy, iteration)
        for part in strategy.persistent(plan):
            strategy.on_commit(part, Level.PERSIST, ok=True)
            stored.append(experts_of(part))
    assert len(stored[0]) == 24
    assert all(len(experts) == 4 for experts in stored[1:])
    assert len(set().union(*stored[1:7])) == 24, "even load: all in turn"


CASES = {
    "one of a rank": with_budgets(1, 1),
    "fewer sent than copied": with_budgets(3, 1),
    "with storage": with_budgets(2, 1, persist_dir="/storage", persist_interval=4),
    "every second iteration": with_budgets(2, 2, interval=2),
}


@pytest.mark.parametrize("job", CASES.values(), ids=CASES.keys())
@pytest.mark.parametrize("partial", [False, True], ids=["agreed snapshots", "parts of snapshots"])
def test_lost_tokens_are_what_a_recount_gives_over_random_faults_and_node_losses(job: Job, partial: bool) -> None:
    recoveries, old = 0, 0
    for seed in range(3):
        world = World(job, seed, 0.2, partial, sends=True)
        while world.steps < 80:
            world.step()
            if world.random.random() < 0.08:
                world.fault(lose_node=world.random.random() < 0.4)
                assert world.strategy.report().lost_tokens == world.lost_tokens, f"seed {seed}"
                layers = len(job.moe_layers)
                share = Fraction(sum(world.lost_tokens), TOKENS * job.iterations * job.topk)
                report = world.strategy.report()
                assert (report.mlt, report.plt, report.plt_pec) == (share, share / layers, share / layers)
        recoveries += len(world.recoveries)
        old += sum(any(plan.lost_tokens.values()) for plan in world.recoveries)
    assert recoveries > 3
    assert old > 1


def test_fewer_tokens_are_at_risk_than_with_experts_in_turn_at_equal_bytes() -> None:
    """MOETION Fig. 11, with experts of skewed popularity that changes in time."""
    job = with_budgets(3, 3)
    in_turn = replace(job, config=MoECheckpointConfig(strategy="pec", pec_k_snapshot=2))
    risks = []
    for strategy in (Selective(job), Pec(in_turn)):
        total, bytes_ = 0, 0
        for iteration in range(1, 120):
            counts = [
                [round(200 / (1 + (index + layer + iteration // 40) % 8) ** 1.5) for index in range(8)]
                for layer in range(3)
            ]
            plan = step(strategy, iteration, counts)  # type: ignore[arg-type]
            total += sum(strategy.report().at_risk)
            bytes_ += len(experts_of(plan))
        risks.append((total, bytes_))
    (by_risk, selective_bytes), (sequential, pec_bytes) = risks
    assert selective_bytes == pec_bytes
    assert by_risk < 0.75 * sequential


def test_experts_owe_what_they_lost_until_it_is_repaid_and_debts_of_the_target_remain() -> None:
    job = replace(with_budgets(1, 1), drops_tokens=True)
    world = World(job, 3, 0.0, sends=True)
    for _ in range(12):
        world.step()
    plan = world.fault(lose_node=False)
    assert plan is not None
    lost = {one: tokens for one, tokens in plan.lost_tokens.items() if tokens}
    strategy = world.strategy
    assert strategy.makes_up
    assert dict(strategy.deferred_tokens) == lost != {}
    one = next(iter(lost))
    rows = [[0] * 8 for _ in range(3)]
    rows[one.layer - 1][one.expert] = lost[one] - 1
    strategy.on_deferred_tokens(plan.target + 1, rows)
    assert dict(strategy.deferred_tokens) == {**lost, one: 1}
    again = Selective(job)
    data = {**json.loads(world.data[plan.target]), "owed": json.loads(json.dumps(strategy.to_data()["owed"]))}
    again.resumed(plan, data, plan.target)
    assert again.deferred_tokens[one] == lost[one] + 1
    strategy.on_deferred_tokens(plan.target + 2, [[10**6] * 8] * 3)
    assert dict(strategy.deferred_tokens) == {}
    without = Selective(replace(job, config=replace(job.config, capacity_boost=0)))
    without.resumed(plan, data, plan.target)
    assert dict(without.deferred_tokens) == {}
    assert without.take_notes() == ()


def test_what_it_remembers_goes_through_json_and_on() -> None:
    strategy = Selective(with_budgets(2, 1))
    step(strategy, 1)
    strategy.throughput_measured(Throughput(1.0, 5.0, math.inf))
    data = json.loads(json.dumps(strategy.to_data()))
    assert strategy.budgets.from_data(data["links"]) == strategy.budgets


@pytest.mark.parametrize(
    ("flags", "experts", "words"),
    [
        ({}, 0, "--moe-ckpt-strategy selective needs --num-experts"),
        ({"budget_local": "0"}, 8, "invalid --moe-ckpt-budget-local 0 .expected auto or a size"),
        ({"budget_remote": "fast"}, 8, "invalid --moe-ckpt-budget-remote fast .expected auto"),
        ({"budget_remote": "10%"}, 8, "invalid --moe-ckpt-budget-remote 10% .expected auto"),
        ({"capacity_boost": 101}, 8, "--moe-ckpt-capacity-boost 101 is a share of the capacity"),
    ],
)
def test_impossible_settings_are_named_with_what_is_allowed(flags: dict[str, object], experts: int, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        Selective(job_of(replace(SELECTIVE, **flags), experts=experts))  # type: ignore[arg-type]


def test_counts_of_a_job_with_other_experts_are_refused() -> None:
    world = World(with_budgets(1, 1), 1, 0.0, sends=True)
    for _ in range(6):
        world.step()
    other = Selective(replace(sized(experts=4), config=world.job.config))
    plan = world.fault(lose_node=False)
    assert plan is not None
    with pytest.raises(UsageError, match=r"tokens were counted of 8 experts in 3 layers, but this job has 4 in 3"):
        other.resumed(plan, json.loads(world.data[plan.target]), plan.target)
