"""What jobs wrote is read whole or not, and added up."""

from __future__ import annotations

import json
import math
import re
import time
from pathlib import Path
from typing import Any

import pytest
from effort import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from lines import iteration, recovery, start, written

from megatron.core.dist_checkpointing.moe.errors import MoECheckpointError, UnreadableCheckpoint, UsageError
from moe_ckpt.runs.accounts import Run
from moe_ckpt.runs.advice import sayings
from moe_ckpt.runs.figures import figures_of
from moe_ckpt.runs.page import render
from moe_ckpt.runs.run_log import read_run
from moe_ckpt.runs.sources import read_runs

FULL = examples(100) == 100
"""Whether this is `make test-full`."""


def run_of(path: Path, *lines: dict[str, Any], end: str = "") -> Run:
    return Run(read_run(written(path / "metrics.jsonl", *lines, end=end), "run"))


def test_time_is_divided_into_what_training_got_and_what_it_lost(tmp_path: Path) -> None:
    run = run_of(
        tmp_path,
        start(100.0),
        iteration(1, 101.0), iteration(2, 101.5), iteration(3, 102.0),  # 0.5 s before the first one
        recovery(102.5, 2), start(110.0, after=2), iteration(3, 111.0), iteration(4, 111.5),
    )  # fmt: skip
    time_ = run.time
    # Iteration 3 was trained twice. From 102 to 110.5 training stopped: the recovery ended then, after the start.
    assert time_.useful_s == pytest.approx(4 * 0.4) and time_.stall_s == pytest.approx(4 * 0.1)
    assert time_.again_s == pytest.approx(0.5) and time_.stopped_s == pytest.approx(8.5)
    assert time_.other_s == pytest.approx(0.5) and time_.total_s == pytest.approx(11.5)
    assert time_.ettr == pytest.approx(1.6 / 11.5)


@pytest.mark.parametrize("step_s", [-86_400.0, 86_400.0])
@pytest.mark.parametrize("from_line", range(1, 8))
def test_a_clock_that_is_set_in_the_middle_changes_no_figure(step_s: float, from_line: int, tmp_path: Path) -> None:
    def told(line: dict[str, Any], late_s: float, boot: dict[str, str]) -> dict[str, Any]:
        """With the seconds since the node was booted, at a time of day that is off by so much."""
        facts = next((line[name] for name in ("run", "recovery") if name in line), line)
        facts |= boot | {"at_s": facts.get("at_s", 109.0) + late_s, "since_boot_s": facts.get("at_s", 109.0) - 50.0}
        if "begun_s" in facts:
            facts["begun_s"] += late_s
        return line

    def lines(step_s: float) -> list[dict[str, Any]]:
        all_lines = [
            start(100.0), iteration(1, 101.0), iteration(2, 101.5), iteration(3, 102.0),
            start(108.0, after=2), recovery(100.5, 2), iteration(3, 111.0), iteration(4, 111.5),
        ]  # fmt: skip
        return [
            told(line, step_s if at >= from_line else 0.0, {"boot": "b"} if "run" in line else {})
            for at, line in enumerate(all_lines)
        ]

    assert run_of(tmp_path, *lines(step_s)).time == run_of(tmp_path, *lines(0.0)).time


def test_lines_without_times_are_added_up_by_what_they_say_of_themselves(tmp_path: Path) -> None:
    time_ = run_of(tmp_path, iteration(1), iteration(2), recovery(5.0, 2), iteration(3)).time
    assert not time_.is_by_clock
    assert time_.total_s == pytest.approx(1.5 + 8.0) and time_.useful_s == pytest.approx(1.2)


def test_copies_that_slow_passes_down_count_as_much_as_they_do_on_average(tmp_path: Path) -> None:
    noisy = [iteration(number, slowed_s=slowed_s) for number, slowed_s in enumerate((0.2, -0.1, 0.2), start=1)]
    assert run_of(tmp_path, *noisy).time.slowed_s == pytest.approx(0.3)
    assert run_of(tmp_path, *noisy).time.useful_s == pytest.approx(3 * 0.4 - 0.3)
    without = [iteration(number, slowed_s=0.2, snapshot_bytes=0) for number in (1, 2)]
    assert run_of(tmp_path, *without).time.slowed_s == 0


def test_times_below_zero_count_as_none(tmp_path: Path) -> None:
    assert run_of(tmp_path, iteration(1, stall_s=-1.0)).time.ettr == 1
    assert run_of(tmp_path, iteration(1, 1.0, iteration_time_s=-1.0)).time.total_s == 0


def test_of_an_iteration_that_ran_again_the_last_report_counts(tmp_path: Path) -> None:
    run = run_of(
        tmp_path, iteration(1), iteration(2, lm_loss=9.0), iteration(3), iteration(2), iteration(3), iteration(4),
        iteration(3, replayed=True), iteration(5),
    )  # fmt: skip
    assert [run.log.columns["iteration"][at] for at in run.kept] == [1, 2, 3, 4, 5]
    assert 9.0 not in run.of_kept("lm_loss")
    assert len(run.again) == 3 and run.newest == 5


def test_stops_are_recoveries_starts_and_iterations_that_begin_again(tmp_path: Path) -> None:
    run = run_of(
        tmp_path,
        start(0.0), iteration(1, 1.0), iteration(2, 2.0),
        start(9.0, after=0), iteration(1, 10.0), iteration(2, 11.0),  # from a checkpoint
        start(20.0, after=1), iteration(2, 20.5, replayed=True), recovery(12.0, 2), iteration(3, 21.0),
        iteration(2, 30.0),  # of a version without starts
    )  # fmt: skip
    assert [(stop.after, stop.resumed, stop.recovery is not None) for stop in run.stops] == [
        (2, 0, False), (2, 2, True), (3, 1, False),
    ]  # fmt: skip


def test_lost_tokens_of_all_recoveries_are_summed_by_layer_and_expert(tmp_path: Path) -> None:
    lost = ({"0": {"1": 5, "2": 7}}, {"0": {"1": 5}, "3": {"0": 1}})
    run = run_of(tmp_path, iteration(1), *(recovery(1.0, at, lost_tokens=one) for at, one in enumerate(lost)))
    assert run.lost_tokens == {0: {1: 10, 2: 7}, 3: {0: 1}}


def test_tokens_that_were_trained_again_from_further_back_are_not_lost(tmp_path: Path) -> None:
    first, second = (recovery(at, target, lost_tokens={"0": {"1": 5}}) for at, target in ((1.0, 20), (2.0, 10)))
    assert run_of(tmp_path, iteration(1), first, second).lost_tokens == {0: {1: 5}}
    assert run_of(tmp_path, iteration(1), first, first).lost_tokens == {0: {1: 5}}
    assert run_of(tmp_path, iteration(1), second, first).lost_tokens == {0: {1: 10}}
    assert run_of(tmp_path, first, iteration(21), start(9.0, after=15), iteration(16)).lost_tokens == {}


def test_a_person_is_told_of_less_protection_with_its_reason(tmp_path: Path) -> None:
    run = run_of(tmp_path, iteration(1), iteration(2, protection="degraded", reason="rank 3: no room"))
    (said,) = [one for one in sayings(run) if one.weight == "warn" and "in memory" in one.text]
    assert "Degraded" in said.text and "rank 3: no room" in said.text


def test_waiting_much_for_checkpoints_is_said_with_what_to_do(tmp_path: Path) -> None:
    def told(stall_s: float) -> bool:
        return any("--moe-ckpt-window" in one.text for one in sayings(run_of(tmp_path, iteration(1, stall_s=stall_s))))

    assert told(0.1) and not told(0.001)


def test_a_line_that_ends_in_the_middle_costs_that_line_only(tmp_path: Path) -> None:
    run = run_of(tmp_path, iteration(1), end='{"iteration": 2, "lm_lo')
    assert len(run.log) == 1 and "ends in the middle" in run.log.notes[0]
    healed = written(tmp_path / "healed", iteration(1), end='{"iteration": 2, "lm\n' + json.dumps(iteration(3)) + "\n")
    log = read_run(healed, "healed")
    assert len(log) == 2 and log.notes == ["1 lines cannot be read and are left out; the first is line 2"]


def test_a_later_version_is_shown_as_far_as_it_is_understood(tmp_path: Path) -> None:
    run = run_of(tmp_path, start(0.0, version=7), iteration(1, new_field={"a": []}), {"weather": {"rain": 1}})
    assert len(run.log) == 1 and "later version (7)" in run.log.notes[0]


@pytest.mark.parametrize(
    "text", ["", "\n\n", "not JSON\n", "[]\n{}\n", '{"iteration": "x"}\n', '{"iter', "\x00\xff\n", "1e999\n"]
)
def test_a_file_without_a_line_of_a_job_is_refused_by_name(text: str, tmp_path: Path) -> None:
    path = tmp_path / "odd.jsonl"
    path.write_text(text)
    with pytest.raises(UnreadableCheckpoint, match=r"odd\.jsonl has no line of --metrics-jsonl"):
        read_run(path, "odd")


def test_places_that_are_no_runs_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="does not exist"):
        read_runs([tmp_path / "nowhere"])
    with pytest.raises(UsageError, match=r"has no metrics\.jsonl"):
        read_runs([tmp_path])
    (tmp_path / "result.json").write_text("[]")
    with pytest.raises(UnreadableCheckpoint, match="not the result of a drill"):
        read_runs([tmp_path])


def test_a_folder_of_a_drill_names_what_was_struck_and_whether_it_mattered(tmp_path: Path) -> None:
    (tmp_path / "subject").mkdir()
    written(tmp_path / "subject" / "reports", iteration(1), iteration(2), recovery(3.0, 2), iteration(3))
    faults = [{"kind": "rank", "target": 1, "after_iteration": 2}, {"kind": "node", "target": 0, "after_iteration": 2}]
    subject = {"ettr": 0.5, "faults": faults, "wrong": [], "wrong_components": []}
    result = {"subject": subject, "baseline": {"ettr": 0.2}}
    (tmp_path / "result.json").write_text(json.dumps(result))
    (run,) = read_runs([tmp_path])
    assert [stop.what for stop in run.stops] == ["rank 1, node 0"]
    assert any("to the last bit" in one.text for one in sayings(run))
    subject["wrong"] = ["iteration 2: lm_loss is 1, but 2 without faults"]
    (tmp_path / "result.json").write_text(json.dumps(result))
    assert any(one.weight == "bad" and "NOT" in one.text for one in sayings(read_runs([tmp_path])[0]))


def test_a_million_lines_are_read_in_bounded_time_and_memory(tmp_path: Path) -> None:
    count = 1_000_000 if FULL else 30_000
    path = tmp_path / "long.jsonl"
    half = json.dumps(iteration(1))[len('{"iteration": 1') :]
    with path.open("w") as file:
        file.writelines(f'{{"iteration": {number}{half}\n' for number in range(1, count + 1))
    began_s = time.monotonic()
    run = Run(read_run(path, "long"))
    page = render([run], 0.0)
    assert run.newest == count and len(page) < 2_000_000
    assert sum(column.itemsize * len(column) for column in run.log.columns.values()) < 200 * count
    assert time.monotonic() - began_s < 120 * count / 1e6 + 20  # a busy machine takes its time


_SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8)
_ANYTHING = st.recursive(
    _SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3)
)
_NAMES = st.sampled_from(sorted({*iteration(1, 0.0), *start(0.0)["run"], *recovery(0.0, 1)["recovery"]}))
_FIELDS = st.dictionaries(_NAMES, _ANYTHING, max_size=6)
_LINES = st.one_of(
    st.binary(max_size=40),
    _ANYTHING.map(lambda value: json.dumps(value).encode()),
    st.builds(lambda more, number: json.dumps(iteration(number) | more).encode(), _FIELDS, st.integers(-2, 6)),
    st.builds(lambda more: json.dumps({"run": start(1.0)["run"] | more}).encode(), _FIELDS),
    st.builds(lambda more: json.dumps({"recovery": recovery(1.0, 2)["recovery"] | more}).encode(), _FIELDS),
)


def runs_of(lines: list[bytes], cut: int, folder: Path) -> list[Run] | MoECheckpointError:
    path = folder / "fuzzed.jsonl"
    path.write_bytes(b"\n".join(lines)[: -cut or None])
    try:
        return read_runs([path])
    except MoECheckpointError as error:
        return error


@pytest.mark.timeout(1800)  # 10,000 take minutes
@settings(max_examples=10_000 if FULL else 200)
@given(lines=st.lists(_LINES, max_size=8), cut=st.integers(0, 30))
def test_whatever_is_in_a_file_there_are_figures_or_the_named_error(
    lines: list[bytes], cut: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    runs = runs_of(lines, cut, tmp_path_factory.getbasetemp())
    if isinstance(runs, MoECheckpointError):
        assert "\n" not in str(runs)
        return
    assert not math.isnan(runs[0].time.total_s) and 0 <= runs[0].time.ettr <= 1
    assert json.dumps(figures_of(runs).as_data(), allow_nan=False)


@settings(max_examples=1_000 if FULL else 30)
@given(lines=st.lists(_LINES, max_size=8))
def test_whatever_can_be_read_can_be_shown(lines: list[bytes], tmp_path_factory: pytest.TempPathFactory) -> None:
    runs = runs_of(lines, 0, tmp_path_factory.getbasetemp())
    if not isinstance(runs, MoECheckpointError):
        page = render([*runs, *runs], 0.0, watch_s=1.0)
        assert page.count("<section") == page.count("</section>")
        assert not re.search(r'(?: d| x| width|style)="[^"]*(?:nan|inf)', page)
