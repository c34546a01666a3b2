"""Figures of the papers that are made of real runs, and of strategies that are driven."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megatron.core.dist_checkpointing.moe.errors import UsageError
from reproduce import (
    fig15,
    figure,
    moc_fig5,
    moc_fig11,
    moc_fig14,
    moc_fig15,
    moetion_fig4,
    moetion_fig7,
    moetion_fig11,
    moetion_table1,
)


def test_lost_tokens_of_one_fault_are_those_of_a_rotation() -> None:
    for k, interval in ((1, 4), (2, 16), (4, 32)):
        steps = moc_fig5.EXPERTS // k
        mean_age = sum(range(steps)) / steps * interval
        # The newest snapshot is still being copied when the fault strikes: it is another one whose age counts.
        assert moc_fig5.plt(k, interval) == pytest.approx(mean_age / moc_fig5.ITERATIONS, abs=2 * interval / 1024)
    assert moc_fig5.plt(16, 32) == 0.0


def test_more_experts_and_shorter_intervals_lose_less() -> None:
    for interval in moc_fig5.INTERVALS:
        found = [moc_fig5.plt(k, interval) for k in moc_fig5.KS]
        assert found == sorted(found, reverse=True)
    for k in moc_fig5.KS:
        assert (by_interval := [moc_fig5.plt(k, interval) for interval in moc_fig5.INTERVALS]) == sorted(by_interval)


def test_losses_of_real_runs_are_compared_with_those_of_the_same_seed() -> None:
    found = moc_fig5.losses()
    assert {one.seed for one in found} >= {1234, 1235}
    assert all(one.name != "fault-free" and one.faults >= 1 and one.plt > 0 for one in found[:4])


def test_memory_with_more_experts_loses_less_where_processes_or_one_node_are_lost() -> None:
    two = {k: moc_fig15.lost(k, 1, nodes_lost=1) for k in (1, 2, 4, 8)}
    assert list(two.values()) == sorted(two.values(), reverse=True)
    for k in (2, 4, 8):
        processes, node, storage = (moc_fig15.lost(k, 1, nodes_lost=nodes) for nodes in (0, 1, 2))
        assert processes < node < storage
        assert node == pytest.approx((processes + storage) / 2)
    assert len({moc_fig15.lost(k, 1, nodes_lost=2) for k in (1, 2, 4)}) == 1


def test_dynamic_k_stays_below_the_threshold_in_real_runs_and_a_fixed_k_does_not() -> None:
    for one in moc_fig15.runs():
        assert list(one.plt) == sorted(one.plt)
        assert (one.plt[-1] <= 0.0375) == (one.name == "Dynamic-K")


def test_sizes_of_moetion_follow_from_its_models_with_and_without_experts() -> None:
    (largest,) = [one for one in moetion_fig4.models() if one.experts == 64]
    given = figure.published("moetion")["fig4"]
    assert largest.full_bytes == pytest.approx(given["full_bytes"])
    assert largest.selected_bytes[1] == pytest.approx(given["selected_bytes"], rel=0.01)
    assert all(one.other_parameters > 0 for one in moetion_fig4.models())


def test_tokens_at_risk_are_read_from_a_real_run() -> None:
    mean, best = moetion_fig11.lower()
    assert len(moetion_fig11.points()) > 100
    assert 0.4 < mean < best < 1


def test_experts_are_all_active_when_alike_and_one_is_when_skewed() -> None:
    boxes = {one.level: one for one in fig15.boxes()}
    assert boxes["0.0"].least == 64
    medians = [one.median for one in boxes.values()]
    assert medians == sorted(medians, reverse=True)
    assert boxes["0.99"].median < 3


def test_snapshots_of_moc_shrink_with_k_and_with_sharding() -> None:
    for case in moc_fig11.cases():
        found = [moc_fig11.snapshot_s(case, k) for k in (1, 2, 4, 8, 16)]
        assert found == sorted(found)
        assert found[-1] <= moc_fig11.baseline_s(case)
    assert moc_fig11.shortest_reduction() >= figure.published("moc")["fig10"]["checkpointing_time_reduction_up_to"]


def test_what_moc_says_of_the_passes_of_each_case_can_be_true() -> None:
    assert all(one.possible for one in moc_fig11.bounds().values())


def test_times_of_moetion_are_those_of_its_figure_9() -> None:
    found = moetion_fig7.systems()
    assert found["moetion"].stall_s == 0.0
    assert found["gemini"].stall_s == pytest.approx(found["gemini"].checkpoint_s - moetion_fig7.iteration_s())
    assert all(one.stall_s == 0.0 for name, one in found.items() if name.endswith("without stall"))
    rows = {what: (ours, there) for what, ours, there in moetion_fig7.compared()}
    assert rows["Fig. 5: stall of CheckFreq, s"][0] == pytest.approx(100, rel=0.15)
    assert rows["Fig. 6: moetion per 100"] == (100, 100)


@pytest.mark.parametrize("module", [fig15, moc_fig5, moc_fig11, moc_fig15, moetion_fig4, moetion_fig7, moetion_fig11])
def test_a_figure_has_data_tables_and_a_picture(module: Any, tmp_path: Path) -> None:
    found = module.figure()
    json.dumps(found.data)
    assert found.report.tables
    found.plot(tmp_path / "figure.png")
    assert (tmp_path / "figure.png").stat().st_size > 1000


def test_what_is_off_is_a_mean_over_seeds_with_its_interval(monkeypatch: pytest.MonkeyPatch) -> None:
    runs = campaign()["runs"]
    runs[-2]["cloze"] += 0.01  # pec K=1 from the second seed
    monkeypatch.setattr(moc_fig14, "runs", lambda: tuple(runs))
    loss, tasks = moc_fig14.off("pec K=1")
    assert (loss.mean, loss.half_width) == (0.0, 0.0)
    assert (tasks.mean, tasks.half_width) == (pytest.approx(2.25), pytest.approx(12.706 * 0.25))


def campaign() -> dict[str, Any]:
    def run(seed: int, name: str, loss: float, cloze: float) -> dict[str, Any]:
        return {
            "seed": seed, "name": name, "loss": loss, "plt": 0.01, "snapshot": 0.4, "cloze": cloze, "original": 0.7,
            "validation": [[10, loss + 1], [20, loss]], "made": f"commit {seed}",
        }  # fmt: skip

    seeds = (1, 2)
    return {"runs": [run(seed, name, 2.0 + seed / 10, share) for seed in seeds for name, share in (
        ("fault-free", 0.5), ("full", 0.5), ("pec K=1", 0.54), ("pec K=1 W", 0.48))]}  # fmt: skip


def test_accuracy_by_what_is_left_out_is_that_of_the_campaign(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(figure, "RESULTS", tmp_path)
    found_runs = campaign()
    found_runs["runs"].append(found_runs["runs"][0] | {"seed": 3, "loss": 9.0, "validation": [[10, 9.0], [20, 9.0]]})
    (tmp_path / moc_fig14.FILE).write_text(json.dumps(found_runs))
    (tmp_path / moc_fig14.VISION_FILE).write_text(json.dumps(of_images()))
    moc_fig14.runs.cache_clear()
    moc_fig14.vision.cache_clear()
    try:
        assert moc_fig14.curve("fault-free") == moc_fig14.curve("full")  # from the seeds of all strategies
        assert moc_fig14.curve("full") == [(10, pytest.approx(3.15)), (20, pytest.approx(2.15))]
        found = moc_fig14.figure()
        assert found.data["deviation"] == pytest.approx([-0.01, 0.02])
        assert [row[0] for row in found.report.tables[0].rows] == ["without faults", "baseline", "W", "WO"]
        assert found.report.notes[0].startswith(
            "(a): from [runs of the campaign](accuracy-campaign.md), seeds 1, commit 1; 2, commit 2; ±"
        )
        turn, load = found.report.tables[1].rows[2:4]
        assert (turn[0], turn[-1]) == ("one expert, in turn", "+0.00 ± 12.71")
        assert (load[0], load[-1]) == ("one expert, by load", "+2.00 ± 0.00")
        assert "Beyond their own interval: one expert, by load." in found.report.notes[-1]
    finally:
        moc_fig14.runs.cache_clear()
        moc_fig14.vision.cache_clear()


def of_images() -> dict[str, Any]:
    right = {"fault-free": (0.7, 0.8), "one bit": (0.7, 0.8), "sequential": (0.71, 0.79), "load-aware": (0.72, 0.82)}
    right["stale"] = (0.7, 0.8)
    runs = [
        {"seed": seed, "name": name, "plt": 0.03, "curve": [2.0, 1.0], "accuracy": accuracy[seed - 1]}
        for name, accuracy in right.items()
        for seed in (2, 1)
    ]
    found = {"iterations": 40, "images": 8, "kills": 4, "tests": 100, "release": "a release", "made": "a commit"}
    return found | {"runs": runs}


def test_losses_with_dropped_tokens_are_compared_with_those_of_the_same_seed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(figure, "RESULTS", tmp_path)
    runs = [{"seed": seed, "dropped": share, "loss": seed * loss} for seed in (1, 2)
            for share, loss in ((0.0, 2.0), (0.03, 2.0), (0.1, 2.5))]  # fmt: skip
    data = {"runs": runs, "iterations": 320, "first": 30, "release": "torch", "made": "commit abc"}
    (tmp_path / moetion_table1.FILE).write_text(json.dumps(data))
    moetion_table1.training.cache_clear()
    try:
        (rows,) = (one.rows for one in moetion_table1.figure().report.tables)
    finally:
        moetion_table1.training.cache_clear()
    assert [row[2:] for row in rows] == [
        ("+0.00% ± 0.00%", "+0.00%"), ("+0.00% ± 0.00%", "+0.11%"), ("+25.00% ± 0.00%", "+73.75%")
    ]  # fmt: skip


def test_a_figure_whose_runs_are_not_there_says_what_makes_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(figure, "RESULTS", tmp_path)
    with pytest.raises(UsageError, match=r"examples/accuracy/campaign\.py"):
        figure.measured(moc_fig14.FILE, moc_fig14.COMMAND)
