"""Predictions are written down before jobs run, from profiles alone; what a job took is read from its reports."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from megatron.core.dist_checkpointing.moe.types import FP32
from moe_ckpt.simulator.clusters import cluster
from moe_ckpt.simulator.cost import MEGATRON_UTILISATION
from moe_ckpt.simulator.layer_times import LayerTimes, Line, layer_shape
from moe_ckpt.simulator.profiles import Profile, as_data

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

import predicted_then_measured as benchmark  # noqa: E402

PLAIN = benchmark.SmallJob("narrow", "pp", 4, 2, 8, "none")
FULL = benchmark.SmallJob("narrow", "pp", 4, 2, 8, "full", 4)
MOE, ENDS, RESTART_S = Line(0.004, 0.003), Line(0.01, 0.001), 5.0


def write_profile(folder: Path, shape: str, layout: str) -> None:
    tp, pp, ep = benchmark.LAYOUTS[layout]
    none = Line(0.0, 0.0)
    layers = LayerTimes(
        layer_shape(benchmark.SHAPES[shape]), 2, tp, pp, ep, benchmark.SEQ_LENGTH, MOE, None, ENDS, none, none,
        restart_s=RESTART_S, contention=0.5,
    )  # fmt: skip
    found = Profile(cluster("this-cpu"), MEGATRON_UTILISATION, 0.3, {}, layers)
    (folder / f"profile-{shape}-{layout}.json").write_text(json.dumps(as_data(found)))


def reports(*stretches: tuple[int, int], each_s: float = 0.5, down_s: float = 7.0) -> list[dict[str, Any]]:
    """Of iterations `first` to `last` of each stretch, with `down_s` between two stretches."""
    found: list[dict[str, Any]] = []
    at_s = 100.0
    for first, last in stretches:
        for iteration in range(first, last + 1):
            at_s += each_s
            found.append({"iteration": iteration, "since_boot_s": at_s})
        at_s += down_s
    return found


def test_an_iteration_is_predicted_from_the_profile_of_its_layout(tmp_path: Path) -> None:
    write_profile(tmp_path, "narrow", "pp")
    found = benchmark.prediction(PLAIN, tmp_path)
    last_stage_s = 2 * MOE.seconds(2) + ENDS.seconds(2)
    assert found["iteration_s"] == pytest.approx((4 + 1) * last_stage_s)
    assert found["overhead_s"] == 0.0


def test_without_checkpoints_all_is_trained_again(tmp_path: Path) -> None:
    write_profile(tmp_path, "narrow", "pp")
    found = benchmark.prediction(PLAIN, tmp_path)
    assert found["recovery_s"] == pytest.approx(RESTART_S + benchmark.KILL_S, rel=0.05)


def test_checkpoints_shorten_the_recovery_and_add_to_an_iteration(tmp_path: Path) -> None:
    write_profile(tmp_path, "narrow", "pp")
    plain, full = (benchmark.prediction(job, tmp_path) for job in (PLAIN, FULL))
    assert full["overhead_s"] > 0
    assert full["iteration_s"] == pytest.approx(plain["iteration_s"] + full["overhead_s"])
    most = RESTART_S + 6 * full["iteration_s"]
    assert RESTART_S < full["recovery_s"] < most


@pytest.mark.parametrize("job", benchmark.JOBS, ids=lambda job: job.name)
def test_every_job_can_be_predicted(job: benchmark.SmallJob, tmp_path: Path) -> None:
    write_profile(tmp_path, job.shape, job.layout)
    assert min(benchmark.prediction(job, tmp_path).values()) >= 0
    assert job.training.precision == FP32


def test_eight_jobs_differ_in_layout_strategy_interval_and_state() -> None:
    assert len({job.name for job in benchmark.JOBS}) == 8
    for field, least in (("shape", 2), ("layout", 3), ("strategy", 4), ("every", 4), ("layers", 3)):
        assert len({getattr(job, field) for job in benchmark.JOBS}) >= least


def test_a_recovery_lasts_until_training_is_beyond_where_it_was() -> None:
    found = benchmark.taken(reports((1, 30), (27, 40)))
    assert found["iteration_s"] == pytest.approx(0.5)
    assert found["recovery_s"] == pytest.approx(7.0 + 4 * 0.5)
    assert found["struck_after"] == 30


def test_a_job_that_did_not_come_back_in_time_is_not_a_measurement() -> None:
    with pytest.raises(SystemExit, match="not beyond iteration 30"):
        benchmark.taken(reports((1, 30), (27, 29)))


def test_predictions_are_written_before_any_job_runs_and_nothing_is_done_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[str] = []

    def run(job: benchmark.SmallJob) -> dict[str, float]:
        written = json.loads((tmp_path / "predictions.json").read_text())
        assert {PLAIN.name, FULL.name} <= written.keys()
        ran.append(job.name)
        if len(ran) == 2:
            raise SystemExit("cut off")
        return {"iteration_s": 0.1, "overhead_s": 0.0, "recovery_s": 6.0}

    monkeypatch.setattr(benchmark, "run", run)
    monkeypatch.setattr(benchmark, "profile", lambda shape, layout, folder: write_profile(folder, shape, layout))
    with pytest.raises(SystemExit, match="cut off"):
        benchmark.measured((PLAIN, FULL), tmp_path)
    before = (tmp_path / "predictions.json").read_text()
    # A profile that is another one later changes no prediction.
    monkeypatch.setattr(benchmark, "prediction", lambda job, folder: pytest.fail("predicted again"))
    found = benchmark.measured((PLAIN, FULL), tmp_path)
    assert ran == [PLAIN.name, FULL.name, FULL.name]
    assert (tmp_path / "predictions.json").read_text() == before
    assert len(found["jobs"]) == 2


def test_a_job_is_met_if_all_three_figures_are_near() -> None:
    measured = {"iteration_s": 1.0, "overhead_s": 0.0, "recovery_s": 10.0}

    def row(name: str, **changes: float) -> dict[str, Any]:
        return {"job": name, "measured": measured, "predicted": measured | changes}

    rows = [row("near", iteration_s=1.05), row("slow", recovery_s=12.0), row("heavy", overhead_s=0.2)]
    result = {"machine": {"cores": 2, "cpu": "a CPU"}, "jobs": rows}
    assert list(benchmark.met(result)) == ["near"]
    assert "all three 1 of 3" in "\n".join(benchmark.page(result))
