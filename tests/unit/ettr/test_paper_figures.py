"""Orders and trends of MoEvement's figures."""

from __future__ import annotations

from itertools import pairwise

import pytest

from reproduce import fig1, fig10, fig11, fig13, fig16
from reproduce.figure import published
from reproduce.jobs import MODELS, MTBF_S, SCALE_OUT


def test_a_dense_checkpoint_in_every_iteration_slows_training_about_as_published() -> None:
    slowdown = 1 + fig1.dense().overhead_share(1)
    assert slowdown == pytest.approx(published()["fig1"]["gemini_slowdown_every_iteration"], rel=0.15)


def test_longer_intervals_cost_less_overhead_and_more_recovery() -> None:
    for shorter, longer in pairwise(fig1.INTERVALS):
        assert fig1.dense().overhead_share(longer) < fig1.dense().overhead_share(shorter)
        assert fig1.dense().recovery_s(longer) > fig1.dense().recovery_s(shorter)


def test_the_best_interval_gets_shorter_and_its_ettr_lower_as_failures_become_frequent() -> None:
    intervals, ettrs = zip(*map(fig1.best, MTBF_S), strict=True)
    assert list(intervals) == sorted(intervals, reverse=True)
    assert list(ettrs) == sorted(ettrs, reverse=True)


def test_moevement_has_the_highest_goodput_under_the_trace_and_moc_the_lowest() -> None:
    assert fig10.runs()["moevement"].faults == 24
    goodput = {system: fig10.samples_per_s(system) for system in fig10.SYSTEMS}
    assert sorted(goodput, key=lambda system: -goodput[system]) == ["moevement", "gemini", "checkfreq", "moc"]


def test_mocs_goodput_drops_over_the_trace_about_as_published_while_its_snapshots_grow() -> None:
    first, last = fig10.training_goodput("moc")
    assert 1 - last / first == pytest.approx(published()["fig10"]["moc_goodput_drop"], abs=0.1)
    shares = [moment.k_share for moment in fig10.runs()["moc"].timeline]
    assert shares == sorted(shares)
    assert shares[0] == pytest.approx(0.125)


def test_other_systems_keep_their_goodput_while_training() -> None:
    for system in ("checkfreq", "gemini", "moevement"):
        first, last = fig10.training_goodput(system)
        assert first == pytest.approx(last)


def test_goodput_over_time_adds_up_to_the_whole_run() -> None:
    spans = fig10.goodput_over_time(fig10.runs()["moevement"].timeline)
    assert len(spans) == 24
    # Iterations that a fault undoes count in the spans, but not in the run.
    assert sum(goodput for _, goodput in spans) / 24 == pytest.approx(fig10.runs()["moevement"].ettr, abs=0.03)


def test_moevement_stays_above_the_published_bound_at_every_scale() -> None:
    assert fig11.least_at_an_hour() > published()["fig11"]["moevement_ettr_1h_at_least"]


@pytest.mark.parametrize("size", SCALE_OUT)
def test_at_every_scale_moevement_leads_and_its_lead_grows_with_the_failure_rate(size: str) -> None:
    leads = [
        fig11.outcomes()[size, mtbf_s, "moevement"].ettr - fig11.outcomes()[size, mtbf_s, "gemini"].ettr
        for mtbf_s in fig11.MTBF_S
    ]
    assert leads[0] > 0
    assert leads == sorted(leads)


@pytest.mark.parametrize("model", MODELS)
def test_no_technique_makes_recovery_longer(model: str) -> None:
    assert all(fig13.saved(model, step) > -0.005 for step in list(fig13.STEPS)[1:])


def test_reordering_does_nothing_for_four_experts_and_most_for_sixty_four() -> None:
    assert abs(fig13.saved("MoE-LLaVa", "reorder")) < 0.001
    assert fig13.saved("DeepSeek-MoE", "reorder") > fig13.saved("GPT-MoE", "reorder")


def test_logging_brings_all_models_to_about_the_same_ettr() -> None:
    assert all(fig13.steps()[model]["log"][1] == pytest.approx(0.97, abs=0.03) for model in MODELS)


def test_skewness_changes_nothing_for_dense_checkpoints() -> None:
    for system in ("checkfreq", "gemini"):
        values = [mean for mean, _ in fig16.ettrs()[system].values()]
        assert max(values) == pytest.approx(min(values))


def test_skewness_shortens_moevements_recovery_and_does_not_help_moc() -> None:
    assert fig16.recovery_s()["0.99"] < fig16.recovery_s()[fig16.UNIFORM]
    moc = fig16.ettrs()["moc"]
    assert moc["0.99"][0] <= moc[fig16.UNIFORM][0] + moc[fig16.UNIFORM][1]


def test_moevement_leads_at_every_skewness() -> None:
    for level in fig16.LEVELS:
        others = [fig16.ettrs()[system][level][0] for system in ("checkfreq", "gemini", "moc")]
        assert fig16.ettrs()["moevement"][level][0] > max(others)
