"""Figures of the papers that are made of what real jobs left: losses, ablation, popularity, fine-tuning."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from megatron.core.dist_checkpointing.moe.errors import UsageError
from reproduce import (
    fig4,
    figure,
    moc_fig10,
    moc_fig12,
    moc_fig13,
    moc_fig14,
    moc_table4,
    moetion_fig8,
    moetion_fig9,
    moetion_fig10,
)


@pytest.fixture
def campaign(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Two seeds; with faults the loss is 0.3 and 0.1 above the one without, and at the end 0.02 below it."""

    def run(seed: int, name: str, above: dict[int, float]) -> dict[str, Any]:
        curve = [[at, 5 - at / 20 + seed / 10 + above.get(at, 0.0)] for at in range(10, 60, 10)]
        return {"seed": seed, "name": name, "validation": curve, "made": "commit abc"}

    runs = [run(seed, "fault-free", {}) for seed in (1, 2)]
    runs += [run(seed, "selective", {20: 0.3, 30: 0.1, 50: -0.02}) for seed in (1, 2)]
    monkeypatch.setattr(figure, "RESULTS", tmp_path)
    kills = ["1@12:forward-backward", "0@38:step"]
    (tmp_path / moetion_fig8.FILE).write_text(json.dumps({"kills": kills, "runs": runs}))
    caches = moc_fig14.runs, moetion_fig8.faults, moetion_fig8.after_faults
    for one in caches:
        one.cache_clear()
    yield
    for one in caches:
        one.cache_clear()


@pytest.mark.usefixtures("campaign")
def test_losses_after_each_fault_are_those_of_the_evaluations_before_the_next_one() -> None:
    first, second = moetion_fig8.after_faults()
    assert (first.iteration, second.iteration) == (12, 38)
    assert [(at, loss.mean) for at, loss in first.above] == [(8, pytest.approx(0.3)), (18, pytest.approx(0.1))]
    assert [(at, loss.mean) for at, loss in second.above] == [(2, pytest.approx(0.0)), (12, pytest.approx(-0.02))]
    assert first.highest == pytest.approx(0.3)


@pytest.mark.usefixtures("campaign")
def test_a_campaign_without_selective_checkpoints_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    without = tuple(run for run in moc_fig14.runs() if run["name"] == "fault-free")
    monkeypatch.setattr(moetion_fig8, "runs", lambda: without)
    with pytest.raises(UsageError, match="no run of selective"):
        moetion_fig8.figure()


@pytest.mark.usefixtures("campaign")
def test_the_highest_loss_after_a_fault_and_the_last_one_are_told(tmp_path: Path) -> None:
    found = moetion_fig8.figure()
    assert [row[1] for row in found.report.tables[1].rows] == ["+0.3000", "-0.0200 ± 0.0000"]
    found.plot(tmp_path / "figure.png")


@pytest.mark.parametrize("module", [moetion_fig8, moetion_fig10, fig4, moc_table4])
def test_a_figure_without_its_runs_names_the_command_that_makes_them(
    module: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("RESULTS", "BENCHMARKS"):
        monkeypatch.setattr(figure, name, tmp_path)
        if hasattr(module, name):
            monkeypatch.setattr(module, name, tmp_path)
    caches = [one for one in vars(module).values() if hasattr(one, "cache_clear") and one is not figure.published]
    for one in caches:
        one.cache_clear()
    with pytest.raises(UsageError, match=module.COMMAND.partition(" ")[2].replace(".", r"\.")):
        module.figure()
    script = module.COMMAND.split()[1]
    assert (Path(__file__).parents[3] / script).is_file()


def test_techniques_are_told_apart_by_what_their_jobs_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    def job(sent: float, spared: float, iteration_s: float = 1.0) -> dict[str, float]:
        return {"copied": 100.0, "sent": sent, "spared": spared, "iteration_s": iteration_s, "copied_in_waits": 7.0}

    row = {"full": job(80, 20, 2.0), "selection": job(50, 10), "+ gradients": job(15, 45), "+ bubbles": job(15, 45)}
    monkeypatch.setattr(moetion_fig10, "rounds", lambda: (row,))
    moetion_fig10.techniques.cache_clear()
    try:
        sent = [one.sent_bytes for one in moetion_fig10.techniques().values()]
        assert sent == [100, 60, 50, 15, 15]
        assert moetion_fig10.techniques()[moetion_fig10.GRADIENTS].by_full == (0.5,)
        assert moetion_fig10.state_sent() == pytest.approx(1 - 7 / 15)
        assert moetion_fig10.left(moetion_fig10.REDUNDANCY, moetion_fig10.SELECTION) == pytest.approx(5 / 6)
    finally:
        moetion_fig10.techniques.cache_clear()


def test_each_technique_that_saves_bytes_does_so_in_real_jobs_and_less_than_in_the_paper_all_together() -> None:
    sent = [moetion_fig10.techniques()[name].sent_bytes for name in moetion_fig10.STEPS[:4]]
    assert all(later < earlier for earlier, later in itertools.pairwise(sent))
    ours, there = zip(*((ours, there) for what, ours, there in moetion_fig10.compared() if "all" in what), strict=True)
    assert max(there) < ours[0] < 0.6
    assert 0.8 < moetion_fig10.state_sent() < 1  # each snapshot has other experts, whose replicas cannot follow


def test_every_routed_token_of_the_real_job_is_counted_once() -> None:
    routed = {sum(counts) for layer in fig4.tokens() for counts in layer}
    assert routed == {16 * 128 * 6}
    assert {len(counts) for layer in fig4.tokens() for counts in layer} == {64}


def test_experts_count_as_active_from_one_token_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fig4, "tokens", lambda: (((4, 0, 0, 0), (1, 1, 2, 0)), ((1, 1, 1, 1), (2, 2, 0, 0))))
    assert fig4.active() == (1, 3, 4, 2)
    assert [fig4.at_least(experts) for experts in (1, 2, 3, 4)] == [1, 0.75, 0.5, 0.25]
    assert fig4.active(0.5) == (3, 2)
    assert fig4.over_time() == [2.5]


def test_shares_are_those_of_the_last_part(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = ((4, 0, 0, 0), (0, 4, 0, 0), (0, 0, 4, 0), (0, 0, 0, 4), (1, 1, 2, 0), (3, 1, 0, 0))
    monkeypatch.setattr(fig4, "tokens", lambda: (layer,))
    (found,) = fig4.dynamics()
    assert found.largest_by_even == pytest.approx((2 + 3) / 2)
    assert found.skew == pytest.approx((1 / 6 + 1 / 2) / 2)
    assert (found.most_popular, found.fluctuation) == (2, 2)


def test_experts_of_a_real_job_come_back_after_few_had_most_tokens_and_popularity_moves() -> None:
    means = fig4.over_time()
    assert min(means) < means[0] and min(means) < 0.6 * means[-1]
    assert all(one.most_popular > 1 and one.largest_by_even > 1.5 for one in fig4.dynamics())


def test_fine_tuned_models_lost_tokens_under_partial_checkpoints_only() -> None:
    runs = moc_table4.runs()
    assert set(runs) == {"Base", "FT-w.o.E", "FT-Full", "FT-PEC"}
    assert {name for name, run in runs.items() if run["plt"] > 0} == {"FT-PEC"}
    assert {name for name, run in runs.items() if run["faults"]} == set(runs) - {"Base"}
    sizes = {name: run["mean_snapshot_bytes"] for name, run in runs.items()}
    assert 0 < sizes["FT-PEC"] < sizes["FT-Full"] and 0 < sizes["FT-w.o.E"] < sizes["FT-Full"]


def test_fine_tuning_lowers_the_loss_less_with_frozen_experts_and_as_much_under_partial_checkpoints() -> None:
    changes = {what: loss for what, loss, _, _ in moc_table4.differences()}
    assert changes["FT-Full against Base"] < changes["FT-w.o.E against Base"] < 0
    assert changes["FT-w.o.E against FT-Full"] > abs(changes["FT-PEC against FT-Full"])


@pytest.mark.parametrize(
    "module",
    [
        *(moetion_fig9, moetion_fig10, fig4, moc_fig10, moc_fig12, moc_table4),
        pytest.param(moc_fig13, marks=pytest.mark.ci),  # of many jobs of many ranks
    ],
)
def test_a_figure_of_runs_has_data_tables_and_a_picture(module: Any, tmp_path: Path) -> None:
    found = module.figure()
    json.dumps(found.data)
    assert found.report.tables
    found.plot(tmp_path / "figure.png")
    assert (tmp_path / "figure.png").stat().st_size > 1000
