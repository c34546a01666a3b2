"""Leases: one job at a time writes to a folder or a URL, judged by what changes and never by clocks."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import subprocess
import sys
import threading
import time
from pathlib import Path

import fsspec
import msgspec
import pytest

from megatron.core.dist_checkpointing.moe.boot_clock import is_ending
from megatron.core.dist_checkpointing.moe.errors import StoreFailure, UsageError
from megatron.core.dist_checkpointing.moe.storage import lease as leases
from megatron.core.dist_checkpointing.moe.storage.lease import (
    STALE_S,
    Holder,
    Lease,
    Verdict,
    decoded,
    holder_of,
    judged,
    machine,
    started,
    writer_of,
)
from megatron.core.dist_checkpointing.moe.storage.lease_files import LEASE, FolderPlace

GONE = 2**22 + 1, 7
OWN_PARENT = os.getppid(), started(os.getppid())


def elsewhere(job: str = "other", **changes: object) -> Holder:
    """A holder on another machine."""
    own = Holder.here(job)
    return msgspec.structs.replace(own, host="far", machine="another boot", process=(4711, 99), **changes)


def left_by(folder: Path, holder: Holder) -> None:
    (folder / LEASE).write_bytes(msgspec.json.encode(holder) + b"\n")


def never(_: float) -> None:
    raise AssertionError("nothing is waited for")


@pytest.fixture(params=["folder", "url"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return str(tmp_path / "run") if request.param == "folder" else f"memory://{tmp_path.name}"


def test_a_lease_says_who_has_it_until_it_is_released(place: str) -> None:
    lease = Lease(place, Holder.here("a"), wait=lambda _: None)
    lease.acquire()
    found = holder_of(place)
    assert found is not None and found.job == "a" and found.process == (os.getpid(), started(os.getpid()))
    lease.release()
    assert holder_of(place) is None


def test_a_second_job_is_refused_by_the_name_of_the_first(place: str) -> None:
    first = Lease(place, msgspec.structs.replace(Holder.here("a"), process=OWN_PARENT), wait=lambda _: None)
    first.acquire()
    second = Lease(place, Holder.here("b"), wait=never)
    with pytest.raises(UsageError) as refused:
        second.acquire()
    line = str(refused.value)
    assert "job 'a'" in line and f"process {OWN_PARENT[0]} on" in line and place in line and "\n" not in line
    assert "--moe-ckpt-take-over a" in line
    second.release()
    assert holder_of(place) is not None, "what was refused takes nothing with it"
    first.release()


def test_a_second_start_of_the_same_job_is_refused_too(tmp_path: Path) -> None:
    left_by(tmp_path, msgspec.structs.replace(Holder.here("a"), process=OWN_PARENT))
    with pytest.raises(UsageError, match="this very job runs already"):
        Lease(str(tmp_path), Holder.here("a"), wait=never).acquire()


@pytest.mark.parametrize("job", ["a", "b"])
def test_what_a_killed_process_of_this_machine_left_is_taken_at_once(tmp_path: Path, job: str) -> None:
    died = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    holder = msgspec.structs.replace(Holder.here("a"), process=(died.pid, started(died.pid)))
    died.kill()
    died.wait()
    left_by(tmp_path, holder)
    lease = Lease(str(tmp_path), Holder.here(job), wait=never)
    lease.acquire()
    found = holder_of(str(tmp_path))
    assert found is not None and found.job == job
    lease.release()


def test_a_process_with_the_number_of_one_that_ended_is_another_one() -> None:
    holder = msgspec.structs.replace(Holder.here("a"), process=(os.getppid(), OWN_PARENT[1] - 1))
    assert judged(holder, Holder.here("b")) is Verdict.TAKE
    assert holder.is_gone


@pytest.mark.parametrize("left", [False, True])
def test_a_job_whose_launcher_will_start_it_again_writes_here_though_its_process_is_gone(
    tmp_path: Path, left: bool
) -> None:
    holder = msgspec.structs.replace(Holder.here("a", OWN_PARENT), process=(os.getpid(), 1), left=left)
    left_by(tmp_path, holder)
    assert writer_of(str(tmp_path)).startswith("job 'a' ")
    left_by(tmp_path, msgspec.structs.replace(holder, launcher=(os.getppid(), OWN_PARENT[1] - 1)))
    assert writer_of(str(tmp_path)) == ""


def test_a_process_that_has_left_its_lease_does_not_write_here(tmp_path: Path) -> None:
    left_by(tmp_path, msgspec.structs.replace(Holder.here("a"), left=True))
    assert writer_of(str(tmp_path)) == ""


def test_a_process_may_have_any_name() -> None:
    """The system cuts names off behind 15 bytes, which may be in the middle of a character."""
    name, own = Path("/proc/self/comm"), Path(f"/proc/{os.getpid()}/task/{os.getpid()}/comm")
    was, before = own.read_bytes(), started(os.getpid())
    try:
        own.write_bytes(b"a) b \xff")
        assert b"\xff" in name.read_bytes()
        assert started(os.getpid()) == before > 0
        assert not is_ending(os.getpid())
    finally:
        own.write_bytes(was.strip())


def test_what_a_lease_of_others_says_is_one_line(tmp_path: Path) -> None:
    job = Holder.here("x\nERROR: all is lost")
    left_by(tmp_path, msgspec.structs.replace(job, process=OWN_PARENT, host="y\n\x1b[31m" * 9, since="2026\n"))
    with pytest.raises(UsageError, match="is in use by job") as refused:
        Lease(str(tmp_path), Holder.here("b"), wait=never).acquire()
    assert str(refused.value).isprintable()


def test_a_process_number_of_another_container_or_boot_proves_nothing() -> None:
    far = elsewhere()
    assert judged(far, Holder.here("b")) is Verdict.WATCH and not far.is_gone
    assert machine() != far.machine


def test_a_lease_that_is_renewed_elsewhere_is_refused(tmp_path: Path) -> None:
    far, waits = elsewhere(since="2099-01-01 00:00:00"), 0
    left_by(tmp_path, far)

    def renewing(_: float) -> None:
        nonlocal waits
        waits += 1
        left_by(tmp_path, msgspec.structs.replace(far, beat=waits // 5))

    with pytest.raises(UsageError, match="job 'other'"):
        Lease(str(tmp_path), Holder.here("b"), wait=renewing).acquire()
    assert waits == 5


def test_a_lease_that_is_not_renewed_is_taken_once_that_was_watched_long_enough(tmp_path: Path) -> None:
    left_by(tmp_path, elsewhere(since="2099-01-01 00:00:00"))
    waited: list[float] = []
    lease = Lease(str(tmp_path), Holder.here("b"), wait=waited.append)
    lease.acquire()
    assert STALE_S <= sum(waited) <= STALE_S + 2
    lease.release()


def test_a_lease_that_goes_while_it_is_watched_is_free(tmp_path: Path) -> None:
    left_by(tmp_path, elsewhere())
    lease = Lease(str(tmp_path), Holder.here("b"), wait=lambda _: (tmp_path / LEASE).unlink())
    lease.acquire()
    lease.release()


def test_looks_that_took_long_do_not_count_as_silence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file server that stood still did so for the holder as well."""
    clock, waits = 0.0, 0

    class Slow(FolderPlace):
        def read(self) -> bytes | None:
            nonlocal clock
            clock += 1000.0 if waits < 100 else 0.0
            return super().read()

    def wait(_: float) -> None:
        nonlocal waits
        waits += 1

    monkeypatch.setattr(leases.time, "monotonic", lambda: clock)
    left_by(tmp_path, elsewhere())
    lease = Lease(str(tmp_path), Holder.here("b"), place=Slow(tmp_path), wait=wait)
    lease.acquire()
    assert waits >= 100 + STALE_S
    lease.release()


def test_a_launcher_that_started_both_hands_the_lease_on_without_a_wait(tmp_path: Path) -> None:
    """As when rank 0 is on another node after a fault."""
    left_by(tmp_path, elsewhere("a", run=("agent 1", "agent 2")))
    lease = Lease(str(tmp_path), Holder.here("a", run=("agent 2", "agent 3")), wait=never)
    lease.acquire()
    lease.release()


def test_between_two_attempts_of_a_job_no_other_one_steps_in(tmp_path: Path) -> None:
    """Rank 0 has died, and the launcher that starts it again lives."""
    dead = msgspec.structs.replace(Holder.here("a"), process=GONE, launcher=OWN_PARENT, run=("agent 1",))
    left_by(tmp_path, dead)
    with pytest.raises(UsageError, match="job 'a'"):
        Lease(str(tmp_path), Holder.here("b"), wait=never).acquire()
    assert judged(msgspec.structs.replace(dead, launcher=GONE), Holder.here("b")) is Verdict.TAKE


@pytest.mark.parametrize("began", [True, False])
def test_an_attempt_that_fails_before_it_trains_keeps_the_lease_for_the_next_one(began: bool, tmp_path: Path) -> None:
    attempt = Holder.here("a", OWN_PARENT, ("agent",))
    if began:
        first = Lease(str(tmp_path), attempt, wait=never)
        first.acquire()
        first.leave()
    second = Lease(str(tmp_path), attempt, wait=never)
    second.acquire()
    second.give_back()
    other = Lease(str(tmp_path), Holder.here("b"), wait=never)
    with pytest.raises(UsageError, match="job 'a'") if began else contextlib.nullcontext():
        other.acquire()
        other.release()


def test_what_a_process_left_to_its_next_attempt_is_not_held_by_it(place: str) -> None:
    first = Lease(place, msgspec.structs.replace(Holder.here("a"), process=OWN_PARENT), wait=lambda _: None)
    first.acquire()
    first.leave()
    second = Lease(place, Holder.here("a"), wait=lambda _: None)
    second.acquire()
    second.release()


def test_the_flag_takes_a_lease_from_the_job_that_it_names_and_from_no_other(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    living = msgspec.structs.replace(Holder.here("a"), process=OWN_PARENT)
    left_by(tmp_path, living)
    with pytest.raises(UsageError):
        Lease(str(tmp_path), Holder.here("b"), "c", wait=never).acquire()
    lease = Lease(str(tmp_path), Holder.here("b"), "a", wait=never)
    lease.acquire()
    assert "taking over the expired lease of job 'a'" in caplog.text
    lease.release()


@pytest.fixture
def unattended(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leases are renewed by the test alone."""
    monkeypatch.setattr(leases.threading.Thread, "start", lambda _: None)


@pytest.mark.usefixtures("unattended")
def test_who_has_lost_its_lease_ends(place: str, caplog: pytest.LogCaptureFixture) -> None:
    first = Lease(place, Holder.here("a"), wait=lambda _: None)
    second = Lease(place, Holder.here("b"), "a", wait=lambda _: None)
    first.acquire()
    first.renew()
    first.check()
    second.acquire()
    first.renew()
    with pytest.raises(UsageError, match="taken over by job 'b'"):
        first.check()
    found = holder_of(place)
    assert found is not None and found.job == "b", "and never writes over what is another's"


@pytest.mark.usefixtures("unattended")
def test_who_cannot_reach_its_own_file_any_more_learns_who_has_taken_its_lease(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = Lease(str(tmp_path), Holder.here("a"), wait=lambda _: None)
    first.acquire()
    Lease(str(tmp_path), Holder.here("b"), "a", wait=lambda _: None).acquire()
    real = os.fstat

    def stale(descriptor: int) -> os.stat_result:
        """As NFS where another node has unlinked the file."""
        if re.search(rf"{LEASE}.* \(deleted\)", os.readlink(f"/proc/self/fd/{descriptor}")):
            raise OSError(errno.ESTALE, "Stale file handle")
        return real(descriptor)

    monkeypatch.setattr(os, "fstat", stale)
    first.renew()
    with pytest.raises(UsageError, match="taken over by job 'b'"):
        first.check()


@pytest.mark.usefixtures("unattended")
def test_a_lease_outlives_a_mount_that_was_away(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder, away = tmp_path / "run", tmp_path / "away"
    lease = Lease(str(folder), Holder.here("a"), wait=lambda _: None)
    lease.acquire()
    folder.rename(away)
    folder.touch()  # nothing can be made there
    assert lease.renew() and lease.renew()
    assert len([line for line in caplog.messages if "cannot renew the lease" in line]) == 1
    folder.unlink()
    lease.renew()  # in the folder that the mount hides
    (folder / LEASE).unlink()
    folder.rmdir()
    away.rename(folder)
    for _ in range(2):
        assert lease.renew()
        lease.check()
    found = holder_of(str(folder))
    assert found is not None and found.beat == 5


def test_who_ends_does_not_wait_for_storage_that_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(leases, "RENEW_S", 0.05)
    hangs, answers = threading.Event(), threading.Event()

    def renew(*_: object) -> None:
        hangs.set()
        answers.wait(60.0)

    lease = Lease(str(tmp_path), Holder.here("a"))
    lease.acquire()
    monkeypatch.setattr(leases.FolderPlace, "renew", renew)
    monkeypatch.setattr(leases.FolderPlace, "remove", lambda _: pytest.fail("hangs, too"))
    assert hangs.wait(60.0)
    lease.release()
    assert "does not answer" in caplog.text
    answers.set()


@pytest.mark.usefixtures("unattended")
def test_a_lease_that_somebody_deleted_is_made_again(place: str) -> None:
    lease = Lease(place, Holder.here("a"), wait=lambda _: None)
    lease.acquire()
    Path(place, LEASE).unlink() if "://" not in place else fsspec.filesystem("memory").rm(f"/{place[9:]}/{LEASE}")
    lease.renew()
    lease.check()
    assert holder_of(place) is not None


@pytest.mark.usefixtures("unattended")
def test_each_renewal_changes_the_content_and_not_its_length(tmp_path: Path) -> None:
    lease = Lease(str(tmp_path), Holder.here("a"))
    lease.acquire()
    before = (tmp_path / LEASE).read_bytes()
    lease.renew()
    after = (tmp_path / LEASE).read_bytes()
    assert before != after and len(before) == len(after)
    assert decoded(after) == msgspec.structs.replace(decoded(before), beat=1)  # type: ignore[type-var]


@pytest.mark.parametrize("content", [b"", b"{", b"[" * 100_000, b'{"job": 1}', b"\0" * 512], ids=range(5))
def test_content_that_is_no_lease_is_watched_and_then_replaced(tmp_path: Path, content: bytes) -> None:
    (tmp_path / LEASE).write_bytes(content)
    waited: list[float] = []
    lease = Lease(str(tmp_path), Holder.here("a"), wait=waited.append)
    lease.acquire()
    assert sum(waited) >= STALE_S
    lease.release()


@pytest.mark.parametrize(("number", "kind"), [(errno.ESTALE, StoreFailure), (errno.EACCES, UsageError)])
def test_a_lease_that_cannot_be_read_now_is_no_mistake_of_a_user(number: int, kind: type[Exception]) -> None:
    """Else a job whose storage is away for a moment ends with all of its memory."""

    class Away(FolderPlace):
        def read(self) -> bytes | None:
            raise OSError(number, os.strerror(number))

    with pytest.raises(kind, match=f"{LEASE}, which says who writes there, cannot be read: "):
        Lease("/save", Holder.here("a"), wait=never, place=Away(Path("/save"))).acquire()


def test_a_url_that_fsspec_does_not_know_is_a_mistake_of_a_user() -> None:
    with pytest.raises(UsageError, match=r"foo://bucket cannot be used: .*; install the fsspec package for it"):
        Lease("foo://bucket", Holder.here("a"), wait=never)


def test_a_fifo_in_its_place_is_named_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / LEASE)
    with pytest.raises(UsageError, match=f"{LEASE}.*no regular file"):
        Lease(str(tmp_path), Holder.here("a"), wait=never).acquire()


def test_a_folder_that_is_full_is_used_with_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Full(FolderPlace):
        def take(self, content: bytes, instead_of: bytes | None) -> bool:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    lease = Lease(str(tmp_path), Holder.here("a"), place=Full(tmp_path), wait=never)
    lease.acquire()
    assert "has no lease" in caplog.text and "No space left" in caplog.text
    assert not lease.name
    lease.check()
    lease.release()


def test_a_lease_that_a_full_device_had_no_space_for_is_taken_once_it_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else another job finds an empty file, takes it, and both write there."""

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(leases, "RENEW_S", 0.05)
    first = Lease(str(tmp_path), msgspec.structs.replace(Holder.here("a"), process=OWN_PARENT), wait=never)
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", full)
        first.acquire()
        assert holder_of(str(tmp_path)) is None
    until_s = time.monotonic() + 60.0
    while holder_of(str(tmp_path)) is None and time.monotonic() < until_s:
        time.sleep(0.05)
    with pytest.raises(UsageError, match="job 'a'"):
        Lease(str(tmp_path), Holder.here("b"), wait=never).acquire()
    monkeypatch.undo()
    first.release()


@pytest.mark.usefixtures("unattended")
@pytest.mark.parametrize("comes", [False, True])
def test_a_free_lease_that_cannot_be_put_away_is_taken_later_unless_another_job_comes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, comes: bool
) -> None:
    def away(*_: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    left_by(tmp_path, msgspec.structs.replace(Holder.here("a"), process=GONE))
    lease = Lease(str(tmp_path), Holder.here("a"), wait=never)
    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", away)
        lease.acquire()
    if comes:
        left_by(tmp_path, elsewhere("b"))
    assert lease.renew() is not comes
    found = holder_of(str(tmp_path))
    assert found is not None and found.job == ("b" if comes else "a") and bool(lease.lost) is comes


def test_nodes_are_not_told_to_look_for_a_lease_that_is_not_written_yet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Full(FolderPlace):
        def take(self, content: bytes, instead_of: bytes | None) -> bool:
            if is_full:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return super().take(content, instead_of)

    lease, is_full = Lease(str(tmp_path), Holder.here("a"), place=Full(tmp_path), wait=never), True
    lease.acquire()
    assert not lease.name
    is_full = False
    lease.renew()
    assert lease.name
    lease.release()
    assert holder_of(str(tmp_path)) is None


def test_a_folder_without_the_right_to_write_is_not_tried_again(tmp_path: Path) -> None:
    class Foreign(FolderPlace):
        def take(self, content: bytes, instead_of: bytes | None) -> bool:
            raise OSError(errno.EACCES, os.strerror(errno.EACCES))

    before = threading.active_count()
    Lease(str(tmp_path), Holder.here("a"), place=Foreign(tmp_path), wait=never).acquire()
    assert threading.active_count() == before


def test_of_two_that_judge_the_same_lease_one_has_it_afterwards(tmp_path: Path) -> None:
    left_by(tmp_path, elsewhere())
    judged_content = (tmp_path / LEASE).read_bytes()
    first, second = FolderPlace(tmp_path), FolderPlace(tmp_path)
    assert first.take(b"first\n", judged_content)
    assert not second.take(b"second\n", judged_content)
    assert (tmp_path / LEASE).read_bytes() == b"first\n"
    assert first.renew(b"again\n"), "its file was put back as it was"
    assert sorted(path.name for path in tmp_path.iterdir()) == [LEASE]
    first.let_go()


@pytest.mark.parametrize("misses", [3, None])
def test_who_is_never_fast_enough_waits_between_tries_and_gives_up(tmp_path: Path, misses: int | None) -> None:
    """As where the cache of a network file system hides a file that is there."""
    tries, waited = 0, list[float]()

    class Crowded(FolderPlace):
        def take(self, content: bytes, instead_of: bytes | None) -> bool:
            nonlocal tries
            tries += 1
            assert tries <= STALE_S + 2, "it does not give up"
            return tries > misses and super().take(content, instead_of) if misses is not None else False

    lease = Lease(str(tmp_path), Holder.here("a"), place=Crowded(tmp_path), wait=waited.append)
    if misses is None:
        with pytest.raises(UsageError, match=f"{LEASE} cannot be taken"):
            lease.acquire()
        assert STALE_S <= sum(waited) <= STALE_S + 2
    else:
        lease.acquire()
        assert len(waited) == misses and all(waited)
    lease.release()
