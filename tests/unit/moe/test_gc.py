"""`moe-ckpt gc`: what is freed, and above all what is not."""

from __future__ import annotations

import errno
import json
import os
import random
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import fsspec
import msgspec
import pytest
from test_cli import run
from verify_places import chained, dense, settled, tensor
from verify_places import save as save_iteration

from megatron.core.dist_checkpointing.moe.policy.lineage import FORGOTTEN, attempt_name
from megatron.core.dist_checkpointing.moe.ports import (
    Facts,
    Field,
    Json,
    Layout,
    SnapshotId,
    Store,
    StoreFailure,
)
from megatron.core.dist_checkpointing.moe.recovery.exactness import Divergence, DivergenceNotes
from megatron.core.dist_checkpointing.moe.storage import manifest
from megatron.core.dist_checkpointing.moe.storage.filesystem import FilesystemStore
from megatron.core.dist_checkpointing.moe.storage.lease import Holder
from megatron.core.dist_checkpointing.moe.storage.lease_files import LEASE
from megatron.core.dist_checkpointing.moe.storage.manifest import checksum
from megatron.core.dist_checkpointing.moe.storage.memory import MemoryStore
from megatron.core.dist_checkpointing.moe.storage.objects import ObjectStore
from megatron.core.dist_checkpointing.moe.storage.system import OperatingSystem
from megatron.core.dist_checkpointing.moe.types import OperatorId, Part, expert
from moe_ckpt.checkpoints.location import A_LINK, GcItem, GcLimits, GcPlan
from moe_ckpt.checkpoints.memory import MemoryLocation
from moe_ckpt.checkpoints.persist_dir import PersistFolder, open_persist_dir
from moe_ckpt.checkpoints.places import locate
from moe_ckpt.checkpoints.saved_iterations import saved_iterations
from moe_ckpt.checkpoints.saves import SavesLocation
from moe_ckpt.checkpoints.storage import StorageLocation
from moe_ckpt.checkpoints.storage_gc import storage_gc_plan
from moe_ckpt.checkpoints.windows import on_timeline, restorable, states, stored_snapshots, timelines
from moe_ckpt.commands.gc import _freed
from moe_ckpt.dense import chain, integrity
from moe_ckpt.dense.names import FORMAT, RELEASE, TRACKER
from moe_ckpt.dense.staging import staging
from moe_ckpt.dense.went_back import RECORD, gone_back

ROOT, RANKS = Path(__file__).parents[3], 2
FIRST, SECOND = (attempt_name(1, "a"), 0), (attempt_name(2, "b"), 4)
HOUR_S = 3600.0
VERSION_2 = '{"sharded_backend": "torch_dist", "sharded_backend_version": 2}'
Way = tuple[tuple[str, int], ...]


@dataclass(frozen=True)
class Made:
    """A job that writes into a storage: its timeline, its id, the iterations of its windows."""

    way: Way = (FIRST,)
    job: str = "job"
    length: int = 1
    flags: tuple[str, ...] | None = ()
    made_by: str = "sparse"
    layout: str = "dp"
    ranks: int = RANKS

    def window(self, root: Path | Store, last: int, ranks: Sequence[int] = range(RANKS), **said: Any) -> None:
        """A window that ends with `last`, of some ranks."""
        for iteration in range(last - self.length + 1, last + 1):
            for rank in ranks:
                self.snapshot(root, SnapshotId(iteration, rank, said.get("kind", "window")), last, **said)

    def snapshot(
        self,
        root: Path | Store,
        snapshot: SnapshotId,
        last: int,
        kind: str = "window",
        parts: Sequence[OperatorId] = (),
    ) -> None:
        scalars: dict[str, Json] = {
            "operators": [[one.layer, one.kind.value, one.expert, Part.MASTER_AND_MOMENTS.value] for one in parts],
            "timeline": [list(attempt) for attempt in self.way],
            "window": [last - self.length + 1, last],
            "made_by": self.made_by,
        }
        if not kind.startswith("experts"):
            command = {} if self.flags is None else {"command": {"flags": list(self.flags), "folder": "/"}}
            scalars["trainer"] = {"iteration": snapshot.iteration, **command}
        layout = Layout.of([Field("weight", "uint8", (100,))])
        store = FilesystemStore(root, snapshot.rank) if isinstance(root, Path) else root
        with store.reserve(snapshot, layout) as writer:
            writer.put("weight", random.Random(str((snapshot, self.way))).randbytes(100))
            writer.seal(Facts(self.job, "plan", {"world_size": self.ranks, "layout": self.layout}, scalars))


def limits(keep_last: int | None = None, idle_s: float = 0.0, ended: Sequence[str] = ()) -> GcLimits:
    return GcLimits(keep_last, idle_s, frozenset(ended), time.time())


def of_storage(root: Path | str, **given: Any) -> GcPlan:
    return StorageLocation(str(root)).gc_plan(limits(**given))


def of_saves(root: Path, **given: Any) -> GcPlan:
    return SavesLocation(str(root)).gc_plan(limits(**given))


def of_memory(root: Path, **given: Any) -> GcPlan:
    return MemoryLocation(str(root)).gc_plan(limits(**given))


def freed(plan: GcPlan) -> list[str]:
    return [item.what for item in plan.freed]


def reasons(plan: GcPlan, what: str) -> str:
    (found,) = {item.reason for item in plan.items if item.what.startswith(what)}
    return found


def apply(plan: GcPlan) -> None:
    for item in plan.freed:
        assert item.remove is not None
        item.remove()


def iterations(root: Path) -> list[int]:
    return sorted({int(path.name[5:12]) for path in root.glob("iter_*")})


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def test_windows_that_newer_ones_supersede_go_and_as_many_as_the_job_was_told_stay(tmp_path: Path) -> None:
    job = Made(length=2, flags=("--moe-ckpt-persist-keep", "3", "--lr", "1"))
    for last in (2, 4, 6, 8):
        job.window(tmp_path, last)
    plan = of_storage(tmp_path)
    assert freed(plan) == ["iterations 1 to 2: 4 snapshots (window)"]
    assert plan.restores == "iterations 7 to 8"
    assert freed(of_storage(tmp_path, keep_last=1)) == [
        f"iterations {n - 1} to {n}: 4 snapshots (window)" for n in (2, 4, 6)
    ]
    assert iterations(tmp_path) == [*range(1, 9)]
    apply(plan)
    assert iterations(tmp_path) == [*range(3, 9)]


@pytest.mark.parametrize(
    ("flags", "kept"),
    [
        (("--moe-ckpt-persist-keep", "1", "--moe-ckpt-persist-keep=3"), 3),
        (("--moe-ckpt-persist-keep=3", "--moe-ckpt-persist-keep", "1"), 1),
        (("--moe-ckpt-persist-keep", "9" * 5000), 2),
    ],
)
def test_of_a_flag_that_is_given_twice_the_last_one_counts(flags: tuple[str, ...], kept: int, tmp_path: Path) -> None:
    for last in (1, 2, 3, 4):
        Made(flags=flags).window(tmp_path, last)
    assert len(freed(of_storage(tmp_path))) == 4 - kept


def test_of_a_job_that_does_not_say_how_many_states_it_keeps_all_stay_unless_asked(tmp_path: Path) -> None:
    """As of recipes of Megatron-Bridge and loops of one's own, whose settings are no flags."""
    for last in (1, 2, 3, 4):
        Made(flags=None).window(tmp_path, last)
    plan = of_storage(tmp_path)
    assert not freed(plan)
    assert "give --keep-last" in plan.notes[0]
    assert len(freed(of_storage(tmp_path, keep_last=1))) == 3


def test_what_training_left_when_it_went_back_goes(tmp_path: Path) -> None:
    for last in (4, 6):
        Made().window(tmp_path, last)
    Made((FIRST, SECOND)).window(tmp_path, 5)
    plan = of_storage(tmp_path)
    assert freed(plan) == ["iteration 6: 2 snapshots (window)"]
    assert reasons(plan, "iteration 6") == "training went back to iteration 4 and came another way"


def test_of_an_attempt_that_has_nothing_whole_yet_everything_stays(tmp_path: Path) -> None:
    Made().window(tmp_path, 3)
    Made(((SECOND[0], 0),)).window(tmp_path, 5, ranks=[1])
    plan = of_storage(tmp_path)
    assert not freed(plan)
    assert "began later" in reasons(plan, "iteration 5")


def test_a_state_that_some_ranks_did_not_store_goes_when_a_newer_one_is_whole_and_stays_when_not(
    tmp_path: Path,
) -> None:
    Made().window(tmp_path, 2, ranks=[0])
    Made().window(tmp_path, 4)
    Made().window(tmp_path, 6, ranks=[1])
    assert freed(of_storage(tmp_path)) == ["iteration 2: 1 snapshot (window)"]


def test_where_the_newest_state_is_damaged_an_older_one_that_is_intact_stays(tmp_path: Path) -> None:
    for last in (2, 4, 6):
        Made().window(tmp_path, last)
    assert freed(of_storage(tmp_path, keep_last=1)) == [f"iteration {n}: 2 snapshots (window)" for n in (2, 4)]
    flip(tmp_path / "iter_0000006-rank_00001-window" / "segment.bin")
    plan = of_storage(tmp_path, keep_last=1)
    assert freed(plan) == ["iteration 2: 2 snapshots (window)"]
    assert plan.restores == "iteration 4"


def test_where_no_state_is_intact_no_snapshot_goes(tmp_path: Path) -> None:
    for last in (2, 4):
        Made().window(tmp_path, last)
        flip(tmp_path / f"iter_{last:07d}-rank_00000-window" / "segment.bin")
    plan = of_storage(tmp_path, keep_last=1)
    assert not freed(plan)
    assert "intact" in plan.notes[0]


GROUPS = {"expertsa": [expert(0, 0)], "expertsb": [expert(0, 1)]}


def pec(root: Path) -> None:
    """Three states, of which the newest needs experts of the oldest."""
    job = Made(made_by="pec")
    for iteration, kinds in ((1, ("expertsa", "expertsb")), (2, ("expertsa",)), (3, ("expertsa",))):
        for kind in kinds:
            for rank in range(RANKS):
                job.snapshot(root, SnapshotId(iteration, rank, kind), iteration, kind, GROUPS[kind])
        for rank in range(RANKS):
            job.snapshot(root, SnapshotId(iteration, rank, "dense"), iteration, "dense", [expert(-1, 0)])


def test_storage_that_is_a_mount_is_looked_at_without_what_only_root_may_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pec(tmp_path)
    only_root = tmp_path / "lost+found"
    only_root.mkdir()

    def refuse(call: Callable[..., Any], path: Any = ".", *arguments: Any, **named: Any) -> Any:
        is_inside = isinstance(path, str | Path) and only_root in Path(path).parents
        if is_inside or (call is scan and Path(path) == only_root):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return call(path, *arguments, **named)

    scan, look = os.scandir, os.stat
    monkeypatch.setattr(os, "scandir", partial(refuse, scan))
    monkeypatch.setattr(os, "stat", partial(refuse, look))
    assert StorageLocation(str(tmp_path)).verify().findings == ()
    assert freed(of_storage(tmp_path, keep_last=1))


def names(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir())


def test_old_copies_of_experts_stay_for_newer_snapshots_that_lack_them(tmp_path: Path) -> None:
    pec(tmp_path)
    apply(of_storage(tmp_path, keep_last=1))
    assert iterations(tmp_path) == [1, 3]
    assert {path.name.rpartition("-")[2] for path in tmp_path.glob("iter_0000001-*")} >= {"expertsb"}


class FailsOnce(OperatingSystem):
    """A device that cannot read one file the first time."""

    def __init__(self, part: str) -> None:
        self.part = part

    def open(self, path: Path, flags: int) -> int:
        if self.part and self.part in str(path):
            self.part = ""
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
        return super().open(path, flags)


def test_where_a_manifest_cannot_be_read_for_a_moment_no_sealed_snapshot_goes(tmp_path: Path) -> None:
    pec(tmp_path)
    for asked in range(3):
        system = FailsOnce("iter_0000001-rank_00000-expertsb/manifest.json")
        persist_dir = PersistFolder(str(tmp_path), FilesystemStore(tmp_path, 0, system=system))
        plan = storage_gc_plan(persist_dir, limits(keep_last=1), lambda nbytes: None)
        assert not system.part, asked
        assert not freed(plan)
        assert "expertsb" in plan.notes[0] and "no sealed snapshot is freed" in plan.notes[0]


def test_where_a_manifest_cannot_be_read_no_sealed_snapshot_goes(tmp_path: Path) -> None:
    pec(tmp_path)
    unreadable = tmp_path / "iter_0000001-rank_00000-expertsa" / "manifest.json"
    unreadable.unlink()
    unreadable.mkdir()
    plan = of_storage(tmp_path, keep_last=1)
    assert not freed(plan)
    assert "could not be read now" in reasons(plan, "expertsa of rank 0")


@pytest.mark.parametrize("harm", ["missing", "damaged", "without a manifest"])
def test_where_the_only_copy_of_experts_is_gone_on_one_rank_those_of_the_others_stay(harm: str, tmp_path: Path) -> None:
    pec(tmp_path)
    folder = tmp_path / "iter_0000001-rank_00000-expertsb"
    if harm == "missing":
        shutil.rmtree(folder)
    elif harm == "damaged":
        flip(folder / "manifest.json")
    else:
        (folder / "manifest.json").unlink()
    before = names(tmp_path)
    plan = of_storage(tmp_path, keep_last=1)
    apply(plan)
    assert names(tmp_path) == before
    assert "older snapshots that it needs" in plan.notes[0]


def test_the_newest_copy_that_one_rank_has_stays_though_another_lost_its_own(tmp_path: Path) -> None:
    pec(tmp_path)
    shutil.rmtree(tmp_path / "iter_0000003-rank_00000-expertsa")
    apply(of_storage(tmp_path, keep_last=1))
    assert {
        "iter_0000003-rank_00001-expertsa",
        "iter_0000002-rank_00000-expertsa",
        "iter_0000002-rank_00001-expertsa",
    } <= {*names(tmp_path)}


def test_beside_a_snapshot_of_a_later_version_no_sealed_one_goes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pec(tmp_path)
    with monkeypatch.context() as later:
        later.setattr(manifest, "FORMAT_VERSION", manifest.FORMAT_VERSION + 1)
        Made(made_by="pec").window(tmp_path, 1, ranks=[0])
    plan = of_storage(tmp_path, keep_last=1)
    assert not freed(plan)
    assert "a later version" in plan.notes[0]


def test_that_both_have_forgotten_attempts_does_not_make_one_job_of_two(tmp_path: Path) -> None:
    others, own = (((FORGOTTEN, 0), attempt) for attempt in ((attempt_name(7, "x"), 4), (attempt_name(8, "y"), 4)))
    Made(others, job="other").window(tmp_path, 6)
    Made(own).window(tmp_path, 8)
    plan = of_storage(tmp_path, keep_last=1)
    assert not freed(plan)
    assert reasons(plan, "iteration 6").startswith("it is of job other, from which the newest state does not come")


def test_a_fresh_start_under_the_same_job_id_gives_no_right_to_the_earlier_run(tmp_path: Path) -> None:
    Made().window(tmp_path, 8)
    Made(((SECOND[0], 0),)).window(tmp_path, 2)
    plan = of_storage(tmp_path, keep_last=1)
    assert not freed(plan)
    assert reasons(plan, "iteration 8").startswith("it is of an earlier run of job job")
    assert freed(of_storage(tmp_path, keep_last=1, ended=["job"])) == ["iteration 8: 2 snapshots (window)"]


@pytest.mark.parametrize("other", [{"layout": "tp"}, {"made_by": "full"}])
def test_what_another_strategy_or_layout_left_is_no_way_that_training_came_back_from(
    other: dict[str, str], tmp_path: Path
) -> None:
    Made().window(tmp_path, 4)
    Made(**other).window(tmp_path, 6)  # type: ignore[arg-type]
    Made((FIRST, SECOND)).window(tmp_path, 5)
    assert not freed(of_storage(tmp_path))


@pytest.mark.parametrize(("before", "after"), [(4, 2), (2, 4)])
def test_the_newest_state_is_that_of_the_newest_layout_and_the_older_one_goes_then(
    before: int, after: int, tmp_path: Path
) -> None:
    """Ranks of before, and what they owned, are no part of it."""
    experts = [expert(0, at) for at in range(4)]
    for way, ranks, last in (((FIRST,), before, 4), ((FIRST, SECOND), after, 6), ((FIRST, SECOND), after, 8)):
        for rank in range(ranks):
            own = experts[rank * 4 // ranks : (rank + 1) * 4 // ranks]
            made = Made(way, layout=str(ranks), ranks=ranks)
            made.snapshot(tmp_path, SnapshotId(last, rank, "window"), last, parts=own)
        stored = stored_snapshots(FilesystemStore(tmp_path, 0))
        assert next(str(found.state) for found in restorable(stored)) == f"iteration {last}"
    assert freed(of_storage(tmp_path, keep_last=1)) == [
        f"iteration 4: {before} snapshots (window)", f"iteration 6: {after} snapshots (window)"
    ]  # fmt: skip


def test_what_is_damaged_beside_another_run_stays(tmp_path: Path) -> None:
    Made().window(tmp_path, 1)
    Made(((SECOND[0], 0),)).window(tmp_path, 4)
    flip(tmp_path / "iter_0000001-rank_00001-window" / "manifest.json")
    assert not freed(of_storage(tmp_path))


def test_verify_asks_only_the_newest_way_for_lost_copies(tmp_path: Path) -> None:
    for rank in range(RANKS):
        Made().snapshot(tmp_path, SnapshotId(6, rank, "window"), 6, parts=[expert(0, 5)])
    Made((FIRST, SECOND)).window(tmp_path, 5)
    flip(tmp_path / "iter_0000006-rank_00000-window" / "segment.bin")
    assert locate(str(tmp_path)).verify().restores == "iteration 5"


def test_links_stay(tmp_path: Path) -> None:
    root, real = tmp_path / "storage", tmp_path / "real"
    for last in (2, 4):
        Made().window(root, last)
    real.mkdir()
    linked = [*root.glob("iter_0000002-*")]
    for path in linked:
        path.rename(real / path.name)
        path.symlink_to(real / path.name)
    for name in (
        ".freed.iter_0000001-rank_00001-window.00001.0123abcd",
        ".writing.iter_0000003-rank_00001-window.00001.0123abcd",
    ):
        (root / name).symlink_to(real / linked[0].name)
    plan = of_storage(root, keep_last=1)
    assert not freed(plan)
    assert {item.reason for item in plan.items if "iteration 4" not in item.what} == {A_LINK}


def test_freeing_a_link_leaves_what_it_leads_to(tmp_path: Path) -> None:
    Made().window(tmp_path / "real", 2)
    store, snapshot = FilesystemStore(tmp_path / "view", 0), SnapshotId(2, 0, "window")
    (tmp_path / "view" / snapshot.name).symlink_to(tmp_path / "real" / snapshot.name)
    store.free(snapshot)
    assert not names(tmp_path / "view")
    assert names(tmp_path / "real" / snapshot.name) == ["manifest.json", "segment.bin"]


def test_times_behind_urls_are_asked_again_and_without_a_zone_they_are_utc(monkeypatch: pytest.MonkeyPatch) -> None:
    class Cached:
        """Lists what it knew before until it is told that this is old."""

        known: str = "2020-01-01T00:00:00"

        def invalidate_cache(self) -> None:
            self.known = "2021-01-01T00:00:00"

        def find(self, root: str, detail: bool) -> dict[str, dict[str, datetime]]:
            return {"a": {"LastModified": datetime.fromisoformat(self.known)}}

    monkeypatch.setenv("TZ", "Asia/Tokyo")
    time.tzset()
    try:
        monkeypatch.setattr(fsspec.core, "url_to_fs", lambda url: (Cached(), url))
        assert open_persist_dir("s3://bucket/run").last_written_s() == datetime(2021, 1, 1, tzinfo=UTC).timestamp()
    finally:
        monkeypatch.undo()
        time.tzset()


def test_what_was_never_sealed_or_half_deleted_goes(tmp_path: Path) -> None:
    Made().window(tmp_path, 2)
    sealed = tmp_path / "iter_0000002-rank_00000-window"
    for state, name in (("writing", "iter_0000003-rank_00001-window"), ("freed", "iter_0000001-rank_00001-window")):
        shutil.copytree(sealed, tmp_path / f".{state}.{name}.00001.0123abcd")
    plan = of_storage(tmp_path)
    assert len(freed(plan)) == 2
    assert all(item.nbytes > 0 for item in plan.freed)
    apply(plan)
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"iter_0000002-rank_0000{n}-window" for n in range(2)]


def test_where_a_job_may_be_writing_nothing_goes(tmp_path: Path) -> None:
    for last in (2, 4, 6):
        Made().window(tmp_path, last)
    plan = of_storage(tmp_path, keep_last=1, idle_s=HOUR_S)
    assert not freed(plan)
    assert "a job may be running" in reasons(plan, "iteration 2")
    settled(tmp_path)
    assert len(freed(of_storage(tmp_path, keep_last=1, idle_s=HOUR_S))) == 2


def test_stamps_that_are_still_to_come_are_told_as_such_and_nothing_goes(tmp_path: Path) -> None:
    for last in (2, 4, 6):
        Made().window(tmp_path, last)
    for path in tmp_path.rglob("*"):
        os.utime(path, (datetime(2131, 1, 1, tzinfo=UTC).timestamp(),) * 2)
    plan = of_storage(tmp_path, keep_last=1, idle_s=HOUR_S)
    assert not freed(plan)
    assert "2131-01-01" in reasons(plan, "iteration 2") and "still to come" in reasons(plan, "iteration 2")
    age = {fact.name: fact.value for fact in StorageLocation(str(tmp_path)).inspect(time.time()).report.facts}["Age"]
    assert age is None, "not: written just now"


def test_where_a_job_has_a_lease_nothing_goes_unless_its_process_is_gone(tmp_path: Path) -> None:
    for last in (2, 4, 6):
        Made().window(tmp_path, last)
    holder = Holder.here("job-of-old")
    lease = tmp_path / LEASE
    lease.write_bytes(msgspec.json.encode(holder))
    settled(tmp_path)
    plan = of_storage(tmp_path, keep_last=1)
    assert not freed(plan)
    assert f"job 'job-of-old' (process {os.getpid()} on" in reasons(plan, "iteration 2")
    assert f"(process {os.getpid()} on" in " ".join(locate(str(tmp_path)).inspect(time.time()).report.notes)
    lease.write_bytes(msgspec.json.encode(msgspec.structs.replace(holder, process=(os.getpid(), 1))))
    settled(tmp_path)
    assert len(freed(of_storage(tmp_path, keep_last=1))) == 2


def started(root: Path | str) -> None:
    """A job begins to write there."""
    (Path(root) / LEASE).write_bytes(msgspec.json.encode(Holder.here("a new start")))


def test_where_a_job_has_begun_since_the_plan_nothing_is_freed(tmp_path: Path) -> None:
    for last in (2, 4, 6):
        Made().window(tmp_path, last)
    for state, name in (("writing", "iter_0000003-rank_00001-window"), ("freed", "iter_0000001-rank_00001-window")):
        (tmp_path / f".{state}.{name}.00001.0123abcd").mkdir()
    plan = of_storage(tmp_path, keep_last=1)
    started(tmp_path)
    before = names(tmp_path)
    failures = [_freed(item) for item in plan.freed]
    assert len(failures) == 4
    assert all("job 'a new start'" in line and line.endswith(": nothing more is freed") for line in failures)
    assert names(tmp_path) == before


def test_a_job_that_begins_while_a_window_is_freed_keeps_the_rest_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for last in (2, 4):
        Made().window(tmp_path, last)
    (item,) = of_storage(tmp_path, keep_last=1).freed
    free = FilesystemStore.free

    def freed_first(store: FilesystemStore, snapshot: SnapshotId) -> None:
        free(store, snapshot)
        started(tmp_path)

    monkeypatch.setattr(FilesystemStore, "free", freed_first)
    assert "nothing more is freed" in _freed(item)
    assert len([*tmp_path.glob("iter_0000002-*")]) == 1


def test_the_command_says_what_is_not_freed_as_a_job_has_begun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for last in (2, 4):
        Made().window(tmp_path, last)
    plan = of_storage(tmp_path, keep_last=1)
    started(tmp_path)
    monkeypatch.setattr(StorageLocation, "gc_plan", lambda *_: plan)
    assert run(monkeypatch, "gc", tmp_path, "--apply", "--json") == 1
    assert [row["verdict"] for row in json.loads(capsys.readouterr().out)["items"]] == ["not freed", "stays"]


def test_what_is_of_another_job_stays_until_it_is_said_to_have_ended(tmp_path: Path) -> None:
    Made(job="elder").window(tmp_path, 8)
    Made(((SECOND[0], 0),), job="younger").window(tmp_path, 2)
    assert not freed(of_storage(tmp_path))
    assert freed(of_storage(tmp_path, ended=["elder"])) == ["iteration 8: 2 snapshots (window)"]


def test_a_damaged_snapshot_goes_only_when_a_newer_state_is_intact(tmp_path: Path) -> None:
    for last in (2, 4, 6):
        Made().window(tmp_path, last)
    for last in (2, 6):
        flip(tmp_path / f"iter_{last:07d}-rank_00001-window" / "manifest.json")
    plan = of_storage(tmp_path, keep_last=2)
    assert sorted(freed(plan)) == [
        "iteration 2: 1 snapshot (window)",
        "window of rank 1 after iteration 2, damaged",
    ]


def test_what_a_later_version_wrote_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as later:
        later.setattr(manifest, "FORMAT_VERSION", manifest.FORMAT_VERSION + 1)
        Made().window(tmp_path, 2)
    Made().window(tmp_path, 4)
    plan = of_storage(tmp_path)
    assert not freed(plan)
    assert reasons(plan, "window of rank 0") == "a later version of moe-ckpt wrote it"


@pytest.mark.parametrize(
    ("theirs", "ours"), [(b"the secret of a job", None), (b"of one job", b"of another"), (None, b"the secret of a job")]
)
def test_what_another_secret_sealed_stays_and_all_that_it_may_need(
    theirs: bytes | None, ours: bytes | None, tmp_path: Path
) -> None:
    try:
        manifest.use_secret(theirs)
        Made(job="another").window(tmp_path, 2)
        manifest.use_secret(ours)
        for last in (4, 6):
            Made(((SECOND[0], 0),)).window(tmp_path, last)
        plan = of_storage(tmp_path, keep_last=1)
    finally:
        manifest.use_secret(None)
    assert not freed(plan)
    assert reasons(plan, "window of rank 0 after iteration 2").startswith("it may be sound: ")
    assert "no sealed snapshot is freed" in plan.notes[0]


def test_object_stores_are_tidied_as_folders_are(tmp_path: Path) -> None:
    url = f"file://{tmp_path}"
    for last in (2, 4, 6):
        for rank in range(RANKS):
            Made().window(ObjectStore(url, rank), last, ranks=[rank])
    for last in (1, 8):  # the newer one was cut off while the job uploaded it
        (tmp_path / f"iter_000000{last}-rank_00000-window").mkdir()
        (tmp_path / f"iter_000000{last}-rank_00000-window" / "segment-00000-01234567.bin").write_bytes(b"torn")
    plan = of_storage(url, keep_last=2)
    assert len(freed(plan)) == 3
    assert "window of rank 0 after iteration 8, never sealed" in freed(plan)
    apply(plan)
    assert iterations(tmp_path) == [4, 6]


@pytest.mark.parametrize("seed", range(60))
def test_whatever_happened_to_a_storage_the_state_that_it_restores_is_the_same_afterwards(
    seed: int, tmp_path: Path
) -> None:
    draw = random.Random(seed)
    way: Way = ()
    root, length, last = tmp_path / "storage", draw.choice((1, 2, 3)), 0
    root.mkdir()
    for attempt in range(draw.randint(1, 3)):
        way = (*way, (f"2026-02-0{attempt + 1}", last))
        for _ in range(draw.randint(0, 4)):
            last += length
            for iteration in range(last - length + 1, last + 1):
                for rank in range(RANKS):
                    FilesystemStore(root, rank).free(SnapshotId(iteration, rank, "window"))
            there = range(RANKS) if draw.random() < 0.7 else [draw.randrange(RANKS)]
            Made(way, length=length).window(root, last, ranks=there)
        last = max(0, last - length * draw.randint(0, 2))
    for path in root.rglob("segment.bin"):
        if draw.random() < 0.05:
            flip(path)
    before = _restored(root)
    apply(of_storage(root, keep_last=draw.choice((None, 1, 2))))
    assert _restored(root) == before


def _restored(root: Path) -> dict[str, bytes] | None:
    """The newest whole state whose bytes are intact, on the newest timeline that has a whole one."""
    store = FilesystemStore(root, 0)
    snapshots = stored_snapshots(store)
    whole = (
        [state for state in states(on_timeline(line, snapshots)) if not state.lacking] for line in timelines(snapshots)
    )
    for state in next(filter(None, whole), ()):
        with ExitStack() as opened:
            readers = [opened.enter_context(store.open(stored.snapshot)) for stored in state.members]
            if not any(reader.verify() for reader in readers):
                return {reader.manifest.snapshot.name: bytes(reader.read("weight")) for reader in readers}
    return None


SAVES = pytest.mark.usefixtures("single_process_group")


@SAVES
def test_what_saves_left_unfinished_goes_and_iterations_stay_unless_asked(tmp_path: Path) -> None:
    root = dense(tmp_path / "saved", 3)
    for name in (".iter_0000036.saving", ".iter_0000006.removing", ".iter_0000024.merging"):
        shutil.copytree(root / "iter_0000012", root / name)
    plan = of_saves(root)
    assert sorted(freed(plan)) == [".iter_0000006.removing", ".iter_0000024.merging", ".iter_0000036.saving"]
    apply(plan)
    assert sorted(path.name for path in root.iterdir()) == ["iter_0000012", "iter_0000024", TRACKER]
    assert not locate(str(root)).verify().findings


@SAVES
def test_a_half_converted_folder_goes_once_its_process_has_ended(tmp_path: Path) -> None:
    root = dense(tmp_path / "saved", 3)
    with staging(root / RELEASE, "importing") as folder:
        shutil.copytree(folder.parent, root / f".{RELEASE}.importing-of_a_killed_one")
        assert freed(of_saves(root)) == [f".{RELEASE}.importing-of_a_killed_one"]


@SAVES
def test_an_iteration_that_a_killed_save_had_moved_out_of_its_way_stays(tmp_path: Path) -> None:
    root = dense(tmp_path / "saved", 3)
    shutil.copytree(root / "iter_0000012", root / ".iter_0000012.replaced")
    assert freed(of_saves(root)) == [".iter_0000012.replaced"]
    (root / "iter_0000024").rename(root / ".iter_0000024.replaced")
    (root / ".iter_0000012.replaced").rename(root / ".iter_0000012.removing")
    assert freed(of_saves(root)) == [".iter_0000012.removing"]


@SAVES
def test_a_folder_is_listed_while_a_job_saves_into_it(tmp_path: Path) -> None:
    root, has_ended = dense(tmp_path / "saved", 3), threading.Event()
    hidden, folder = root / ".iter_0000036.saving", root / "iter_0000036"
    shutil.copytree(root / "iter_0000024", hidden)
    for number in range(50):
        (hidden / f"part_{number}").touch()

    def save_on() -> None:
        while not has_ended.is_set():
            (hidden / "part").touch()
            (hidden / "part").unlink()
            hidden.rename(folder)
            time.sleep(0.002)
            folder.rename(hidden)

    with ThreadPoolExecutor() as pool:
        saving = pool.submit(save_on)
        try:
            for _ in range(1000):
                assert len(saved_iterations(root)) in (2, 3)
        finally:
            has_ended.set()
            saving.result()


@SAVES
def test_older_iterations_go_with_keep_last(tmp_path: Path) -> None:
    root = dense(tmp_path / "saved", 3)
    plan = of_saves(root, keep_last=1)
    assert (freed(plan), plan.restores) == (["iter_0000012"], "iter_0000024")
    apply(plan)
    assert sorted(path.name for path in root.iterdir()) == ["iter_0000024", TRACKER]


@SAVES
def test_iterations_stay_where_a_job_has_begun_since_the_plan(tmp_path: Path) -> None:
    root = dense(tmp_path / "saved", 3)
    for name in (".iter_0000006.removing", ".iter_0000024.merging"):
        shutil.copytree(root / "iter_0000012", root / name)
    plan = of_saves(root, keep_last=1)
    started(root)
    failures = [_freed(item) for item in plan.freed]
    assert [line.endswith(": nothing more is freed") for line in failures] == [True] * 3
    assert len([*root.glob("*iter_*")]) == 4


@SAVES
@pytest.mark.parametrize("text", [None, "soon"])
def test_without_a_tracker_that_names_an_iteration_all_stay(text: str | None, tmp_path: Path) -> None:
    root = dense(tmp_path / "saved", 3)
    (root / TRACKER).unlink()
    if text is not None:
        (root / TRACKER).write_text(text)
    plan = of_saves(root, keep_last=1)
    assert (freed(plan), plan.restores) == ([], "")
    assert str(root / TRACKER) in reasons(plan, "iter_0000024")


@SAVES
def test_an_empty_tracker_counts_as_lost(tmp_path: Path) -> None:
    root = dense(tmp_path / "saved", 3)
    (root / TRACKER).write_text("\n")
    assert freed(of_saves(root, keep_last=1)) == ["iter_0000012"]


@SAVES
def test_iterations_that_training_left_do_not_count_and_stay(tmp_path: Path) -> None:
    root = dense(tmp_path / "saved", 3)
    (root / RECORD).write_bytes(gone_back(root, 12, "job", [12, 24]).encoded())
    save_iteration(root, 36, {"w": tensor(random.Random(1), 4)})
    (root / TRACKER).write_text("36")
    assert not freed(of_saves(root, keep_last=2))
    plan = of_saves(root, keep_last=1)
    assert (freed(plan), plan.restores) == (["iter_0000012"], "iter_0000036")
    assert reasons(plan, "iter_0000024") == "training went back before it with --ckpt-step; remove it by hand"


@SAVES
def test_what_iterations_that_training_left_need_stays(tmp_path: Path) -> None:
    root = with_newer(chained(tmp_path / "saved", 3))
    (root / RECORD).write_bytes(gone_back(root, 12, "job", [12, 24]).encoded())
    plan = of_saves(root, keep_last=1)
    assert reasons(plan, "iter_0000012") == "it holds experts for one that is kept"
    assert freed(plan) == ["iter_0000036", "iter_0000048"]


@SAVES
def test_iterations_that_hold_experts_for_a_kept_one_stay(tmp_path: Path) -> None:
    root = chained(tmp_path / "saved", 3)
    plan = of_saves(root, keep_last=1)
    assert not freed(plan)
    assert reasons(plan, "iter_0000012") == "it holds experts for one that is kept"


@SAVES
def test_where_the_newest_iteration_is_damaged_the_one_before_stays(tmp_path: Path) -> None:
    root = dense(tmp_path / "saved", 3)
    flip(next((root / "iter_0000024").glob("*.distcp")))
    plan = of_saves(root, keep_last=1)
    assert (freed(plan), plan.restores) == ([], "iter_0000012")


@SAVES
def test_an_iteration_that_the_tracker_does_not_name_yet_neither_goes_nor_counts(tmp_path: Path) -> None:
    root = dense(tmp_path / "saved", 3)
    save_iteration(root, 36, {"w": tensor(random.Random(1), 4)})
    plan = of_saves(root, keep_last=1)
    assert freed(plan) == ["iter_0000012"]


def unread(path: Path) -> None:
    """Reading it fails, and not because it is missing."""
    path.unlink()
    path.mkdir()


def later(path: Path) -> None:
    """As a later version would write it."""
    (member,) = {"chain", "integrity"} & json.loads(path.read_bytes()).keys()
    said = json.loads(path.read_bytes())[member]
    body = json.dumps(
        said | {"format": {"chain": chain.FORMAT_VERSION, "integrity": integrity.FORMAT_VERSION}[member] + 1},
        separators=(",", ":"),
    )
    path.write_text(f'{{"xxh3":"{checksum(body.encode())}","{member}":{body}}}\n')


def with_newer(root: Path) -> Path:
    """Beside a chain, two newer iterations that hold everything."""
    for iteration in (48, 60):
        save_iteration(root, iteration, {"w": tensor(random.Random(iteration), 4)})
    (root / TRACKER).write_text("60")
    return root


@SAVES
@pytest.mark.parametrize(
    ("name", "harm", "why"),
    [
        (chain.MANIFEST, unread, "it cannot be read now"),
        (chain.MANIFEST, later, "a later version of moe-ckpt wrote it"),
        (integrity.NAME, unread, "it cannot be read now"),
        (integrity.NAME, later, "a later version of moe-ckpt wrote it"),
        (FORMAT, unread, "it cannot be read now"),
        (FORMAT, lambda path: path.write_text(VERSION_2), "a later version of moe-ckpt wrote it"),
    ],
)
def test_iterations_that_cannot_be_judged_stay_with_all_that_they_may_need(
    name: str, harm: Callable[[Path], None], why: str, tmp_path: Path
) -> None:
    root = with_newer(chained(tmp_path / "saved", 3))
    assert freed(of_saves(root, keep_last=1)) == [f"iter_{n:07d}" for n in (12, 24, 36, 48)]
    harm(root / "iter_0000036" / name)
    plan = of_saves(root, keep_last=1)
    assert freed(plan) == ["iter_0000048"]
    assert reasons(plan, "iter_0000036").startswith(why)
    assert reasons(plan, "iter_0000012").startswith("iteration 36 may need it")


@SAVES
def test_iterations_whose_experts_lie_on_a_disk_that_is_away_stay(tmp_path: Path) -> None:
    root = with_newer(chained(tmp_path / "saved", 3))
    (root / "iter_0000012").rename(tmp_path / "archive")
    (root / "iter_0000012").symlink_to(tmp_path / "archive")
    (tmp_path / "archive").rename(tmp_path / "unmounted")
    plan = of_saves(root, keep_last=1)
    assert freed(plan) == ["iter_0000048"]
    away = "it is not readable now: iteration 12 is a link to a folder that is not there"
    assert reasons(plan, "iter_0000036") == reasons(plan, "iter_0000024") == away


@SAVES
def test_what_iterations_past_the_tracked_one_need_stays(tmp_path: Path) -> None:
    root = chained(tmp_path / "saved", 3)
    save_iteration(root, 30, {"w": tensor(random.Random(1), 4)})
    (root / TRACKER).write_text("30")
    plan = of_saves(root, keep_last=1)
    assert not freed(plan)
    assert reasons(plan, "iter_0000012") == "it holds experts for one that is kept"


@SAVES
def test_iterations_that_are_links_or_in_another_format_stay(tmp_path: Path) -> None:
    root = dense(tmp_path / "saved", 3)
    (root / "iter_0000012").rename(tmp_path / "elsewhere")
    (root / "iter_0000012").symlink_to(tmp_path / "elsewhere")
    (root / "iter_0000006" / "mp_rank_00").mkdir(parents=True)
    (root / "iter_0000006" / "mp_rank_00" / "model_optim_rng.pt").write_bytes(b"legacy")
    (root / "iter_0000003").mkdir()
    for name in (".metadata", "__0_0.distcp"):  # of torch_dcp or fsdp_dtensor
        (root / "iter_0000003" / name).write_bytes(b"x")
    plan = of_saves(root, keep_last=1)
    assert not freed(plan)
    assert reasons(plan, "iter_0000012") == A_LINK
    for name in ("iter_0000006", "iter_0000003"):
        assert "in a format that is not supported" in reasons(plan, name)


@pytest.fixture
def memory_dir(tmp_path: Path) -> Path:
    (tmp_path / "memory" / "node").mkdir(parents=True)
    return tmp_path / "memory"


def test_memory_of_a_running_job_stays_whatever_is_said(memory_dir: Path) -> None:
    with closing(MemoryStore(memory_dir / "node", "job", 0, (4096,) * 2)):
        plan = of_memory(memory_dir, ended=["job"])
        assert not freed(plan)
        assert "uses it" in plan.items[0].reason


def test_memory_that_a_restart_can_continue_from_goes_only_when_there_will_be_none(memory_dir: Path) -> None:
    with closing(MemoryStore(memory_dir / "node", "job", 0, (4096,) * 2)) as store:
        Made().window(store, 7, ranks=[0])
    plan = of_memory(memory_dir)
    assert not freed(plan)
    assert plan.items[0].what == "job job on node: snapshots up to iteration 7 are left"
    assert "--ended job" in plan.items[0].reason
    apply(of_memory(memory_dir / "node" / "job", ended=["job"]))
    assert not [*memory_dir.rglob("*.bin")]


def test_snapshots_in_memory_that_cannot_be_read_stay_until_the_job_is_said_to_have_ended(memory_dir: Path) -> None:
    with closing(MemoryStore(memory_dir / "node", "job", 0, (4096,) * 2)) as store:
        Made().window(store, 7, ranks=[0])
    (sealed,) = memory_dir.rglob("segment-*.json")
    unread(sealed)
    plan = of_memory(memory_dir)
    assert not freed(plan)
    assert plan.items[0].what == "job job on node: snapshots that this version cannot read are left"
    assert len(freed(of_memory(memory_dir, ended=["job"]))) == 1


def test_the_note_of_a_diverged_replay_stays_until_the_job_is_said_to_have_ended(memory_dir: Path) -> None:
    with closing(MemoryStore(memory_dir / "node", "job", 0, (4096,) * 2)) as store:
        DivergenceNotes(store.directory).add(Divergence(3, 4, (0,), False, 1, 2, (FIRST,), "another loss"))
    plan = of_memory(memory_dir)
    assert not freed(plan)
    assert plan.items[0].what == "job job on node: only a note of a diverged replay is left"
    assert plan.items[0].reason == "a restart of the job needs it; --ended job if there will be none"
    assert len(freed(of_memory(memory_dir, ended=["job"]))) == 1


def test_memory_that_a_later_version_wrote_stays_whatever_is_said(
    memory_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with closing(MemoryStore(memory_dir / "node", "job", 0, (4096,) * 2)) as store, monkeypatch.context() as later:
        later.setattr(manifest, "FORMAT_VERSION", manifest.FORMAT_VERSION + 1)
        Made().window(store, 7, ranks=[0])
    plan = of_memory(memory_dir, ended=["job"])
    assert not freed(plan)
    assert "a later version" in plan.items[0].reason


def test_the_memory_of_one_process_is_no_place_to_tidy(
    memory_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    MemoryStore(memory_dir / "node", "job", 0, (4096,) * 2).close()
    assert run(monkeypatch, "gc", memory_dir / "node" / "job" / "slot-000") == 2
    assert "give the folder of its job" in capsys.readouterr().err


def test_memory_without_snapshots_of_a_job_that_is_gone_goes_after_a_while(memory_dir: Path) -> None:
    MemoryStore(memory_dir / "node", "job", 0, (4096,) * 2).close()
    assert not freed(of_memory(memory_dir, idle_s=HOUR_S))
    plan = of_memory(memory_dir)
    assert len(freed(plan)) == 1
    apply(plan)
    assert not [*memory_dir.iterdir()]


TAKES = """
import sys
from moe_ckpt.megatron_core import skip_megatron_core
from pathlib import Path
skip_megatron_core()
from megatron.core.dist_checkpointing.moe.storage.memory import MemoryStore
store = MemoryStore(Path(sys.argv[1]), "job", 0, (4096,) * 2)
print("taken", flush=True)
sys.stdin.read()
"""


def test_memory_that_a_process_takes_in_the_last_moment_is_not_removed(memory_dir: Path) -> None:
    MemoryStore(memory_dir / "node", "job", 0, (4096,) * 2).close()
    (item,) = of_memory(memory_dir).freed
    command = [sys.executable, "-c", TAKES, str(memory_dir / "node")]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment) as owner:
        assert owner.stdout is not None and owner.stdin is not None
        assert owner.stdout.readline() == b"taken\n"
        assert item.remove is not None
        with pytest.raises(StoreFailure, match="the job runs"):
            item.remove()
        assert len([*memory_dir.rglob("*.bin")]) == 2
        owner.stdin.close()


def test_the_command_changes_nothing_by_itself_and_says_what_it_would_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    root = tmp_path / "with a space"
    root.mkdir()
    for last in (2, 4, 6):
        Made().window(root, last)
    settled(root)
    assert run(monkeypatch, "gc", root, "--json") == 0
    told = json.loads(capsys.readouterr().out)
    assert [row["verdict"] for row in told["items"]] == ["can go", "stays", "stays"]
    assert told["can_be_freed_bytes"] == sum(row["size_bytes"] for row in told["items"] if row["verdict"] == "can go")
    assert iterations(root) == [2, 4, 6]
    assert run(monkeypatch, "gc", root, "--apply") == 0
    assert "freed" in capsys.readouterr().out
    assert iterations(root) == [4, 6]
    settled(root)
    assert run(monkeypatch, "gc", root, "--apply", "--json") == 0
    assert {row["verdict"] for row in json.loads(capsys.readouterr().out)["items"]} == {"stays"}


def test_what_cannot_be_freed_is_told_and_costs_the_exit_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for last in (2, 4, 6):
        Made().window(tmp_path, last)
    settled(tmp_path)

    def refused(store: FilesystemStore, snapshot: SnapshotId) -> None:
        raise StoreFailure(f"cannot free the {snapshot}: Read-only file system")

    monkeypatch.setattr(FilesystemStore, "free", refused)
    assert run(monkeypatch, "gc", tmp_path, "--apply") == 1
    assert "Read-only" in capsys.readouterr().out


def test_a_snapshot_whose_bytes_could_not_be_deleted_is_not_freed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for last in (2, 4, 6):
        Made().window(tmp_path, last)
    settled(tmp_path)

    def refused(system: OperatingSystem, path: Path) -> None:
        raise OSError(errno.ENOTEMPTY, "Directory not empty", str(path))

    monkeypatch.setattr(OperatingSystem, "remove_directory", refused)
    assert run(monkeypatch, "gc", tmp_path, "--keep-last", "1", "--apply", "--json") == 1
    rows = json.loads(capsys.readouterr().out)["items"]
    assert [row["verdict"] for row in rows] == ["not freed", "not freed", "stays"]
    assert ".freed.iter_0000002" in rows[0]["why"] and "could not be deleted" in rows[0]["why"]


def test_a_url_that_refuses_to_say_how_long_an_object_is_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    class Refusing:
        def du(self, path: str) -> int:
            raise RuntimeError("503 slow down")

    monkeypatch.setattr(fsspec.core, "url_to_fs", lambda url: (Refusing(), url))
    with pytest.raises(StoreFailure, match="s3://bucket/run cannot be read"):
        open_persist_dir("s3://bucket/run").disk_bytes("bucket/run/a")


def test_an_error_that_names_no_file_is_told_as_it_is() -> None:
    def refused() -> None:
        raise OSError("Cannot call rmtree on a symbolic link")

    assert _freed(GcItem("a link", 0, "", refused)) == "Cannot call rmtree on a symbolic link"


def test_one_snapshot_or_iteration_is_no_place_to_tidy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    Made().window(tmp_path, 2)
    assert run(monkeypatch, "gc", tmp_path / "iter_0000002-rank_00000-window") == 2
    assert "give the folder it lies in" in capsys.readouterr().err
