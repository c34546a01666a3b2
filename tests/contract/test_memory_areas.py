"""A process has one folder per area of the memory tier, each with segments and an owner of its own."""

from __future__ import annotations

import gc
import json
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import nullcontext
from pathlib import Path

import pytest
from workload import FACTS, JOB, LAYOUT, RANK, SEGMENTS, read, write

from megatron.core.dist_checkpointing.moe.boot_clock import is_ending, started
from megatron.core.dist_checkpointing.moe.config import MoECheckpointConfig
from megatron.core.dist_checkpointing.moe.errors import UsageError
from megatron.core.dist_checkpointing.moe.ports import NoRoom, SnapshotId, StoreFailure
from megatron.core.dist_checkpointing.moe.runtime.process_info import ProcessInfo, drop_memory, open_memory
from megatron.core.dist_checkpointing.moe.storage import ownership
from megatron.core.dist_checkpointing.moe.storage.memory import MemoryStore
from megatron.core.dist_checkpointing.moe.storage.ownership import kept_free, live_owner, slot_directories
from megatron.core.dist_checkpointing.moe.types import LOG

ONE = SnapshotId(10, RANK, LOG)


@pytest.fixture
def kind() -> str:
    return "memory"


def test_two_areas_of_a_slot_share_neither_segments_nor_snapshots(place: Path) -> None:
    snapshots, standby = (
        MemoryStore(place, JOB, RANK, SEGMENTS[:1]),
        MemoryStore(place, JOB, RANK, SEGMENTS[:2], area="standby"),
    )
    write(snapshots, ONE)
    with pytest.raises(NoRoom):
        snapshots.reserve(SnapshotId(11, RANK), LAYOUT)
    write(standby, ONE, 1)
    assert read(snapshots, ONE) != read(standby, ONE)
    standby.free(ONE)
    assert snapshots.snapshots().sealed == (ONE,)
    assert standby.snapshots().sealed == ()


def test_an_areas_folder_is_named_after_it(place: Path) -> None:
    store = MemoryStore(place, JOB, RANK, SEGMENTS, area="standby")
    assert store.directory == place / JOB / f"standby-{RANK:03d}"
    assert slot_directories(place, JOB, "standby") == {RANK: store.directory}
    assert slot_directories(place, JOB) == {}


def test_an_area_of_one_job_keeps_other_jobs_out_of_the_memory_dir(place: Path) -> None:
    store = MemoryStore(place, JOB, RANK, SEGMENTS, area="standby")
    with pytest.raises(UsageError, match="is in use by this process"):
        MemoryStore(place, "another", RANK, SEGMENTS)
    store.close()
    with pytest.raises(UsageError, match="was left behind by job"):
        MemoryStore(place, "another", RANK, SEGMENTS, area="standby")
    store = MemoryStore(place, JOB, RANK, SEGMENTS, area="standby")
    store.remove()
    MemoryStore(place, "another", RANK, SEGMENTS).remove()


def test_an_area_has_one_owner_at_a_time(place: Path) -> None:
    store = MemoryStore(place, JOB, RANK, SEGMENTS, area="standby")
    with pytest.raises(UsageError, match="in use by this process already"):
        MemoryStore(place, JOB, RANK, SEGMENTS, area="standby")
    store.close()
    MemoryStore(place, JOB, RANK, SEGMENTS, area="standby").close()


HOLDER = """
import fcntl, json, os, sys
file = open(sys.argv[1], "w")
fcntl.lockf(file, fcntl.LOCK_EX)
process = float(sys.argv[2]) if sys.argv[2:] else os.getpid()
json.dump({"job": "job", "slot": 3, "process": process, "host": "here"}, file)
file.flush()
print(flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize(("ends", "leaves"), [(True, True), (True, False), (False, False)])
def test_a_slot_is_waited_for_while_the_process_that_was_killed_ends(
    ends: bool, leaves: bool, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    MemoryStore(place, JOB, RANK, SEGMENTS).close()
    owner_file = slot_directories(place, JOB)[RANK] / "owner.json"
    command = [sys.executable, "-c", HOLDER, str(owner_file)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdin and holder.stdout and holder.stdout.readline()

        def asked(process: int) -> bool:
            assert process == holder.pid
            if leaves:
                holder.stdin.close()  # type: ignore[union-attr]
            return ends

        monkeypatch.setattr(ownership, "is_ending", asked)
        monkeypatch.setattr(ownership, "ENDING_S", 30.0 if leaves else 0.2)
        if leaves:
            MemoryStore(place, JOB, RANK, SEGMENTS).close()
        else:
            with pytest.raises(UsageError, match=f"is in use by job job, slot 3, process {holder.pid} on here"):
                MemoryStore(place, JOB, RANK, SEGMENTS)
        holder.kill()


@pytest.mark.parametrize("leaves", [True, False])
def test_a_slot_whose_owner_is_gone_is_waited_for_while_another_process_looks_at_it(
    leaves: bool, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    MemoryStore(place, JOB, RANK, SEGMENTS).close()
    owner_file, gone = slot_directories(place, JOB)[RANK] / "owner.json", 2**22 + 1  # above what a process may have
    command = [sys.executable, "-c", HOLDER, str(owner_file), str(gone)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdin and holder.stdout and holder.stdout.readline()

        def asked(_process: int) -> bool:
            if leaves:
                holder.stdin.close()  # type: ignore[union-attr]
            return False

        monkeypatch.setattr(ownership, "is_ending", asked)
        monkeypatch.setattr(ownership, "LOOKING_S", 30.0 if leaves else 0.2)
        with nullcontext() if leaves else pytest.raises(UsageError, match="is in use by job job, slot 3"):
            MemoryStore(place, JOB, RANK, SEGMENTS).close()
        holder.kill()


def test_a_slot_whose_owner_names_no_process_is_refused_at_once(place: Path) -> None:
    MemoryStore(place, JOB, RANK, SEGMENTS).close()
    owner_file = slot_directories(place, JOB)[RANK] / "owner.json"
    command = [sys.executable, "-c", HOLDER, str(owner_file), "inf"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout and holder.stdout.readline()
        with pytest.raises(UsageError, match="is in use by another process"):
            MemoryStore(place, JOB, RANK, SEGMENTS)
        holder.kill()


def test_a_process_that_has_ended_and_is_not_yet_gone_is_ending() -> None:
    assert not is_ending(os.getpid())
    child = subprocess.Popen([sys.executable, "-c", ""], stdout=subprocess.PIPE)
    assert child.stdout and not child.stdout.read(), "closed at its end"
    while started(child.pid) >= 0:
        time.sleep(0.01)
    assert is_ending(child.pid)
    child.wait()
    assert not is_ending(child.pid)


def test_removing_an_area_leaves_the_others(place: Path) -> None:
    snapshots, standby = (MemoryStore(place, JOB, RANK, SEGMENTS, area=area) for area in ("slot", "standby"))
    write(snapshots, ONE)
    standby.remove()
    assert snapshots.snapshots().sealed == (ONE,)
    snapshots.remove()
    assert not (place / JOB).exists()


def test_what_was_being_written_in_an_area_when_its_process_died_is_torn_there(place: Path) -> None:
    child = os.fork()
    if not child:
        store = MemoryStore(place, JOB, RANK, SEGMENTS, area="standby")
        writer = store.reserve(ONE, LAYOUT)
        writer.whole()[:8] = b"too late"
        other = store.reserve(SnapshotId(9, RANK, LOG), LAYOUT)
        other.whole()[:8] = b"in time!"
        other.seal(FACTS)
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)
    store = MemoryStore(place, JOB, RANK, SEGMENTS, area="standby")
    assert store.snapshots().sealed == (SnapshotId(9, RANK, LOG),)
    assert [one.snapshot for one in store.snapshots().torn] == [ONE]
    write(store, ONE)
    assert store.snapshots().torn == ()
    store.close()


@pytest.mark.parametrize("area", ["", "Standby", "../slot", "slot-1"])
def test_an_area_that_cannot_be_a_folder_is_refused(place: Path, area: str) -> None:
    with pytest.raises(UsageError, match="must be 1 to 16 letters a-z"):
        MemoryStore(place, JOB, RANK, SEGMENTS, area=area)


def test_what_an_area_kept_is_given_back_where_the_next_attempt_does_not_use_it(place: Path) -> None:
    config, process = MoECheckpointConfig(memory_dir=str(place)), ProcessInfo(RANK, "node-0", JOB)
    store = open_memory(config, process, SEGMENTS[:1], "standby")
    with store.reserve(ONE, LAYOUT):
        pass
    kept = slot_directories(place / "node-0", JOB, "standby")[RANK]
    with pytest.raises(UsageError, match="is in use by this process"):
        drop_memory(config, process, "standby")
    assert sorted(kept.glob("segment-*.bin"))
    store.close()
    assert drop_memory(config, process, "standby")
    assert not kept.exists()
    assert not drop_memory(config, process, "standby"), "there is nothing left to give back"


def test_memory_that_stayed_mapped_for_a_next_attempt_goes_with_the_area(place: Path) -> None:
    """Else a survivor's node keeps the pages of files that are gone, for as long as the process lives."""
    config, process = MoECheckpointConfig(memory_dir=str(place)), ProcessInfo(RANK, "node-0", JOB)
    store = open_memory(config, process, SEGMENTS[:1], "standby")
    kept = str(slot_directories(place / "node-0", JOB, "standby")[RANK])
    store.close(keep_mapped=True)
    del store
    assert kept in Path("/proc/self/maps").read_text()
    assert drop_memory(config, process, "standby")
    gc.collect()
    assert kept not in Path("/proc/self/maps").read_text()


def taking(owner_file: Path, then: str = "") -> list[str]:
    """A command that takes the lock of a folder, says so, and does something with it once it has read a line."""
    code = "import fcntl, sys; f = open(sys.argv[1], 'r+'); fcntl.lockf(f, fcntl.LOCK_EX | fcntl.LOCK_NB);"
    return [sys.executable, "-Sc", f"{code} print('has it', flush=True); input(); {then}", str(owner_file)]


def test_a_folder_that_is_removed_while_a_process_waits_for_it_is_made_again(place: Path) -> None:
    store = MemoryStore(place, JOB, 0, (4096,))
    owner_file = store.directory / "owner.json"
    store.close()
    removes = [*taking(owner_file, then="import shutil; shutil.rmtree(sys.argv[2])"), str(place / JOB)]
    with subprocess.Popen(removes, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"has it\n"
        threading.Timer(0.2, other.communicate, (b"\n",)).start()
        store = MemoryStore(place, JOB, 0, (4096,))
    assert json.loads(owner_file.read_bytes())["process"] == os.getpid()
    assert live_owner(owner_file) is not None
    store.close()


def test_nobody_can_claim_a_folder_while_it_is_removed_nor_is_one_removed_that_somebody_has(place: Path) -> None:
    store = MemoryStore(place, JOB, 0, (4096,))
    owner_file = store.directory / "owner.json"
    store.close()
    claims = taking(owner_file)
    with kept_free(place / JOB):
        assert "BlockingIOError" in subprocess.run(claims, capture_output=True, text=True, check=False).stderr
    with subprocess.Popen(claims, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None and other.stdin is not None
        assert other.stdout.readline() == b"has it\n"
        with pytest.raises(StoreFailure, match="is used by a process now: the job runs"), kept_free(place / JOB):
            pass
        other.communicate(b"\n")
    with kept_free(place / JOB):
        pass
    store = MemoryStore(place, JOB, 0, (4096,))
    with pytest.raises(StoreFailure, match="is used by a process now: the job runs"), kept_free(place / JOB):
        pass
    assert "BlockingIOError" in subprocess.run(claims, capture_output=True, text=True, check=False).stderr, "and stays"
    store.close()
