"""MoEvement Table 7: what can be held against the text of section 5.7, and what holds in every row."""

from __future__ import annotations

import pytest

from reproduce import table7
from reproduce.table7 import MTBF_S, SETTINGS, PublishedRange


def test_at_least_half_of_the_ranges_hold_or_have_ours_within_them() -> None:
    assert sum(claim.verdict != "NO" for claim in table7.claims()) >= len(table7.claims()) / 2


def test_the_range_of_moevements_ettr_has_ours_within_it_and_its_overhead_is_two_hundredths_above() -> None:
    by_name = {claim.what: claim for claim in table7.claims()}
    assert by_name["MoEvement ETTR"].inside
    overhead = by_name["MoEvement overhead"]
    assert overhead.ours[1] <= overhead.paper[1] + 0.022


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("mtbf_s", MTBF_S)
def test_moevement_is_best_and_moc_worst_in_every_row(setting: str, mtbf_s: int) -> None:
    ettr = {system: table7.outcomes()[setting, mtbf_s, system].ettr for system in ("gemini", "checkfreq", "moc")}
    assert table7.outcomes()[setting, mtbf_s, "moevement"].ettr > max(ettr.values())
    assert min(ettr, key=lambda system: ettr[system]) == "moc"


@pytest.mark.parametrize("system", ["checkfreq", "gemini"])
def test_narrower_states_are_checkpointed_more_often(system: str) -> None:
    by_width = ["fp8-fp8", "fp8-fp16-fp8", "fp8-fp16-fp32", "fp8-fp32"]
    intervals = [table7.outcomes()[setting, 3600, system].interval for setting in by_width]
    assert intervals == sorted(intervals)
    assert intervals[0] < intervals[-1] / 1.8


def test_fp8_makes_iterations_shorter_but_not_twice_as_fast() -> None:
    fp16, fp8 = (table7.outcomes()[setting, 3600, "gemini"].iteration_s for setting in ("fp16-fp16", "fp8-fp32"))
    assert 1.1 < fp16 / fp8 < 2


def test_a_range_holds_by_its_ends_and_is_within_without_them() -> None:
    def claim(low: float, high: float) -> PublishedRange:
        return PublishedRange("", (10.0, 20.0), (low, high), (1.0, 2.0))

    assert [claim(*ends).verdict for ends in ((9.5, 21.0), (12.0, 15.0), (12.0, 23.0))] == ["yes", "within", "NO"]
