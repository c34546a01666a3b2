"""What only the memory tier promises: bounded memory, one owner, buffers in place, adoption after a crash."""

from __future__ import annotations

import contextlib
import errno
import gc
import logging
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from workload import FACTS, JOB, LAYOUT, RANK, SEGMENTS, content, new_store, read, write

from megatron.core.dist_checkpointing.moe.errors import UnreadableCheckpoint, UsageError, reason
from megatron.core.dist_checkpointing.moe.ports import Field, Layout, NoRoom, SnapshotId
from megatron.core.dist_checkpointing.moe.storage.memory import MemoryStore
from megatron.core.dist_checkpointing.moe.storage.ownership import refused_as_unusable, slot_directories
from megatron.core.dist_checkpointing.moe.storage.slot_reader import SlotReader
from megatron.core.dist_checkpointing.moe.storage.system import OperatingSystem

FIRST, SECOND, THIRD, FOURTH = (SnapshotId(iteration, RANK) for iteration in (10, 11, 12, 13))
PAGE = 4096


@pytest.fixture
def kind() -> str:
    return "memory"


@contextmanager
def owned_by_another_process(place: Path, job: str = JOB) -> Iterator[int]:
    """A process, by its id, that owns the rank's folder and is killed at the end."""
    ready = os.pipe()
    child = os.fork()
    if not child:
        try:
            store = MemoryStore(place, job, RANK, SEGMENTS)
            os.write(ready[1], b"x")
            signal.pause()
            store.close()
        finally:
            os._exit(1)
    assert os.read(ready[0], 1) == b"x"
    try:
        yield child
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_all_memory_is_taken_at_construction(place: Path) -> None:
    store = MemoryStore(place, JOB, RANK, (PAGE, 5 * PAGE, 100))
    assert store.total_bytes == 7 * PAGE
    assert sum(path.stat().st_blocks * 512 for path in store.directory.glob("*.bin")) == 7 * PAGE
    store.close()


def test_writing_the_same_layout_again_takes_no_new_memory(place: Path) -> None:
    layout = Layout.of([Field(f"tensor {at}", "float32", (1024, 512)) for at in range(8)])  # 16 MiB, 4096 pages
    store = MemoryStore(place, JOB, RANK, (layout.nbytes,) * 3)
    source = np.ones(2 << 20, np.uint8)

    def round_(iteration: int) -> None:
        with store.reserve(SnapshotId(iteration, RANK), layout) as writer:
            for field in layout.fields:
                writer.put(field.key, source)
            writer.seal(FACTS)
        store.free(SnapshotId(iteration - 2, RANK))

    blocks = sum(path.stat().st_blocks for path in store.directory.glob("*.bin"))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for iteration in range(2, 32):
        round_(iteration)
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
    assert faults < 4096  # of 30 x 4096 pages written
    assert blocks == sum(path.stat().st_blocks for path in store.directory.glob("*.bin"))
    store.close()


def test_a_snapshot_takes_the_smallest_segment_that_is_large_enough(place: Path) -> None:
    store = MemoryStore(place, JOB, RANK, (8 * PAGE, PAGE, 4 * PAGE))
    manifest = write(store, FIRST)
    assert (store.directory / manifest.segment).stat().st_size == PAGE
    large = Layout.of([Field("large", "uint8", (2 * PAGE,))])
    assert (store.directory / write(store, SECOND, layout=large).segment).stat().st_size == 4 * PAGE
    store.close()


def test_a_snapshot_larger_than_every_segment_is_refused_with_both_numbers(store: Any) -> None:
    with pytest.raises(UsageError, match="8192 bytes does not fit in segments of at most 4096"):
        store.reserve(FIRST, Layout.of([Field("large", "uint8", (8192,))]))


def test_without_a_free_segment_the_refusal_says_what_holds_them(store: Any) -> None:
    for snapshot in (FIRST, SECOND):
        write(store, snapshot)
    with store.reserve(THIRD, LAYOUT), pytest.raises(NoRoom, match=r"all 3 segments .* in use, 2 of them by sealed"):
        store.reserve(FOURTH, LAYOUT)
    write(store, FOURTH)


def test_freeing_never_waits_and_the_memory_returns_with_the_last_view(store: Any) -> None:
    for snapshot in (FIRST, SECOND, THIRD):
        write(store, snapshot)
    reader = store.open(FIRST)
    view = np.frombuffer(reader.read("rng"), np.uint8)[5:]
    store.free(FIRST)
    assert bytes(reader.read("step")) == content(FIRST)["step"]
    reader.close()
    with pytest.raises(NoRoom):
        store.reserve(FOURTH, LAYOUT)
    assert view.tobytes() == content(FIRST)["rng"][5:]
    del view
    write(store, FOURTH)


def where(view: Any) -> int:
    return int(np.frombuffer(view, np.uint8).ctypes.data)


def test_an_own_snapshot_is_read_where_it_was_written_and_nobody_may_write_to_it(store: Any) -> None:
    """There its pages are locked: a device reads them itself."""
    with store.reserve(FIRST, LAYOUT) as writer:
        whole = where(writer.whole())
        writer.seal(FACTS)
    with store.open(FIRST) as reader:
        assert where(reader.raw()) == whole
        assert reader.raw().readonly and reader.read("rng").readonly


class User:
    """A copy engine that records the addresses of the segments that it was given."""

    def __init__(self) -> None:
        self.known: set[int] = set()

    def prepare(self, segments: Any) -> None:
        self.known |= set(map(where, segments))

    def release(self, segments: Any) -> None:
        self.known -= set(map(where, segments))


@pytest.mark.parametrize("freed", [False, True])
def test_a_resize_leaves_locked_what_a_transfer_still_reads_or_writes(store: Any, freed: bool) -> None:
    """A device that reads pages as they are unlocked fails for good."""
    user = User()
    write(store, FIRST)
    store.lend(user)
    with store.open(FIRST) as reader, store.reserve(SECOND, LAYOUT) as writer:
        if freed:
            store.free(FIRST)
        raw, whole = reader.raw(), writer.whole()
        store.resize((2 * PAGE,))
        assert {where(raw), where(whole)} < user.known
        assert len(user.known) == 3, "what nobody uses is unlocked"
        del raw, whole
    if not freed:
        assert read(store, FIRST) == content(FIRST)


def test_buffers_are_written_in_place(store: Any) -> None:
    with store.reserve(FIRST, LAYOUT) as writer:
        for key, data in content(FIRST).items():
            with writer.buffer(key) as buffer:
                buffer[:] = data
        writer.seal(FACTS)
    assert read(store, FIRST) == content(FIRST)


def test_a_whole_segment_is_copied_and_verified_at_once(store: Any) -> None:
    original = write(store, FIRST)
    with store.open(FIRST) as reader, store.reserve(SECOND, original.layout) as writer:
        with writer.whole() as whole, reader.raw() as raw:
            whole[:] = raw
        assert writer.seal(original.facts, original.checksums).records == original.records
    assert read(store, SECOND) == content(FIRST)


@pytest.mark.parametrize(
    "hold", [lambda view: view, lambda view: view[2:3], lambda view: np.frombuffer(view, np.uint8)]
)
def test_nothing_is_sealed_while_its_bytes_could_still_be_changed(store: Any, hold: Any) -> None:
    layout = Layout.of([Field("a", "uint8", (9,))])
    with store.reserve(FIRST, layout) as writer:
        held = hold(writer.buffer("a"))
        with pytest.raises(UsageError, match="still referred to"):
            writer.seal(FACTS)
        del held
        writer.seal(FACTS)
    assert store.snapshots().sealed == (FIRST,)


def test_an_abandoned_buffer_is_not_used_again_while_somebody_holds_it(store: Any) -> None:
    with store.reserve(FIRST, LAYOUT) as writer:
        held = writer.buffer("rng")
    for snapshot in (FIRST, SECOND):
        write(store, snapshot)
    with pytest.raises(NoRoom):
        store.reserve(THIRD, LAYOUT)
    held[:] = bytes(len(held))
    assert [read(store, one) for one in (FIRST, SECOND)] == [content(one) for one in (FIRST, SECOND)]
    del held
    write(store, THIRD)


def test_a_reader_in_another_process_pins_its_snapshot(store: Any) -> None:
    write(store, FIRST)
    ready, wrote = os.pipe(), os.pipe()
    child = os.fork()
    if not child:
        reader = SlotReader(store.directory).open(FIRST)
        os.write(ready[1], b"x")
        os.read(wrote[0], 1)
        os._exit(bytes(reader.read("rng")) != content(FIRST)["rng"])
    os.read(ready[0], 1)
    store.free(FIRST)
    write(store, SECOND)
    write(store, THIRD)
    with pytest.raises(NoRoom):
        store.reserve(FOURTH, LAYOUT)
    os.write(wrote[1], b"x")
    assert os.waitpid(child, 0)[1] == 0
    write(store, FOURTH)


def test_a_forked_child_does_not_keep_what_its_parent_lets_go(store: Any) -> None:
    for snapshot in (FIRST, SECOND, THIRD):
        write(store, snapshot)
    reader = store.open(FIRST)
    end = os.pipe()
    child = os.fork()
    if not child:
        os.read(end[0], 1)
        os._exit(0)
    reader.close()
    store.free(FIRST)
    write(store, FOURTH)
    store.close()
    again = MemoryStore(store.directory.parent.parent, JOB, RANK, SEGMENTS)
    again.close()
    os.write(end[1], b"x")
    os.waitpid(child, 0)


def test_a_forked_child_cannot_end_the_pin_of_its_parent(store: Any) -> None:
    for snapshot in (FIRST, SECOND, THIRD):
        write(store, snapshot)
    reader = store.open(FIRST)
    gc.collect()  # what others left could wait, in the child, for threads that it does not have
    child = os.fork()
    if not child:
        reader.close()
        gc.collect()
        os._exit(0)
    os.waitpid(child, 0)
    store.free(FIRST)
    with pytest.raises(NoRoom):
        store.reserve(FOURTH, LAYOUT)
    assert bytes(reader.read("rng")) == content(FIRST)["rng"]
    reader.close()
    write(store, FOURTH)


def test_a_killed_reader_pins_nothing_even_if_its_own_child_lives_on(store: Any) -> None:
    for snapshot in (FIRST, SECOND, THIRD):
        write(store, snapshot)
    begun, end = os.pipe(), os.pipe()
    child = os.fork()
    if not child:
        os.close(end[1])
        reader = SlotReader(store.directory).open(FIRST)
        if os.fork():
            os.read(begun[0], 1)
            os.kill(os.getpid(), signal.SIGKILL)
        os.write(begun[1], b"x")
        os.read(end[0], 1)  # lives until the test is over
        os._exit(reader.manifest.snapshot != FIRST)
    os.waitpid(child, 0)
    store.free(FIRST)
    write(store, FOURTH)
    os.close(end[1])


def test_any_process_lists_and_reads_what_a_live_rank_has_sealed(store: Any, place: Path) -> None:
    write(store, FIRST)
    with store.reserve(SECOND, LAYOUT):
        shelves = {rank: SlotReader(path) for rank, path in slot_directories(place, JOB).items()}
        assert list(shelves) == [RANK]
        assert shelves[RANK].snapshots() == store.snapshots()
        assert read(shelves[RANK], FIRST) == content(FIRST)


def test_a_memory_dir_that_is_missing_is_refused(place: Path) -> None:
    with pytest.raises(UsageError, match=r"does not exist: create it on a tmpfs"):
        MemoryStore(place / "nowhere", JOB, RANK, SEGMENTS)


def test_a_memory_dir_that_is_too_small_is_refused_with_the_numbers(place: Path) -> None:
    found = os.statvfs(place)
    free_bytes = found.f_bavail * found.f_frsize
    with pytest.raises(NoRoom, match=r"has \d+\.\d{3} GB free, but the 2 new segments need \d+\.\d{3} GB"):
        MemoryStore(place, JOB, RANK, (free_bytes // 2 + (1 << 30),) * 2)
    new_store("memory", place).close()


def test_the_pieces_of_a_snapshot_are_reserved_with_one_look_at_the_folder(place: Path) -> None:
    class Listing(OperatingSystem):
        listed = 0

        def list_directory(self, path: Path) -> list[str]:
            self.listed += 1
            return super().list_directory(path)

    system = Listing()
    store = MemoryStore(place, JOB, RANK, (PAGE,) * 12, system=system)
    for iteration in (10, 11):
        for piece in "abcd":
            write(store, SnapshotId(iteration, RANK, f"expert{piece}"))
    store.free(SnapshotId(10, RANK, "expertb"))
    before = system.listed
    writers = [store.reserve(SnapshotId(12, RANK, f"expert{piece}"), LAYOUT) for piece in "abcd"]
    assert system.listed - before == 1
    with pytest.raises(UsageError, match="is sealed already"):
        store.reserve(SnapshotId(11, RANK, "expertc"), LAYOUT)
    for writer in writers:
        writer.abandon()
    store.free(SnapshotId(11, RANK, "expertc"))
    write(store, SnapshotId(11, RANK, "expertc"))
    assert len(store.snapshots().sealed) == 7 and not store.snapshots().torn
    store.close()


def test_a_full_tmpfs_is_found_when_memory_is_allocated_not_when_it_is_written(place: Path) -> None:
    class Full(OperatingSystem):
        def allocate(self, descriptor: int, nbytes: int) -> None:
            raise OSError(28, "No space left on device")

    with pytest.raises(NoRoom, match="cannot allocate 4096 bytes"):
        new_store("memory", place, Full())
    new_store("memory", place).close()


@pytest.mark.parametrize("job", ["", "a/b", "..", "x" * 200])
def test_a_job_id_that_is_no_folder_name_is_refused(place: Path, job: str) -> None:
    with pytest.raises(UsageError, match="job id"):
        MemoryStore(place, job, RANK, SEGMENTS)


def test_a_folder_on_a_disk_is_used_with_a_warning(
    place: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from megatron.core.dist_checkpointing.moe.storage import ownership

    monkeypatch.setattr(ownership, "MEMORY_FILE_SYSTEMS", ())
    with caplog.at_level(logging.WARNING):
        new_store("memory", place).close()
    assert "not tmpfs" in caplog.text


def test_a_folder_on_tmpfs_is_used_without_a_warning(place: Path, caplog: pytest.LogCaptureFixture) -> None:
    if not place.is_relative_to("/dev/shm"):
        pytest.skip("this machine has no writable /dev/shm")
    new_store("memory", place).close()
    assert not caplog.records


def test_a_second_store_of_the_same_rank_is_refused_in_the_same_process(store: Any, place: Path) -> None:
    with pytest.raises(UsageError, match="in use by this process already"):
        new_store("memory", place)


def test_a_rank_owned_by_a_live_process_is_refused_and_adopted_when_that_was_killed(place: Path) -> None:
    with (
        owned_by_another_process(place) as process,
        pytest.raises(UsageError, match=f"in use by job {JOB}, slot {RANK}, process {process}"),
    ):
        new_store("memory", place)
    new_store("memory", place).close()


def test_a_rank_that_comes_back_in_its_own_process_waits_for_a_job_that_only_looks_whose_the_folder_is(
    place: Path,
) -> None:
    new_store("memory", place).close()
    (owner,) = place.glob(f"{JOB}/*/owner.json")
    looks = "import fcntl, sys, time; file = open(sys.argv[1]); fcntl.lockf(file, fcntl.LOCK_SH); print(flush=True)"
    command = [sys.executable, "-c", f"{looks}; time.sleep(0.3)", str(owner)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as looking:
        assert looking.stdout is not None and looking.stdout.readline() == b"\n"
        new_store("memory", place).close()


def test_a_memory_dir_in_use_by_another_job_is_refused_and_left_as_it_was(place: Path) -> None:
    with (
        owned_by_another_process(place, "other-job"),
        pytest.raises(UsageError, match=r"in use by job other-job, .* give each job its own memory dir"),
    ):
        new_store("memory", place)
    assert [path.name for path in place.iterdir()] == ["other-job"]


def test_what_another_job_left_behind_is_refused_with_its_path_and_kept(place: Path) -> None:
    other = MemoryStore(place, "other-job", 0, SEGMENTS)
    write(other, FIRST)
    other.close()
    with pytest.raises(UsageError, match=rf"{place}/other-job was left behind by job other-job, .*rm -r"):
        new_store("memory", place)
    other = MemoryStore(place, "other-job", 0, SEGMENTS)
    assert read(other, FIRST) == content(FIRST)
    other.close()


def test_ranks_of_one_job_share_a_memory_dir(place: Path) -> None:
    stores = [MemoryStore(place, JOB, rank, SEGMENTS) for rank in range(3)]
    for rank, store in enumerate(stores):
        write(store, SnapshotId(4, rank))
    assert list(slot_directories(place, JOB)) == [0, 1, 2]
    for store in stores:
        store.close()


def test_segments_of_other_sizes_stay_until_what_they_hold_is_freed(place: Path) -> None:
    before = MemoryStore(place, JOB, RANK, (PAGE, PAGE, 2 * PAGE))
    manifest = write(before, FIRST)
    before.close()
    store = MemoryStore(place, JOB, RANK, (3 * PAGE,) * 2)
    assert read(store, FIRST) == content(FIRST)
    assert len(list(store.directory.glob("*.bin"))) == 3
    assert store.total_bytes == 6 * PAGE
    for snapshot in (SECOND, THIRD):
        write(store, snapshot)
    store.free(FIRST)
    assert not (store.directory / manifest.segment).exists()
    assert read(store, SECOND) == content(SECOND)
    store.close()


def test_a_segment_with_a_hole_is_refused_because_a_full_tmpfs_would_kill_the_reader(place: Path) -> None:
    store = new_store("memory", place)
    manifest = write(store, FIRST)
    path = store.directory / manifest.segment
    store.close()
    os.truncate(path, 0)
    os.truncate(path, PAGE)
    with pytest.raises(UnreadableCheckpoint, match="has 0 of"):
        SlotReader(path.parent).open(FIRST)


def test_a_manifest_whose_segment_is_gone_stays_torn_beside_new_segments(place: Path) -> None:
    store = new_store("memory", place)
    manifest = write(store, FIRST)
    store.close()
    (store.directory / manifest.segment).unlink()
    store = new_store("memory", place)
    assert store.snapshots().sealed == ()
    assert [one.snapshot for one in store.snapshots().torn] == [FIRST]
    store.free(FIRST)
    write(store, FIRST)
    assert read(store, FIRST) == content(FIRST)
    store.close()


def test_removing_a_store_gives_all_memory_back(place: Path) -> None:
    store = new_store("memory", place)
    write(store, FIRST)
    store.remove()
    assert list(place.iterdir()) == []


def test_a_writer_that_cannot_mark_its_segment_gives_it_back(place: Path) -> None:
    refuses = SimpleNamespace(now=False)

    class Refusing(OperatingSystem):
        def rename(self, old: Path, new: Path) -> None:  # type: ignore[override]
            if refuses.now and new.suffix == ".writing":
                raise OSError(5, "Input/output error")
            os.rename(old, new)

    store = new_store("memory", place, Refusing())
    refuses.now = True
    for _ in range(2 * len(SEGMENTS)):
        with pytest.raises(Exception, match="safe to try again"):
            store.reserve(FIRST, LAYOUT)
    refuses.now = False
    for snapshot in (FIRST, SECOND, THIRD):
        write(store, snapshot)
    store.close()


def test_after_a_resize_there_is_room_for_as_many_snapshots_as_were_asked_for(store: Any) -> None:
    large = Layout.of([Field("large", "uint8", (3 * PAGE,))])
    store.resize((3 * PAGE,) * 4)
    for iteration in range(4):
        write(store, SnapshotId(iteration, RANK), layout=large)
    with pytest.raises(NoRoom, match="all 4 segments"):
        store.reserve(FIRST, large)


def test_what_is_sealed_outlives_a_resize_and_its_segment_goes_when_it_is_freed(store: Any) -> None:
    write(store, FIRST)
    store.resize((2 * PAGE,))
    assert read(store, FIRST) == content(FIRST)
    assert store.total_bytes == 2 * PAGE
    store.free(FIRST)
    assert store.snapshots().sealed == ()
    write(store, SECOND)
    with pytest.raises(NoRoom, match="all 1 segments"):
        store.reserve(THIRD, LAYOUT)


def test_what_is_being_written_outlives_a_resize(store: Any) -> None:
    writer = store.reserve(FIRST, LAYOUT)
    store.resize((2 * PAGE,))
    for key, data in content(FIRST).items():
        writer.put(key, data)
    writer.seal(FACTS)
    assert read(store, FIRST) == content(FIRST)


def test_what_is_read_outlives_a_resize_and_its_end(store: Any) -> None:
    write(store, FIRST)
    with store.open(FIRST) as reader:
        store.free(FIRST)
        store.resize((2 * PAGE, 2 * PAGE))
        write(store, SECOND)
        assert bytes(reader.read("rng")) == content(FIRST)["rng"]


def test_where_the_segments_suffice_a_resize_changes_nothing(store: Any) -> None:
    before = store.total_bytes
    store.resize((PAGE // 2, PAGE))
    assert store.total_bytes == before


def test_a_resize_takes_over_segments_that_an_earlier_process_has_sealed(place: Path) -> None:
    store = MemoryStore(place, "job", 0, [LAYOUT.nbytes] * 2)
    write(store, FIRST)
    store.close()
    later = MemoryStore(place, "job", 0, [3 * PAGE])
    later.resize([LAYOUT.nbytes] * 2)
    assert len(list(later.directory.glob("segment-*.bin"))) == 2
    assert read(later, FIRST) == content(FIRST)
    write(later, SECOND)
    later.free(FIRST)
    write(later, THIRD)
    later.close()


def test_a_resize_keeps_segments_of_the_same_size(store: Any) -> None:
    manifest = write(store, FIRST)
    store.resize((PAGE, 2 * PAGE))
    assert store.total_bytes == 3 * PAGE
    store.free(FIRST)
    assert write(store, SECOND).segment == manifest.segment


def test_a_resize_gives_memory_that_is_not_used_any_more_back(place: Path) -> None:
    store = MemoryStore(place, JOB, RANK, (5 * PAGE,) * 3)
    writer = store.reserve(FIRST, LAYOUT)
    store.resize((PAGE,) * 5)
    assert len(list(store.directory.glob("*.bin"))) == 6, "one is still written"
    writer.abandon()
    assert {path.stat().st_size for path in store.directory.glob("*.bin")} == {PAGE}
    store.close()


def test_a_resize_that_finds_too_little_memory_leaves_all_as_it_was(place: Path, monkeypatch: Any) -> None:
    store = MemoryStore(place, JOB, RANK, SEGMENTS)
    write(store, FIRST)
    free = SimpleNamespace(f_bavail=1, f_frsize=PAGE, f_blocks=9)
    monkeypatch.setattr("os.statvfs", lambda _: free)
    with pytest.raises(NoRoom, match=r"0\.000 GB free, but snapshots now need .* more: enlarge the tmpfs"):
        store.resize((9 * PAGE,) * 3)
    assert store.total_bytes == sum(SEGMENTS)
    assert read(store, FIRST) == content(FIRST)
    write(store, SECOND)
    store.close()


def test_a_resize_that_the_system_refuses_half_way_leaves_as_much_room_as_before(place: Path) -> None:
    class Full(OperatingSystem):
        left = 10**9

        def allocate(self, descriptor: int, nbytes: int) -> None:
            Full.left -= nbytes
            if nbytes == 2 * PAGE and Full.left < 0:
                raise OSError(28, "No space left on device")
            super().allocate(descriptor, nbytes)

    store = MemoryStore(place, JOB, RANK, SEGMENTS, system=Full())
    write(store, SECOND)
    Full.left = 3 * PAGE
    with pytest.raises(NoRoom):
        store.resize((2 * PAGE,) * 3)
    assert store.total_bytes == sum(SEGMENTS)
    assert len(list(store.directory.glob("*.bin"))) == len(SEGMENTS)
    write(store, FIRST)
    for snapshot in (FIRST, SECOND):
        with store.open(snapshot) as reader:
            assert where(reader.raw()) in map(where, store.views())
    store.close()


class FilledUp(OperatingSystem):
    """A device on which every page is taken, from the moment that `now` is true: what has pages can be written over."""

    now = False

    def open(self, path: Path, flags: int) -> int:
        if self.now and flags & os.O_TRUNC:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return super().open(path, flags)

    def allocate(self, descriptor: int, nbytes: int) -> None:
        if self.now and os.fstat(descriptor).st_blocks * 512 < nbytes:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        super().allocate(descriptor, nbytes)

    def pwrite(self, descriptor: int, data: Any, offset: int) -> int:
        if self.now and os.fstat(descriptor).st_blocks * 512 < offset + len(data):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return os.pwrite(descriptor, data, offset)


def test_on_a_tmpfs_that_others_fill_every_snapshot_is_sealed(place: Path) -> None:
    system = FilledUp()
    store = new_store("memory", place, system)
    system.now = True
    for iteration in range(1, 3 * len(SEGMENTS)):
        snapshot = SnapshotId(iteration, RANK)
        write(store, snapshot)
        assert read(store, snapshot) == content(snapshot)
        store.reserve(SnapshotId(99, RANK), LAYOUT).abandon()
        store.free(snapshot)
    write(store, FIRST)
    store.close()
    again = new_store("memory", place, system)
    assert read(again, FIRST) == content(FIRST), "nor does a restart need a page"
    for snapshot in (SECOND, THIRD):
        write(again, snapshot)
    again.close()


def test_what_was_torn_when_its_process_died_gives_its_pages_to_the_next_snapshot(place: Path) -> None:
    system = FilledUp()
    store = new_store("memory", place, system)
    for snapshot in (FIRST, SECOND, THIRD):
        store.reserve(snapshot, LAYOUT)
    store.close()
    system.now = True
    store = new_store("memory", place, system)
    store.sweep()
    for snapshot in (FIRST, SECOND, THIRD):
        write(store, snapshot)
    store.close()


def test_a_manifest_that_took_more_than_its_room_keeps_that(place: Path) -> None:
    system = FilledUp()
    store = MemoryStore(place, JOB, RANK, SEGMENTS, system=system)
    many = Layout.of([Field(f"record-{at:04d}", "uint8", (1,)) for at in range(600)])
    store.resize((1 << 16,) * 3)
    for snapshot in (FIRST, SECOND, THIRD):
        write(store, snapshot, 0, many)
    system.now = True
    for snapshot in (FIRST, SECOND, THIRD):
        store.free(snapshot)
        write(store, snapshot, 1, many)
        assert read(store, snapshot) == content(snapshot, 1, many)
    store.close()


def test_a_slot_of_a_version_without_rooms_is_taken_over(place: Path) -> None:
    store = new_store("memory", place)
    manifest = write(store, FIRST)
    store.close()
    for path in store.directory.glob("segment-*.room"):
        path.unlink()
    sealed = next(store.directory.glob("*.json"))
    sealed.write_bytes(sealed.read_bytes().rstrip(b"\0"))
    full = FilledUp()
    full.now = True
    store = new_store("memory", place, full)
    assert read(store, FIRST) == content(FIRST) and store.open(FIRST).manifest == manifest
    store.close()
    store = new_store("memory", place)
    for snapshot in (SECOND, THIRD):
        write(store, snapshot)
    assert len(list(store.directory.glob("segment-*"))) == 2 * len(SEGMENTS)
    store.close()


def test_on_a_real_tmpfs_without_a_free_byte_snapshots_are_sealed_and_come_back(tmp_path: Path) -> None:
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=512k,mode=0700", "none", tmp_path], check=False)
    if mounted.returncode:
        pytest.skip("this user may not mount a tmpfs")
    try:
        store = new_store("memory", tmp_path)
        with contextlib.suppress(OSError), (tmp_path / "others").open("wb", buffering=0) as file:
            while file.write(bytes(4096)):
                pass
        assert os.statvfs(tmp_path).f_bavail == 0
        for snapshot in (FIRST, SECOND, THIRD):
            write(store, snapshot)
        store.close()
        store = new_store("memory", tmp_path)
        assert read(store, THIRD) == content(THIRD)
        store.free(FIRST)
        write(store, FOURTH)
        store.close()
        with pytest.raises(UsageError, match="it is full; free space there") as refused:
            MemoryStore(tmp_path, JOB, RANK + 1, SEGMENTS)
        assert "permissions" not in str(refused.value)
    finally:
        subprocess.run(["umount", "--lazy", tmp_path], check=True)  # segments stay mapped for a while


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_device_or_a_quota_is_called_full_and_nothing_of_permissions(code: int) -> None:
    for said in (reason(OSError(code, os.strerror(code))), refused_by(OSError(code, os.strerror(code)))):
        assert "it is full" in said and "permissions" not in said


@pytest.mark.parametrize("code", [errno.EACCES, errno.EPERM, errno.EROFS])
def test_a_right_that_is_missing_is_called_that(code: int) -> None:
    assert reason(OSError(code, os.strerror(code))).endswith("check its permissions")
    assert "full" not in reason(OSError(code, os.strerror(code)))


def refused_by(error: OSError) -> str:
    """What is said where a memory dir cannot be used for this."""
    with pytest.raises(UsageError) as refused, refused_as_unusable(Path("/dev/shm/run")):
        raise error
    return str(refused.value)
