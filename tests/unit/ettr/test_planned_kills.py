"""Recoveries that are predicted and then measured: units, bounds and the null predictor."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "benchmarks"))

import planned_kills


def job(name: str, iteration_s: float, *faults: tuple[float, float]) -> dict[str, Any]:
    """A job whose faults cost so many iterations, and were predicted to; each restart takes 8 s."""
    each = [{"predicted": told, "again_s": found * iteration_s, "restart_s": 8.0} for found, told in faults]
    return {"case": name, "iteration_s": iteration_s, "faults": each}


CASES = [job("a", 2.0, (3.0, 3.0), (6.0, 5.0)), job("b", 0.5, (2.0, 2.0), (4.4, 4.0)), job("c", 1.0, (1.0, 1.1))]


def test_a_fault_is_measured_in_iterations_of_its_own_job_and_bounded_by_the_other_jobs() -> None:
    first = next(planned_kills.outcomes(CASES, planned_kills.again))
    assert (first.measured, first.predicted) == (3.0, 3.0)
    assert first.null == pytest.approx((2.0 + 4.4 + 1.0) / 3)
    logs = [math.log(found / told) for found, told in ((2.0, 2.0), (4.4, 4.0), (1.0, 1.1))]
    assert math.sqrt(first.low * first.high) == pytest.approx(3.0 * math.exp(sum(logs) / 3))
    spread = math.sqrt(sum((one - sum(logs) / 3) ** 2 for one in logs) / 2)
    assert math.log(first.high / first.low) / 2 == pytest.approx(4.303 * spread * math.sqrt(4 / 3))
    assert first.is_covered


def test_a_restart_is_predicted_to_take_as_long_as_those_of_other_jobs() -> None:
    found = list(planned_kills.outcomes(CASES, planned_kills.whole))
    assert [one.predicted for one in found] == pytest.approx([7.0, 9.0, 18.0, 20.0, 9.1])
    assert [one.measured for one in found] == pytest.approx([7.0, 10.0, 18.0, 20.4, 9.0])


def test_a_predictor_that_knows_nothing_wins_where_ours_is_wrong() -> None:
    right = [job(name, 1.0, (cost, cost)) for name, cost in (("a", 1.0), ("b", 3.0), ("c", 5.0), ("d", 7.0))]
    assert planned_kills.beats(list(planned_kills.outcomes(right, planned_kills.again)))
    wrong = [job(name, 1.0, (3.0, told), (3.1, told)) for name, told in (("a", 1.0), ("b", 9.0))]
    assert not planned_kills.beats(list(planned_kills.outcomes(wrong, planned_kills.again)))


def test_a_gain_of_one_job_is_no_win_over_the_interval_of_all_jobs() -> None:
    # Many faults of one job are one measurement: they would make the interval of the mean narrow.
    cases = [job("a", 1.0, *[(9.0, 9.0)] * 20), job("b", 1.0, (4.0, 8.0)), job("c", 1.0, (5.0, 4.0))]
    found = list(planned_kills.outcomes(cases, planned_kills.again))
    over_jobs = planned_kills.gain(found)
    assert over_jobs.runs == 3
    assert 0 < over_jobs.mean < over_jobs.half_width
    assert planned_kills.error(found, "predicted") < planned_kills.error(found, "null")
    assert not planned_kills.beats(found)


def test_the_unit_is_what_the_same_processes_train_once_and_warm() -> None:
    lines: list[dict[str, Any]] = [{"iteration": at, "iteration_time_s": 9.0 if at < 5 else 1.0} for at in range(1, 9)]
    lines += [{"recovery": {}}, {"iteration": 7, "iteration_time_s": 7.0}, {"iteration": 8, "iteration_time_s": 7.0}]
    lines += [{"iteration": at, "iteration_time_s": 5.0 if at < 11 else 1.0} for at in range(9, 13)]
    assert planned_kills.iteration_s(lines) == 1.0


def test_what_is_predicted_is_what_the_plan_says_where_the_fault_lies_in_the_interval() -> None:
    def told(case: str, fault: str) -> dict[str, float]:
        layout, strategy, _ = planned_kills.CASES[case]
        return planned_kills.predicted(planned_kills.SMALL, layout, strategy, fault)

    assert told("PP=2, `full`, I=6", "1@15:forward-backward") == {"predicted": pytest.approx(2), "planned": 2}
    assert told("PP=2, `full`, I=6", "1@67:start") == {"predicted": pytest.approx(6), "planned": 6}
    alone, all_stages = (told(f"PP=2, `sparse`, W=4{which}", "1@15:step") for which in ("", ", all stages"))
    assert alone["planned"] == all_stages["planned"] == 5
    assert alone["predicted"] < all_stages["predicted"] < 5


def test_what_a_predicted_iteration_takes_is_as_sure_as_jobs_agree_on_it() -> None:
    cases = [job("a", 1.0, (3.1, 2.0), (5.1, 4.0)), job("b", 1.0, (6.9, 6.0), (8.9, 8.0))]
    for case in cases:
        for fault in case["faults"]:
            fault |= {"planned": 3, "again": 3 if case["case"] == "a" else 4}
    found = list(planned_kills.outcomes(cases, planned_kills.again))
    text = "\n".join(planned_kills.regressions({"cases": cases}, found))
    assert "takes 1.25 ± 1.51 iterations, the mean of jobs" in text  # not of 4 faults: two of a job are alike
    assert "1.37 (a), 1.13 (b)" in text
    assert "run again after 2 of 4 faults" in text


def test_the_iteration_of_a_depth_is_predicted_by_the_other_depths_of_its_layout() -> None:
    depths = {"PP=2": [(2, 1.0), (4, 9.0), (6, 3.1), (8, 4.0), (2, 1.1), (4, 9.0), (6, 3.0), (8, 4.0)]}
    text = "\n".join(
        planned_kills.regressions(
            {"cases": CASES, "depths": depths}, list(planned_kills.outcomes(CASES, planned_kills.again))
        )
    )
    assert "| PP=2 | 2, 6, 8 | 2 | 0.4929 ± 0.0087 | 2.043 ± 0.125 | 9.000 | **no** | 2.000 |" in text
