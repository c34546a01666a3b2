"""Fault injection: what is accepted, and that each fault strikes once per job."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from megatron.core.dist_checkpointing.moe.errors import MoECheckpointError, UsageError
from megatron.core.dist_checkpointing.moe.runtime.faults import (
    FaultInjector,
    FaultPoint,
    Phase,
    check_fault_ranks,
    parse_fault,
)


class Kills:
    """Counts instead of killing."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self) -> None:
        self.count += 1


@pytest.mark.parametrize(
    ("text", "point"),
    [
        ("2@7", FaultPoint(2, 7, Phase.START)),
        ("0@1:forward-backward", FaultPoint(0, 1, Phase.FORWARD_BACKWARD)),
        ("11@300:step", FaultPoint(11, 300, Phase.STEP)),
        ("1@6:save", FaultPoint(1, 6, Phase.SAVE)),
        ("1@6:end", FaultPoint(1, 6, Phase.END)),
    ],
)
def test_a_fault_is_read(text: str, point: FaultPoint) -> None:
    assert parse_fault(text) == point


@pytest.mark.parametrize("phase", Phase)
def test_a_printed_fault_reads_back_as_itself(phase: Phase) -> None:
    assert parse_fault(str(FaultPoint(3, 14, phase))) == FaultPoint(3, 14, phase)


@pytest.mark.parametrize(
    "text", ["", "7", "@7", "1@", "a@7", "1@b", "-1@7", "1@7:", "1@7:never", "1@7:START", "1@7 ", "\u0661@7"]
)
def test_anything_else_is_refused_with_the_valid_phases(text: str) -> None:
    with pytest.raises(UsageError, match="start, forward-backward, step, save, end"):
        parse_fault(text)


def test_iteration_zero_is_refused_because_iterations_count_from_one() -> None:
    with pytest.raises(UsageError, match=r"use 1@1:step"):
        parse_fault("1@0:step")


def test_a_rank_that_the_job_does_not_have_is_refused() -> None:
    check_fault_ranks([FaultPoint(3, 1)], world_size=4)
    with pytest.raises(UsageError, match=r"rank 4, but the ranks are 0 to 3"):
        check_fault_ranks([FaultPoint(4, 1)], world_size=4)


def test_a_fault_strikes_at_its_rank_iteration_and_phase_only(tmp_path: Path) -> None:
    struck = []
    for rank in (0, 1):
        kills = Kills()
        injector = FaultInjector([FaultPoint(1, 3, Phase.STEP)], rank, tmp_path / str(rank), kills)
        for iteration in (2, 3, 4):
            for phase in Phase:
                before = kills.count
                injector.reached(iteration, phase)
                if kills.count > before:
                    struck.append((rank, iteration, phase))
    assert struck == [(1, 3, Phase.STEP)]


def test_a_fault_does_not_strike_again_after_a_restart_and_says_why(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    points, kills = [FaultPoint(0, 3)], Kills()
    FaultInjector(points, 0, tmp_path, kills).reached(3, Phase.START)
    with caplog.at_level("INFO"):
        FaultInjector(points, 0, tmp_path, kills).reached(3, Phase.START)
    assert kills.count == 1
    assert "was injected before" in caplog.text and f"{tmp_path}/fired-0-3-start" in caplog.text


def test_each_of_several_faults_strikes_once(tmp_path: Path) -> None:
    points, kills = [FaultPoint(0, 3), FaultPoint(0, 3, Phase.END), FaultPoint(0, 5)], Kills()
    for _restart in range(4):
        injector = FaultInjector(points, 0, tmp_path, kills)
        for iteration in range(1, 7):
            for phase in Phase:
                injector.reached(iteration, phase)
    assert kills.count == 3


def test_another_job_has_its_own_faults(tmp_path: Path) -> None:
    points, kills = [FaultPoint(0, 3)], Kills()
    for job in ("a", "b"):
        FaultInjector(points, 0, tmp_path / job, kills).reached(3, Phase.START)
    assert kills.count == 2


def test_the_record_is_on_disk_before_the_kill(tmp_path: Path) -> None:
    seen: list[list[str]] = []
    injector = FaultInjector([FaultPoint(2, 3)], 2, tmp_path, lambda: seen.append(os.listdir(tmp_path)))
    injector.reached(3, Phase.START)
    assert seen == [["fired-2-3-start"]]


def test_without_a_ledger_a_fault_strikes_once_per_process() -> None:
    kills = Kills()
    injector = FaultInjector([FaultPoint(0, 3)], 0, None, kills)
    injector.reached(3, Phase.START)
    injector.reached(3, Phase.START)
    assert kills.count == 1


def test_a_ledger_that_cannot_be_written_is_an_error_and_nobody_dies(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(MoECheckpointError, match="cannot be recorded"):
        FaultInjector([FaultPoint(0, 3)], 0, tmp_path / "file" / "ledger", Kills())


def test_a_ledger_that_disappears_is_an_error_and_nobody_dies(tmp_path: Path) -> None:
    kills = Kills()
    injector = FaultInjector([FaultPoint(0, 3)], 0, tmp_path / "ledger", kills)
    (tmp_path / "ledger").rmdir()
    with pytest.raises(MoECheckpointError, match="cannot be recorded"):
        injector.reached(3, Phase.START)
    assert kills.count == 0


def test_a_rank_without_faults_leaves_no_directory_behind(tmp_path: Path) -> None:
    FaultInjector([FaultPoint(1, 3)], 0, tmp_path / "ledger").reached(3, Phase.START)
    assert not (tmp_path / "ledger").exists()


def test_a_real_process_dies_of_sigkill_once_and_lives_the_second_time(tmp_path: Path) -> None:
    def run() -> int:
        child = os.fork()
        if child == 0:
            FaultInjector([FaultPoint(0, 2, Phase.SAVE)], 0, tmp_path).reached(2, Phase.SAVE)
            os._exit(0)
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

    assert run() == -signal.SIGKILL
    assert run() == 0
