"""Who looks at a running job sees how each rank stands: through its store, or by what lies on this node."""

from __future__ import annotations

import json
import tempfile
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from effort import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from lines import iteration, start, written
from torch.distributed import PrefixStore, TCPStore

from megatron.core.dist_checkpointing.moe.errors import UsageError
from megatron.core.dist_checkpointing.moe.policy.lifecycle import Protection, ProtectionState
from megatron.core.dist_checkpointing.moe.runtime import status as published
from megatron.core.dist_checkpointing.moe.runtime.status import StatusBoard, readable
from megatron.core.dist_checkpointing.moe.snapshot.coordinator import ProtectionReport
from megatron.core.dist_checkpointing.moe.storage import ownership
from megatron.core.dist_checkpointing.moe.storage.ownership import OWNER_FILE
from megatron.pretrain.bound_store import bound_store
from moe_ckpt.commands.main import commands
from moe_ckpt.runs import status as read
from moe_ckpt.runs.status import RankStatus, status_of

WELL = ProtectionReport(0.1, 1, 1, Protection(ProtectionState.PROTECTED, 4), None, protected_iteration=9, iteration=10)
POOR = ProtectionReport(
    0.1, 1, 1, Protection(ProtectionState.DEGRADED, 8), Protection(ProtectionState.PROTECTED, 8), protected_iteration=7,
    persisted_iteration=8, reason="the snapshot of iteration 9 was NOT taken: no room", iteration=10,
)  # fmt: skip


@pytest.fixture
def store() -> TCPStore:
    return bound_store("127.0.0.1", timeout=timedelta(seconds=20))


def slot(memory: Path, rank: int, job: str = "job") -> Path:
    """The folder of a rank on the only node; no process holds it."""
    folder = memory / "node-0" / job / f"slot-{rank}"
    folder.mkdir(parents=True)
    (folder / OWNER_FILE).write_text("{}")
    return folder


def shown(folder: Path, store: Any, rank: int, report: ProtectionReport, node: str = "node-0", ranks: int = 2) -> None:
    """A rank says how it stands, and has said it when this returns."""
    facts = {"rank": rank, "world_size": ranks, "node": node, "job": "job", "strategy": "sparse"}
    board = StatusBoard(folder, store, facts)
    board.show(report)
    deadline_s = time.monotonic() + 30
    key = published.STATUS_KEY.format(rank)
    while not ((folder / published.STATUS_FILE).exists() and store_of(store).check([key])):
        assert time.monotonic() < deadline_s
        time.sleep(0.02)
    board.close()


@pytest.mark.parametrize(("ranks", "is_newest"), [(2, True), (10**6, False)])
def test_ranks_of_a_large_job_write_into_the_one_store_as_seldom_as_that_takes_all_of_them(
    ranks: int, is_newest: bool, store: TCPStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(published, "INTERVAL_S", 0.05)
    folder, key = slot(tmp_path, 0), published.STATUS_KEY.format(0)
    board = StatusBoard(folder, store, {"rank": 0, "world_size": ranks, "node": "n", "job": "job", "strategy": "full"})
    for report in (WELL, POOR):
        board.show(report)
        deadline_s, said = time.monotonic() + 30, f'"protected_iteration": {report.protected_iteration}'
        while not (path := folder / published.STATUS_FILE).exists() or said not in path.read_text():
            assert time.monotonic() < deadline_s
            time.sleep(0.02)
    time.sleep(0.2)  # the store is written to behind the file
    found = json.loads(store_of(store).get(key))
    board.close()
    assert (found["protected_iteration"] == POOR.protected_iteration) is is_newest


def test_whoever_has_closed_the_status_can_remove_its_folder(
    store: TCPStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file that came meanwhile kept it on the node, after jobs that had ended well."""
    folder, write, is_writing = slot(tmp_path, 0), Path.write_text, threading.Event()
    late = lambda *given: (is_writing.set(), time.sleep(0.2), write(*given))  # noqa: E731
    monkeypatch.setattr(Path, "write_text", late)
    board = StatusBoard(folder, store, {"rank": 0})
    board.show(WELL)
    assert is_writing.wait(60)
    board.close()
    content = sorted(folder.iterdir())
    time.sleep(0.5)
    assert sorted(folder.iterdir()) == content


def store_of(store: Any) -> Any:
    """A client of its own, without prefix."""
    root = readable(store)
    assert root is not None
    return TCPStore(root.host, root.port, is_master=False, wait_for_workers=False)


def status(*arguments: object) -> Result:
    return CliRunner().invoke(commands, ["status", *map(str, arguments)])


def test_both_ends_agree_on_where_it_stands() -> None:
    assert (published.STATUS_FILE, published.STATUS_KEY) == (read.STATUS_FILE, read.STATUS_KEY)


def test_all_nodes_are_asked_through_the_store_that_the_ranks_met_at(store: TCPStore, tmp_path: Path) -> None:
    inner = PrefixStore("default", PrefixStore("attempt", store))
    shown(slot(tmp_path, 0), inner, 0, WELL)
    shown(slot(tmp_path / "elsewhere", 1), inner, 1, POOR, node="node-1")
    result = status("--store", f"127.0.0.1:{store.port}", "--json")
    found = json.loads(result.output)
    assert result.exit_code == 1, "one rank has less than was asked for"
    assert found["ranks_reporting"] == "2 of 2" and found["protection"] == "degraded"
    assert (found["iteration"], found["newest_protected"], found["newest_persisted"]) == (10, 7, 8)
    assert [row["node"] for row in found["nodes"]] == ["node-0", "node-1"]
    assert all(row["memory_free_bytes"] > 0 for row in found["nodes"])
    assert found["problems"] == [{"rank": 1, "node": "node-1", "what": "degraded", "why": POOR.reason}]


def test_a_node_without_the_store_knows_its_own_ranks_and_says_so(store: TCPStore, tmp_path: Path) -> None:
    shown(slot(tmp_path, 0), store, 0, WELL)
    result = status(tmp_path)
    assert result.exit_code == 1 and "its process has ended" in result.output
    assert "Local view only: its processes on this node have ended." in result.output


def test_a_store_that_is_gone_is_said_in_one_line(tmp_path: Path) -> None:
    result = status("--store", "127.0.0.1:1")
    assert str(result.exception) == "the store at 127.0.0.1:1 cannot be reached: Connection refused"
    unusable = status("--store", "nowhere").exception
    assert isinstance(unusable, UsageError) and "no HOST:PORT" in str(unusable), "so the exit code is 2"


def test_lost_answers_of_a_name_server_do_not_make_a_store_unreachable(
    store: TCPStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits = []

    class Client(TCPStore):
        def __init__(self, *place: Any, timeout: timedelta, **settings: Any) -> None:
            waits.append(timeout)
            super().__init__(*place, timeout=timeout, **settings)

    shown(slot(tmp_path, 0), store, 0, WELL, ranks=1)
    monkeypatch.setattr("torch.distributed.TCPStore", Client)
    assert status("--store", f"127.0.0.1:{store.port}").exit_code == 0
    assert waits and min(waits) >= timedelta(seconds=3 * 2 * 5), "three names, each asked for twice, for 5 s each"


def test_several_jobs_are_told_apart(store: TCPStore, tmp_path: Path) -> None:
    for job in ("one", "two"):
        text = json.dumps({"rank": 0, "job": job, "world_size": 1, "protection": "protected", "at_s": time.time()})
        (slot(tmp_path, 0, job) / published.STATUS_FILE).write_text(text)
    assert "choose one of one, two with --job" in str(status(tmp_path).exception)
    assert "two" in status(tmp_path, "--job", "two").output
    assert "no status of job three" in str(status(tmp_path, "--job", "three").exception)


def test_an_empty_memory_dir_has_no_job(tmp_path: Path) -> None:
    assert "holds no memory of a job: none runs here" in str(status(tmp_path).exception)
    slot(tmp_path, 0)
    assert "no status of a job" in str(status(tmp_path).exception)


def test_the_memory_of_the_slurm_job_in_which_it_runs_is_looked_at_first(monkeypatch: pytest.MonkeyPatch) -> None:
    with tempfile.TemporaryDirectory(prefix="moe-ckpt-job-", dir="/dev/shm") as memory:
        monkeypatch.setenv("SLURM_JOB_ID", memory.rpartition("-")[2])
        assert memory in str(status().exception)


def test_what_another_user_may_have_put_in_the_usual_place_is_not_believed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    planted = tmp_path / "planted"
    planted.symlink_to(tmp_path)
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    monkeypatch.setattr(ownership, "default_memory_folder", lambda: planted)
    assert f"{planted} was made by another user: name the folder of the job" in str(status().exception)


def test_a_rank_that_says_nothing_for_long_is_silent() -> None:
    one = RankStatus(0, "job", "node", "full", 100.0, 5, "protected", 5, None, -1, world_size=1)
    found = read.JobStatus((one,), from_store=True)
    assert read.is_well(found, 110.0, 60.0) and not read.is_well(found, 200.0, 60.0)
    (table,) = [table for table in read.as_report(found, 200.0, 60.0).tables if table.title == "Problems"]
    assert table.rows[0][2] == "silent" and "100 s" in table.rows[0][3]


def test_of_a_rank_whose_clock_is_ahead_it_is_not_said_that_it_spoke_just_now() -> None:
    one = RankStatus(0, "job", "node", "full", 1000.0, 5, "protected", 5, None, -1, world_size=1)
    found = read.JobStatus((one,), from_store=True)
    assert read.is_well(found, 990.0, 60.0) and not read.is_well(found, 100.0, 60.0)
    report = read.as_report(found, 100.0, 60.0)
    (table,) = [table for table in report.tables if table.title == "Problems"]
    assert table.rows[0][2] == "clock" and "900 s ahead" in table.rows[0][3]
    assert {fact.name: fact.value for fact in report.facts}["Last heartbeat"] is None


def test_a_rank_that_was_never_heard_of_is_no_good_sign() -> None:
    one = RankStatus(0, "job", "node", "full", 100.0, 5, "protected", 5, None, -1, world_size=2)
    assert not read.is_well(read.JobStatus((one,), from_store=True), 101.0, 60.0)


def test_ranks_of_other_nodes_that_cannot_be_asked_are_no_good_sign() -> None:
    one = RankStatus(0, "job", "node", "full", 100.0, 5, "protected", 5, None, -1, world_size=2)
    assert not read.is_well(read.JobStatus((one,), from_store=False, why_not="x"), 101.0, 60.0)


def test_the_log_of_a_job_says_what_can_be_known_from_anywhere(tmp_path: Path) -> None:
    last = iteration(2, time.time(), persistence="protected", persisted_iteration=1)
    path = written(tmp_path / "metrics.jsonl", start(0.0), iteration(1, 1.0), last)
    result = status("--metrics", path, "--json")
    found = json.loads(result.output)
    assert result.exit_code == 0 and (found["job"], found["iteration"], found["newest_persisted"]) == ("j", 2, 1)


def test_a_log_whose_lines_have_no_time_does_not_say_that_its_job_lives(tmp_path: Path) -> None:
    result = status("--metrics", written(tmp_path / "metrics.jsonl", iteration(1, persistence="protected")), "--json")
    found = json.loads(result.output)
    assert (result.exit_code, found["last_heartbeat_s"]) == (1, None)
    assert [(row["rank"], row["what"]) for row in found["problems"]] == [(0, "undated")]


@settings(max_examples=10_000 if examples(100) == 100 else 300)
@given(text=st.binary(max_size=60) | st.dictionaries(
    st.sampled_from("rank job node at_s iteration protection persistence memory_free_bytes world_size store".split()),
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.lists(st.none(), max_size=2),
).map(lambda data: json.dumps(data).encode()))  # fmt: skip
def test_whatever_lies_there_is_a_status_or_none(text: bytes) -> None:
    found = status_of(text)
    if found is not None:
        report = read.as_report(read.JobStatus((found,), from_store=False, why_not="x"), 10.0, 60.0)
        assert report.as_data()["nodes"]
