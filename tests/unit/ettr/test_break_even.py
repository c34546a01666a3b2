"""Where sparse and full pay, on the page and by formula."""

from __future__ import annotations

from functools import cache
from typing import Any

from reproduce import break_even
from reproduce.figure import measured


@cache
def page() -> dict[str, Any]:
    return measured("break-even.json", "python -m reproduce break_even --docs")


def test_sparse_gains_nothing_where_links_carry_a_state_in_half_an_iteration() -> None:
    small = [row for row in page()["sparse_and_full"] if row["ratio"] <= 0.5]
    assert len(small) == 2 * len(break_even.MTBFS)
    assert all(row["sparse"] - row["full"] < break_even.WORTH for row in small)


def test_sparse_wins_where_a_state_is_a_few_times_what_links_carry_and_not_where_its_window_ends() -> None:
    gains = {(row["ratio"], row["mtbf"]): row["sparse"] - row["full"] for row in page()["sparse_and_full"]}
    assert all(gains[ratio, mtbf] > break_even.WORTH for ratio in (2.0, 4.0) for mtbf in break_even.MTBFS)
    assert all(gains[16.0, mtbf] < 0 for mtbf in break_even.MTBFS)


def test_full_gains_less_the_rarer_faults_are_and_the_band_holds_it() -> None:
    for gpus in break_even.GPUS:
        gains = [row["gain"] for row in page()["full_and_stock"] if row["gpus"] == gpus]
        assert gains == sorted(gains, reverse=True)
    assert all(row["least"] <= row["gain"] <= row["most"] for row in page()["full_and_stock"])


def test_at_the_break_even_full_gains_half_a_point() -> None:
    found = break_even._stock(break_even.job_setting(64, "cold"), break_even.break_even_s(64))
    assert abs(found.gain - break_even.WORTH) < 0.001


def test_the_break_even_lies_between_those_of_the_bands() -> None:
    for by in page()["break_even_s"].values():
        assert by["least"] < by["gain"] < by["most"]
    least, middle, most = (page()["break_even_gpus"][which] for which in ("most", "gain", "least"))
    assert 64 < least < middle < most < 4096
