"""The timeline of a recovery: what ranks leave, tell and what is made of it."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from thread_ranks import ThreadTransport, Together, on_ranks

from megatron.core.dist_checkpointing.moe.boot_clock import boot_id
from megatron.core.dist_checkpointing.moe.recovery.timeline import (
    FILE,
    Milestone,
    RecoveryTimeline,
    Timestamps,
    forget,
    gather_timeline,
    left_in,
)
from megatron.core.dist_checkpointing.moe.storage.small_files import INFORMING_BYTES
from megatron.core.dist_checkpointing.moe.types import RecoveryPlan, Topology
from megatron.core.dist_checkpointing.moe.types.recovery import ReplaySegment, Scope

TOPOLOGY = Topology(world_size=4, pp=2, ep=2, ranks_per_node=2)
PLAN = RecoveryPlan(7, Scope.LOCAL, (ReplaySegment((1,), 4, 7),), ())
AFTER = dict.fromkeys(("restarted", "rendezvous", "built", "inventory", "planned", "fetched", "rejoined"), 0.0)


def fault(detected_s: float, parked_s: float, attempt: str = "1") -> dict[str, Any]:
    return {"attempt": attempt, "times": {"detected": detected_s, "parked": parked_s}}


def row(*earlier: dict[str, Any], clock_s: float = 120.0, **times: float) -> dict[str, Any]:
    at = dict(zip(AFTER, range(110, 117), strict=True))
    return {"clock_s": clock_s, "times": at | times, "earlier": list(earlier)}


class Wall:
    """A clock that is set by hand."""

    def __init__(self, now_s: float = 0.0) -> None:
        self.now_s = now_s

    def __call__(self) -> float:
        return self.now_s


def episode(*rows: dict[str, Any], plan: RecoveryPlan = PLAN) -> RecoveryTimeline:
    """What ranks with these times come to, all the same."""

    def main(transport: Any) -> RecoveryTimeline:
        one = rows[transport.rank]
        timestamps = Timestamps(Wall(one["clock_s"]), Wall(one["clock_s"]), stayed=one.get("stayed", False))
        for name, at_s in one["times"].items():
            timestamps.mark(Milestone(name), at_s)
        return gather_timeline(transport, timestamps, one["earlier"], plan, TOPOLOGY)

    first, *others = on_ranks(*[main] * len(rows))
    assert all(one == first for one in others), others
    assert isinstance(first, RecoveryTimeline), first
    return first


def test_parts_last_from_one_slowest_rank_to_the_next_and_sum_up_to_the_whole() -> None:
    found = episode(row(fault(100, 101)), row(fault(100.5, 104)), row(), row(replayed=115.5, rejoined=118))
    assert found.parts == {
        "detect": 0.5,
        "park": 3.5,
        "restart": 6,
        "rendezvous": 1,
        "build": 1,
        "inventory": 1,
        "plan": 1,
        "fetch": 1,
        "replay": 0.5,
        "rejoin": 2.5,
    }
    assert found.total_s == 18
    assert found.begun_s == 100
    assert found.is_whole


def test_the_imports_of_new_processes_are_a_part_of_their_own() -> None:
    found = episode(row(fault(100, 101)), row(imported=110.75), row(), row(imported=110.25))
    assert (found.parts["restart"], found.parts["import"], found.parts["rendezvous"]) == (9, 0.75, 0.25)
    assert found.slowest["import"] == 1
    assert found.total_s == 16


def test_ranks_that_kept_their_processes_are_counted_and_told() -> None:
    found = episode(row(fault(100, 101)) | {"stayed": True}, row() | {"stayed": False}, row() | {"stayed": True}, row())
    assert found.stayed == 2
    assert "in place, 2 ranks kept their processes" in next(iter(found.lines()))
    assert "in place" not in next(iter(episode(row(), row(), row(), row()).lines()))


def test_the_slowest_rank_of_each_part_is_named() -> None:
    found = episode(row(fault(100, 101)), row(fault(100.5, 100.6)), row(planned=115), row(replayed=116, rejoined=118))
    assert found.slowest["detect"] == 1
    assert found.slowest["park"] == 0
    assert found.slowest["plan"] == 2
    assert found.slowest["replay"] == 3


def test_ranks_that_died_left_nothing_and_the_others_tell_when_it_was() -> None:
    found = episode(row(), row(fault(100, 101)), row(), row())
    assert found.total_s == 16
    assert found.told_by == 1


def test_when_nobody_left_word_the_timeline_begins_with_the_restart_and_says_so() -> None:
    found = episode(row(restarted=109), row(), row(), row())
    assert not found.is_whole
    assert found.begun_s == 109
    assert found.parts["restart"] == 1
    assert next(iter(found.lines())).startswith("recovery took 7.00 s from the restart to rejoin")
    assert "missing" in list(found.lines())[1]


def test_a_recovery_that_was_interrupted_counts_from_the_first_fault_on() -> None:
    found = episode(
        row(fault(100, 101)), row(fault(100.2, 101), fault(105, 106, "2")), row(fault(105.1, 105.2, "2")), row()
    )
    assert found.attempts == 2
    assert found.parts["aborted"] == 5
    assert found.parts["park"] == pytest.approx(0.9)
    assert found.total_s == 16
    assert "2 attempts" in list(found.lines())[1]


def test_a_part_that_nobody_passed_is_left_out_and_its_time_belongs_to_the_next_one() -> None:
    rows = [row(fault(100, 101)) for _ in range(4)]
    for one in rows:
        del one["times"]["built"]
    found = episode(*rows)
    assert "replay" not in found.parts
    assert "build" not in found.parts
    assert found.parts["inventory"] == 2


def test_a_clock_that_jumped_back_makes_no_part_negative() -> None:
    found = episode(row(fault(100, 101), rendezvous=90), row(rendezvous=90), row(rendezvous=90), row(rendezvous=90))
    assert found.parts["rendezvous"] == 0
    assert found.total_s == 16


def test_a_node_whose_clock_is_off_is_corrected_by_what_it_is_off_and_that_is_rank_timestamps() -> None:
    def late(one: dict[str, Any], by_s: float) -> dict[str, Any]:
        times = {name: at_s + by_s for name, at_s in one["times"].items()}
        earlier = [fault(one["times"]["detected"] + by_s, one["times"]["parked"] + by_s) for one in one["earlier"]]
        return {"clock_s": one["clock_s"] + by_s, "times": times, "earlier": earlier}

    right = [row(fault(100, 101)), row(), row(fault(100.5, 104)), row(replayed=115.5)]
    off = [*right[:2], *(late(one, 3600) for one in right[2:])]
    assert episode(*off).parts == pytest.approx(episode(*right).parts)
    assert episode(*off).clocks_s == 3600
    assert "node clocks differ by 3600.00 s" in list(episode(*off).lines())[-1]


def test_a_rank_that_reads_its_clock_late_does_not_make_the_clock_of_its_node_wrong() -> None:
    found = episode(row(fault(100, 101)), row(), row(clock_s=120.1), row(clock_s=123))
    assert found.clocks_s == 0
    assert found.total_s == 16


def test_the_line_says_who_replayed_and_how_much() -> None:
    line = next(iter(episode(row(fault(100, 101)), row(), row(), row(replayed=116)).lines()))
    assert "(local; 2 of 4 ranks replayed up to 3 iterations): detect 0.00, park 1.00, restart 9.00" in line
    dense = RecoveryPlan(7, Scope.GLOBAL, (ReplaySegment((0, 1), 7, 7),), ())
    assert "(global; no replay)" in next(iter(episode(row(), row(), row(), row(), plan=dense).lines()))


def test_json_gives_the_same_episode_back() -> None:
    found = episode(row(fault(100, 101)), row(), row(), row(replayed=116))
    data = json.loads(json.dumps(found.to_data()))
    assert data.pop("total_s") == found.total_s
    assert RecoveryTimeline(**data) == found


def test_a_fault_is_detected_once_and_other_points_count_when_they_are_passed_last() -> None:
    wall = Wall(1.0)
    timestamps = Timestamps(wall)
    for mark in (Milestone.DETECTED, Milestone.PLANNED):
        timestamps.mark(mark)
    wall.now_s = 2.0
    for mark in (Milestone.DETECTED, Milestone.PLANNED):
        timestamps.mark(mark)
    assert timestamps.times() == {"detected": 1.0, "planned": 2.0}


def test_a_point_can_be_noted_after_the_fact() -> None:
    timestamps = Timestamps(Wall(9.0))
    timestamps.mark(Milestone.DETECTED, 4.5)
    assert timestamps.times() == {"detected": 4.5}


def test_what_a_process_leaves_the_next_one_finds_and_tells(tmp_path: Path) -> None:
    timestamps = Timestamps(Wall(100.0))
    timestamps.mark(Milestone.DETECTED)
    timestamps.mark(Milestone.PARKED, 101.0)
    timestamps.leave(tmp_path, "1")
    earlier = left_in(tmp_path)
    assert [{"attempt": one["attempt"], "times": one["times"]} for one in earlier] == [fault(100.0, 101.0)]
    clocks = Wall(105.0), Wall(1105.0)
    (found,) = on_ranks(lambda all_: gather_timeline(all_, Timestamps(*clocks), earlier, PLAN, Topology(1)))
    assert (found.begun_s, found.parts, found.told_by) == (1100.0, {"detect": 0.0, "park": 1.0}, 1)


def test_times_that_lack_a_key_are_put_aside_with_its_name(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / FILE).write_text('[{"attempt": "1", "times": {}}]')
    assert left_in(tmp_path) == []
    assert f"{tmp_path / FILE} not readable, renamed to *.damaged: 'boot' is missing" in caplog.text


@pytest.mark.parametrize("step_s", [-86_400.0, 86_400.0, 1e9])
def test_a_clock_that_is_set_between_the_fault_and_the_recovery_changes_no_part(step_s: float, tmp_path: Path) -> None:
    clock, wall = Wall(100.0), Wall(1e9)
    before = Timestamps(clock, wall)
    before.mark(Milestone.DETECTED)
    before.leave(tmp_path, "1")
    clock.now_s, wall.now_s = 103.0, 1e9 + 3.0 + step_s
    after = Timestamps(clock, wall)
    after.mark(Milestone.RESTARTED)
    clock.now_s = 105.0
    after.mark(Milestone.REJOINED)
    (found,) = on_ranks(lambda all_: gather_timeline(all_, after, left_in(tmp_path), PLAN, Topology(1)))
    assert found.parts == {"detect": 0.0, "restart": 3.0, "rejoin": 2.0}
    assert found.begun_s == pytest.approx(1e9 + 3.0 + step_s - 5.0)


def test_times_from_before_the_node_was_booted_are_no_part_of_a_timeline(tmp_path: Path) -> None:
    Timestamps(Wall(1.0)).leave(tmp_path, "1")
    (left,) = json.loads((tmp_path / FILE).read_text())
    (tmp_path / FILE).write_text(json.dumps([left | {"boot": "another"}]))
    assert left_in(tmp_path) == []


def test_faults_before_the_recovery_is_over_are_kept_side_by_side_and_forgotten_together(tmp_path: Path) -> None:
    for attempt in ("1", "2", "2"):
        Timestamps(Wall(float(attempt))).leave(tmp_path, attempt)
    assert [one["attempt"] for one in left_in(tmp_path)] == ["1", "2"]
    forget(tmp_path)
    assert left_in(tmp_path) == []
    forget(tmp_path)


TIMES = json.dumps([{"attempt": "1", "boot": boot_id(), "times": {"parked": "%s"}}]).replace('"%s"', "%s")


@pytest.mark.parametrize(
    "content",
    [
        "", "{", "[1]", '[{"attempt": "1"}]', TIMES % '"x"', TIMES % "1e999", TIMES % "-Infinity", TIMES % "NaN",
        "[" * 100_000, " " * (INFORMING_BYTES + 1), "\0" * 9,
    ],
    ids=range(11),
)  # fmt: skip
def test_a_damaged_file_of_timestamps_costs_the_times_in_it_and_is_said_once(
    content: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / FILE).write_text(content)
    assert left_in(tmp_path) == []
    assert left_in(tmp_path) == []
    assert caplog.text.count("not readable") == 1
    assert (tmp_path / f"{FILE}.damaged").read_text() == content


@pytest.mark.parametrize("kind", ["fifo", "folder", "link", "link to a device"])
@pytest.mark.timeout(60)
def test_what_is_no_file_of_timestamps_is_neither_waited_for_nor_read(
    kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path, elsewhere = tmp_path / FILE, tmp_path / "elsewhere"
    elsewhere.write_text(TIMES % "1.5")
    make = {
        "fifo": lambda: os.mkfifo(path),
        "folder": path.mkdir,
        "link": lambda: path.symlink_to(elsewhere),
        "link to a device": lambda: path.symlink_to("/dev/zero"),
    }
    make[kind]()
    assert left_in(tmp_path) == []
    assert caplog.text.count("not readable") == 1


def test_timestamps_that_cannot_be_kept_do_not_disturb_a_failing_rank(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    Timestamps().leave(tmp_path / "gone", "1")
    assert "cannot write the timeline" in caplog.text


def test_timestamps_of_later_versions_are_passed_over(tmp_path: Path) -> None:
    (tmp_path / FILE).write_text(
        json.dumps([{"attempt": "1", "boot": boot_id(), "times": {"detected": 3, "teleported": 4}}])
    )
    assert left_in(tmp_path)[0]["times"] == {"detected": 3.0}


def test_clocks_are_read_right_after_all_ranks_have_met() -> None:
    wall = Wall(118.0)

    class Waiting(ThreadTransport):
        def least(self, values: Sequence[int]) -> tuple[int, ...]:
            wall.now_s += 7.0  # for the slowest rank
            return super().least(values)

    class Meanwhile(Wall):
        def __call__(self) -> float:
            return wall.now_s

    timestamps = Timestamps(Wall(118.0), Meanwhile())
    timestamps.mark(Milestone.RESTARTED, 110.0)
    timestamps.mark(Milestone.REJOINED)
    found = gather_timeline(Waiting(0, Together(1)), timestamps, [fault(100.0, 101.0)], PLAN, Topology(1))  # type: ignore[arg-type]
    assert found.parts == {"detect": 0.0, "park": 1.0, "restart": 9.0, "rejoin": 8.0}
    assert found.begun_s == 107.0


def test_what_a_rank_receives_of_the_timeline_does_not_grow_with_the_number_of_ranks() -> None:
    def most_bytes(ranks: int) -> int:
        messages: list[int] = []

        class Counted(ThreadTransport):
            def merge(self, value: bytes, combine: Callable[[bytes, bytes], bytes]) -> bytes:
                merged = super().merge(value, combine)
                messages.append(len(merged))
                return merged

        def main(transport: ThreadTransport) -> RecoveryTimeline:
            timestamps = Timestamps(Wall(120.0), Wall(120.0))
            for at_s, name in enumerate(AFTER):
                timestamps.mark(Milestone(name), 110.0 + at_s)
            own = Counted(transport.rank, transport.together)
            return gather_timeline(own, timestamps, [fault(100, 101)], PLAN, Topology(ranks, ranks_per_node=4))  # type: ignore[arg-type]

        assert on_ranks(*[main] * ranks)[0].told_by == ranks
        return max(messages)

    assert most_bytes(64) <= most_bytes(8) + 32  # numbers of ranks have more digits
