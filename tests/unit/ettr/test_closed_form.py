"""ETTR by formula."""

from __future__ import annotations

from dataclasses import replace

import pytest
from effort import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.core.dist_checkpointing.moe.errors import UsageError
from moe_ckpt.simulator.behaviour import Behaviour, Nodes, RecoveryCost
from moe_ckpt.simulator.closed_form import ettr
from moe_ckpt.simulator.ettr import ettr as formula


def steady(iteration_s: float, overhead_s: float, recovery_s: float) -> Behaviour:
    def recover(iteration: int, nodes: Nodes, down: Nodes) -> RecoveryCost:
        return RecoveryCost(0.0, recovery_s, 0.0, 0.0, 0)

    return Behaviour("steady", iteration_s, 10, 1, overhead_s, recovery_s, recover)


class Tiring(Behaviour):
    """Each fault doubles the overhead."""

    def strike(self, iteration: int, *, nodes: Nodes, down: Nodes | None = None) -> RecoveryCost:
        object.__setattr__(self, "overhead_s", 2 * self.overhead_s)
        return super().strike(iteration, nodes=nodes, down=down)

    def fresh(self) -> Tiring:
        return replace(self)


def tiring(overhead_s: float) -> Tiring:
    plain = steady(1.0, overhead_s, 0.0)
    return Tiring(plain.name, 1.0, 10, 1, overhead_s, 0.0, plain.recover)


@given(st.floats(0.1, 100), st.floats(0, 100), st.floats(0, 5000), st.floats(300, 1e6), st.floats(60, 3e4))
@settings(max_examples=examples(40), deadline=None)
def test_a_strategy_that_no_fault_changes_has_the_ettr_of_the_papers_formula(
    iteration_s: float, overhead_s: float, recovery_s: float, mtbf_s: float, duration_s: float
) -> None:
    expected = formula(iteration_s, overhead_s, 1, recovery_s, mtbf_s)
    assert ettr(steady(iteration_s, overhead_s, recovery_s), mtbf_s, duration_s) == pytest.approx(expected)


def test_a_strategy_that_faults_slow_down_pays_more_the_longer_it_runs() -> None:
    hour, day = (ettr(tiring(0.1), 1800, hours * 3600) for hours in (1, 24))
    assert day < hour


def test_between_faults_a_strategy_is_as_the_faults_have_left_it() -> None:
    assert ettr(tiring(0.5), 600, 1800) == pytest.approx((1 / 1.5 + 1 / 2 + 1 / 3) / 3)


def test_asking_twice_gives_the_same_answer() -> None:
    one = tiring(0.1)
    assert ettr(one, 600) == ettr(one, 600)


@pytest.mark.parametrize("mtbf_s", [0.0, -1.0, float("nan")])
def test_a_time_between_failures_that_cannot_be_is_refused(mtbf_s: float) -> None:
    with pytest.raises(UsageError, match="mtbf_s"):
        ettr(steady(1.0, 0.0, 0.0), mtbf_s)
