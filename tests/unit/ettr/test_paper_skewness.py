"""Expert popularity of a given skewness (appendix D)."""

from __future__ import annotations

from statistics import fmean

import pytest

from reproduce.figure import published
from reproduce.skewness import (
    alpha_of,
    dirichlet,
    expected_skewness,
    skewness,
)

PAIRS = [(float(target), alpha) for target, alpha in published()["fig16"]["alpha"].items()]


def test_equal_shares_have_no_skewness_and_a_single_expert_has_all() -> None:
    assert skewness([0.25] * 4) == pytest.approx(0.0)
    assert skewness([1.0, 0.0, 0.0, 0.0]) == pytest.approx(1.0)


@pytest.mark.parametrize(("target", "alpha"), PAIRS)
def test_the_published_alphas_give_the_published_skewness_for_64_experts(target: float, alpha: float) -> None:
    assert expected_skewness(alpha, 64) == pytest.approx(target, abs=0.005)


@pytest.mark.parametrize(("target", "alpha"), PAIRS)
def test_draws_have_that_skewness_on_average(target: float, alpha: float) -> None:
    drawn = [skewness(dirichlet(alpha, 64, seed)) for seed in range(400)]
    assert fmean(drawn) == pytest.approx(target, abs=0.04)


def test_the_shares_of_a_draw_add_up_to_one() -> None:
    assert sum(dirichlet(0.000158, 64, 0)) == pytest.approx(1.0)


@pytest.mark.parametrize("alpha", [0.000158, 0.05, 3.0])
def test_the_alpha_of_a_skewness_is_the_one_that_gives_it(alpha: float) -> None:
    assert alpha_of(expected_skewness(alpha, 32), 32) == pytest.approx(alpha, rel=1e-6)
