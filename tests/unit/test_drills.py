"""Drills: when what is struck, what is compared, what is measured."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import astuple
from pathlib import Path
from typing import Any

import pytest

from megatron.pretrain.processes import processes_with
from moe_ckpt.drills import __main__ as drills
from moe_ckpt.drills.__main__ import is_right, page
from moe_ckpt.drills.drill import SUBJECT, UNTIED, Drill, DrillSettings
from moe_ckpt.drills.job import DrillFailure, DrillJob, JobPlan
from moe_ckpt.drills.processes import TOKEN, Running
from moe_ckpt.drills.reports import (
    Journal,
    checkpoint_costs,
    differences,
    ettr,
    iteration_s,
    read_journal,
    recoveries_in,
    trained_again,
    unlike_components,
)
from moe_ckpt.drills.schedule import FaultRates, Kind, StockCosts, best_interval, reached, schedule

ODDS = FaultRates(mtbf_s=30.0, node_share=0.2, nodes=2, ranks=8)


def report(iteration: int, **changes: Any) -> dict[str, Any]:
    loss = 5.0 - iteration / 10
    usual = {"lm_loss": loss, "grad_norm": 1.5, "learning_rate": 1e-3, "loss_scale": 1.0, "skipped": False}
    return {"iteration": iteration, "consumed_train_samples": 4 * iteration, "iteration_time_s": 0.5} | usual | changes


def journal(*reports: dict[str, Any]) -> Journal:
    return Journal(reports)


def test_a_drill_removes_only_what_an_earlier_one_left(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    own = tmp_path / "own"
    (own / "baseline").mkdir(parents=True)
    assert drills.main(["--folder", str(own)]) == 2
    assert f"{own}/baseline is of no earlier drill" in capsys.readouterr().err and (own / "baseline").is_dir()
    for _ in range(2):
        assert drills.made_room(tmp_path / "run") is None and not (tmp_path / "run" / "subject").exists()
        (tmp_path / "run" / "subject").mkdir()


REFERENCE = journal(*(report(iteration) for iteration in range(1, 9)))


def test_only_what_was_trained_more_than_once_was_trained_again() -> None:
    lost_reports_were_replayed = (report(3, replayed=True), report(4, replayed=True))
    assert trained_again(journal(report(1), report(2), *lost_reports_were_replayed, report(5))) == 0
    assert trained_again(journal(report(1), report(2), report(1), report(2), report(3), report(3))) == 3


def test_times_between_faults_are_exponential_with_the_mean_that_was_asked_for() -> None:
    times = [kill.at_s for kill in schedule(1, ODDS, 300_000.0)]
    gaps = [later - earlier for earlier, later in zip([0.0, *times], times, strict=False)]
    assert statistics.fmean(gaps) == pytest.approx(30.0, rel=0.05)
    assert statistics.pstdev(gaps) == pytest.approx(30.0, rel=0.05)
    assert sum(gap < 30.0 for gap in gaps) / len(gaps) == pytest.approx(0.632, abs=0.02)


def test_ranks_and_nodes_are_struck_alike_and_in_the_share_that_was_asked_for() -> None:
    found = schedule(2, ODDS, 300_000.0)
    ranks = [fault.target for fault in found if fault.kind is Kind.RANK]
    nodes = [fault.target for fault in found if fault.kind is Kind.NODE]
    assert len(nodes) / len(found) == pytest.approx(0.2, abs=0.02)
    assert set(ranks) == set(range(8))
    assert set(nodes) == {0, 1}
    assert statistics.fmean(ranks) == pytest.approx(3.5, abs=0.1)


def test_a_seed_repeats_its_faults_and_a_longer_schedule_begins_with_the_shorter_one() -> None:
    assert schedule(3, ODDS, 600.0)[: len(schedule(3, ODDS, 200.0))] == schedule(3, ODDS, 200.0)
    assert schedule(3, ODDS, 600.0) != schedule(4, ODDS, 600.0)


def test_another_share_of_nodes_leaves_the_times_alone() -> None:
    ranks_only = FaultRates(30.0, 0.0, 2, 8)
    assert [kill.at_s for kill in schedule(5, ODDS, 900.0)] == [kill.at_s for kill in schedule(5, ranks_only, 900.0)]
    assert {kill.kind for kill in schedule(5, ranks_only, 900.0)} == {Kind.RANK}


def test_a_job_on_one_node_loses_no_nodes() -> None:
    assert {kill.kind for kill in schedule(6, FaultRates(30.0, 1.0, 1, 8), 900.0)} == {Kind.RANK}


def test_iterations_that_were_repeated_and_replayed_with_the_same_outcome_are_alike() -> None:
    struck = journal(report(1), report(2), report(2, replayed=True), report(3))
    assert not list(differences(struck, REFERENCE))


@pytest.mark.parametrize("name", ["lm_loss", "grad_norm", "learning_rate", "loss_scale", "skipped"])
def test_a_difference_in_the_last_bit_of_any_report_is_found(name: str) -> None:
    right = report(2)[name]
    wrong = True if name == "skipped" else right * (1 + 2**-52)
    struck = journal(report(1), report(2, **{name: wrong}), report(2), report(3))
    (told,) = differences(struck, REFERENCE)
    assert told == f"iteration 2: {name} is {wrong!r}, but {right!r} without faults"


def test_a_replayed_iteration_is_named_as_such() -> None:
    (told,) = differences(journal(report(3, replayed=True, lm_loss=float("nan"))), REFERENCE)
    assert told.startswith("iteration 3 (replayed): lm_loss is nan")


def test_an_iteration_that_the_reference_does_not_have_is_not_taken_for_alike() -> None:
    assert list(differences(journal(report(9)), REFERENCE)) == ["iteration 9 is not in the reference, which ends at 8"]


def test_components_that_differ_or_are_missing_on_either_side_are_found() -> None:
    assert unlike_components({"a": "1", "b": "2", "c": "3"}, {"a": "1", "b": "4", "d": "5"}) == ("b", "c", "d")


def test_the_ratio_counts_each_iteration_of_the_final_state_once() -> None:
    assert ettr(iterations=60, useful_iteration_s=0.5, wall_s=60.0) == 0.5


def test_the_time_of_an_iteration_is_the_median_after_warming_up_without_replays() -> None:
    times = [9.0, 9.0, 9.0, 0.5, 0.7, 0.6]
    reports = [report(at, iteration_time_s=time_s) for at, time_s in enumerate(times)]
    assert iteration_s(journal(*reports, report(6, replayed=True, iteration_time_s=50.0))) == 0.6
    with pytest.raises(ValueError, match="4 are needed"):
        iteration_s(journal(report(1)))


def test_a_checkpoint_costs_what_iterations_take_longer_and_at_least_what_training_waits() -> None:
    plain = timed([0.5] * 16)
    assert costs_of(plain, timed([0.5, 0.5, 0.5, 0.9] * 4)) == pytest.approx((0.4, 0.0, 0.5))
    assert costs_of(plain, timed([0.8, 0.8, 0.8, 0.9] * 4)) == pytest.approx((3 * 0.3 + 0.4, 0.0, 0.5))
    assert costs_of(plain, timed([0.3, 0.3, 0.3, 0.7] * 4)) == pytest.approx((0.4, 0.0, 0.5)), "a machine that was busy"
    assert costs_of(plain, timed([0.3] * 16)) == pytest.approx((0.0, 0.0, 0.5))


def test_what_the_first_checkpoint_costs_beyond_the_others_is_told_apart() -> None:
    begins = [0.5, 0.5, 0.5, 12.9, 0.5, 0.5, 0.5, 0.9]
    assert costs_of(timed([0.5] * 16), timed([*begins, *[0.5, 0.5, 0.5, 0.9] * 2])) == pytest.approx((0.4, 12.0, 0.5))


def timed(iterations_s: list[float]) -> Journal:
    """Each iteration takes so long, whatever a loop says of it."""
    ends = itertools.accumulate(iterations_s)
    return journal(*(report(number, since_boot_s=end_s) for number, end_s in enumerate(ends, 1)))


def costs_of(plain: Journal, saving: Journal) -> tuple[float, float, float]:
    return astuple(checkpoint_costs(plain, saving, 4))


def test_timelines_of_recoveries_are_told_apart_from_reports_and_half_a_line_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "reports"
    path.write_text(f'{json.dumps(report(1))}\n{{"recovery": {{"total_s": 2.0}}}}\n{{"iteration": 2, "lm')
    found = read_journal(path)
    assert found.newest == 1
    assert found.recoveries == ({"total_s": 2.0},)
    assert read_journal(tmp_path / "missing") == Journal(())


def test_recoveries_are_counted_by_their_scope() -> None:
    log = (
        "recovered iteration 6 exactly (global rollback); state restored in 0.08 s:\n  own memory\n"
        "recovered iteration 9 exactly (local rollback); state restored in 1.08 s:\n"
        "recovered iteration 12 exactly (local rollback); state restored in 0.07 s:\nloaded checkpoint from /there\n"
    )
    assert recoveries_in(log) == {"checkpoint": 1, "global": 1, "local": 2}
    assert recoveries_in(" successfully loaded checkpoint from x [ t 1/1 ] at iteration 4\n") == {"checkpoint": 1}
    assert recoveries_in("nothing") == {}


def test_flags_of_checkpoints_go_to_the_job_that_is_examined_only() -> None:
    given = ("--hidden-size", "32", "--moe-ckpt-window", "2", "--bf16", "--moe-ckpt-strict")
    settings = DrillSettings(Path(), Path(), 2, 2, 60.0, 30.0, 100.0, (), given)
    assert settings.common == ("--train-iters", "1200", *UNTIED, "--hidden-size", "32", "--bf16")
    assert settings.subject[-3:] == ("--moe-ckpt-window", "2", "--moe-ckpt-strict")


def test_a_given_strategy_comes_without_the_window_of_another_one() -> None:
    assert DrillSettings(Path(), Path(), 2, 2, 60.0, 30.0, 100.0, ()).subject == SUBJECT
    given = ("--moe-ckpt-strategy", "full", "--moe-ckpt-replicas", "2")
    assert DrillSettings(Path(), Path(), 2, 2, 60.0, 30.0, 100.0, (), given).subject == given


def judged(**changes: Any) -> dict[str, Any]:
    usual = {"ettr": 0.5, "iterations": 40, "wall_s": 60.0, "faults": [{"kind": "rank"}, {"kind": "node"}]}
    counts = {"recoveries": {"local": 2}, "trained_again": 3, "replayed": 4}
    return usual | counts | {"wrong": [], "wrong_components": []} | changes


def result(**changes: Any) -> dict[str, Any]:
    return {"seed": 1, "nodes": 2, "nproc": 2, "standbys": 0, "mtbf_s": 30.0, "subject": judged(**changes)}


@pytest.mark.parametrize(("standbys", "of_the_baseline"), [(0, 0), (1, 4)])
def test_stock_checkpoints_start_again_from_standbys_where_the_examined_job_has_them(
    standbys: int, of_the_baseline: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = dict[str, int]()

    def run(self: Drill, name: str, flags: list[str], *, struck: bool, standbys: int) -> None:
        given[name] = standbys

    monkeypatch.setattr(Drill, "_run", run)
    drill = Drill(DrillSettings(Path(), Path(), 2, 4, 60.0, 30.0, 100.0, (), standbys=standbys), str)
    drill.subject()
    drill.baseline(5)
    assert given == {"subject": standbys, "baseline": of_the_baseline}


def test_the_result_says_how_much_time_was_useful_beside_stock_checkpoints() -> None:
    stock = judged(ettr=0.25) | {"checkpoint_s": 0.5, "restart_s": 20.0, "interval": 11}
    lines = list(page(result() | {"baseline": stock}))
    assert lines[1].startswith("this subsystem: ETTR 0.500 (iteration 40 in 60.0 s; 1 ranks and 1 nodes killed;")
    assert "one every 11 iterations is best" in lines[2]
    assert lines[3].startswith("stock torch_dist: ETTR 0.250")
    assert lines[-1] == "as without faults, to the last bit"


def test_a_wrong_loss_and_a_wrong_component_are_told_and_are_no_success() -> None:
    for wrong in ({"wrong": ["iteration 2: lm_loss is 1"]}, {"wrong_components": ["master weights"]}):
        assert not is_right(result(**wrong))
        assert any(line.startswith("WRONG: ") for line in page(result(**wrong)))
        assert list(page(result(**wrong)))[-1] == "NOT as without faults"


SLEEPER = "import time; time.sleep(600)"
AGENT = f"""
import os, subprocess, sys, time
for rank in sys.argv[1:]:
    subprocess.Popen([sys.executable, "-c", {SLEEPER!r}], env=os.environ | {{"RANK": rank}}, start_new_session=True)
time.sleep(600)
"""


@pytest.fixture
def running(tmp_path: Path) -> Iterator[Running]:
    """Two nodes with two ranks each that only sleep."""
    found = Running(f"unit-test-{os.getpid()}-{tmp_path.name}", tmp_path)
    agents = []
    for number in range(2):
        (tmp_path / f"node-{number}" / "job").mkdir(parents=True)
        environment = os.environ | {TOKEN: found.token, "MOE_CKPT_NODE": f"node-{number}"}
        command = [sys.executable, "-c", AGENT, str(2 * number), str(2 * number + 1)]
        agents.append(subprocess.Popen(command, env=environment))
    while len(found.workers()) < 4:
        assert all(agent.poll() is None for agent in agents)
    yield found
    found.kill_all()
    for agent in agents:
        agent.wait()


def test_a_rank_is_found_by_its_number_and_killed_alone(running: Running) -> None:
    assert sorted(running.workers()) == [0, 1, 2, 3]
    assert running.lose_rank(2)
    assert sorted(running.workers()) == [0, 1, 3]
    assert not running.lose_rank(2)
    assert len(running.agents()) == 2


def test_a_node_is_lost_with_its_ranks_and_its_memory(running: Running) -> None:
    assert running.lose_node(1) == "node-1"
    assert sorted(running.workers()) == [0, 1]
    assert [path.name for path in running.memory.glob("node-*")] == ["node-0"]
    assert running.lose_node(1) == ""


def test_a_node_is_lost_once_its_processes_are_gone_however_slowly_they_die(
    running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    kill = os.kill

    def kill_late(pid: int, number: int) -> None:
        time.sleep(0.1)
        with contextlib.suppress(ProcessLookupError):
            kill(pid, number)

    with ThreadPoolExecutor(64) as dying, monkeypatch.context() as patched:
        patched.setattr(os, "kill", lambda *target: dying.submit(kill_late, *target))
        running.lose_node(1)
        assert sorted(running.workers()) == [0, 1]


def fake_job(tmp_path: Path, script: str, **plan: Any) -> DrillJob:
    command = [sys.executable, "-u", "-c", script]
    return DrillJob(JobPlan("job", command, {}, **plan), tmp_path / "job", tmp_path / "memory", lambda text: None)


@pytest.mark.ci
def test_a_job_that_gets_nowhere_is_ended_and_what_was_waited_for_is_told(tmp_path: Path) -> None:
    with fake_job(tmp_path, SLEEPER, patience_s=2.0) as job:
        with pytest.raises(DrillFailure, match="made no progress for 2 s while waiting for its first iteration"):
            job.run()
        token = job.token
    assert not list(processes_with({TOKEN: token}))


def test_a_job_that_fails_is_told_with_its_last_lines(tmp_path: Path) -> None:
    script = "import sys; print('out of luck'); sys.exit(3)"
    with (
        fake_job(tmp_path, script) as job,
        pytest.raises(DrillFailure, match=r"(?s)ended with exit code 3.*out of luck"),
    ):
        job.run()


@pytest.mark.ci
def test_the_time_of_a_job_is_that_between_its_first_and_its_last_report(tmp_path: Path) -> None:
    script = (
        "import sys, time\n"
        "for line in (1, 2, 3):\n"
        "    time.sleep(1)\n"
        "    open(sys.argv[-1], 'a').write('{\"iteration\": %d}\\n' % line)\n"
        "time.sleep(2)\n"
    )
    with fake_job(tmp_path, script) as job:
        begun_s = time.monotonic()
        outcome = job.run()
        whole_s = time.monotonic() - begun_s
    assert (outcome.first, outcome.last) == (1, 3)
    assert 1.0 < outcome.wall_s < whole_s - 2.0  # where it is busy, a report is noticed late


COSTS = StockCosts(iteration_s=1.0, checkpoint_s=0.5, restart_s=20.0)


def test_a_job_without_faults_reaches_what_its_time_allows() -> None:
    assert reached([], 100.0, COSTS, 10) == 95
    assert best_interval([], 100.0, COSTS) == 101


def test_a_fault_takes_a_job_back_to_its_newest_checkpoint_and_costs_a_restart() -> None:
    assert reached([25.0], 46.0, COSTS, 10) == 20 + 1
    assert reached([25.0], 46.0, COSTS, 30) == 0 + 1


def test_a_job_pays_for_the_first_checkpoint_after_each_start() -> None:
    costs = StockCosts(iteration_s=1.0, checkpoint_s=0.5, restart_s=20.0, first_checkpoint_s=12.0)
    assert reached([], 22.4, costs, 10) == 9
    assert reached([], 22.5 + 10.5 + 3.0, costs, 10) == 23
    assert reached([25.0], 45.0 + 22.5 + 1.0, costs, 10) == 10 + 11


def test_a_fault_during_a_restart_begins_it_again() -> None:
    assert reached([25.0, 40.0], 59.0, COSTS, 10) == 20
    assert reached([25.0, 40.0], 63.0, COSTS, 10) == 20 + 3


def test_where_restarts_take_most_of_the_time_the_best_interval_fits_into_what_is_left() -> None:
    """Thirty seconds between faults leave ten: with longer intervals nothing would ever be saved."""
    faults = [30.0 * number for number in range(1, 10)]
    assert 2 <= best_interval(faults, 300.0, COSTS) <= 10
    assert reached(faults, 300.0, COSTS, 12) < reached(faults, 300.0, COSTS, best_interval(faults, 300.0, COSTS))
