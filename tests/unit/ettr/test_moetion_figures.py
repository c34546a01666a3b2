"""MOETION's Fig. 9: sizes and times that follow from one fitted rate."""

from __future__ import annotations

import itertools

import pytest

from reproduce import moetion_fig9
from reproduce.figure import published

EXPERTS = (1, 2, 4, 8, 16, 32)


def test_the_shape_has_the_published_parameters_and_gemini_the_published_bytes() -> None:
    given = published("moetion")
    parameters = given["models"]["MoE-GPT-3.8B-8E"]["parameters"]
    assert moetion_fig9.shape(8).total_parameters == pytest.approx(parameters, rel=0.002)
    assert moetion_fig9.point(32).gemini_bytes == pytest.approx(given["fig9"]["gemini_bytes"]["32"], rel=0.002)


def test_moetions_time_with_32_experts_is_within_a_fifth_of_the_published_one() -> None:
    given = published("moetion")["fig9"]["moetion_s"]["32"]
    assert moetion_fig9.point(32).moetion_s == pytest.approx(given, rel=0.20)


def test_moetions_time_with_8_experts_is_within_a_tenth_of_that_of_figure_10() -> None:
    given = published("moetion")["fig10"]["full_s"]
    assert moetion_fig9.point(8).moetion_s == pytest.approx(given, rel=0.10)


@pytest.mark.parametrize("experts", EXPERTS)
def test_moetion_saves_less_and_is_faster_with_any_number_of_experts(experts: int) -> None:
    one = moetion_fig9.point(experts)
    assert one.moetion_bytes < one.gemini_bytes
    assert one.moetion_s < one.gemini_s


@pytest.mark.parametrize("experts", EXPERTS)
def test_moetions_checkpoints_end_within_the_iteration_and_geminis_do_not(experts: int) -> None:
    one = moetion_fig9.point(experts)
    assert one.moetion_s <= one.iteration_s < one.gemini_s


def test_the_advantage_grows_with_the_experts_up_to_about_ninefold() -> None:
    gains = [
        moetion_fig9.point(experts).gemini_bytes / moetion_fig9.point(experts).moetion_bytes for experts in EXPERTS
    ]
    assert gains == sorted(gains)
    assert 7 < gains[-1] < 9.5


def test_iterations_grow_more_slowly_than_the_model() -> None:
    for fewer, more in itertools.pairwise(EXPERTS):
        one, other = moetion_fig9.point(fewer), moetion_fig9.point(more)
        assert 1 < other.iteration_s / one.iteration_s < other.gemini_bytes / one.gemini_bytes


def test_the_size_that_is_not_published_is_predicted() -> None:
    assert published("moetion")["fig9"]["moetion_bytes"]["32"] is None
    assert moetion_fig9.point(32).moetion_bytes > 0
