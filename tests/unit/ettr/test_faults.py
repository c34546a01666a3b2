"""Faults by chance and from traces."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.core.dist_checkpointing.moe.errors import UsageError
from megatron.core.dist_checkpointing.moe.simulate.ettr.faults import (
    Bursts,
    Fault,
    load_trace,
    poisson,
    save_trace,
    sweep,
)


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


def test_a_sweep_moves_the_same_faults_apart() -> None:
    found = sweep([600, 1200], 43_200, 12, seed=5)
    rare = found[1200]
    assert [(2 * one.at_s, one.nodes) for one in found[600][: len(rare)]] == [(one.at_s, one.nodes) for one in rare]


def test_bursts_take_adjacent_nodes_as_often_as_asked() -> None:
    faults = poisson(60, 600_000, 12, seed=3, bursts=Bursts(0.25, 3))
    bursts = [fault for fault in faults if len(fault.nodes) == 3]
    assert {len(fault.nodes) for fault in faults} == {1, 3}
    assert len(bursts) / len(faults) == pytest.approx(0.25, abs=0.02)
    assert all(any({(n + step) % 12 for step in range(3)} == fault.nodes for n in range(12)) for fault in bursts)


def test_the_built_in_trace_has_24_faults_in_6_hours() -> None:
    faults = load_trace()
    assert len(faults) == 24
    assert faults[-1].at_s < 6 * 3600
    assert set().union(*(fault.nodes for fault in faults)) <= set(range(12))


def test_a_trace_that_is_saved_reads_back_the_same(tmp_path: Path) -> None:
    faults = (Fault(1.5, frozenset((3,))), Fault(20.0, frozenset((0, 11))))
    save_trace(tmp_path / "trace.csv", faults)
    assert load_trace(tmp_path / "trace.csv") == faults


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
    ],
)
def test_a_broken_trace_is_refused_with_the_place(tmp_path: Path, text: str, complaint: str) -> None:
    (tmp_path / "trace.csv").write_text(text)
    with pytest.raises(UsageError, match=complaint):
        load_trace(tmp_path / "trace.csv")


def test_a_trace_that_is_not_there_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"nowhere\.csv"):
        load_trace(tmp_path / "nowhere.csv")


def test_a_burst_of_more_nodes_than_there_are_is_refused() -> None:
    with pytest.raises(UsageError, match="nodes"):
        poisson(600, 3600, 2, 0, Bursts(0.5, 3))
