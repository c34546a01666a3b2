"""What published.json holds: what the paper's text says, and null for what was not at hand."""

from __future__ import annotations

from typing import Any

import pytest

from reproduce.figure import published

SYSTEMS = ("checkfreq", "gemini", "moc", "moevement")


def leaves(value: Any) -> list[Any]:
    if isinstance(value, dict | list):
        children = value.values() if isinstance(value, dict) else value
        return [leaf for child in children for leaf in leaves(child)]
    return [value]


def without_keys(row: dict[str, Any], *keys: str) -> dict[str, Any]:
    return {key: value for key, value in row.items() if key not in keys}


def test_rows_of_table_3_that_were_not_at_hand_have_no_figure() -> None:
    table = published()["table3"]
    for model, entry in table.items():
        for row in entry["rows"]:
            if model == "QWen-MoE" or row["mtbf_s"] == 1200:
                assert set(leaves(without_keys(row, "mtbf_s"))) == {None}
    assert set(leaves(without_keys(table["QWen-MoE"], "rows"))) == {None}


def test_every_other_row_of_table_3_is_complete() -> None:
    for model, entry in published()["table3"].items():
        for row in entry["rows"]:
            if model != "QWen-MoE" and row["mtbf_s"] != 1200:
                assert None not in leaves(row)


def test_overhead_in_seconds_and_in_per_cent_give_one_iteration_time_per_model() -> None:
    for model, iteration_s in {"MoE-LLaVa": 1.70, "GPT-MoE": 2.10, "DeepSeek-MoE": 2.90}.items():
        rows = [row for row in published()["table3"][model]["rows"] if row["moc_overhead_share"]]
        largest = max(rows, key=lambda row: row["moc_overhead_share"])
        ratio = largest["moc_overhead_s"] / largest["moc_overhead_share"]
        assert ratio == pytest.approx(iteration_s, rel=0.005)


def test_table_6_adds_up() -> None:
    for row in published()["table6"].values():
        if row["total_bytes"] is not None:
            assert row["sparse_bytes"] + row["log_bytes"] == pytest.approx(row["total_bytes"], rel=0.001)


def test_shares_are_fractions_of_one_and_not_per_cent() -> None:
    for entry in published()["table3"].values():
        for row in entry["rows"]:
            assert all(0 < row["ettr"][system] < 1 for system in SYSTEMS if row["ettr"][system] is not None)
            assert (row["gemini_overhead_share"] or 0) < 1
