"""The process that continues persisting when its trainer has died: what it publishes, what not, and for how long."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import NoReturn
from unittest import mock

import psutil
import pytest
from descriptors import room_for_open_files

from megatron.core.dist_checkpointing.moe.errors import StoreFailure, UnreadableCheckpoint
from megatron.core.dist_checkpointing.moe.extensions.persist_agent import agent
from megatron.core.dist_checkpointing.moe.extensions.persist_agent.agent import (
    LOCK,
    PersistAgent,
    last_line,
    wait_for_agent,
)
from megatron.core.dist_checkpointing.moe.ports import Facts, Field, Layout, SnapshotId
from megatron.core.dist_checkpointing.moe.snapshot.persisting import CopyOrder, carry_out, line_of, orders_from
from megatron.core.dist_checkpointing.moe.storage.filesystem import FilesystemStore
from megatron.core.dist_checkpointing.moe.storage.lease import Holder, Lease
from megatron.core.dist_checkpointing.moe.storage.lease_files import LEASE
from megatron.core.dist_checkpointing.moe.storage.manifest import use_secret
from megatron.core.dist_checkpointing.moe.storage.memory import MemoryStore

RANK, SECRET = 3, b"sixteen bytes or more"
LAYOUT = Layout.of([Field(f"weights {at}", "float32", (64, 8)) for at in range(4)])
FACTS = Facts("job", "0" * 32, {}, {"timeline": [["first", 0]]})
OTHER_ATTEMPT = replace(FACTS, scalars={"timeline": [["second", 0]]})
NEWEST = SnapshotId(12, RANK)


def content(key: str, iteration: int = 12) -> bytes:
    return bytes((len(key) * at + int(key[-1]) + iteration) % 251 for at in range(64 * 8 * 4))


def sealed(memory: MemoryStore, snapshot: SnapshotId = NEWEST) -> None:
    with memory.reserve(snapshot, LAYOUT) as writer:
        for field in LAYOUT.fields:
            writer.put(field.key, content(field.key, snapshot.iteration))
        writer.seal(FACTS)


def ordered(memory: MemoryStore, snapshot: SnapshotId = NEWEST) -> CopyOrder:
    with memory.open(snapshot) as reader:
        return CopyOrder.of(snapshot, FACTS, LAYOUT, [reader])


@pytest.fixture(params=[None, SECRET], ids=["", "with a secret"])
def secret(request: pytest.FixtureRequest) -> Iterator[bytes | None]:
    use_secret(request.param)
    yield request.param
    use_secret(None)


Trainer = Callable[..., Path]


@pytest.fixture
def trainer(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> Trainer:
    """Runs a trainer that has iteration 12 sealed in memory, does what it is told, and dies by SIGKILL; its slot."""

    def run(
        does: Callable[[MemoryStore, PersistAgent], object], limit_s: float = 30.0, secret: bytes | None = None
    ) -> Path:
        (tmp_path / "memory").mkdir(exist_ok=True)
        ready, told = os.pipe()
        child = os.fork()
        if not child:
            with suppress(BaseException):
                memory = MemoryStore(tmp_path / "memory", "job", RANK, (LAYOUT.nbytes,) * 2)
                sealed(memory)
                agent = PersistAgent(memory.directory, str(tmp_path / "storage"), RANK, limit_s, secret)
                does(memory, agent)
                os.write(told, b"x")
                signal.pause()
            os.kill(os.getpid(), signal.SIGKILL)
        os.close(told)
        os.read(ready, 1)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(ready)
        slot = tmp_path / "memory" / "job" / f"slot-{RANK:03}"
        assert (slot / LOCK).exists()
        return slot

    return run


@pytest.fixture
def open_files() -> Iterator[None]:
    with room_for_open_files(2048), ExitStack() as stack:
        for _ in range(1100):
            stack.callback(os.close, os.open(os.devnull, os.O_RDONLY))
        yield


def in_storage(tmp_path: Path) -> FilesystemStore:
    return FilesystemStore(tmp_path / "storage", RANK)


def assert_stored(storage: FilesystemStore, snapshot: SnapshotId = NEWEST) -> None:
    with storage.open(snapshot) as reader:
        assert reader.manifest.facts == FACTS
        assert {field.key: bytes(reader.read(field.key)) for field in LAYOUT.fields} == {
            field.key: content(field.key, snapshot.iteration) for field in LAYOUT.fields
        }


def test_what_a_killed_trainer_was_persisting_is_published_whole_and_verified(
    trainer: Trainer, secret: bytes | None, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    def torn(memory: MemoryStore, agent: PersistAgent) -> None:
        agent.announce([ordered(memory)])
        writer = in_storage(tmp_path).reserve(NEWEST, LAYOUT)
        writer.put("weights 0", content("weights 0"))  # and it dies

    wait_for_agent(trainer(torn, secret=secret), 30.0)
    storage = in_storage(tmp_path)
    assert_stored(storage)
    assert storage.snapshots().torn == (), "what the trainer left is gone"
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith(f"rank {RANK}: its trainer ended while it persisted iteration 12; that was finished in ")


@pytest.mark.parametrize("has_sealed", [True, False])
def test_what_another_attempt_that_has_the_lease_since_has_sealed_is_not_replaced(
    has_sealed: bool, trainer: Trainer, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    def does(memory: MemoryStore, agent: PersistAgent) -> None:
        agent.announce([ordered(memory)])
        Lease(str(tmp_path / "storage"), Holder.here("job")).acquire()
        if has_sealed:
            with in_storage(tmp_path).reserve(NEWEST, LAYOUT) as writer:
                for field in LAYOUT.fields:
                    writer.put(field.key, content(field.key))
                writer.seal(OTHER_ATTEMPT)

    wait_for_agent(trainer(does), 30.0)
    with in_storage(tmp_path).open(NEWEST) as reader:
        assert reader.manifest.facts == (OTHER_ATTEMPT if has_sealed else FACTS)
    (line,) = capfd.readouterr().err.splitlines()
    assert ("was NOT finished: job 'job'" in line and "has written the" in line) is has_sealed


@pytest.fixture
def carried_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[str]]:
    """Runs what the process does when its trainer has died; for how long it paused, and its exit code."""

    def run(refusals: int = 0, error: type[Exception] = StoreFailure) -> list[str]:
        (tmp_path / "memory").mkdir()
        memory, noted = MemoryStore(tmp_path / "memory", "job", RANK, (LAYOUT.nbytes,)), tmp_path / "noted"
        sealed(memory)
        line, lock = line_of([ordered(memory)]), os.open(memory.directory / LOCK, os.O_RDWR | os.O_CREAT)
        facts = {"slot": str(memory.directory), "place": str(tmp_path / "storage"), "rank": RANK, "limit_s": 30.0}
        facts |= {"lock": lock, "lease": "of the trainer", "secret": None}
        reserve, left = FilesystemStore.reserve, iter([error("storage is away")] * refusals)

        def refusing(self: FilesystemStore, snapshot: SnapshotId, layout: Layout) -> object:
            if failure := next(left, None):
                raise failure
            return reserve(self, snapshot, layout)

        def note(number: float) -> None:
            with noted.open("a") as file:
                print(number, file=file)

        monkeypatch.setattr(agent, "_first_line", lambda: json.dumps(facts).encode())
        monkeypatch.setattr(agent, "last_line", lambda parent: line)
        monkeypatch.setattr(FilesystemStore, "reserve", refusing)
        child = os.fork()
        if not child:
            with suppress(BaseException):
                time.sleep = note
                note(agent.main(os.getppid()))
            os.kill(os.getpid(), signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(lock)
        return noted.read_text().split()

    return run


def test_what_storage_refuses_twice_is_written_at_the_third_attempt(
    carried_out: Callable[..., list[str]], tmp_path: Path
) -> None:
    assert carried_out(refusals=2) == ["1.0", "4.0", "0"]
    assert_stored(in_storage(tmp_path))


@pytest.mark.parametrize(
    ("error", "pauses"), [(StoreFailure, ["1.0", "4.0"]), (UnreadableCheckpoint, [])], ids=["storage", "memory"]
)
def test_what_cannot_be_written_is_given_up_when_training_would_have(
    error: type[Exception],
    pauses: list[str],
    carried_out: Callable[..., list[str]],
    capfd: pytest.CaptureFixture[str],
) -> None:
    assert carried_out(refusals=9, error=error) == [*pauses, "1"]
    assert "was NOT finished: storage is away" in capfd.readouterr().err


def test_what_the_holder_of_the_lease_has_written_is_not_waited_for(
    carried_out: Callable[..., list[str]], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    storage = in_storage(tmp_path)
    Lease(str(tmp_path / "storage"), Holder.here("job")).acquire()
    with storage.reserve(NEWEST, LAYOUT) as writer:
        for field in LAYOUT.fields:
            writer.put(field.key, content(field.key))
        writer.seal(OTHER_ATTEMPT)
    assert carried_out() == ["1"]
    assert "has written the" in capfd.readouterr().err


def test_nothing_is_replaced_where_nobody_can_tell_who_has_the_lease(
    trainer: Trainer, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    def does(memory: MemoryStore, agent: PersistAgent) -> None:
        agent.announce([ordered(memory)])
        with in_storage(tmp_path).reserve(NEWEST, LAYOUT) as writer:
            for field in LAYOUT.fields:
                writer.put(field.key, content(field.key))
            writer.seal(OTHER_ATTEMPT)
        os.mkfifo(tmp_path / "storage" / LEASE)

    wait_for_agent(trainer(does), 30.0)
    with in_storage(tmp_path).open(NEWEST) as reader:
        assert reader.manifest.facts == OTHER_ATTEMPT
    (line,) = capfd.readouterr().err.splitlines()
    assert "was NOT finished: " in line and "cannot be read: it is no regular file" in line


@pytest.mark.ci
def test_the_engine_is_imported_from_where_it_lies_without_the_finder_of_an_editable_install() -> None:
    program = f"""
import sys
from {agent.__name__} import _skip_megatron_core
_skip_megatron_core()
for name in ("megatron", "megatron.core", "megatron.core.dist_checkpointing"):
    print(*sys.modules[name].__path__)
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    engine = Path(agent.__file__).parents[2]
    assert ended.stdout.split() == [str(engine.parents[above]) for above in (2, 1, 0)]


@pytest.mark.parametrize("said", ["nothing", "ended", "half a line"])
def test_without_something_begun_nothing_is_written(
    said: str, trainer: Trainer, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    def does(memory: MemoryStore, agent: PersistAgent) -> None:
        orders = [ordered(memory)]
        if said == "ended":
            agent.announce(orders)
            agent.announce([])
        if said == "half a line":
            write = os.write

            def half(descriptor: int, data: memoryview) -> None:
                write(descriptor, data[: len(data) // 2])
                os.kill(os.getpid(), signal.SIGKILL)

            with mock.patch.object(os, "write", half):
                agent.announce(orders)

    wait_for_agent(trainer(does), 30.0)
    assert in_storage(tmp_path).snapshots().sealed == ()
    assert capfd.readouterr().err == ""


def test_a_trainer_with_more_than_1024_open_files_is_heard(trainer: Trainer, tmp_path: Path, open_files: None) -> None:
    wait_for_agent(trainer(lambda memory, agent: agent.announce([ordered(memory)])), 30.0)
    assert_stored(in_storage(tmp_path))


def test_what_is_not_in_memory_any_more_is_told_in_one_line_and_nothing_is_published(
    trainer: Trainer, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    def freed(memory: MemoryStore, agent: PersistAgent) -> None:
        order = ordered(memory)
        memory.free(NEWEST)
        agent.announce([order])

    wait_for_agent(trainer(freed), 30.0)
    assert in_storage(tmp_path).snapshots().sealed == ()
    (line,) = capfd.readouterr().err.splitlines()
    assert "was NOT finished" in line
    assert "not sealed here" in line


def test_bytes_that_changed_after_they_were_sealed_are_not_published(
    trainer: Trainer, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    def changed(memory: MemoryStore, agent: PersistAgent) -> None:
        agent.announce([ordered(memory)])
        (entry,) = memory.directory.glob("segment-*.json")
        with (memory.directory / f"{entry.name.partition('.')[0]}.bin").open("rb+") as segment:
            segment.seek(700)
            segment.write(b"\xff\xfe\xfd")

    wait_for_agent(trainer(changed), 30.0)
    assert in_storage(tmp_path).snapshots().sealed == ()
    (line,) = capfd.readouterr().err.splitlines()
    assert "does not match its checksum" in line


def test_it_ends_after_its_time_and_a_restart_does_not_wait_longer(
    trainer: Trainer, capfd: pytest.CaptureFixture[str]
) -> None:
    def late(memory: MemoryStore, agent: PersistAgent) -> None:
        agent.announce([ordered(memory)])

    slot, begun_s = trainer(late, limit_s=1e-3), time.monotonic()
    wait_for_agent(slot, 300.0)
    assert time.monotonic() - begun_s < 120
    (line,) = capfd.readouterr().err.splitlines()
    assert "was NOT finished: not within 0.001 s" in line


def test_it_ends_after_its_time_also_where_a_backend_catches_everything_and_hangs_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def hangs(*_: object) -> NoReturn:
        while True:
            with suppress(BaseException):
                time.sleep(3600)

    lock = os.open(tmp_path / LOCK, os.O_RDWR | os.O_CREAT)
    facts = {"lock": lock, "limit_s": 0.2, "rank": RANK, "place": "nowhere"}
    monkeypatch.setattr(agent, "_first_line", lambda: json.dumps(facts).encode())
    monkeypatch.setattr(agent, "last_line", lambda parent: b"[1]")
    monkeypatch.setattr(agent, "_finish", hangs)
    child = os.fork()
    if not child:
        agent.main(os.getppid())
        os.kill(os.getpid(), signal.SIGKILL)  # it did not end by itself
    until_s = time.monotonic() + 60
    while (ended := os.waitpid(child, os.WNOHANG))[0] == 0 and time.monotonic() < until_s:
        time.sleep(0.02)
    if not ended[0]:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    os.close(lock)
    assert ended[0] and os.waitstatus_to_exitcode(ended[1]) == 1
    assert "was NOT finished: not within 0.2 s" in capfd.readouterr().err


@pytest.mark.parametrize("moved", [False, True], ids=["", "from another slot"])
def test_a_restart_waits_only_so_long(moved: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    own = tmp_path / "slot-000"
    held = tmp_path / "slot-005" if moved else own
    held.mkdir()
    holder = (
        "import fcntl, os, sys, time\n"
        f"fcntl.flock(os.open({str(held / LOCK)!r}, os.O_RDWR | os.O_CREAT), fcntl.LOCK_EX)\n"
        "print(flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", holder], stdout=subprocess.PIPE) as process, ExitStack() as stack:
        stack.callback(process.kill)
        assert process.stdout is not None
        process.stdout.readline()
        wait_for_agent(own, -4.5)
    assert f"{held}: still held by another persist agent after 0.5 s" in caplog.text


def test_a_restart_finds_the_process_of_a_trainer_that_died_as_soon_as_it_had_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "memory").mkdir()
    memory = MemoryStore(tmp_path / "memory", "job", RANK, (LAYOUT.nbytes,))
    agent = PersistAgent(memory.directory, str(tmp_path / "storage"), RANK, 30.0, None)
    wait_for_agent(memory.directory, -5.0)
    assert "still held by another persist agent after 0 s" in caplog.text
    agent.close()
    caplog.clear()
    wait_for_agent(memory.directory, 30.0)
    assert caplog.text == ""


def test_the_process_leaves_nothing_in_a_slot_whose_memory_was_given_back(tmp_path: Path) -> None:
    """It may still be starting when a short job ends: a folder that is removed meanwhile must not get a new file."""
    slot = tmp_path / "slot-003"
    slot.mkdir()
    before = psutil.Process().children()
    agent = PersistAgent(slot, str(tmp_path / "storage"), RANK, 30.0, None)
    started = [process for process in psutil.Process().children() if process not in before]
    for path in slot.iterdir():  # as `MemoryStore.remove` does first
        path.unlink()
    agent.close()
    _, alive = psutil.wait_procs(started, timeout=60.0)
    assert started
    assert not alive
    slot.rmdir()


def reading_s(monkeypatch: pytest.MonkeyPatch, pieces: int) -> float:
    """CPU seconds that it takes to take in one line of so many pieces, at best of three times."""

    def read() -> float:
        coming = iter([*[bytes(64)] * pieces, b"\n", b""])
        monkeypatch.setattr(os, "read", lambda descriptor, most: next(coming))
        begun_s = time.thread_time()
        assert len(last_line(os.getppid())) == 64 * pieces
        return time.thread_time() - begun_s

    monkeypatch.setattr(select, "select", lambda reading, *_: ([0], [], []))
    return min(read() for _ in range(3))


def test_a_line_of_eight_times_as_many_orders_takes_about_eight_times_as_long(monkeypatch: pytest.MonkeyPatch) -> None:
    assert reading_s(monkeypatch, 40_000) < 24 * reading_s(monkeypatch, 5_000)


def test_what_was_closed_is_finished_though_the_trainer_lives_on(tmp_path: Path) -> None:
    (tmp_path / "memory").mkdir()
    memory = MemoryStore(tmp_path / "memory", "job", RANK, (LAYOUT.nbytes,))
    sealed(memory)
    agent = PersistAgent(memory.directory, str(tmp_path / "storage"), RANK, 30.0, None)
    agent.announce([ordered(memory)])
    agent.close()
    storage, deadline = in_storage(tmp_path), time.monotonic() + 120
    while not storage.snapshots().sealed and time.monotonic() < deadline:
        time.sleep(0.02)
    assert_stored(storage)
    agent.announce([])  # too late to matter, and no error


def test_it_ends_when_it_is_told_to_though_a_helper_of_the_trainer_holds_the_connection(tmp_path: Path) -> None:
    (tmp_path / "memory").mkdir()
    memory = MemoryStore(tmp_path / "memory", "job", RANK, (LAYOUT.nbytes,))
    sealed(memory)
    agent = PersistAgent(memory.directory, str(tmp_path / "storage"), RANK, 30.0, None)
    agent.announce([ordered(memory)])
    helper = os.fork()  # as a data loader is
    if not helper:
        time.sleep(600)
        os._exit(0)
    try:
        agent.close()
        deadline = time.monotonic() + 120
        while not in_storage(tmp_path).snapshots().sealed and time.monotonic() < deadline:
            time.sleep(0.02)
        assert_stored(in_storage(tmp_path))
        begun_s = time.monotonic()
        wait_for_agent(memory.directory, 300.0)
        assert time.monotonic() - begun_s < 120, "a new session need not wait"
    finally:
        os.kill(helper, signal.SIGKILL)
        os.waitpid(helper, 0)


def test_orders_travel_as_a_line_of_which_every_byte_counts(tmp_path: Path) -> None:
    (tmp_path / "memory").mkdir()
    memory = MemoryStore(tmp_path / "memory", "job", RANK, (LAYOUT.nbytes,))
    sealed(memory)
    order = ordered(memory)
    line = line_of([order])
    assert orders_from(line) == (order,)
    assert orders_from(line_of([])) == ()
    for at in range(0, len(line) - 1, 7):
        with suppress(UnreadableCheckpoint):
            assert orders_from(line[:at] + bytes([line[at] ^ 1]) + line[at + 1 :])[0].manifest == order.manifest


def test_a_snapshot_of_another_attempt_under_the_same_name_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "memory").mkdir()
    memory, storage = MemoryStore(tmp_path / "memory", "job", RANK, (LAYOUT.nbytes,)), in_storage(tmp_path)
    sealed(memory)
    order = ordered(memory)
    older = replace(order, manifest=replace(order.manifest, facts=OTHER_ATTEMPT))
    with memory.open(NEWEST) as reader:
        assert carry_out(older, [reader], storage) == LAYOUT.nbytes
        assert carry_out(order, [reader], storage) == LAYOUT.nbytes
        assert carry_out(order, [reader], storage) == 0
    assert_stored(storage)
