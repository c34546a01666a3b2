"""MoC-System's figures: what their text says comes out of the real selection and sharding."""

from __future__ import annotations

import pytest

from moe_ckpt.simulator.ettr import moc_save_overhead_s
from reproduce import moc_fig10, moc_fig12, moc_fig13
from reproduce.figure import published
from reproduce.moc_iteration import MocIteration, compute_s, cost_of, exchanges_s, machines

CASES = ("Case1", "Case2", "Case3")


def test_one_expert_of_sixteen_makes_the_published_share_of_a_full_checkpoint() -> None:
    ours = moc_fig10.total_shares()["both"][1]
    assert ours == pytest.approx(published("moc")["fig10"]["total_share_of_full_k1"], abs=0.002)


@pytest.mark.parametrize("scope", ["weights", "optimizer", "both"])
def test_each_scope_makes_the_share_of_table_3(scope: str) -> None:
    given = published("moc")["total_share_by_scope"][scope]
    assert moc_fig10.total_shares()[scope][1] == pytest.approx(given, abs=0.005)


def test_checkpoints_shrink_with_k_in_every_scope() -> None:
    for by_k in moc_fig10.total_shares().values():
        shares = [by_k[k] for k in moc_fig10.EXPERTS_SAVED]
        assert shares == sorted(set(shares))
        assert shares[-1] == 1


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("k", moc_fig10.EXPERTS_SAVED)
def test_the_bottleneck_falls_from_baseline_over_equal_to_adaptive_sharding(case: str, k: int) -> None:
    of = moc_fig10.bottlenecks()[case][k]
    assert of["adaptive"] <= of["equal"] < of["none"]
    assert of["equal"] <= min(of["EE"], of["EN"])


@pytest.mark.parametrize("case", CASES)
def test_adaptive_sharding_lowers_the_bottleneck_further_with_one_expert(case: str) -> None:
    of = moc_fig10.bottlenecks()[case][1]
    assert of["adaptive"] < of["equal"]


def test_sharding_experts_alone_helps_only_with_several_groups_of_expert_parallelism() -> None:
    helps = [
        case for case, by_k in moc_fig10.bottlenecks().items() if any(of["EE"] < of["none"] for of in by_k.values())
    ]
    assert helps == published("moc")["fig10"]["expert_sharding_helps_in"]


@pytest.mark.parametrize("case", CASES)
def test_fewer_experts_never_make_the_bottleneck_larger(case: str) -> None:
    for strategy in moc_fig10.SERIES:
        sizes = [moc_fig10.bottlenecks()[case][k][strategy] for k in moc_fig10.EXPERTS_SAVED]
        assert sizes == sorted(sizes)


def test_all_techniques_take_at_least_the_published_half_off_the_bottleneck() -> None:
    least = min(of[moc_fig10.ALL_TECHNIQUES] for of in moc_fig10.reductions().values())
    assert least >= published("moc")["fig10"]["checkpointing_time_reduction_up_to"]


def test_without_sharding_partial_checkpoints_save_a_rank_less_than_with_it() -> None:
    saved = moc_fig10.pec_reductions()
    assert 0 < saved["rank_reduction_without_sharding_k1"] < saved["total_reduction_k1"] < saved["rank_reduction_k1"]
    assert not any(published("moc")["pec"][name] for name in saved)


def test_the_composition_of_a_checkpoint_is_that_of_figure_2() -> None:
    table = next(table for table in moc_fig10.figure().report.tables if table.title.startswith("Composition"))
    for _, ours, given in table.rows:
        assert ours == pytest.approx(given, abs=0.005)


@pytest.mark.ci
def test_everything_that_the_text_says_of_figure_13_holds() -> None:
    assert [text for text, holds in moc_fig13.statements().items() if not holds] == []


@pytest.mark.ci
def test_the_assumed_network_lies_within_the_range_in_which_the_text_holds() -> None:
    lowest, highest = moc_fig13.rates_that_agree()
    assert lowest < machines()["a800"].node_bytes_per_s < highest


def test_computation_takes_the_published_share_of_the_peak() -> None:
    ratio = compute_s(MocIteration("a800", 64)) / compute_s(MocIteration("h100", 64))
    assert ratio == pytest.approx(989 / 312)


def test_experts_on_one_node_exchange_nothing_between_nodes() -> None:
    within_s, between_s = exchanges_s(MocIteration("a800", 8))
    assert within_s > 0
    assert between_s == 0


def test_partial_snapshots_take_an_eighth_of_the_time_and_the_non_experts() -> None:
    one = cost_of(MocIteration("a800", 256))
    assert 1 / 8 < one.moc_snapshot_s / one.base_snapshot_s < 0.14
    assert one.moc_async_s == one.forward_backward_s + moc_save_overhead_s(one.moc_snapshot_s, one.forward_backward_s)


def test_a_shorter_interval_and_the_same_one_both_lose_less_than_full_checkpoints() -> None:
    lost = {name: share for name, (_, _, share) in moc_fig13.overheads().items()}
    assert lost["MoC, shorter interval"] < lost["MoC, same interval"] < lost["full"]


def test_blocking_checkpoints_are_as_long_as_the_published_speedups_need() -> None:
    given = published("moc")["fig12"]
    least, most = ((1 + x) / (1 + (1 - given["overhead_reduction"][1]) * x) for x in moc_fig12.checkpoint())
    assert least == pytest.approx(given["speedup"][0])
    assert most > given["speedup"][1]


def test_methods_that_hide_more_of_a_checkpoint_have_shorter_iterations() -> None:
    for case in CASES:
        bars = [one for one in moc_fig12.bars() if one.case == case]
        assert [one.method for one in bars] == [moc_fig12.BASELINE, moc_fig12.BASE_ASYNC, moc_fig12.MOC_ASYNC]
        for low, high in zip(bars[1:], bars, strict=False):
            assert low.said < high.said
            assert 1 <= low.least <= high.least
            assert high.most is None or (low.most is not None and low.most <= high.most)


def test_what_the_passes_can_hide_explains_all_methods_but_base_async() -> None:
    far = {(one.case, one.method) for one in moc_fig12.bars() if one.apart > 0.08}
    assert far == {("Case1", moc_fig12.BASE_ASYNC), ("Case3", moc_fig12.BASE_ASYNC)}


def test_without_sharding_the_snapshot_of_the_first_case_exceeds_the_passes_by_what_sharding_saves() -> None:
    (base,) = (one for one in moc_fig12.bars() if (one.case, one.method) == ("Case1", moc_fig12.BASE_ASYNC))
    of = moc_fig10.bottlenecks()["Case1"][16]
    assert base.most == pytest.approx(of["none"] / of["adaptive"])


def test_the_published_gain_lies_within_what_the_said_bars_allow() -> None:
    (least, most), said = moc_fig12.gains(), published("moc")["fig12"]["gain_over_base_async"]
    assert least <= said[0] < said[1] <= most
