"""The ledger of tokens, what faults cost, and the papers' measures of it."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, field
from fractions import Fraction

import pytest
from effort import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.core.dist_checkpointing.moe.errors import UsageError
from megatron.core.dist_checkpointing.moe.extensions.lossy.recovery import Level, TokenLedger, mlt, plt_moc, plt_pec
from megatron.core.dist_checkpointing.moe.types import OperatorId, OperatorKind, expert

SNAPSHOT, PERSIST = Level.SNAPSHOT, Level.PERSIST
LAYERS, EXPERTS = (1, 3), 3


def trained(ledger: TokenLedger, *iterations: list[list[int]]) -> TokenLedger:
    for counts in iterations:
        ledger = ledger.advance(ledger.iteration + 1, counts)
    return ledger


@pytest.fixture
def ledger() -> TokenLedger:
    """Layer 1 and 3; expert 1-0 saved after iteration 1, expert 1-1 and all of layer 3 after iteration 2."""
    ledger = trained(TokenLedger.started(LAYERS, EXPERTS), [[5, 3, 2], [1, 1, 8]])
    ledger = ledger.saved(1, [expert(1, 0)], SNAPSHOT)
    ledger = trained(ledger, [[4, 4, 2], [10, 0, 0]])
    return ledger.saved(2, [expert(1, 1), *(expert(3, index) for index in range(3))], SNAPSHOT)


def test_tokens_count_from_the_last_saved_copy_of_each_level(ledger: TokenLedger) -> None:
    ledger = trained(ledger, [[1, 1, 1], [2, 2, 2]])
    assert ledger.unsaved(SNAPSHOT) == ((5, 1, 5), (2, 2, 2))
    assert ledger.unsaved(PERSIST) == ((10, 8, 5), (13, 3, 10))
    assert ledger.last_saved(SNAPSHOT) == ((1, 2, 0), (2, 2, 2))


def test_a_fault_loses_what_experts_learnt_between_their_copy_and_the_restored_iteration(ledger: TokenLedger) -> None:
    ledger = trained(ledger, [[100, 100, 100], [100, 100, 100]])
    copies = {expert(1, 0): 1, expert(1, 2): 0}
    assert ledger.tokens_between(expert(1, 2), 0, 2) == 4
    assert ledger.loss(2, copies) == (4 + 4, 0)
    assert ledger.at_risk(SNAPSHOT) == (8, 0)
    after = ledger.recovered(3, 2, copies)
    assert (after.iteration, after.lost_tokens) == (2, (8, 0))
    assert (after.losses[0].fault_iteration, after.losses[0].restored_iteration) == (3, 2)


def test_saving_all_experts_leaves_nothing_at_risk(ledger: TokenLedger) -> None:
    ledger = trained(ledger, [[7, 7, 7], [7, 7, 7]])
    everyone = [expert(layer, index) for layer in LAYERS for index in range(EXPERTS)]
    assert trained(ledger.saved(3, everyone, PERSIST), [[9, 9, 9], [9, 9, 9]]).at_risk(PERSIST) == (0, 0)


def test_a_second_fault_before_any_training_loses_nothing_more(ledger: TokenLedger) -> None:
    copies = {expert(1, 0): 1, expert(1, 2): 0}
    again = ledger.recovered(2, 2, copies).recovered(2, 2, copies)
    assert again.losses[1].lost_tokens == (0, 0)
    assert again.lost_tokens == (8, 0)
    assert again.unsaved(SNAPSHOT) == ((0, 0, 0), (0, 0, 0))


def test_a_fault_that_takes_a_newer_copy_later_only_adds_the_difference(ledger: TokenLedger) -> None:
    recovered = ledger.recovered(2, 2, {expert(1, 0): 1, expert(1, 2): 0})
    worse = recovered.recovered(2, 2, {expert(1, 0): 0, expert(1, 2): 0})
    assert worse.losses[-1].lost_tokens == (5, 0)
    assert worse.lost_tokens == (13, 0)


def test_going_back_further_undoes_the_losses_after_that_point(ledger: TokenLedger) -> None:
    later = ledger.recovered(2, 2, {expert(1, 0): 1, expert(1, 2): 0})
    undone = later.recovered(2, 1, {expert(1, 1): 0, expert(1, 2): 0, **{expert(3, index): 0 for index in range(3)}})
    assert [loss.restored_iteration for loss in undone.losses] == [1]
    assert undone.lost_tokens == (3 + 2, 1 + 1 + 8)


def test_storage_may_seal_an_iteration_that_was_marked_before(ledger: TokenLedger) -> None:
    later = trained(ledger.marked([PERSIST]), [[1, 1, 1], [1, 1, 1]])
    later = later.saved(3, [expert(1, 2)], SNAPSHOT).saved(2, [expert(1, 1)], PERSIST)
    assert later.unsaved(PERSIST)[0] == (10, 1, 5)
    assert later.at_risk(PERSIST) == (9 + 4, 20)


def test_counts_of_iterations_that_cannot_be_restored_any_more_are_dropped() -> None:
    ledger = TokenLedger.started([0], 4, kept_points=2)
    for iteration in range(1, 41):
        ledger = trained(ledger, [[1, 2, 3, 4]]).marked([SNAPSHOT, PERSIST])
        ledger = ledger.saved(iteration, [expert(0, iteration % 4)], SNAPSHOT)
        if iteration % 10 == 0:
            ledger = ledger.saved(iteration, [expert(0, iteration // 10 % 4)], PERSIST)
        else:
            ledger = ledger.abandoned(iteration, PERSIST)
    assert [point.iteration for point in ledger.points] == [30, 39, 40]
    assert max(len(history) for history in ledger.copies[SNAPSHOT][0]) <= 4
    assert ledger.loss(30, {expert(0, 3): 27}) == (3 * 4,)


def test_a_ledger_survives_json(ledger: TokenLedger) -> None:
    ledger = trained(ledger.recovered(2, 2, {expert(1, 0): 1}).marked([PERSIST]), [[1, 2, 3], [4, 5, 6]])
    assert TokenLedger.from_data(json.loads(json.dumps(ledger.to_data()))) == ledger


def test_advancing_15000_experts_takes_a_small_part_of_an_iteration() -> None:
    counts = [[3] * 256 for _ in range(58)]
    ledger = trained(TokenLedger.started(range(3, 61), 256), counts)
    before = time.process_time()
    for counted in range(2, 22):
        ledger = ledger.advance(counted, counts)
    per_iteration_s = (time.process_time() - before) / 20
    before = time.process_time()
    for _ in range(20):
        [list(row) for row in [[value + 1 for value in row] for row in counts]]
    one_pass_s = (time.process_time() - before) / 20
    assert per_iteration_s < 20 * one_pass_s


def test_advancing_keeps_what_did_not_change() -> None:
    ledger = trained(TokenLedger.started([0, 1], 2), [[1, 1], [1, 1]])
    saved = ledger.saved(1, [expert(0, 0)], SNAPSHOT)
    assert saved.copies[SNAPSHOT][1] is ledger.copies[SNAPSHOT][1]
    assert trained(saved, [[1, 1], [1, 1]]).copies is saved.copies


@dataclass
class Shadow:
    """What really happens: each expert's state is the list of (iteration, tokens) that it was trained on."""

    state: dict[OperatorId, list[tuple[int, int]]]
    routed: dict[OperatorId, list[tuple[int, int]]]
    copies: dict[tuple[Level, OperatorId, int], list[tuple[int, int]]] = field(default_factory=dict)

    def lost(self, layer: int) -> int:
        """Tokens routed on the way to this state that the state has not learnt."""
        return sum(
            sum(tokens for _, tokens in self.routed[op]) - sum(tokens for _, tokens in self.state[op])
            for op in self.state
            if op.layer == layer
        )


def run_shadowed(data: st.DataObject, steps: int, newest_only: bool = False) -> tuple[TokenLedger, Shadow]:
    operators = [expert(layer, index) for layer in LAYERS for index in range(EXPERTS)]
    ledger = TokenLedger.started(LAYERS, EXPERTS, levels=tuple(Level))
    shadow = Shadow({op: [] for op in operators}, {op: [] for op in operators})
    shadow.copies = {(level, op, 0): [] for level in Level for op in operators}
    for _ in range(steps):
        action = data.draw(st.sampled_from(["train", "train", "save", "fault"]))
        if action == "train":
            rows = data.draw(st.lists(st.lists(st.integers(0, 9), min_size=3, max_size=3), min_size=2, max_size=2))
            ledger = trained(ledger, rows)
            for op in operators:
                step = (ledger.iteration, rows[LAYERS.index(op.layer)][op.expert])
                shadow.state[op] = [*shadow.state[op], step]
                shadow.routed[op] = [*shadow.routed[op], step]
        elif action == "save":
            level = data.draw(st.sampled_from(Level))
            chosen = data.draw(st.lists(st.sampled_from(operators), unique=True))
            ledger = ledger.saved(ledger.iteration, chosen, level)
            shadow.copies.update({(level, op, ledger.iteration): shadow.state[op] for op in chosen})
        else:
            restored = data.draw(st.sampled_from([point.iteration for point in ledger.points]))
            used = {}
            for op in operators:
                known = {it for (_, other, it) in shadow.copies if other == op and it <= restored}
                row = LAYERS.index(op.layer)
                kept = {copy.iteration for level in Level for copy in ledger.copies[level][row][op.expert]}
                usable = sorted(known if newest_only else known & kept)
                used[op] = usable[-1] if newest_only else data.draw(st.sampled_from(usable))
                shadow.state[op] = next(s for (_, o, it), s in shadow.copies.items() if o == op and it == used[op])
                shadow.routed[op] = [step for step in shadow.routed[op] if step[0] <= restored]
                gone = [key for key in shadow.copies if key[1] == op and key[2] > used[op]]
                for key in gone:
                    del shadow.copies[key]
            ledger = ledger.recovered(ledger.iteration, restored, used)
    return ledger, shadow


@settings(max_examples=examples(200), deadline=None)
@given(st.data())
def test_the_ledger_agrees_with_the_history_of_each_expert(data: st.DataObject) -> None:
    ledger, shadow = run_shadowed(data, 25)
    for row, layer in enumerate(LAYERS):
        assert ledger.lost_tokens[row] == shadow.lost(layer)
        for index in range(EXPERTS):
            op = expert(layer, index)
            assert ledger.tokens[row][index] == sum(tokens for _, tokens in shadow.state[op])
            for level in Level:
                iteration = ledger.last_saved(level)[row][index]
                copy = shadow.copies.get((level, op, iteration), [])
                saved = sum(tokens for _, tokens in copy)
                assert ledger.unsaved(level)[row][index] == ledger.tokens[row][index] - saved


@settings(max_examples=examples(100), deadline=None)
@given(st.data())
def test_the_newest_usable_copy_is_known_for_every_iteration_that_can_be_restored(data: st.DataObject) -> None:
    ledger, shadow = run_shadowed(data, 25, newest_only=True)
    for point in ledger.points:
        for level, operator in {(level, operator) for level, operator, _ in shadow.copies}:
            made = [it for other, op, it in shadow.copies if (other, op) == (level, operator) and it <= point.iteration]
            if made:
                history = ledger.copies[level][LAYERS.index(operator.layer)][operator.expert]
                assert max(made) in [copy.iteration for copy in history]


@settings(max_examples=examples(50), deadline=None)
@given(st.data())
def test_every_ledger_survives_json(data: st.DataObject) -> None:
    ledger, _ = run_shadowed(data, 12)
    assert TokenLedger.from_data(json.loads(json.dumps(ledger.to_data()))) == ledger


def test_the_papers_measures_follow_their_equations() -> None:
    lost, tokens, topk = (10, 30), (100, 200), (1, 2)
    assert plt_moc(lost, tokens, topk) == (Fraction(10, 100) + Fraction(30, 400)) / 2
    assert plt_pec(lost, tokens, topk) == Fraction(40, 500)
    assert mlt(lost, tokens, topk) == Fraction(10, 100) + Fraction(30, 400)


@settings(max_examples=examples(100), deadline=None)
@given(
    st.integers(1, 5).flatmap(
        lambda layers: st.lists(
            st.lists(st.integers(0, 10**15), min_size=layers, max_size=layers), min_size=1, max_size=4
        )
    ),
    st.integers(1, 10**13),
    st.integers(1, 8),
)
def test_the_measures_of_single_faults_add_up(faults: list[list[int]], tokens: int, topk: int) -> None:
    everything = [sum(column) for column in zip(*faults, strict=True)]
    for measure in (plt_moc, plt_pec, mlt):
        assert sum(measure(fault, tokens, topk) for fault in faults) == measure(everything, tokens, topk)
    assert plt_moc(everything, tokens, topk) == plt_pec(everything, tokens, topk)


@pytest.mark.parametrize(
    ("act", "words"),
    [
        (lambda ledger: ledger.advance(4, [[0] * 3] * 2), "iteration is 4"),
        (lambda ledger: ledger.advance(2, [[0] * 3] * 2), "iteration is 2"),
        (lambda ledger: ledger.advance(3, [[0] * 3]), "counts has 1 layers"),
        (lambda ledger: ledger.advance(3, [[0] * 3, [0] * 2]), "layer 3 has 2 experts"),
        (lambda ledger: ledger.advance(3, [[0] * 3, [0, -1, 0]]), "layer 3 has -1"),
        (lambda ledger: ledger.advance(3, [[0] * 3, [0, 1.0, 0]]), "layer 3 has 1.0"),
        (lambda ledger: ledger.saved(1, [], SNAPSHOT), "iteration is 1, but 2 is snapshot-sealed"),
        (lambda ledger: ledger.saved(7, [], PERSIST), "iteration is 7, but the ledger only keeps counts of"),
        (lambda ledger: ledger.saved(2, [expert(2, 0)], PERSIST), "operator is layer2.expert0"),
        (lambda ledger: ledger.saved(2, [expert(1, 3)], PERSIST), "operator is layer1.expert3"),
        (lambda ledger: ledger.recovered(1, 2, {}), "fault_iteration is 1"),
        (lambda ledger: ledger.recovered(2, 2, {expert(1, 0): 3}), "copy of layer1.expert0 is of iteration 3"),
        (lambda ledger: ledger.loss(2, {expert(1, 1): 1}), "copy of layer1.expert1 is of iteration 1"),
        (lambda ledger: ledger.loss(2, {OperatorId(1, OperatorKind.ROUTER): 1}), "operator is layer1.router"),
        (lambda ledger: TokenLedger.started([], 3), "layers is ()"),
        (lambda ledger: TokenLedger.started([3, 1], 3), "layers is (3, 1)"),
        (lambda ledger: TokenLedger.started([1], 0), "num_experts is 0"),
        (lambda ledger: TokenLedger.started([1], 1, kept_points=0), "kept_points is 0"),
        (lambda ledger: TokenLedger.from_data({"version": 2}), "version is 2"),
        (lambda ledger: TokenLedger.from_data({"version": 1, "layers": []}), "iteration is missing"),
        (lambda ledger: plt_moc([], 1, 1), "lost_tokens is []"),
        (lambda ledger: plt_moc([-1], 1, 1), "lost_tokens is [-1]"),
        (lambda ledger: plt_pec([1, 1], [5], 1), "tokens is [5]"),
        (lambda ledger: mlt([1], 5, 0), "topk is 0"),
    ],
)
def test_bad_input_is_named_with_its_range(ledger: TokenLedger, act: object, words: str) -> None:
    with pytest.raises(UsageError) as caught:
        act(ledger)  # type: ignore[operator]
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)
