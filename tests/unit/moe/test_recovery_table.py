"""The table that says what a recovery did."""

from __future__ import annotations

from fractions import Fraction

import pytest

from megatron.core.dist_checkpointing.moe.recovery.exactness import Exactness, RecoveryTable, Unverified
from megatron.core.dist_checkpointing.moe.strategies import LossReport
from megatron.core.dist_checkpointing.moe.types import (
    OperatorId,
    OperatorKind,
    Part,
    RecoveryPlan,
    Tier,
    expert,
)
from megatron.core.dist_checkpointing.moe.types.recovery import CopySource, Refusal, RefusalReason, ReplaySegment, Scope

HEAD = OperatorId(2, OperatorKind.HEAD)
ONE, OTHER = expert(1, 0), expert(1, 1)
NODES = (0, 0, 1, 1)


def source(rank: int, operators: set[OperatorId], **changes: object) -> CopySource:
    there = CopySource(rank, 4, Tier.OWN_MEMORY, NODES[rank], Part.MASTER_AND_MOMENTS, frozenset(operators))
    return there._replace(**changes)  # type: ignore[arg-type]


def lines(
    *sources: CopySource, losses: LossReport | None = None, damaged: tuple[str, ...] = (), **changes: object
) -> list[str]:
    plan = RecoveryPlan(4, Scope.GLOBAL, (), sources, **changes)  # type: ignore[arg-type]
    return list(RecoveryTable(plan, NODES, damaged, 0.256, losses).lines())


def shares(*of_all: str) -> LossReport:
    return LossReport((0,), (0,), (0,), *map(Fraction, of_all))


def columns(line: str) -> list[str]:
    return line.split()


def test_the_first_line_says_where_training_continues_and_how_long_it_took() -> None:
    assert lines()[0] == "recovered iteration 4 exactly (global rollback); state restored in 0.26 s:"


def test_a_recovery_that_loses_tokens_is_not_called_exact() -> None:
    assert lines(lost_tokens={ONE: 3})[0].startswith("recovered iteration 4 with lost tokens (")


def test_ranks_with_the_same_source_share_a_line_that_counts_their_operators() -> None:
    found = lines(
        source(0, {ONE}), source(1, {OTHER}), source(2, {ONE}, tier=Tier.PEER_MEMORY, holder=0), source(3, {HEAD})
    )
    assert [columns(line) for line in found[2:]] == [
        ["own", "memory", "of", "node", "0", "4", "full", "state", "2", "0-1"],
        ["own", "memory", "of", "node", "1", "4", "full", "state", "1", "3"],
        ["peer", "memory", "of", "node", "0", "4", "full", "state", "1", "2"],
    ]


def test_operators_that_several_ranks_share_count_once() -> None:
    (line,) = lines(source(0, {HEAD}), source(1, {HEAD}))[2:]
    assert columns(line)[-2:] == ["1", "0-1"]


def test_storage_has_no_node() -> None:
    (line,) = lines(source(0, {ONE}, tier=Tier.PERSISTENT, holder=None))[2:]
    assert columns(line)[:2] == ["persistent", "4"]


def test_parts_and_older_iterations_have_lines_of_their_own() -> None:
    found = lines(
        source(0, {ONE}, part=Part.MASTER), source(0, {ONE}, part=Part.MOMENTS, iteration=2), source(0, {HEAD})
    )
    assert [columns(line)[5:-2] for line in found[2:]] == [
        ["2", "moments"],
        ["4", "full", "state"],
        ["4", "master", "weights"],
    ]


def test_ranks_that_do_not_follow_each_other_are_told_apart() -> None:
    ranks = (0, 1, 2, 5, 7, 8)
    found = list(
        RecoveryTable(
            RecoveryPlan(4, Scope.GLOBAL, (), tuple(source(0, {ONE})._replace(rank=rank) for rank in ranks)), (0,) * 9
        ).lines()
    )
    assert columns(found[2])[-1] == "0-2,5,7-8"


def test_refused_copies_come_with_their_reasons_once_each() -> None:
    torn = Refusal(1, 4, Tier.OWN_MEMORY, 0, RefusalReason.TORN)
    found = lines(source(0, {ONE}), refusals=(torn, torn), damaged=("snapshot of rank 2: a bit flipped",))
    assert found[3:] == [
        "  skipped: 1 copy in own memory of ranks 1, iterations 4: it was never sealed",
        "  refused: snapshot of rank 2: a bit flipped",
    ]


@pytest.mark.parametrize(
    ("older", "newer", "words"), [(Part.MASTER, Part.MOMENTS, "master weights"), (Part.MOMENTS, Part.MASTER, "moments")]
)
def test_a_loss_of_one_part_of_the_state_names_it_and_what_is_not_lost(older: Part, newer: Part, words: str) -> None:
    old, new = source(0, {ONE}, part=older, iteration=2), source(0, {ONE}, part=newer)
    (line,) = (line for line in lines(old, new, lost_tokens={ONE: 30}) if "lost in layer" in line)
    assert f"of 1 experts, in their {words} only; their" in line
    assert line.endswith("are those of iteration 4")
    both = lines(source(0, {ONE}, iteration=2), lost_tokens={ONE: 30})
    assert "only" not in "".join(both)


def test_losses_are_summed_by_layer_and_their_share_of_all_faults_is_told() -> None:
    found = lines(lost_tokens={ONE: 30, OTHER: 12, expert(0, 3): 5}, losses=shares("0.012345", "0.25", "0.5"))
    assert found[2:] == [
        "  lost in layer 0: the updates of 5 routed tokens, of 1 experts",
        "  lost in layer 1: the updates of 42 routed tokens, of 2 experts",
        "  proportion of lost tokens, all faults so far: 1.2345 %",
        "  portion of lost tokens by PEC eq. 4, all faults so far: 25.0000 %",
        "  momentary lost tokens (MLT), all faults so far: 50.0000 %",
    ]


def test_the_share_of_lost_tokens_is_told_also_when_this_fault_cost_nothing() -> None:
    assert lines(losses=shares("0", "0", "0"))[2:] == [
        "  proportion of lost tokens, all faults so far: 0.0000 %",
        "  portion of lost tokens by PEC eq. 4, all faults so far: 0.0000 %",
        "  momentary lost tokens (MLT), all faults so far: 0.0000 %",
    ]


def test_a_replay_is_told_with_its_window_and_what_was_frozen() -> None:
    replayed = ReplaySegment((0,), 4, 6, (frozenset({ONE, OTHER}), frozenset({ONE})))
    plan = RecoveryPlan(6, Scope.GLOBAL, (replayed,), ())
    assert list(RecoveryTable(plan, NODES, windows={4: range(4, 7)}).lines())[1] == (
        "  window 4 to 6: restored iteration 4, then replayed 5 to 6 with up to 2 operators frozen"
    )


def test_a_state_that_is_dense_at_once_has_no_line_of_a_replay() -> None:
    plan = RecoveryPlan(6, Scope.GLOBAL, (ReplaySegment((0,), 6, 6),), ())
    assert not [line for line in RecoveryTable(plan, NODES).lines() if "replayed" in line]


def test_a_local_recovery_says_who_replayed_from_whose_logs_and_who_ran_nothing_again() -> None:
    replayed = ReplaySegment((1,), 4, 6, (frozenset({ONE}), frozenset()), logs_from=(0,))
    plan = RecoveryPlan(6, Scope.LOCAL, (replayed,), (), roll_forward=(1,))
    table = RecoveryTable(plan, NODES, windows={4: range(4, 6)}, stages=2)
    assert list(table.lines())[:4] == [
        "recovered iteration 6 exactly (local rollback); state restored in 0.00 s:",
        "  stage 1 (ranks 2-3), window 4 to 5: restored iteration 4, then replayed 5 to 6 with up to 1 operators"
        " frozen, fed from the logs of stage 0",
        "  stage 0 (ranks 0-1): resumed from parked state, ran nothing again",
        "  ranks 1: made the step of iteration 6 with the gradients they had kept",
    ]


def test_each_segment_of_a_recovery_has_a_line_with_its_own_window() -> None:
    segments = tuple(ReplaySegment((stage,), base, 6, (frozenset(),) * (6 - base)) for stage, base in ((0, 4), (2, 5)))
    table = RecoveryTable(RecoveryPlan(6, Scope.LOCAL, segments, ()), (0,) * 3, windows={4: range(3, 5)}, stages=3)
    assert [line.split(":")[0] for line in table.lines() if "replayed" in line] == [
        "  stage 0 (ranks 0), window 3 to 4",
        "  stage 2 (ranks 2), window 5",
    ]


def test_the_reason_for_a_wider_scope_follows_the_first_line() -> None:
    table = RecoveryTable(RecoveryPlan(6, Scope.GLOBAL, (), ()), NODES, wider="no rank has parked its state")
    assert list(table.lines())[1] == "  not local: no rank has parked its state"


def test_refusals_of_one_tier_and_reason_share_a_line() -> None:
    refusals = [Refusal(rank, at, Tier.PEER_MEMORY, 1, RefusalReason.CORRUPT) for rank in (0, 1) for at in (4, 5)]
    refusals.append(Refusal(3, 5, Tier.PARKED, 1, RefusalReason.TORN))
    found = lines(refusals=tuple(refusals))
    assert found[2:] == [
        "  skipped: 1 copy in parked of ranks 3, iterations 5: it was never sealed",
        "  skipped: 4 copies in peer memory of ranks 0-1, iterations 4-5: its checksum does not match",
    ]


def test_what_was_compared_with_nothing_is_named_and_the_state_not_called_exact() -> None:
    segments = (ReplaySegment((1,), 4, 6, (frozenset(), frozenset())),)
    how = Exactness(unverified=(Unverified((1,), (5, 6)),))
    plan = RecoveryPlan(6, Scope.LOCAL, segments, ())
    first, second, *_ = RecoveryTable(plan, (0,) * 4, duration_s=0.5, stages=2, exactness=how).lines()
    assert first == "recovered iteration 6 unverified (local rollback); state restored in 0.50 s:"
    assert second.startswith("  not verified: stage 1 (ranks 2-3), iterations 5-6: nothing is recorded")


def test_a_tolerance_is_said_in_place_of_exactly() -> None:
    plan = RecoveryPlan(6, Scope.GLOBAL, (), ())
    (first, *_) = RecoveryTable(plan, NODES, exactness=Exactness(tolerance=0.001)).lines()
    assert first.startswith("recovered iteration 6 within tolerance 0.001 of the recorded losses (global rollback)")


def test_replays_that_diverged_before_are_told_with_what_is_trained_again() -> None:
    plan = RecoveryPlan(6, Scope.GLOBAL, (), ())
    lines = list(RecoveryTable(plan, NODES, diverged=("the replay of stage 1",), again=range(7, 10)).lines())
    assert lines[1:3] == ["  diverged before: the replay of stage 1", "  trained again: iterations 7 to 9"]
