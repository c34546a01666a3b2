"""Cross-validation, sources of constants, public reports and large scale: what they claim, and that they can fail."""

from __future__ import annotations

import json
import runpy
from dataclasses import fields, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from moe_ckpt.commands.simulate import simulate
from moe_ckpt.simulator.constants import COMEBACKS, MOEVEMENT, THIS_PROJECT, Constants
from moe_ckpt.simulator.cost import MOEVEMENT_UTILISATION, Utilisation
from moe_ckpt.simulator.sources import CONSTANTS, UTILISATION, sourced
from reproduce import cross_validation, large_scale, public_reports

ROOT = Path(__file__).resolve().parents[3]


SYSTEMS = ("checkfreq", "gemini", "moevement")


@cache
def on_the_page(name: str) -> Any:
    return json.loads((ROOT / "docs" / "results" / f"{name}.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("system", SYSTEMS)
@pytest.mark.parametrize("by", ["model", "MTBF", "table"])
def test_errors_on_what_was_left_out_are_smaller_than_those_of_two_numbers(system: str, by: str) -> None:
    found = on_the_page("cross-validation")["mean_error"][system][by]
    assert found["ours"] < found["null"]


def test_mocs_constants_are_not_adopted_as_they_lose_on_the_other_table() -> None:
    found = on_the_page("cross-validation")
    assert found["mean_error"]["moc"]["table"]["ours"] > found["mean_error"]["moc"]["table"]["null"]
    assert not [name for name in found["adopted"] if name.startswith("pec_")]


@pytest.mark.ci
@pytest.mark.parametrize("system", SYSTEMS)
def test_ettr_of_a_model_that_was_left_out_is_within_the_target_on_average(system: str) -> None:
    assert cross_validation.mean_error("model", system) <= cross_validation.TARGET
    assert cross_validation.mean_error("model", system) < cross_validation.null_mean_error("model", system)


@pytest.mark.ci
def test_what_is_left_out_is_not_fitted_to() -> None:
    seen: list[cross_validation.Cells] = []
    for held in cross_validation.held_out("model"):
        left = {cell.rpartition(" ")[0].rpartition(" ")[0] for cell in held.errors}
        assert left == {cell.rpartition(" ")[0].rpartition(" ")[0] for cell in held.null_errors} == {held.left_out}
        seen.append(tuple((held.left_out, at) for at in cross_validation.RATES))
    assert len(seen) == 12


def test_the_null_model_finds_the_two_numbers_that_made_its_cells(monkeypatch: pytest.MonkeyPatch) -> None:
    cross_validation.null_fit.cache_clear()
    monkeypatch.setattr(cross_validation, "_ettr", lambda system, model, mtbf_s: 0.9 / (1 + 120 / mtbf_s))
    found = cross_validation.null_fit("gemini", cross_validation.CELLS)
    cross_validation.null_fit.cache_clear()
    assert found == pytest.approx({"share": 0.9, "recovery_s": 120}, rel=0.02)


def test_constants_are_those_of_the_files_that_measured_or_fitted_them() -> None:
    tool = runpy.run_path(str(ROOT / "tools" / "simulator_constants.py"))
    assert tool["PRESET"].read_text("utf-8") == tool["render"](), "run python tools/simulator_constants.py"


def test_what_was_measured_or_fitted_stands_in_the_file_that_is_named_for_it() -> None:
    page = (ROOT / "docs" / "results" / "cross-validation.md").read_text("utf-8")
    fitted = page.partition("## All fitted constants")[2]
    for one in sourced(MOEVEMENT, MOEVEMENT_UTILISATION):
        if one.kind == "fitted" and one.value is not None:
            assert f"| {one.name} | {one.value:.3g} |" in fitted, one
        elif one.kind == "measured" and one.name not in {f"comeback {mode}" for mode in COMEBACKS}:
            number = one.source.partition("decision ")[2][:3]
            (decision,) = (ROOT / "docs" / "internals" / "decisions").glob(f"{number}-*.md")
            assert f"{one.value:,.0f}" in decision.read_text("utf-8"), one


def test_recovery_in_place_is_not_slower_than_from_standbys_nor_these_than_cold() -> None:
    assert COMEBACKS["in-place"] <= COMEBACKS["standby"] <= COMEBACKS["cold"]
    rows = on_the_page("large-scale")["rows"]
    for one in rows:
        others = [of for of in rows if (of["gpus"], of["system"]) == (one["gpus"], one["system"])]
        restart_s = {of["comeback"]: of["restart_s"] for of in others}
        assert restart_s["in-place"] <= restart_s["standby"] <= restart_s["cold"]


def test_the_linear_terms_of_a_recovery_are_those_of_the_store() -> None:
    small, large = (replace(THIS_PROJECT, connect_s=0.0).meet_s(ranks) for ranks in (2048, 16384))
    assert large == pytest.approx(8 * small)
    assert large == pytest.approx(4 * 2048 / 30_000 + 16384 / 20_000)


def test_other_constants_give_other_errors() -> None:
    cells = cross_validation.CELLS[:4]
    usual, slower = (cross_validation.errors("gemini", cells, one) for one in (THIS_PROJECT, cold(400.0)))
    assert all(slower[cell] < usual[cell] - 0.01 for cell in usual)


def cold(seconds: float) -> Constants:
    return replace(THIS_PROJECT, cold_launch_s=seconds)


def test_the_least_value_is_found_between_bounds() -> None:
    found = cross_validation.minimum(lambda of: (of["x"] - 3) ** 2 + (of["y"] + 1) ** 2, {"x": (0, 10), "y": (0, 5)})
    assert found["x"] == pytest.approx(3, abs=0.05)
    assert found["y"] == 0


def test_iteration_times_that_were_not_fitted_are_within_a_tenth() -> None:
    assert all(abs(ours / there - 1) < 0.1 for there, ours, _ in cross_validation.iteration_times().values())


def test_every_constant_has_a_source_of_a_known_kind() -> None:
    assert {field.name for field in fields(Constants)} - {"name", "source"} == CONSTANTS.keys()
    assert {field.name for field in fields(Utilisation)} - {"source"} == UTILISATION.keys()
    assert {one.kind for one in sourced()} <= {"published", "measured", "fitted", "assumed", "given"}


def test_the_command_prints_each_constant_with_its_source() -> None:
    result = CliRunner().invoke(simulate, ["constants"])
    assert result.exit_code == 0
    assert "cold_launch_s" in result.output and "MegaScale" in result.output


@pytest.mark.parametrize("report", [one for one in public_reports.REPORTS if one.asked_for], ids=lambda one: one.name)
def test_iteration_times_are_within_a_quarter_of_public_reports(report: public_reports.Reported) -> None:
    assert abs(report.error) <= public_reports.TOLERANCE


def test_a_restart_takes_longer_with_more_ranks_and_less_where_processes_stay() -> None:
    assert THIS_PROJECT.meet_s(10_000) == pytest.approx(30.0, rel=0.03)
    modes = ("cold", "standby", "in-place")
    cold_s, standby_s, in_place_s = (replace(THIS_PROJECT, comeback=mode).launch_s(96) for mode in modes)
    assert cold_s > 5 * standby_s > 5 * 1.5 * in_place_s
    known = replace(THIS_PROJECT, restart_s=20.0)
    assert known.launch_s(1000) + known.meet_s(1000) == pytest.approx(20.0)


def test_the_failure_rate_is_metas() -> None:
    hours = large_scale.META_GPU_S / 16384 / 3600
    assert hours == pytest.approx(3.09, abs=0.01)
