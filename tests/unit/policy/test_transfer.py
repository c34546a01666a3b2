"""State or gradients: what is sent to a peer."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.core.dist_checkpointing.moe.errors import UsageError
from megatron.core.dist_checkpointing.moe.extensions.gradient_replicas.transfer import (
    TransferChoice,
    TransferCost,
    transfer,
)
from megatron.core.dist_checkpointing.moe.types import OperatorId, expert

GRADIENTS, STATE = TransferChoice.GRADIENTS, TransferChoice.STATE
EXPERTS = tuple(expert(layer, index) for layer in range(2) for index in range(4))
COSTS = dict.fromkeys(EXPERTS, TransferCost(1200, 400))
SETS = st.frozensets(st.sampled_from(EXPERTS))


def test_a_stable_selection_sends_gradients_after_the_state_was_sent_once() -> None:
    chosen = frozenset(EXPERTS[:2])
    assert set(transfer(frozenset(), chosen, 1, frozenset(), COSTS).values()) == {STATE}
    assert set(transfer(chosen, chosen, 1, chosen, COSTS).values()) == {GRADIENTS}


def test_an_expert_that_joins_the_selection_sends_its_state() -> None:
    a, b, c = EXPERTS[:3]
    assert transfer({a, b}, {b, c}, 1, {a, b}, COSTS) == {b: GRADIENTS, c: STATE}


def test_snapshots_that_skip_iterations_send_the_state() -> None:
    chosen = frozenset(EXPERTS)
    assert set(transfer(chosen, chosen, 2, chosen, COSTS).values()) == {STATE}


def test_an_expert_whose_peer_did_not_confirm_sends_its_state() -> None:
    a, b = EXPERTS[:2]
    assert transfer({a, b}, {a, b}, 1, {b}, COSTS) == {a: STATE, b: GRADIENTS}


def test_an_acknowledgement_from_before_the_last_snapshot_counts_for_nothing() -> None:
    a, b = EXPERTS[:2]
    assert transfer({b}, {a, b}, 1, {a, b}, COSTS) == {a: STATE, b: GRADIENTS}


@pytest.mark.parametrize(("gradient_bytes", "decision"), [(1199, GRADIENTS), (1200, STATE), (1201, STATE)])
def test_gradients_that_are_not_smaller_than_the_state_are_not_sent(
    gradient_bytes: int, decision: TransferChoice
) -> None:
    chosen = frozenset(EXPERTS[:1])
    costs = {EXPERTS[0]: TransferCost(1200, gradient_bytes)}
    assert transfer(chosen, chosen, 1, chosen, costs) == {EXPERTS[0]: decision}


@given(SETS, SETS, SETS, st.integers(1, 3), st.randoms(use_true_random=False))
def test_the_order_of_the_inputs_does_not_matter(previous, current, acknowledged, interval, random) -> None:
    def shuffled(operators: frozenset[OperatorId]) -> dict[OperatorId, None]:
        return dict.fromkeys(random.sample(sorted(operators), len(operators)))

    costs = {operator: COSTS[operator] for operator in shuffled(frozenset(EXPERTS))}
    decisions = transfer(previous, current, interval, acknowledged, COSTS)
    again = transfer(
        shuffled(previous).keys(), shuffled(current).keys(), interval, shuffled(acknowledged).keys(), costs
    )
    assert list(decisions.items()) == list(again.items())
    assert list(decisions) == sorted(current)


@given(st.lists(st.tuples(SETS, SETS), max_size=12))
def test_a_peer_never_steps_a_replica_that_is_not_of_the_iteration_before(rounds) -> None:
    """Each round is (selection, messages that get lost); the peer keeps the iteration of each replica."""
    replica: dict[OperatorId, int] = {}
    previous = acknowledged = frozenset[OperatorId]()
    for iteration, (current, lost) in enumerate(rounds, 1):
        decisions = transfer(previous, current, 1, acknowledged, COSTS)
        arrived = {operator: decision for operator, decision in decisions.items() if operator not in lost}
        for operator, decision in arrived.items():
            assert decision is STATE or replica[operator] == iteration - 1
            replica[operator] = iteration
        stable = previous & current & acknowledged
        assert all(decisions[operator] is GRADIENTS for operator in stable)
        previous, acknowledged = current, frozenset(arrived)


@pytest.mark.parametrize("interval", [0, -1, 1.5, float("nan")])
def test_an_interval_that_is_no_positive_whole_number_is_refused(interval: int) -> None:
    with pytest.raises(UsageError, match=rf"^interval is {interval}, but must be a whole number of at least 1$"):
        transfer(set(), set(), interval, set(), COSTS)


def test_an_operator_without_cost_is_refused_by_name() -> None:
    with pytest.raises(UsageError, match=r"^costs has no entry for layer7\.expert0: "):
        transfer(set(), {expert(7, 0)}, 1, set(), COSTS)


def test_impossible_costs_are_refused_by_name() -> None:
    with pytest.raises(UsageError, match=r"^state_bytes is -1, but must be a whole number of at least 0$"):
        TransferCost(-1, 0)
    with pytest.raises(UsageError, match=r"^gradient_bytes is -1"):
        TransferCost(0, -1)
