"""What is recognized in a folder, and what is refused, in one line that says what was found and what to do."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import fsspec
import pytest

from megatron.core.dist_checkpointing.moe.errors import NewerFormat, UnreadableCheckpoint, UsageError
from megatron.core.dist_checkpointing.moe.ports import Facts, Field, Layout, SnapshotId
from megatron.core.dist_checkpointing.moe.storage.filesystem import FilesystemStore
from megatron.core.dist_checkpointing.moe.storage.manifest import framed
from megatron.core.dist_checkpointing.moe.storage.memory import MemoryStore
from megatron.core.dist_checkpointing.moe.storage.objects import ObjectStore
from moe_ckpt.checkpoints.location import LocationKind
from moe_ckpt.checkpoints.recognition import recognize
from moe_ckpt.checkpoints.slots import slots
from moe_ckpt.commands.main import main

if TYPE_CHECKING:
    from conftest import Content as Saved
    from conftest import Save

SNAPSHOT = SnapshotId(12, 0)
LAYOUT = Layout.of([Field("weight", "uint8", (4,))])
TRACKER = "latest_checkpointed_iteration.txt"

REFUSED: dict[str, tuple[tuple[str, ...], str]] = {
    "legacy Megatron": (("mp_rank_00/model_optim_rng.pt",), "holds nothing in a format that moe-ckpt supports"),
    "legacy Megatron's --save": (
        (TRACKER, "iter_0000010/mp_rank_00/model_optim_rng.pt"),
        "iter_0000010 is in a format that is not supported: load it with what saved it",
    ),
    "a model without Megatron": (("config.json", "model.safetensors"), "(found: config.json, model.safetensors)"),
    "FSDP": ((".metadata", "__0_0.distcp", "__1_0.distcp"), "without Megatron's metadata.json"),
    "nothing": ((), "is empty"),
    "something else": (("notes.txt", "a/", "b/", "c/", "d/"), "found: a, b, c, d, and 1 more"),
    "a save without an index": (
        ("common.pt", "__0_0.distcp", "metadata.json"),
        "half-written checkpoint: it has no .m",
    ),
    "a save without a commit": (("common.pt", "__0_0.distcp", ".metadata"), "it has no metadata.json"),
    "a save that never finished": ((".iter_0000003.saving/__0_0.distcp",), "only a half-written checkpoint"),
    "a renamed snapshot": (("manifest.json", "segment.bin"), "under another name"),
}


def write(root: Path, *names: str) -> Path:
    root.mkdir(parents=True, exist_ok=True)
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        if name.endswith("/"):
            (root / name).mkdir()
        else:
            (root / name).write_bytes(b"")
    return root


def stored(store: Any, snapshot: SnapshotId = SNAPSHOT) -> None:
    with store.reserve(snapshot, LAYOUT) as writer:
        writer.put("weight", b"1234")
        writer.seal(Facts("job"))


def kind_of(place: object) -> LocationKind:
    return recognize(str(place))


@contextmanager
def without_privileges() -> Iterator[None]:
    """As a user who owns nothing; tests may run as root, whom no permission stops."""
    before = os.geteuid()
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(before)


@pytest.fixture
def inspected(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[[Path], Any]:
    def call(place: Path) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["moe-ckpt", "inspect", str(place)])
        with pytest.raises(SystemExit) as exit_info:
            main()
        return exit_info.value.code, *capsys.readouterr()

    return call


@pytest.mark.parametrize("who", REFUSED)
def test_what_cannot_be_read_is_refused_in_one_line_with_what_was_found(
    who: str, inspected: Any, tmp_path: Path
) -> None:
    names, words = REFUSED[who]
    place = write(tmp_path / "a folder", *names)
    with pytest.raises(UnreadableCheckpoint) as refusal:
        recognize(str(place))
    assert words in str(refusal.value)
    code, out, err = inspected(place)
    assert (code, out, err) == (1, "", f"moe-ckpt: {refusal.value}\n")
    assert "\n" not in str(refusal.value)
    assert str(place) in err


@pytest.mark.parametrize("name", [".iter_0000012.saving", ".iter_0000012.removing"])
def test_a_staging_folder_is_a_half_written_checkpoint(name: str, tmp_path: Path) -> None:
    with pytest.raises(UnreadableCheckpoint, match="half-written checkpoint: iteration 12"):
        recognize(str(write(tmp_path / name, "__0_0.distcp")))


def test_an_iteration_that_a_save_had_moved_aside_is_not_called_half_written(tmp_path: Path) -> None:
    with pytest.raises(UnreadableCheckpoint, match=r"is iteration 12, moved aside by a save of it: .* the next start"):
        recognize(str(write(tmp_path / ".iter_0000012.replaced", "__0_0.distcp")))


@pytest.mark.parametrize("name", [f".writing.{SNAPSHOT.name}.00000.5f0c8a1e", SNAPSHOT.name])
def test_a_snapshot_that_was_never_sealed_is_half_written(name: str, tmp_path: Path) -> None:
    with pytest.raises(UnreadableCheckpoint, match="half-written snapshot"):
        recognize(str(write(tmp_path / name, "segment.bin")))


@pytest.mark.parametrize(
    ("name", "said", "words"),
    [
        ("metadata.json", {"sharded_backend": "torch_dist", "sharded_backend_version": 2}, "version 2 of torch_dist"),
        ("moe_ckpt_chain.json", framed("chain", b'{"format":7}'), "written in format 7"),
    ],
)
def test_a_checkpoint_of_a_later_version_is_told_from_a_damaged_one(
    name: str, said: Any, words: str, tmp_path: Path
) -> None:
    write(tmp_path, ".metadata", "metadata.json", "common.pt", "__0_0.distcp")
    (tmp_path / name).write_bytes(said if isinstance(said, bytes) else json.dumps(said).encode())
    with pytest.raises(NewerFormat, match=words):
        recognize(str(tmp_path))


def test_a_snapshot_of_a_later_version_is_told_from_a_damaged_one(tmp_path: Path) -> None:
    write(tmp_path / SNAPSHOT.name, "segment.bin")
    manifest = tmp_path / SNAPSHOT.name / "manifest.json"
    manifest.write_bytes(framed("manifest", b'{"format":2}'))
    with pytest.raises(NewerFormat, match="written in format 2"):
        recognize(str(manifest.parent))


def test_a_version_is_not_believed_before_its_checksum(tmp_path: Path) -> None:
    write(tmp_path / SNAPSHOT.name, "segment.bin")
    manifest = tmp_path / SNAPSHOT.name / "manifest.json"
    manifest.write_bytes(framed("manifest", b'{"format":1}').replace(b"1}", b"2}"))
    assert kind_of(manifest.parent) is LocationKind.SNAPSHOT


def test_a_commit_marker_that_is_nested_without_end_is_no_crash(tmp_path: Path) -> None:
    write(tmp_path, ".metadata", "common.pt", "__0_0.distcp")
    (tmp_path / "metadata.json").write_bytes(b"[" * 100_000)
    assert kind_of(tmp_path) is LocationKind.ITERATION


@pytest.mark.parametrize("scheme", ["zip", "tar"])
def test_what_a_backend_of_a_url_says_in_its_own_way_is_one_line(scheme: str, inspected: Any, tmp_path: Path) -> None:
    (tmp_path / "archive").write_bytes(b"no archive at all")
    code, out, err = inspected(f"{scheme}://::file://{tmp_path}/archive")
    assert (code, out, err.count("\n")) == (1, "", 1)
    assert "cannot be read: " in err


def test_a_checkpoint_in_megatrons_zarr_format_is_named(tmp_path: Path) -> None:
    write(tmp_path, "common.pt")
    (tmp_path / "metadata.json").write_text(json.dumps({"sharded_backend": "zarr", "sharded_backend_version": 1}))
    with pytest.raises(UnreadableCheckpoint, match="in the format 'zarr'"):
        recognize(str(tmp_path))


def test_files_are_no_places(tmp_path: Path) -> None:
    write(tmp_path, "notes.txt")
    with pytest.raises(UnreadableCheckpoint, match="is a file; give a folder"):
        recognize(str(tmp_path / "notes.txt"))


@pytest.mark.parametrize("place", ["nowhere", "no where/at all", "memory://nowhere/at-all", "magic://x"])
def test_a_place_that_cannot_be_is_wrong_usage(place: str, inspected: Any, tmp_path: Path) -> None:
    where = place if "://" in place else str(tmp_path / place)
    with pytest.raises(UsageError):
        recognize(where)
    code, out, err = inspected(Path(where) if "://" not in place else where)
    assert (code, out, err.count("\n")) == (2, "", 1)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
def test_a_place_that_must_not_be_read_is_named(tmp_path: Path) -> None:
    place = write(tmp_path / "private", "metadata.json")
    place.chmod(0o700)
    with without_privileges(), pytest.raises(UsageError, match="no permission to read it"):
        recognize(str(place))


def test_dense_checkpoints_are_recognized_with_and_without_common_pt(
    content: Saved, save: Save, tmp_path: Path
) -> None:
    with_common = save(content, tmp_path / "with")
    content.objects["common_state"] = content.common
    without = save(content, tmp_path / "with out")
    (without / "common.pt").unlink(missing_ok=True)
    assert kind_of(with_common) is LocationKind.ITERATION
    assert kind_of(without) is LocationKind.ITERATION


def test_a_damaged_commit_marker_is_left_to_those_who_read_it(content: Saved, save: Save, tmp_path: Path) -> None:
    directory = save(content, tmp_path / "saved")
    (directory / "metadata.json").write_text("{")
    assert kind_of(directory) is LocationKind.ITERATION


def test_a_save_folder_is_known_by_its_tracker_or_its_iterations(tmp_path: Path) -> None:
    assert kind_of(write(tmp_path / "a", TRACKER)) is LocationKind.SAVES
    assert kind_of(write(tmp_path / "b", "iter_0000012/.metadata")) is LocationKind.SAVES
    assert kind_of(write(tmp_path / "c", "iter_0000012/mp_rank_00/model_optim_rng.pt", "iter_0000024/common.pt")) is (
        LocationKind.SAVES
    )


def test_storage_is_recognized_in_folders_and_behind_urls(tmp_path: Path) -> None:
    stored(FilesystemStore(tmp_path / "a store", 0))
    stored(ObjectStore("memory://recognized/store", 0))
    assert kind_of(tmp_path / "a store") is LocationKind.STORAGE
    assert kind_of(f"file://{tmp_path}/a store") is LocationKind.STORAGE
    assert kind_of("memory://recognized/store") is LocationKind.STORAGE
    assert kind_of(tmp_path / "a store" / SNAPSHOT.name) is LocationKind.SNAPSHOT
    assert kind_of(f"memory://recognized/store/{SNAPSHOT.name}/") is LocationKind.SNAPSHOT


def test_a_url_without_snapshots_is_refused_with_what_is_there() -> None:
    fsspec.filesystem("memory").pipe_file("/elsewhere/iter_0000012/common.pt", b"")
    with pytest.raises(UnreadableCheckpoint, match=r"no snapshots \(found: iter_0000012\).*copy it to one"):
        recognize("memory://elsewhere")


@pytest.mark.parametrize("below", ["", "node-0", "node-0/job", "node-0/job/slot-003"])
def test_the_memory_tier_is_recognized_at_every_level(below: str, tmp_path: Path) -> None:
    write(tmp_path / "node-0")
    store = MemoryStore(tmp_path / "node-0", "job", 3, [4096])
    stored(store)
    assert kind_of(tmp_path / below) is LocationKind.MEMORY
    (slot,) = slots(tmp_path / below)
    assert (slot.node, slot.job, slot.area, slot.local_rank) == ("node-0", "job", "slot", 3)
    assert slot.reader.snapshots().sealed == (SNAPSHOT,)
    store.close()


def test_a_slot_says_whether_its_process_lives(tmp_path: Path) -> None:
    store = MemoryStore(tmp_path, "job", 0, [4096])
    (owned,) = slots(tmp_path)
    assert (owned.alive, owned.owner) == (True, f"process {os.getpid()} on {os.uname().nodename}")
    store.close()
    (left,) = slots(tmp_path)
    assert not left.alive


def test_looking_at_a_slot_leaves_its_owner_the_lock(tmp_path: Path) -> None:
    store = MemoryStore(tmp_path, "job", 0, [4096])
    slots(tmp_path)
    child = os.fork()
    if not child:
        try:
            MemoryStore(tmp_path, "job", 0, [4096])
        except UsageError:
            os._exit(0)
        os._exit(1)
    assert os.waitpid(child, 0)[1] == 0
    store.close()


def test_another_process_sees_that_the_owner_lives(tmp_path: Path) -> None:
    store = MemoryStore(tmp_path, "job", 0, [4096])
    child = os.fork()
    if not child:
        os._exit(0 if slots(tmp_path)[0].alive else 1)
    assert os.waitpid(child, 0)[1] == 0
    store.close()


def test_a_folder_without_slots_is_no_memory_dir(tmp_path: Path) -> None:
    with pytest.raises(UnreadableCheckpoint, match="holds no memory of a job"):
        slots(write(tmp_path, "node-0/job/"))
