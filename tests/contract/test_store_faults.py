"""Stores on a device that fails, and files that were changed behind their back: never a wrong byte."""

from __future__ import annotations

import errno
import json
import os
import random
import re
import shutil
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import fsspec
import pytest
from effort import cases
from faulty import KILLING, Fault, FaultyFiles, FaultySystem
from workload import LAYOUT, RANK, REFUSALS, SEGMENTS, Expected, content, new_store, perform, read, run, write

from megatron.core.dist_checkpointing.moe.dense_saves.directory import CheckpointDirectory
from megatron.core.dist_checkpointing.moe.errors import UnreadableCheckpoint
from megatron.core.dist_checkpointing.moe.ports import NoRoom, SnapshotId, StoreFailure
from megatron.core.dist_checkpointing.moe.storage.filesystem import FilesystemStore
from megatron.core.dist_checkpointing.moe.storage.system import OperatingSystem

CASES = {
    ("memory", Fault.KILL): 80,
    ("memory", Fault.KILL_AFTER): 80,
    ("memory", Fault.NO_SPACE): 50,
    ("memory", Fault.IO_ERROR): 50,
    ("memory", Fault.SHORT): 30,
    ("filesystem", Fault.KILL): 80,
    ("filesystem", Fault.KILL_AFTER): 80,
    ("filesystem", Fault.POWER_CUT): 120,
    ("filesystem", Fault.NO_SPACE): 50,
    ("filesystem", Fault.IO_ERROR): 50,
    ("filesystem", Fault.SHORT): 50,
}
BATCHES = 10
FIRST, SECOND = SnapshotId(10, RANK), SnapshotId(11, RANK)


def operate(kind: str, place: Path, system: FaultySystem, seed: int, journal: Any) -> None:
    """Runs the workload from the opening of the store on."""
    try:
        store = new_store(kind, place, system)
    except REFUSALS:
        return
    run(store, seed, journal)
    store.close()


def operate_in_child(kind: str, place: Path, system: FaultySystem, seed: int, journal: Path) -> None:
    """The same in a process that the fault kills; the journal is a file."""
    child = os.fork()
    if child:
        assert os.waitpid(child, 0)[1] in (0, 9), f"the workload broke on seed {seed}"
        return
    status = 1
    try:
        descriptor = os.open(journal, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

        def note(event: str, what: str, snapshot: SnapshotId, version: int) -> None:
            os.write(descriptor, (json.dumps([event, what, snapshot.iteration, version]) + "\n").encode())

        operate(kind, place, system, seed, note)
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


def count_calls(kind: str, place: Path, seed: int) -> int:
    system = FaultySystem()
    operate(kind, place, system, seed, lambda *_: None)
    shutil.rmtree(place)
    place.mkdir()
    return system.calls


def check_case(kind: str, fault: Fault, place: Path, seed: int) -> None:
    """One fault at a random call of a random workload, then a fresh store over what is left."""
    expected = Expected()
    at = random.Random(seed).randrange(count_calls(kind, place, seed)) + 1
    system = FaultySystem(fault, at, seed)
    if fault in KILLING:
        journal = place / "journal"
        operate_in_child(kind, place, system, seed, journal)
        for line in journal.read_text().splitlines():
            event, what, iteration, version = json.loads(line)
            getattr(expected, event)(what, SnapshotId(iteration, RANK), version)
    else:
        operate(kind, place, system, seed, lambda event, *operation: getattr(expected, event)(*operation))
        assert system.calls >= at
    store = new_store(kind, place)
    expected.compare(store)
    # What has been sealed is whole, or gone: never torn.
    assert all(".writing" in Path(torn.path).name for torn in store.snapshots().torn)
    for one in {*store.snapshots().sealed, *(torn.snapshot for torn in store.snapshots().torn)}:
        store.free(one)
    store.sweep()
    assert (store.snapshots().sealed, store.snapshots().torn) == ((), ())
    for iteration in range(len(SEGMENTS)):  # all the space is there again
        write(store, SnapshotId(iteration, RANK), version=500)
    assert all(read(store, one) == content(one, 500) for one in store.snapshots().sealed)
    store.close()


def test_there_are_more_than_five_hundred_cases() -> None:
    assert sum(CASES.values()) >= 500


@pytest.mark.parametrize(("kind", "fault"), CASES, ids=lambda one: getattr(one, "name", one))
@pytest.mark.parametrize("batch", cases(range(BATCHES), fast=range(3)))
def test_a_fault_at_any_call_never_makes_a_wrong_byte(kind: str, fault: Fault, batch: int, place: Path) -> None:
    for seed in range(batch, CASES[kind, fault], BATCHES):
        here = place / str(seed)
        here.mkdir()
        try:
            check_case(kind, fault, here, seed)
        except BaseException as error:
            error.add_note(f"repeat with check_case({kind!r}, {fault}, place, seed={seed})")
            raise
        shutil.rmtree(here)


@pytest.mark.parametrize("kind", ["memory", "filesystem"])
@pytest.mark.parametrize("fault", [Fault.KILL, Fault.KILL_AFTER], ids=lambda fault: fault.name)
def test_replacing_a_snapshot_survives_a_kill_at_every_single_call(kind: str, fault: Fault, place: Path) -> None:
    def replace(here: Path, system: FaultySystem) -> None:
        store = new_store(kind, here, system)
        perform(store, "write", SECOND, 0)
        store.free(FIRST)
        store.close()

    reference = FaultySystem()
    for at in range(1_000_000):
        here = place / str(at)
        here.mkdir()
        before = new_store(kind, here)
        write(before, FIRST)
        before.close()
        if not at:
            replace(here, reference)
            continue
        if at > reference.calls:
            break
        if not os.fork():
            try:
                replace(here, FaultySystem(fault, at))
            finally:
                os._exit(0)
        os.wait()
        store = new_store(kind, here)
        sealed = store.snapshots().sealed
        assert sealed in ((FIRST,), (FIRST, SECOND), (SECOND,)), f"killed at call {at}"
        assert all(read(store, one) == content(one) for one in sealed), f"killed at call {at}"
        store.close()
    assert reference.calls > 10


@pytest.mark.parametrize("kind", ["objects", "objects in files"])
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("error", [OSError(errno.EIO, "an error"), RuntimeError("the backend's own")], ids=repr)
def test_an_object_store_that_fails_at_any_call_never_makes_a_wrong_byte(
    kind: str, seed: int, error: Exception, place: Path
) -> None:
    def attempt(at: int) -> tuple[Path, Expected, list[str]]:
        here, expected, calls = place / str(at), Expected(), list[str]()
        store = new_store(kind, here)
        store.files = FaultyFiles(store.files, at, calls, error)
        run(store, seed, lambda event, *operation: getattr(expected, event)(*operation))
        return here, expected, calls

    total = len(attempt(0)[2])
    for at in range(1 + seed, total + 1, 4):
        here, expected, _ = attempt(at)
        store = new_store(kind, here)
        expected.compare(store)
        assert all("manifest.json" in torn.why for torn in store.snapshots().torn)  # no manifest before the segment
        for one in {*store.snapshots().sealed, *(torn.snapshot for torn in store.snapshots().torn)}:
            store.free(one)
        assert (store.snapshots().sealed, store.snapshots().torn) == ((), ())


class WithoutCreate:
    """A file system of fsspec before it knew puts that replace nothing."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def pipe_file(self, path: str, value: bytes) -> None:
        self._inner.pipe_file(path, value)


@pytest.mark.parametrize("kind", ["objects", "objects in files"])
@pytest.mark.parametrize("files", [lambda inner: inner, WithoutCreate], ids=["", "older"])
def test_a_writer_that_was_given_up_and_comes_late_seals_nothing_over_what_another_has_sealed(
    kind: str, files: Callable[[Any], Any], place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hung, other = new_store(kind, place), new_store(kind, place)
    hung.files = files(hung.files)
    publish = hung.publish

    def late(*arguments: Any) -> None:
        other.free(FIRST)
        write(other, FIRST, version=1)
        publish(*arguments)

    monkeypatch.setattr(hung, "publish", late)
    with pytest.raises(StoreFailure, match="another process has sealed this snapshot meanwhile"):
        write(hung, FIRST)
    assert read(other, FIRST) == content(FIRST, version=1)
    monkeypatch.undo()
    hung.free(FIRST)
    write(hung, FIRST, version=2)
    assert read(other, FIRST) == content(FIRST, version=2)


def test_a_late_writer_that_is_not_told_what_is_there_seals_nothing(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hung, other = new_store("objects", place), new_store("objects", place)

    class Unreachable(WithoutCreate):
        """Looks, and puts that replace nothing, are those of fsspec's base class."""

        def info(self, path: str) -> Any:
            raise OSError(errno.ETIMEDOUT, os.strerror(errno.ETIMEDOUT), path)

        def exists(self, path: str) -> bool:
            return fsspec.AbstractFileSystem.exists(self, path)

        def pipe_file(self, path: str, value: bytes, mode: str = "overwrite") -> None:
            if mode == "create" and self.exists(path):
                raise FileExistsError(path)
            super().pipe_file(path, value)

    publish = hung.publish

    def unreachable(*arguments: Any) -> None:
        write(other, FIRST, version=1)
        monkeypatch.setattr(hung, "files", Unreachable(hung.files))
        publish(*arguments)

    monkeypatch.setattr(hung, "publish", unreachable)
    with pytest.raises(StoreFailure, match="timed out"):
        write(hung, FIRST)
    assert read(other, FIRST) == content(FIRST, version=1)


def test_a_snapshot_is_free_though_its_folder_cannot_be_removed_yet(
    place: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Busy(OperatingSystem):
        """As NFS, where the files of a folder stay while somebody has them open."""

        is_open = True

        def remove_directory(self, path: Path) -> None:
            if self.is_open:
                raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY), str(path))
            super().remove_directory(path)

    system = Busy()
    store = new_store("filesystem", place, system)
    write(store, FIRST)
    store.free(FIRST)
    assert store.snapshots().sealed == ()
    assert "takes space until the next start" in caplog.text
    system.is_open = False
    store.sweep()
    assert not [one for one in place.rglob("*") if one.is_dir() and "freed" in one.name]


def test_the_folder_of_all_ranks_is_listed_for_a_write_only_where_something_may_have_been_left(place: Path) -> None:
    class Listing(OperatingSystem):
        """Counts how often the folder of all ranks is listed; a folder in it goes only where that is allowed."""

        listed, removes = 0, True

        def list_directory(self, path: Path) -> list[str]:
            self.listed += path == store.directory
            return super().list_directory(path)

        def remove_directory(self, path: Path) -> None:
            if not self.removes:
                raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
            super().remove_directory(path)

    def listings(action: Callable[[], Any]) -> int:
        before = system.listed
        action()
        return system.listed - before

    def again() -> None:
        store.free(FIRST)
        write(store, FIRST)

    system = Listing()
    store = new_store("filesystem", place, system)
    assert listings(again) == 2, "an earlier process may have left something of this snapshot"
    store.sweep()
    assert listings(again) == 0
    store.free(FIRST)
    assert listings(again) == 0
    system.removes = False
    store.reserve(SECOND, LAYOUT).abandon()
    system.removes = True
    assert listings(again) > 0
    store.sweep()
    assert listings(again) == 0 and not list(place.rglob(".writing*"))


def test_a_seal_that_was_made_though_it_was_said_to_fail_is_not_taken_for_anothers(place: Path) -> None:
    store = new_store("objects", place)
    inner, tries = store.files, list[str]()

    class Lost(WithoutCreate):
        def pipe_file(self, path: str, value: bytes, mode: str = "overwrite") -> None:
            inner.pipe_file(path, value)
            tries.append(mode)
            if mode == "create":
                raise OSError(errno.ETIMEDOUT, os.strerror(errno.ETIMEDOUT))

    store.files = Lost(inner)
    write(store, FIRST)
    assert tries == ["create", "overwrite"]
    assert read(store, FIRST) == content(FIRST)


@pytest.fixture(params=["memory", "filesystem", "objects", "objects in files"])
def kind(request: pytest.FixtureRequest) -> str:
    """Stores that have files."""
    return str(request.param)


class Scene:
    """A store with two sealed snapshots, whose files can be changed behind its back."""

    def __init__(self, kind: str, place: Path) -> None:
        self.kind, self.place = kind, place
        store = new_store(kind, place)
        for snapshot in (FIRST, SECOND):
            write(store, snapshot)
        store.close()
        self.files = fsspec.filesystem("memory" if kind == "objects" else "file")

    def paths(self, ending: str) -> list[str]:
        found = sorted(self.files.find(str(self.place)))
        return [path for path in found if path.endswith(ending) and "owner" not in path]

    @contextmanager
    def changed(self, path: str, data: bytes | None) -> Iterator[Any]:
        """The store while a file has other bytes, or is missing."""
        before = self.files.cat_file(path)
        if data is None:
            self.files.rm_file(path)
        else:
            self.files.pipe_file(path, data)
        store = new_store(self.kind, self.place)
        yield store
        store.close()
        self.files.makedirs(os.path.dirname(path), exist_ok=True)
        self.files.pipe_file(path, before)

    def check(self, store: Any, damaged: bool) -> int:
        """Reads all that can be read; returns how many records were refused."""
        refused = 0
        listing = store.snapshots()
        assert set(listing.sealed) | {one.snapshot for one in listing.torn} <= {FIRST, SECOND}
        for snapshot in (FIRST, SECOND):
            try:
                reader = store.open(snapshot)
            except UnreadableCheckpoint:
                refused += len(LAYOUT.fields)
                continue
            with reader:
                bad = {record.key for record in reader.verify()}
                for key, data in content(snapshot).items():
                    if key not in bad:
                        assert bytes(reader.read(key)) == data
                        continue
                    refused += 1
                    with pytest.raises(UnreadableCheckpoint, match=re.escape(key)):
                        reader.read(key)
        assert bool(refused) == damaged
        return refused


@pytest.fixture
def scene(kind: str, place: Path) -> Scene:
    return Scene(kind, place)


def test_every_changed_byte_of_a_manifest_is_found(scene: Scene) -> None:
    path = scene.paths(".json")[0]
    whole = scene.files.cat_file(path)
    flips = random.Random(3)
    store = new_store(scene.kind, scene.place)
    text = len(whole.rstrip(b"\0"))
    for at in (*range(text), *range(text, len(whole), 1009)):  # in memory there are zeros behind it
        changed = bytearray(whole)
        changed[at] ^= flips.randrange(1, 256)
        scene.files.pipe_file(path, bytes(changed))
        with pytest.raises(UnreadableCheckpoint):
            store.open(FIRST)
        if at % 100 == 0:
            listing = store.snapshots()
            assert (listing.sealed, [one.snapshot for one in listing.torn]) == ((SECOND,), [FIRST])
    store.close()


def test_a_changed_byte_of_a_record_is_found_and_only_that_record_is_refused(scene: Scene) -> None:
    path = next(path for path in scene.paths(".bin") if any(scene.files.cat_file(path)))
    whole = scene.files.cat_file(path)
    flips = random.Random(4)
    places = [
        at
        for field, offset in zip(LAYOUT.fields, LAYOUT.offsets, strict=True)
        for at in flips.sample(range(offset, offset + field.nbytes), min(field.nbytes, 40))
    ]
    for at in places:
        changed = bytearray(whole)
        changed[at] ^= flips.randrange(1, 256)
        with scene.changed(path, bytes(changed)) as store:
            assert scene.check(store, damaged=True) == 1


@pytest.mark.parametrize("ending", [".json", ".bin"])
def test_a_truncated_file_is_found(scene: Scene, ending: str) -> None:
    for path in scene.paths(ending)[:2]:
        whole = scene.files.cat_file(path)
        written = len(whole.rstrip(b"\0")) if ending == ".json" else len(whole)  # zeros behind a manifest are nothing
        for size in sorted({0, 1, 64, written // 2, min(written, LAYOUT.nbytes) - 1}):
            with scene.changed(path, whole[:size]) as store:
                scene.check(store, damaged=True)


@pytest.mark.parametrize("ending", [".json", ".bin"])
def test_a_deleted_file_is_found(scene: Scene, ending: str) -> None:
    for path in scene.paths(ending)[:2]:
        with scene.changed(path, None) as store:
            scene.check(store, damaged=True)


def test_a_manifest_under_another_name_is_refused(scene: Scene) -> None:
    first, second = scene.paths(".json")
    with scene.changed(first, scene.files.cat_file(second)) as store:
        scene.check(store, damaged=True)
        assert store.snapshots().sealed == (SECOND,)
        assert "belongs to the snapshot of rank 3 after iteration 11" in store.snapshots().torn[0].why


def test_a_damaged_snapshot_can_be_freed_and_written_again(scene: Scene) -> None:
    path = scene.paths(".json")[0]
    with scene.changed(path, b"{}") as store:
        store.free(FIRST)
        write(store, FIRST, version=1)
        assert read(store, FIRST) == content(FIRST, version=1)
        store.free(FIRST)


class Sick(OperatingSystem):
    """A device with a bad block: from the middle of a transfer on, each call about it fails."""

    def __init__(self, call: str, code: int) -> None:
        self.code, self.is_sick = code, False
        setattr(self, call, partial(self._half, getattr(self, call)))

    def _half(self, transfer: Any, descriptor: int, *arguments: Any) -> Any:
        if not self.is_sick:
            return transfer(descriptor, *arguments)
        if isinstance(arguments[0], int):  # bytes to allocate
            raise OSError(self.code, os.strerror(self.code))
        data, offset = arguments
        if len(data) < 2:
            raise OSError(self.code, os.strerror(self.code))
        return transfer(descriptor, data[: len(data) // 2], offset)


@pytest.mark.parametrize(
    ("kind", "call", "code"),
    [
        ("memory", "pwrite", errno.EIO),
        ("memory", "pwrite", errno.EDQUOT),
        ("filesystem", "pwrite", errno.EIO),
        ("filesystem", "pwrite", errno.EDQUOT),
        ("filesystem", "allocate", errno.EDQUOT),
    ],
)
def test_a_write_that_fails_in_its_middle_is_told_and_costs_nothing_older(
    kind: str, call: str, code: int, place: Path
) -> None:
    """Also where statvfs shows as free what a quota does not give."""
    system = Sick(call, code)
    store = new_store(kind, place, system)
    write(store, FIRST)
    system.is_sick = True
    for _ in range(len(SEGMENTS) + 1):
        with pytest.raises(StoreFailure, match=os.strerror(code)) as failed:
            write(store, SECOND)
        assert isinstance(failed.value, NoRoom) is (code == errno.EDQUOT)
        assert read(store, FIRST) == content(FIRST)
    system.is_sick = False
    write(store, SECOND)
    assert (read(store, FIRST), read(store, SECOND)) == (content(FIRST), content(SECOND))
    store.close()


def test_a_read_that_fails_in_its_middle_refuses_that_copy_and_the_one_before_is_read(place: Path) -> None:
    system = Sick("pread", errno.EIO)
    store = new_store("filesystem", place, system)
    write(store, FIRST)
    write(store, SECOND)
    reader = store.open(SECOND)
    system.is_sick = True
    with pytest.raises(UnreadableCheckpoint, match="Input/output error; use another copy"):
        reader.read("rng")
    assert [torn.snapshot for torn in store.snapshots().torn] == [FIRST, SECOND], "named, and nothing is removed"
    system.is_sick = False
    assert read(store, FIRST) == content(FIRST)
    assert store.snapshots().sealed == (FIRST, SECOND)
    reader.close()
    store.close()


class Unsynced(OperatingSystem):
    """A device on which the name of a folder once cannot be made durable."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.fails = folder, True
        self.synced: list[Path] = []

    def sync(self, descriptor: int) -> None:
        path = Path(f"/proc/self/fd/{descriptor}").readlink()
        if path == self.folder and self.fails:
            self.fails = False
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        super().sync(descriptor)
        self.synced.append(path)


def test_a_snapshot_whose_name_may_not_be_durable_is_written_again(place: Path) -> None:
    system = Unsynced(place / "disk")
    store = new_store("filesystem", place, system)
    with pytest.raises(StoreFailure, match="Input/output error"):
        write(store, FIRST)
    assert not store.snapshots() and not list(store.directory.iterdir())
    system.synced.clear()
    write(store, FIRST, version=1)
    assert system.synced[-1] == store.directory
    assert read(store, FIRST) == content(FIRST, version=1)


@pytest.fixture
def lost_folder(place: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """That of the first of two snapshots, whose file handle a server does not know any more."""
    store = new_store("filesystem", place)
    for snapshot in (FIRST, SECOND):
        write(store, snapshot)
    folder: Path = store.directory / FIRST.name

    def stale(call: Callable[..., Any], path: Any, *arguments: Any, **named: Any) -> Any:
        if isinstance(path, str | Path) and Path(path).is_relative_to(folder):
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), str(path))
        return call(path, *arguments, **named)

    for name in ("open", "stat", "lstat", "rename"):
        monkeypatch.setattr(os, name, partial(stale, getattr(os, name)))
    return folder


@pytest.mark.usefixtures("lost_folder")
def test_a_folder_that_cannot_be_looked_at_is_listed_as_unusable_beside_the_others(place: Path) -> None:
    listed = new_store("filesystem", place).snapshots()
    assert (listed.sealed, [one.snapshot for one in listed.torn]) == ((SECOND,), [FIRST])


def test_a_folder_that_cannot_be_looked_at_is_not_taken_for_one_that_is_gone(
    place: Path, lost_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = new_store("filesystem", place)
    for act in (lambda: store.free(FIRST), lambda: store.reserve(FIRST, LAYOUT)):
        with pytest.raises(StoreFailure, match=os.strerror(errno.ESTALE)):
            act()
    monkeypatch.undo()
    assert lost_folder.is_dir()


def test_memory_beyond_a_quota_is_refused_as_memory_that_is_not_there(place: Path) -> None:
    system = Sick("allocate", errno.EDQUOT)
    system.is_sick = True
    with pytest.raises(NoRoom, match="Disk quota exceeded"):
        new_store("memory", place, system)
    new_store("memory", place).close()


@pytest.mark.parametrize(
    "make", [lambda path: FilesystemStore(path, 0), lambda path: CheckpointDirectory(path).stage(1)]
)
def test_the_name_of_a_new_folder_is_on_the_device_before_anything_is_in_it(
    make: Callable[[Path], object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[Path] = []

    def sync(descriptor: int) -> None:
        synced.append(Path(f"/proc/self/fd/{descriptor}").readlink())

    monkeypatch.setattr(OperatingSystem, "sync", staticmethod(sync))
    make(tmp_path / "runs" / "first")
    assert {tmp_path, tmp_path / "runs"} <= set(synced)
    synced.clear()
    FilesystemStore(tmp_path / "runs" / "first", 0)
    assert not synced, "it was there"
