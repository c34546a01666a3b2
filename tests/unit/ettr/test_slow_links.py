"""`sparse` against `full` on slow links: each round by its own costs, and no verdict that is within noise."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "benchmarks"))

import slow_links


def round_of(full_s: float, sparse_s: float) -> dict[str, Any]:
    """Iterations without checkpoints take 1 s; a fault makes 4 run again with `sparse`, each in half of that."""
    fault = {"again_s": 2.0, "again": 4, "restart_s": 10.0}
    return {
        "none": {"iteration_s": 1.0, "window": 0, "faults": []},
        "full": {"iteration_s": full_s, "window": 0, "faults": [fault]},
        "sparse": {"iteration_s": sparse_s, "window": 4, "faults": [fault]},
    }


def page_of(*rounds: dict[str, Any]) -> str:
    about = {"cores": 2, "cpu": "a", "torch": "b", "megatron_core": "c"}
    links = {"links": {"2": list(rounds)}, "bytes": 1, "iteration_s": 1.0, "interval": 4}
    return "\n".join(slow_links.page({"machine": about, **links, "gains": slow_links.gained(links)}))


@pytest.mark.parametrize("file", [slow_links.BENCHMARK.data, slow_links.AGAIN], ids=lambda file: file.stem)
def test_gains_that_are_kept_follow_from_the_rounds_beside_them(file: Path) -> None:
    kept = json.loads(file.read_text())
    for ratio, by_mtbf in slow_links.gained(kept).items():
        for mtbf, gain in by_mtbf.items():
            assert kept["gains"][ratio][mtbf] == pytest.approx(gain), (ratio, mtbf)


def test_a_round_is_judged_by_its_own_costs() -> None:
    (gain,) = slow_links.gains([round_of(1.25, 1.1)], interval=4, restart=10.0, mtbf=1000)
    # A snapshot of `full` costs 1 iteration; its best interval for 1,000 iterations is the square root of 2,000.
    # Over all phases a window of 4 has 5.5 iterations run again, and half of one is cut off; of both what runs again
    # takes 2 iterations less than as much training did.
    sparse = 1 / (1 + (10 + 5.5 + 0.5 - 2) / 1000) / 1.1
    assert gain == pytest.approx(sparse - 1 / (1 + (10 + 45 / 2 + 1 - 2) / 1000) / (1 + 1 / 45), abs=1e-4)


def test_a_snapshot_of_all_costs_full_no_less_than_sparse() -> None:
    one = round_of(0.99, 1.1)
    assert slow_links.charged(one, interval=4) == pytest.approx((0.0, 0.1))
    one["sparse"]["window"] = 1
    assert slow_links.charged(one, interval=4) == pytest.approx((0.1, 0.1))
    assert slow_links.charged(one | {"full": {"iteration_s": 1.25}}, interval=4) == pytest.approx((1.0, 0.1))


def test_faults_that_made_nothing_run_again_say_nothing_of_a_cold_start() -> None:
    one, other = round_of(1.0, 1.0), round_of(1.0, 1.0)
    other["sparse"]["faults"] = [{"again_s": 0.0, "again": 0, "restart_s": 10.0}]
    assert slow_links.cold_start([one, other], "sparse") == -2.0
    assert slow_links.cold_start([other], "sparse") == 0.0


def test_a_window_of_one_loses_what_a_snapshot_in_each_iteration_does() -> None:
    one = round_of(1.0, 1.0)
    one["sparse"] = {"iteration_s": 1.0, "window": 1, "faults": [{"again_s": 0.0, "again": 0, "restart_s": 10.0}]}
    assert slow_links.again_on_average(one, 0.0) == 1 / 2 + slow_links.USABLE_AFTER


def test_no_fault_is_charged_a_window_that_came_behind_it() -> None:
    one = round_of(1.0, 1.0)
    one["sparse"]["window"] = 13
    assert slow_links.again_on_average(one, -2.0) == (1.5 * 5 - 0.5) + 0.5 - 2


def test_the_window_is_the_one_that_the_fault_found() -> None:
    windows = {at: 3 if at < 22 else 9 for at in range(1, 41)}
    lines = [
        {"iteration": at, "iteration_time_s": 1.0, "snapshot_bytes": 1, "checkpoint_memory": {"window": windows[at]}}
        for at in range(1, 41)
    ]
    lines.insert(21, {"recovery": {"scope": "global", "total_s": 1.0, "parts": {}, "replayed": 5}})
    assert slow_links.summary(lines)["window"] == 3


def test_each_interval_that_counts_has_the_cost_of_one_snapshot() -> None:
    # A snapshot every 4 iterations makes the next one a second longer; a fault strikes in the 23rd.
    times = {at: 2.0 if at % 4 == 1 else 1.0 for at in range(1, 41)}
    lines = [{"iteration": at, "iteration_time_s": times[at]} for at in (*range(1, 23), *range(21, 41))]
    lines.insert(22, {"recovery": {}})
    counted = slow_links.times(lines)
    assert len(counted) == 16 + 12
    assert sum(counted) / len(counted) == 1.25


def test_one_is_ahead_only_beyond_the_interval_of_its_rounds() -> None:
    verdict = "A fault every 1,000 iterations, beyond the interval ahead: "
    assert verdict + "`sparse` at no ratio; `full` at 2; neither at no ratio." in page_of(
        round_of(1.25, 1.20), round_of(1.25, 1.21)
    )
    assert verdict + "`sparse` at 2; `full` at no ratio; neither at no ratio." in page_of(
        round_of(2.0, 1.0), round_of(2.0, 1.001)
    )
    assert verdict + "`sparse` at no ratio; `full` at no ratio; neither at 2." in page_of(
        round_of(1.25, 1.5), round_of(1.25, 0.9)
    )
    assert "neither at 2." in page_of(round_of(1.25, 1.2))
