"""Whatever lies where a file should be costs that entry and a line with its path: what is intact beside it is used."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import stat
import sys
import tempfile
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from pathlib import Path

import pytest
import torch
import verify_places

from megatron.core.dist_checkpointing.moe.dense_saves.choosing import _candidates
from megatron.core.dist_checkpointing.moe.dense_saves.directory import CheckpointDirectory
from megatron.core.dist_checkpointing.moe.errors import MoECheckpointError, UsageError
from megatron.core.dist_checkpointing.moe.policy.lineage import Lineage
from megatron.core.dist_checkpointing.moe.ports import SnapshotId
from megatron.core.dist_checkpointing.moe.recovery import exactness, timeline
from megatron.core.dist_checkpointing.moe.recovery.exactness import Divergence, DivergenceNotes
from megatron.core.dist_checkpointing.moe.runtime.status import STATUS_FILE
from megatron.core.dist_checkpointing.moe.stock.dense import _iteration_in
from megatron.core.dist_checkpointing.moe.storage.memory import MemoryStore
from megatron.core.dist_checkpointing.moe.storage.objects import open_durable
from megatron.core.dist_checkpointing.moe.storage.ownership import OWNER_FILE, job_of_launcher
from megatron.core.dist_checkpointing.moe.storage.small_files import INFORMING_BYTES
from moe_ckpt.commands.main import main
from moe_ckpt.dense import integrity
from moe_ckpt.dense.dense import open_dense
from moe_ckpt.dense.names import COMMON, FORMAT, INDEX, TRACKER

PATIENCE_S = 20
TERABYTE = 1 << 40
TIMELINE: Lineage = (("first", 0),)
NOTE = Divergence(2, 3, (0,), alone=False, first=1, last=2, timeline=TIMELINE, why="loss 1 is not 2")

pytestmark = pytest.mark.usefixtures("single_process_group")


def sparse(path: Path) -> None:
    path.touch()
    os.truncate(path, TERABYTE)


def device(path: Path) -> None:
    try:
        os.mknod(path, stat.S_IFCHR | 0o600, os.makedev(1, 5))
    except PermissionError:
        path.symlink_to("/dev/full")


STRANGE: dict[str, Callable[[Path, bytes], object]] = {
    "FIFO": lambda path, was: os.mkfifo(path),
    "folder": lambda path, was: (path.mkdir(), (path / "file").touch()),
    "link to an endless device": lambda path, was: path.symlink_to("/dev/zero"),
    "device": lambda path, was: device(path),
    "sparse terabyte": lambda path, was: sparse(path),
    "truncated": lambda path, was: path.write_bytes(was[: len(was.rstrip(b"\0")) // 2]),
    "empty": lambda path, was: path.touch(),
    "random bytes": lambda path, was: path.write_bytes(os.urandom(4096)),
    "more digits than int() takes": lambda path, was: path.write_bytes(b"9" * 5000),
}


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    """An empty folder on tmpfs, where there is one: on a disk these tests would mostly wait for it."""
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    folder = Path(tempfile.mkdtemp(dir=memory, prefix="moe-ckpt-test-"))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def in_time() -> Iterator[None]:
    """Fails what waits."""

    def late(*unused: object) -> None:
        raise AssertionError(f"it still waits after {PATIENCE_S} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(PATIENCE_S)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def strange_copies(original: Path, pattern: str, folder: Path) -> Iterator[tuple[str, Path, Path]]:
    """For each strange thing a copy of a place in which it lies in place of the last file that fits the pattern."""
    for name, make in STRANGE.items():
        place = folder / "copy"
        shutil.copytree(original, place)
        path = sorted(place.glob(pattern))[-1]
        was = path.read_bytes()
        path.unlink()
        make(path, was)
        yield name, place, path
        shutil.rmtree(place)


def said(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *command: object) -> tuple[int, str]:
    """Exit code and all output of a command, which ends in time, without a traceback."""
    monkeypatch.setattr(sys, "argv", ["moe-ckpt", *map(str, command)])
    capsys.readouterr()
    with in_time(), pytest.raises(SystemExit) as ended:
        main()
    output = capsys.readouterr()
    assert "Traceback" not in output.err
    return int(ended.value.code or 0), output.out + output.err


def stock(root: Path, seed: int) -> Path:
    """As dense checkpoints are without their checksums."""
    verify_places.dense(root, seed)
    for folder in root.glob("iter_*"):
        (folder / integrity.NAME).unlink()
        torch.save({"iteration": int(folder.name[5:]), "checkpoint_version": 3.0}, folder / COMMON)
    return root


def with_sidecars(root: Path, seed: int) -> Path:
    """A memory dir where each rank has left all that it may leave beside its snapshots."""
    verify_places.memory(root, seed)
    for slot in root.glob("node/job/slot-*"):
        (slot / timeline.FILE).write_text('[{"attempt": "1", "times": {"detected": 9.0}}]')
        DivergenceNotes(slot).add(NOTE)
        facts = {"rank": int(slot.name[5:]), "at_s": 9.0, "job": "job", "world_size": 2, "protection": "protected"}
        (slot / STATUS_FILE).write_text(json.dumps(facts))
    return root


# What `verify` says that can be restored where the newest file of this kind is strange.
NEWEST, OLDER, ANY = "newest", "older", "any"
SIDECARS = (timeline.FILE, exactness.FILE, STATUS_FILE)
MEMORY = {
    "node/job/slot-000/segment-*.iter_0000002-*.json": OLDER,
    "node/job/slot-000/segment-002.bin": ANY,
    f"node/job/slot-000/{OWNER_FILE}": NEWEST,
    f"node/job/slot-000/{timeline.FILE}": NEWEST,
    f"node/job/slot-000/{exactness.FILE}": NEWEST,
    f"node/job/slot-000/{STATUS_FILE}": NEWEST,
}
STORAGE = {"*/manifest.json": OLDER, "*/segment.bin": OLDER}
FILES = (INDEX, COMMON, FORMAT, "*_0.distcp")
DENSE = {
    **{f"iter_0000024/{name}": OLDER for name in FILES},
    f"iter_0000024/{integrity.NAME}": OLDER,
    TRACKER: ANY,
}
STOCK = {f"iter_0000024/{name}": OLDER for name in FILES}
PLACES = {
    "memory": (with_sidecars, MEMORY),
    "storage": (verify_places.storage, STORAGE),
    "dense": (verify_places.dense, DENSE),
    "stock": (stock, STOCK),
}


@pytest.mark.parametrize(
    ("kind", "pattern"), [(kind, pattern) for kind, (_, patterns) in PLACES.items() for pattern in patterns]
)
def test_commands_name_what_is_strange_and_use_the_rest(
    kind: str, pattern: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    make, patterns = PLACES[kind]
    original = make(tmp_path / "original", 1)
    newest = json.loads(said(capsys, monkeypatch, "verify", original, "--json")[1])["newest_state"]
    for name, place, path in strange_copies(original, pattern, tmp_path):
        code, output = said(capsys, monkeypatch, "verify", place, "--json")
        verified = json.loads(output)
        findings = [finding["path"] + finding["found"] for finding in verified.get("findings", ())]
        if path.name in SIDECARS:
            assert (code, findings) == (0, []), name
        elif patterns[pattern] != ANY:
            assert code == 3, (name, output)  # there is something to restore
            assert any(str(path) in line or path.parent.name in line for line in findings), (name, output)
        if patterns[pattern] != ANY:
            assert (verified["newest_state"] == newest) == (patterns[pattern] == NEWEST), (name, output)
        assert said(capsys, monkeypatch, "inspect", place)[0] in (0, 1)
        digested = said(capsys, monkeypatch, "digest", place / "iter_0000024")[0]
        assert digested in ((0, 1) if (place / "iter_0000024").exists() else (2,))
        if kind == "memory":
            code, output = said(capsys, monkeypatch, "status", place)
            assert "Ranks reporting" in output
            assert (str(path) in output) == (path.name == STATUS_FILE), (name, output)
        # Twice: what a command put in order is as it should be.
        for apply in ((), ("--apply",)):
            kept = () if kind == "memory" else ("--keep-last", "1")
            assert said(capsys, monkeypatch, "gc", place, "--idle", "1s", *kept, *apply)[0] in (0, 1)
        assert said(capsys, monkeypatch, "verify", place)[0] in (0, 1, 3)
        assert any(place.rglob("*"))


@pytest.mark.parametrize("pattern", MEMORY)
def test_a_job_starts_beside_what_is_strange_in_its_memory(pattern: str, tmp_path: Path) -> None:
    original = with_sidecars(tmp_path / "original", 1)
    for name, place, path in strange_copies(original, pattern, tmp_path):
        with in_time():
            assert job_of_launcher(place / "node") in ("", "job")
            # Whether another process holds the slot is what its owner file is for; links may be somebody's trap.
            if path.is_symlink() or (path.name == OWNER_FILE and not path.is_file()):
                with pytest.raises(UsageError, match=str(path)):
                    MemoryStore(place / "node", "job", 0, (1 << 14,) * 3)
                continue
            with closing(MemoryStore(place / "node", "job", 0, (1 << 14,) * 3)) as store:
                left = store.snapshots()
                assert SnapshotId(1, 0) in left.sealed, name
                for torn in left.torn:
                    assert path.name in torn.why or path.stem in torn.why
                timeline.left_in(store.directory)
                DivergenceNotes(store.directory).read()
                verify_places.write(store, verify_places.random.Random(2), SnapshotId(3, 0), 1)
                for snapshot in {*left.sealed, *(torn.snapshot for torn in left.torn)}:
                    store.free(snapshot)
                store.sweep()
                assert store.snapshots().sealed == (SnapshotId(3, 0),), name
                for iteration in (4, 5):  # each segment is of use, also that of what was strange
                    verify_places.write(store, verify_places.random.Random(2), SnapshotId(iteration, 0), 1)
                for iteration in (4, 5):
                    store.free(SnapshotId(iteration, 0))
                assert not store.snapshots().torn
                store.remove()


@pytest.mark.parametrize("prefix", ["", "file://"])
@pytest.mark.parametrize("pattern", STORAGE)
def test_a_job_uses_the_rest_of_its_storage(pattern: str, prefix: str, tmp_path: Path) -> None:
    original = verify_places.storage(tmp_path / "original", 1)
    for name, place, path in strange_copies(original, pattern, tmp_path):
        with in_time():
            store = open_durable(f"{prefix}{place}", 1)
            listed = store.snapshots()
            strange = SnapshotId.parse(path.parent.name)
            assert strange is not None
            assert len(listed.sealed) == len(list(original.iterdir())) - 1, name
            assert [torn.snapshot for torn in listed.torn] == [strange], name
            assert path.name in listed.torn[0].why, name
            with pytest.raises(MoECheckpointError):
                store.open(strange)
            with suppress(MoECheckpointError) if prefix else contextlib.nullcontext():
                store.free(strange)
                store.sweep()
                assert not store.snapshots().torn, name


@pytest.mark.parametrize("pattern", DENSE)
def test_a_dense_checkpoint_that_cannot_be_read_is_refused_in_a_line(pattern: str, tmp_path: Path) -> None:
    for make in (verify_places.dense, stock) if pattern in STOCK else (verify_places.dense,):
        original = make(tmp_path / make.__name__, 1)
        for name, place, path in strange_copies(original, pattern, tmp_path):
            with in_time():
                assert open_dense(place / "iter_0000012").common["iteration"] == 12
                assert _iteration_in(str(place)) in (-1, 0, 2, 24), name
                with suppress(MoECheckpointError):
                    checkpoint = open_dense(place)
                    for tensor in checkpoint.tensors:
                        list(checkpoint.read_blocks(tensor))
                    integrity.check(place / "iter_0000024")
            if path.name == TRACKER:
                args = Namespace(load=str(place), save=None, ckpt_step=None, pretrained_checkpoint=None)
                with in_time(), suppress(UsageError):
                    found = _candidates(args, "load")
                    # An empty tracker counts as lost, half of one names another iteration; nothing begins again.
                    assert found, name


@pytest.mark.parametrize(
    "content",
    [
        "[" * 100_000, " " * (INFORMING_BYTES + 1), "{}", "[1]", "\udcff", "NaN", '[{"iteration": 1e999}]',
    ],
    ids=range(7),
)  # fmt: skip
def test_damaged_notes_of_replays_are_said_once_and_put_aside(
    content: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / exactness.FILE).write_text(content, errors="surrogateescape")
    notes = DivergenceNotes(tmp_path)
    assert notes.read() == []
    assert notes.read() == []
    assert caplog.text.count(str(tmp_path / exactness.FILE)) == 1
    notes.add(NOTE)
    assert DivergenceNotes(tmp_path).read() == [NOTE]


@pytest.mark.parametrize("kind", ["link", "FIFO"])
def test_whatever_lies_where_a_file_is_written_aside_is_not_written_through(kind: str, tmp_path: Path) -> None:
    planted, victim = tmp_path / f".{TRACKER}.{os.getpid()}.tmp", tmp_path / "victim"
    victim.write_text("of somebody")
    planted.symlink_to(victim) if kind == "link" else os.mkfifo(planted)
    CheckpointDirectory(tmp_path).track(12)
    assert (tmp_path / TRACKER).read_text() == "12" and not (tmp_path / TRACKER).is_symlink()
    assert victim.read_text() == "of somebody"
