"""Faults by chance and from traces."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.core.dist_checkpointing.moe.errors import UsageError
from moe_ckpt.simulator.faults import FailureMix, correlated, load_trace, poisson


@given(st.integers(0, 2**32), st.floats(60, 10_000), st.integers(1, 100))
def test_faults_come_in_order_within_the_run_on_nodes_that_exist(seed: int, mtbf_s: float, nodes: int) -> None:
    faults = poisson(mtbf_s, 20_000, nodes, seed)
    times = [fault.at_s for fault in faults]
    assert times == sorted(times)
    assert all(0 <= fault.at_s < 20_000 and fault.nodes <= set(range(nodes)) for fault in faults)


def test_faults_are_as_far_apart_as_asked_on_average() -> None:
    count = len(poisson(600, 6_000_000, 12, seed=1))
    assert count == pytest.approx(10_000, rel=0.03)  # 3 standard deviations


def test_the_same_seed_gives_the_same_faults_and_another_one_others() -> None:
    assert poisson(600, 43_200, 12, seed=1) == poisson(600, 43_200, 12, seed=1) != poisson(600, 43_200, 12, seed=2)


def test_a_trace_may_list_faults_in_any_order(tmp_path: Path) -> None:
    (tmp_path / "trace.csv").write_text("nodes,at_s\n1,30\n2,10\n")
    assert [fault.at_s for fault in load_trace(tmp_path / "trace.csv")] == [10, 30]


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("at_s\n1\n", "nodes is missing"),
        ("at_s,nodes\n1,2\nsoon,3\n", "line 3.*soon"),
        ("at_s,nodes\n-1,2\n", "line 2.*at_s is -1"),
        ("at_s,nodes\n1,\n", "line 2.*takes no nodes"),
        ("at_s,nodes\nnan,1\n", "line 2.*nan"),
        ("", "at_s is missing"),
        (f"at_s,nodes\n{'1' * 140_000},2\n", "cannot be read as a trace.*field larger"),
    ],
)
def test_a_broken_trace_is_refused_with_the_place(tmp_path: Path, text: str, complaint: str) -> None:
    (tmp_path / "trace.csv").write_text(text)
    with pytest.raises(UsageError, match=complaint):
        load_trace(tmp_path / "trace.csv")


def test_a_trace_that_is_not_there_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"nowhere\.csv"):
        load_trace(tmp_path / "nowhere.csv")


def test_correlated_faults_are_as_many_as_those_by_chance_and_take_racks_repeated_and_slow_nodes() -> None:
    mix, span_s = FailureMix(), 3600.0 * 20_000
    found = correlated(3600.0, span_s, 64, seed=3)
    assert len(found) == pytest.approx(20_000, rel=0.03)
    assert [fault.at_s for fault in found] == sorted(fault.at_s for fault in found)
    racks = [fault for fault in found if len(fault.nodes) > 1]
    assert len(racks) / len(found) == pytest.approx(mix.rack_share, rel=0.1)
    assert all(len(fault.nodes) == 4 and min(fault.nodes) % 4 == 0 for fault in racks)
    assert sum(fault.slow_s > 0 for fault in found) / len(found) == pytest.approx(mix.slow_share, rel=0.1)
    again = sum(one.nodes <= other.nodes or other.nodes <= one.nodes for one, other in pairwise(found))
    alone = correlated(3600.0, span_s, 64, seed=3, mix=FailureMix(repeat_share=0.0))
    assert again > 3 * sum(one.nodes <= other.nodes or other.nodes <= one.nodes for one, other in pairwise(alone))


def test_the_same_seed_gives_the_same_correlated_faults() -> None:
    assert correlated(600.0, 36000.0, 8, seed=1) == correlated(600.0, 36000.0, 8, seed=1)
    assert correlated(600.0, 36000.0, 8, seed=1) != correlated(600.0, 36000.0, 8, seed=2)


def test_a_share_of_one_is_refused() -> None:
    with pytest.raises(UsageError, match="repeat_share is 1"):
        FailureMix(repeat_share=1.0)
    with pytest.raises(UsageError, match="more than 1 together"):
        FailureMix(rack_share=0.5, repeat_share=0.4, slow_share=0.2)
