"""Memory that another user could have filled is refused in one line that names it, and nothing in it is touched."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron.core.dist_checkpointing.moe.config import MoECheckpointConfig
from megatron.core.dist_checkpointing.moe.errors import UsageError
from megatron.core.dist_checkpointing.moe.ports import Facts, Field, Layout, SnapshotId
from megatron.core.dist_checkpointing.moe.runtime.process_info import JobClaim, ProcessInfo, memory_folder, open_memory
from megatron.core.dist_checkpointing.moe.storage.memory import MemoryStore
from megatron.core.dist_checkpointing.moe.storage.ownership import check_outside, default_memory_folder

PLACE = ProcessInfo(0, "node-0", "job")
STRANGER = 65_534
SNAPSHOT, LAYOUT = SnapshotId(4, 0), Layout.of([Field("w", "uint8", (10,))])
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files to another user")


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """The memory dir of a job that left one snapshot there."""
    folder = tmp_path / "memory"
    folder.mkdir(mode=0o700)
    store = opened(folder)
    with store.reserve(SNAPSHOT, LAYOUT) as writer:
        writer.put("w", bytes(range(10)))
        writer.seal(Facts("job", "", {}, {}))
    store.close()
    return folder


def test_a_user_whose_name_a_container_does_not_know_has_a_folder_by_number(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown() -> str:
        raise KeyError("getpwuid(): uid not found: 987654")

    monkeypatch.setattr("getpass.getuser", unknown)
    monkeypatch.setattr(os, "getuid", lambda: 987654)
    folder = Path("/dev/shm/moe-ckpt-987654")
    assert memory_folder(MoECheckpointConfig(strategy="full")) == default_memory_folder() == folder


def opened(folder: Path) -> MemoryStore:
    return open_memory(MoECheckpointConfig(strategy="full", memory_dir=str(folder)), PLACE, [4096, 4096])


def tree(folder: Path) -> dict[str, tuple[int, int, bytes]]:
    paths = [folder, *sorted(folder.rglob("*"))]
    facts = [(path, path.lstat()) for path in paths if path.name != "owner.json"]
    content = {str(path): path.read_bytes() if path.is_file() else b"" for path in paths}
    return {str(path): (found.st_uid, found.st_mode, content[str(path)]) for path, found in facts}


def refused(folder: Path, says: str) -> None:
    before = tree(folder)
    with pytest.raises(UsageError, match=says) as found:
        opened(folder).close()
    assert "\n" not in str(found.value)
    assert tree(folder) == before


@as_root
@pytest.mark.parametrize("below", ["", "node-0", "node-0/job", "node-0/job/slot-000"])
def test_a_folder_that_another_user_has_planted_is_refused(base: Path, below: str) -> None:
    os.chown(base / below, STRANGER, STRANGER)
    refused(base, f"{base / below} belongs to user ")


@as_root
@pytest.mark.parametrize("pattern", ["segment-*.json", "segment-000.bin"])
def test_a_snapshot_that_another_user_has_planted_is_refused(base: Path, pattern: str) -> None:
    (planted,) = (base / "node-0/job/slot-000").glob(pattern)
    os.chown(planted, STRANGER, STRANGER)
    refused(base, f"{planted.name} belongs to user .*but this job runs as .*nothing else was touched")


@pytest.mark.parametrize("below", ["", "node-0", "node-0/job", "node-0/job/slot-000"])
def test_a_link_in_place_of_a_folder_is_refused(base: Path, below: str) -> None:
    folder = base / below
    folder.rename(base.parent / "elsewhere")
    folder.symlink_to(base.parent / "elsewhere")
    refused(base, f"{folder} is a link")


@pytest.mark.parametrize("below", ["node-0", "node-0/job", "node-0/job/slot-000"])
def test_a_file_in_place_of_a_folder_is_refused(base: Path, below: str) -> None:
    folder = base / below
    folder.rename(base.parent / "elsewhere")
    folder.write_text("of somebody")
    refused(base, f"{folder} is no folder, and belongs to user .*: name another")


def test_a_link_in_place_of_a_segment_is_refused(base: Path) -> None:
    segment = base / "node-0/job/slot-000/segment-001.bin"
    segment.rename(base.parent / "elsewhere")
    segment.symlink_to(base.parent / "elsewhere")
    refused(base, "segment-001.bin is a link, which no job makes")


@pytest.mark.parametrize("mode", [0o770, 0o757, 0o777], ids=oct)
@pytest.mark.parametrize("below", ["", "node-0", "node-0/job/slot-000"])
def test_a_folder_in_which_others_may_write_is_refused(base: Path, below: str, mode: int) -> None:
    (base / below).chmod(mode)
    refused(base, f"can be written by others \\(mode {mode:04o}\\).*chmod go-w")


def test_a_folder_that_others_could_exchange_is_refused(base: Path) -> None:
    base.parent.chmod(0o777)
    refused(base, "insecure memory dir")


@as_root
@pytest.mark.parametrize(("mode", "says"), [(0o1777, "insecure memory dir .* who can put another"), (0o755, None)])
def test_a_folder_that_somebody_shares_and_could_exchange_is_refused(
    mode: int, says: str | None, base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    os.chown(base.parent, STRANGER, STRANGER)
    base.parent.chmod(mode)
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    with pytest.raises(UsageError, match=says) if says else contextlib.nullcontext():
        check_outside(base)


def test_what_is_refused_is_refused_before_any_of_it_is_read(base: Path) -> None:
    (base / "node-0").chmod(0o777)
    config = MoECheckpointConfig(strategy="full", memory_dir=str(base))
    with pytest.raises(UsageError, match="can be written by others"):
        JobClaim.of(config, ProcessInfo(0, "node-0", launcher="launcher"))


def test_a_folder_that_all_users_share_holds_a_node_of_our_own(tmp_path: Path) -> None:
    shared = tmp_path / "shm"
    shared.mkdir()
    shared.chmod(0o1777)
    store = opened(shared)
    assert stat.S_IMODE((shared / "node-0").stat().st_mode) == 0o700
    store.close()


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o077], ids=oct)
def test_whatever_the_umask_folders_and_files_are_readable_by_their_user_only(
    tmp_path: Path, umask: int, changed_umask: Callable[[int], None]
) -> None:
    changed_umask(umask)
    store = opened(tmp_path)
    with store.reserve(SNAPSHOT, LAYOUT) as writer:
        writer.put("w", bytes(10))
        writer.seal(Facts("job", "", {}, {}))
    store.close()
    made = [path.stat() for path in (tmp_path / "node-0").rglob("*")]
    assert made
    assert not [found for found in made if found.st_mode & 0o077]


@pytest.fixture
def changed_umask(request: pytest.FixtureRequest) -> Callable[[int], None]:
    def change(umask: int) -> None:
        before = os.umask(umask)
        request.addfinalizer(lambda: os.umask(before))

    return change
