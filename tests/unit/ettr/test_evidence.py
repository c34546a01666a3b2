"""Cross-validation, sources of constants, public reports and large scale: what they claim, and that they can fail."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest
from click.testing import CliRunner

from moe_ckpt.commands.simulate import simulate
from moe_ckpt.simulator.constants import COMEBACKS, THIS_PROJECT, Constants
from moe_ckpt.simulator.cost import Utilisation
from moe_ckpt.simulator.sources import CONSTANTS, UTILISATION, sourced
from reproduce import cross_validation, large_scale, public_reports


@pytest.mark.parametrize("system", ["checkfreq", "gemini", "moevement"])
def test_ettr_of_a_model_that_was_left_out_is_within_the_target_on_average(system: str) -> None:
    assert cross_validation.mean_error("model", system) <= cross_validation.TARGET


def test_what_is_left_out_is_not_fitted_to() -> None:
    seen: list[cross_validation.Cells] = []
    for held in cross_validation.held_out("model"):
        left = {cell.rpartition(" ")[0].rpartition(" ")[0] for cell in held.errors}
        assert left == {held.left_out}
        seen.append(tuple((held.left_out, at) for at in cross_validation.RATES))
    assert len(seen) == 9


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
    assert THIS_PROJECT.meet_s(10_000) == pytest.approx(30.0)
    launches = [replace(THIS_PROJECT, comeback=mode).launch_s(96) for mode in COMEBACKS]
    assert launches[0] > 5 * max(launches[1:])
    known = replace(THIS_PROJECT, restart_s=20.0)
    assert known.launch_s(1000) + known.meet_s(1000) == pytest.approx(20.0)


def test_the_failure_rate_is_metas() -> None:
    hours = large_scale.META_GPU_S / 16384 / 3600
    assert hours == pytest.approx(3.09, abs=0.01)
