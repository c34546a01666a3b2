"""`moe-ckpt verify` and what is behind it: whatever is damaged is found, and nothing else."""

from __future__ import annotations

import dataclasses
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import verify_places
from verify_places import PLACES, copies, facts, harmed, write

from megatron.core.dist_checkpointing.moe.errors import UnreadableCheckpoint
from megatron.core.dist_checkpointing.moe.extensions.lossy.ledger import TokenLedger
from megatron.core.dist_checkpointing.moe.ports import Field, Layout, SnapshotId
from megatron.core.dist_checkpointing.moe.storage.filesystem import FilesystemStore
from megatron.core.dist_checkpointing.moe.storage.manifest import framed, unframed
from megatron.core.dist_checkpointing.moe.storage.memory import MemoryStore
from megatron.core.dist_checkpointing.moe.storage.objects import ObjectStore
from megatron.core.dist_checkpointing.moe.types import Level, OperatorId, OperatorKind, Part, SnapshotPlan, expert
from moe_ckpt.checkpoints.location import Verified
from moe_ckpt.checkpoints.places import locate
from moe_ckpt.checkpoints.saved_iterations import saved_iterations
from moe_ckpt.checkpoints.storage import StorageLocation
from moe_ckpt.commands.main import main
from moe_ckpt.dense import chain, integrity
from moe_ckpt.dense.dense import DenseCheckpoint
from moe_ckpt.dense.names import FORMAT, TRACKER
from moe_ckpt.dense.went_back import RECORD, gone_back

if TYPE_CHECKING:
    from conftest import Content, Save

CORRUPTIONS = 60
INTACT = {"dense": 50, "chain": 30, "storage": 60, "memory": 60}

pytestmark = pytest.mark.usefixtures("single_process_group")


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    """An empty folder on tmpfs, where there is one: on a disk these tests would mostly wait for it."""
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    folder = Path(tempfile.mkdtemp(dir=memory, prefix="moe-ckpt-test-"))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


def found(place: Path | str) -> list[str]:
    """Everything that is wrong with a place, one line each."""
    try:
        return [str(finding) for finding in locate(str(place)).verify().findings]
    except UnreadableCheckpoint as error:
        return [str(error)]


def looked_at(place: Path | str) -> Verified:
    return locate(str(place)).verify()


@pytest.mark.parametrize("kind", PLACES)
def test_each_of_many_seeded_corruptions_is_found_and_told_in_one_line_each(kind: str, tmp_path: Path) -> None:
    original = PLACES[kind](tmp_path / "original", 7)
    missed = []
    for seed, place in copies(original, tmp_path, CORRUPTIONS):
        done = harmed(place, seed)
        lines = found(place)
        if not lines or any("\n" in line for line in lines):
            missed.append((seed, done, lines))
    assert missed == []


@pytest.mark.parametrize("kind", PLACES)
def test_many_intact_places_with_varied_contents_pass(kind: str, tmp_path: Path) -> None:
    accused = []
    for seed in range(INTACT[kind]):
        place = PLACES[kind](tmp_path / f"{kind} {seed}", seed)
        if lines := found(place):
            accused.append((seed, lines))
        shutil.rmtree(place)
    assert accused == []


def test_a_finding_names_the_file_and_what_it_was(tmp_path: Path) -> None:
    root = verify_places.dense(tmp_path, 1)
    shard = sorted((root / "iter_0000012").glob("*.distcp"))[0]
    shard.write_bytes(shard.read_bytes() + b"!")
    (line,) = found(root)
    assert line == f"{shard}: it has {shard.stat().st_size} bytes; expected {shard.stat().st_size - 1} bytes"


def test_the_newest_iteration_that_can_be_restored_is_named(tmp_path: Path) -> None:
    root = verify_places.dense(tmp_path, 2)
    assert looked_at(root).restores == "iteration 24"
    (root / "iter_0000024" / ".metadata").write_bytes(b"x")
    assert looked_at(root).restores == "iteration 12"


def test_an_iteration_that_was_saved_with_checksums_and_lost_them_is_a_finding(tmp_path: Path) -> None:
    root = verify_places.dense(tmp_path, 3)
    (root / "iter_0000024" / integrity.NAME).unlink()
    (line,) = found(root)
    assert f"{integrity.NAME}, with which it was saved, is missing" in line


def test_a_stock_checkpoint_is_read_as_a_whole_and_its_bytes_are_said_to_be_unchecked(
    content: Content, save: Save, tmp_path: Path
) -> None:
    folder = save(content, tmp_path / "iter_0000012")
    result = looked_at(folder)
    assert result.findings == ()
    assert result.checked[0].items == len(content.tensors) + len(content.objects)
    assert "as stock Megatron saves" in result.unchecked[0]


def test_a_tensor_of_a_stock_checkpoint_that_cannot_be_read_is_named(
    content: Content, save: Save, tmp_path: Path
) -> None:
    folder = save(content, tmp_path / "iter_0000012")
    for shard in folder.glob("*.distcp"):
        shard.write_bytes(bytes(shard.stat().st_size))
    result = looked_at(folder)
    named = {one.item for one in result.findings}
    # From Megatron-Core 0.17 on the common state is in these files, too, and read first.
    assert named >= set(content.tensors) if (folder / "common.pt").exists() else named
    assert result.unchecked == ()


def test_an_iteration_under_the_name_of_another_is_found(tmp_path: Path) -> None:
    root = verify_places.dense(tmp_path, 4)
    (root / "iter_0000012").rename(root / "iter_0000018")
    (line,) = found(root)
    assert "it holds iteration 12: it was renamed" in line


@pytest.mark.parametrize("way", [".", "../latest", "../../link"])
def test_an_iteration_is_whole_by_whatever_way_it_is_reached(
    way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = verify_places.chained(tmp_path / "saved", 3)
    (root / "latest").symlink_to("iter_0000036")
    (tmp_path / "link").symlink_to(root / "iter_0000036")
    monkeypatch.chdir(root / "iter_0000036")
    assert locate(way).inspect(time.time()).problem == ""
    found = locate(way).verify()
    assert (found.findings, found.restores, len(found.checked)) == ((), "iteration 36", 3)


def test_an_iteration_of_a_chain_is_verified_with_those_that_hold_its_experts(tmp_path: Path) -> None:
    root = verify_places.chained(tmp_path, 5)
    assert [one.part for one in looked_at(root / "iter_0000036").checked] == [
        *("iter_0000012", "iter_0000024", "iter_0000036")
    ]
    (root / "iter_0000012" / "common.pt").write_bytes(b"x")
    (line,) = found(root / "iter_0000036")
    assert str(root / "iter_0000012" / "common.pt") in line


def test_a_holder_that_was_saved_again_breaks_the_iterations_that_need_it(tmp_path: Path) -> None:
    root, other = verify_places.chained(tmp_path / "one", 6), verify_places.chained(tmp_path / "other", 7)
    shutil.rmtree(root / "iter_0000024")
    shutil.copytree(other / "iter_0000024", root / "iter_0000024")
    lines = found(root)
    assert any("saved again" in line and "iter_0000036 needs" in line for line in lines)
    assert saved_iterations(root)[-1].state == "not whole: needs iteration 24, which was saved again"


@pytest.mark.parametrize(
    ("harm", "why"),
    [
        (lambda holder: (holder / chain.MANIFEST).write_bytes(b"x"), "whose manifest of experts cannot be read"),
        (lambda holder: (holder / chain.MANIFEST).unlink(), "which was saved again"),
        (lambda holder: (holder / FORMAT).unlink(), f"which has no {FORMAT}"),
        (shutil.rmtree, "which is missing"),
    ],
)
def test_an_iteration_whose_holder_is_not_whole_does_not_count_as_whole(
    harm: Callable[[Path], None], why: str, tmp_path: Path
) -> None:
    root = verify_places.chained(tmp_path, 6)
    harm(root / "iter_0000024")
    assert saved_iterations(root)[-1].state == f"not whole: needs iteration 24, {why}"


def test_where_no_iteration_is_whole_that_is_said(tmp_path: Path) -> None:
    root = verify_places.dense(tmp_path, 8)
    for folder in root.glob("iter_*"):
        (folder / "common.pt").unlink()
    assert looked_at(root).restores == ""
    assert any("nothing to restore from" in line for line in found(root))


def test_what_a_save_left_behind_is_told_and_is_no_damage(tmp_path: Path) -> None:
    root = verify_places.dense(tmp_path, 9)
    (root / ".iter_0000036.saving").mkdir()
    result = looked_at(root)
    assert result.findings == ()
    assert ".iter_0000036.saving was left by a save that did not finish" in result.unchecked[0]


@pytest.mark.parametrize(("make", "iteration"), [(verify_places.dense, 24), (verify_places.chained, 36)])
def test_an_iteration_that_a_killed_save_had_moved_aside_is_whole(
    make: Callable[[Path, int], Path], iteration: int, tmp_path: Path
) -> None:
    """Killed between its two renames: the next start publishes what was there before."""
    root = make(tmp_path / "saved", 5)
    aside = (root / f"iter_{iteration:07d}").rename(root / f".iter_{iteration:07d}.replaced")
    result = looked_at(root)
    assert (result.findings, result.restores) == ((), f"iteration {iteration}")
    assert result.unchecked == (
        f"{aside} was to be replaced by a save that did not finish: the next start publishes it",
    )


def test_a_byte_that_changed_in_an_iteration_that_was_moved_aside_is_found(tmp_path: Path) -> None:
    root = verify_places.dense(tmp_path / "saved", 5)
    aside = (root / "iter_0000024").rename(root / ".iter_0000024.replaced")
    verify_places.flip(random.Random(5), root, list(aside.glob("*.distcp")))
    result = looked_at(root)
    assert [str(aside) in str(finding) for finding in result.findings] == [True]
    assert result.restores == "iteration 12"


def test_an_iteration_that_is_removed_while_it_is_read_is_no_damage(tmp_path: Path) -> None:
    root = verify_places.dense(tmp_path, 9)
    result = locate(str(root)).verify(lambda _: shutil.rmtree(root / "iter_0000012", ignore_errors=True))
    assert (result.findings, [one.part for one in result.checked]) == ((), ["iter_0000024"])


def test_iterations_that_a_job_publishes_while_it_removes_what_is_read_are_verified_too(tmp_path: Path) -> None:
    root, later = verify_places.dense(tmp_path / "run", 9), tmp_path / "later"
    verify_places.save(later, 36, verify_places.drawn(random.Random(1)))

    def go_on(nbytes: int) -> None:
        if (later / "iter_0000036").exists():
            (later / "iter_0000036").rename(root / "iter_0000036")
            (root / TRACKER).write_text("36")
            for number in (12, 24):
                shutil.rmtree(root / f"iter_{number:07d}")

    result = locate(str(root)).verify(go_on)
    assert (result.findings, result.restores) == ((), "iteration 36")


def test_tensors_of_a_stock_checkpoint_are_read_a_piece_at_a_time(
    content: Content, save: Save, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tensor with the experts of all layers is as large as the model."""
    folder = save(content, tmp_path / "iter_0000012", pieces=4)
    monkeypatch.setattr(DenseCheckpoint, "read_blocks", lambda self, name: pytest.fail(f"{name} was put together"))
    result = looked_at(folder)
    assert result.findings == ()
    assert result.checked[0].items == len(content.tensors) + len(content.objects)


@pytest.mark.parametrize("text", ["1" * 5000, "soon"])
def test_a_tracker_that_names_no_iteration_is_a_finding(text: str, tmp_path: Path) -> None:
    root = verify_places.dense(tmp_path, 10)
    (root / TRACKER).write_text(text)
    (line,) = found(root)
    assert "not an iteration" in line


@pytest.mark.parametrize(("text", "why"), [(None, "is missing"), ("soon", "holds 'soon', not an iteration")])
def test_without_a_tracker_that_names_an_iteration_there_is_nothing_to_restore_from(
    text: str | None, why: str, output: Any, tmp_path: Path
) -> None:
    root = verify_places.dense(tmp_path, 10)
    (root / TRACKER).unlink()
    if text is not None:
        (root / TRACKER).write_text(text)
    result = looked_at(root)
    (line,) = map(str, result.findings)
    assert line.startswith(f"{root / TRACKER} {why}") and line.endswith(f"; write 24 into {TRACKER}")
    assert (result.restores, output(root)[0]) == ("", 1)
    assert looked_at(root / "iter_0000012").findings == (), "an iteration is judged alone"
    (root / TRACKER).write_text("24")
    assert looked_at(root).findings == ()


def test_of_a_released_model_without_a_tracker_it_is_said_what_belongs_into_it(tmp_path: Path) -> None:
    root = verify_places.dense(tmp_path, 10)
    shutil.rmtree(root / "iter_0000012")
    (root / "iter_0000024").rename(root / "release")
    (root / TRACKER).unlink()
    (line,) = found(root)
    assert line.endswith(f"; write release into {TRACKER}")


def test_with_an_empty_tracker_the_newest_iteration_is_restored_as_by_a_job(tmp_path: Path) -> None:
    root = verify_places.dense(tmp_path, 10)
    (root / TRACKER).write_text("")
    result = looked_at(root)
    assert (len(result.findings), result.restores) == (1, "iteration 24")


def test_iterations_that_training_left_do_not_count_as_restorable(tmp_path: Path) -> None:
    root = verify_places.dense(tmp_path, 10)
    (root / RECORD).write_bytes(gone_back(root, 12, "job", [12, 24]).encoded())
    verify_places.save(root, 36, verify_places.drawn(random.Random(1)))
    (root / TRACKER).write_text("36")
    result = looked_at(root)
    assert (result.findings, result.restores) == ((), "iteration 36")
    assert "iter_0000024 was left when training went back with --ckpt-step" in result.unchecked[0]
    (root / "iter_0000036" / ".metadata").write_bytes(b"x")
    assert looked_at(root).restores == "iteration 12"
    (root / TRACKER).write_text("24")
    assert looked_at(root).restores == "iteration 24", "what the tracker names is loaded all the same"


def test_iterations_newer_than_the_tracker_says_do_not_count_as_restorable(tmp_path: Path) -> None:
    root = verify_places.dense(tmp_path, 10)
    (root / TRACKER).write_text("12")
    result = looked_at(root)
    assert (result.findings, result.restores) == ((), "iteration 12")
    assert "iter_0000024 is newer than" in result.unchecked[0]


def test_snapshots_without_a_whole_window_are_intact_and_yet_nothing_to_restore_from(tmp_path: Path) -> None:
    with closing(FilesystemStore(tmp_path, 0)) as store:
        write(store, random.Random(0), SnapshotId(1, 0), 2)
    verify_places.settled(tmp_path)
    lines = found(tmp_path)
    assert any("rank 1 after iteration 1" in line for line in lines)
    assert any("nothing to restore from" in line for line in lines)


def test_a_window_that_is_being_written_is_no_damage_while_an_older_one_is_whole(tmp_path: Path) -> None:
    root = verify_places.storage(tmp_path, 11)
    newest = max(int(path.name[5:12]) for path in root.glob("iter_*"))
    with closing(FilesystemStore(root, 0)) as store:
        write(store, random.Random(0), SnapshotId(newest + 1, 0), 1)
        writer = store.reserve(SnapshotId(newest + 1, 1), Layout.of([Field("w", "uint8", (10,))]))
        result = looked_at(root)
        writer.abandon()
    assert result.findings == ()
    assert any("is being written" in note for note in result.unchecked)


def test_a_state_that_other_ranks_may_be_about_to_complete_is_no_damage_until_time_has_passed(tmp_path: Path) -> None:
    root = verify_places.storage(tmp_path, 11)
    newest = max(int(path.name[5:12]) for path in root.glob("iter_*"))
    with closing(FilesystemStore(root, 0)) as store:
        write(store, random.Random(0), SnapshotId(newest + 1, 0), 1)
    result = looked_at(root)
    assert result.findings == ()
    assert any("is being written" in note for note in result.unchecked)
    verify_places.settled(root)
    (line,) = found(root)
    assert f"rank 1 after iteration {newest + 1}" in line


def test_a_window_that_a_job_frees_behind_a_newer_one_is_no_damage_until_time_has_passed(tmp_path: Path) -> None:
    for rank in range(verify_places.WORLD_SIZE):
        with closing(FilesystemStore(tmp_path, rank)) as store:
            for iteration in (1, 2):
                write(store, random.Random(0), SnapshotId(iteration, rank), 1)
    shutil.rmtree(tmp_path / SnapshotId(1, 1).name)
    result = looked_at(tmp_path)
    assert (result.findings, result.restores) == ((), "iteration 2")
    assert any("frees it, or it is lost" in note for note in result.unchecked)
    verify_places.settled(tmp_path)
    (line,) = found(tmp_path)
    assert "rank 1 after iteration 1" in line


def object_places(url: str, iterations: int) -> ObjectStore:
    """Snapshots of both ranks; the store of the first one."""
    stores = [ObjectStore(url, rank) for rank in range(verify_places.WORLD_SIZE)]
    for rank, store in enumerate(stores):
        for iteration in range(1, iterations + 1):
            write(store, random.Random(rank), SnapshotId(iteration, rank), 1)
    return stores[0]


def test_an_upload_that_was_torn_is_no_damage_in_an_object_store_either(tmp_path: Path) -> None:
    url = f"file://{tmp_path}/run"
    object_places(url, 1)
    (tmp_path / "run" / SnapshotId(2, 1).name).mkdir()
    (tmp_path / "run" / SnapshotId(2, 1).name / "segment-00001-5f0c8a1e.bin").write_bytes(b"half")
    result = looked_at(url)
    assert (result.findings, result.restores) == ((), "iteration 1")
    assert any("was never sealed, or is being written" in note for note in result.unchecked)


def test_a_state_in_an_object_store_is_given_time_as_in_a_folder(tmp_path: Path) -> None:
    url = f"file://{tmp_path}/run"
    store = object_places(url, 1)
    write(store, random.Random(0), SnapshotId(2, 0), 1)
    assert looked_at(url).findings == ()
    verify_places.settled(tmp_path)
    (line,) = found(url)
    assert "rank 1 after iteration 2" in line


def test_a_manifest_that_was_damaged_in_an_object_store_is_found(tmp_path: Path) -> None:
    url = f"file://{tmp_path}/run"
    object_places(url, 2)
    (tmp_path / "run" / SnapshotId(1, 1).name / "manifest.json").write_bytes(b"x")
    assert any(SnapshotId(1, 1).name in line for line in found(url))


def test_what_a_job_seals_while_it_frees_what_is_read_is_verified_too(tmp_path: Path) -> None:
    url = f"file://{tmp_path}/run"
    store = object_places(url, 1)

    def go_on(nbytes: int) -> None:
        if (1, 0) in {(one.iteration, one.rank) for one in store.snapshots().sealed}:
            for rank in range(verify_places.WORLD_SIZE):
                store.free(SnapshotId(1, rank))
                write(ObjectStore(url, rank), random.Random(rank), SnapshotId(2, rank), 1)

    result = locate(url).verify(go_on)
    assert (result.findings, result.restores) == ((), "iteration 2")


def seal_experts(store: FilesystemStore, snapshot: SnapshotId) -> None:
    """A piece with the state of one expert, as `pec` stores it beside all that is no expert."""
    said = facts(snapshot.iteration)
    scalars = {key: value for key, value in said.scalars.items() if key != "trainer"}
    scalars["operators"] = [[0, OperatorKind.EXPERT.value, 1, Part.MASTER_AND_MOMENTS.value]]
    with store.reserve(snapshot, Layout.of([Field("w", "uint8", (10,))])) as writer:
        writer.put("w", bytes(10))
        writer.seal(dataclasses.replace(said, scalars=scalars))


def test_a_piece_of_the_experts_that_one_rank_lacks_is_found(tmp_path: Path) -> None:
    root = verify_places.storage(tmp_path, 12)
    with closing(FilesystemStore(root, 0)) as store:
        seal_experts(store, SnapshotId(1, 0, "expertsa"))
    lone, nothing = found(root)
    assert "expertsa of rank 0 after iteration 1, but not that of rank 1" in lone
    assert "there is nothing to restore from" in nothing  # of that expert there is no other copy


def test_an_expert_is_missed_on_a_rank_of_which_nothing_else_had_it(tmp_path: Path) -> None:
    """The other rank holds a share of it, so all operators of the piece are known."""
    operators = {"experta": expert(0, 0), "expertb": expert(0, 1), "dense": OperatorId(-1, OperatorKind.EMBEDDING)}
    part, experts = Part.MASTER_AND_MOMENTS, (operators["experta"], operators["expertb"])
    left_out = [[one.layer, one.kind.value, one.expert] for one in experts]
    for rank in range(verify_places.WORLD_SIZE):
        for kind, held in operators.items():
            said = facts(1)
            scalars = said.scalars | {
                "left_out": left_out,
                "operators": [[held.layer, held.kind.value, held.expert, part.value]],
            }
            if kind != "dense":
                del scalars["trainer"], scalars["left_out"]
            digest = SnapshotPlan(1, {held: part}).digest()
            with FilesystemStore(tmp_path, rank).reserve(SnapshotId(1, rank, kind), Layout.of([])) as writer:
                writer.seal(dataclasses.replace(said, plan_digest=digest, scalars=scalars))
    assert not found(tmp_path)
    shutil.rmtree(tmp_path / SnapshotId(1, 1, "expertb").name)
    verify_places.settled(tmp_path)
    lone, nothing = found(tmp_path)
    assert "expertb of rank 0 after iteration 1, but not that of rank 1" in lone
    assert "there is nothing to restore from" in nothing


def test_without_an_intact_copy_of_an_expert_nothing_can_be_restored(tmp_path: Path) -> None:
    root = verify_places.storage(tmp_path, 12)
    for rank in range(verify_places.WORLD_SIZE):
        with closing(FilesystemStore(root, rank)) as store:
            seal_experts(store, SnapshotId(1, rank, "expertsa"))
    assert found(root) == []
    (root / SnapshotId(1, 1, "expertsa").name / "segment.bin").write_bytes(b"1" * 64)
    assert looked_at(root).restores == ""
    assert any("no intact copy of layer0.expert1 is left" in line for line in found(root))


def test_an_expert_that_the_job_had_saved_is_missed_though_nothing_is_left_of_its_snapshot(tmp_path: Path) -> None:
    ledger = TokenLedger.started((0,), 2).advance(1, [[3, 3]]).saved(1, [expert(0, 1)], Level.SNAPSHOT)
    ledger = ledger.saved(1, [expert(0, 1)], Level.PERSIST).advance(2, [[3, 3]])
    said = facts(2)
    scalars = said.scalars | {"strategy": {"ledger": ledger.to_data(), "planned": [100, 2]}}
    for rank in range(verify_places.WORLD_SIZE):
        with closing(FilesystemStore(tmp_path, rank)) as store:
            seal_experts(store, SnapshotId(1, rank, "expertsa"))
            with store.reserve(SnapshotId(2, rank), Layout.of([Field("w", "uint8", (10,))])) as writer:
                writer.put("w", bytes(10))
                writer.seal(dataclasses.replace(said, scalars=scalars))
    assert looked_at(tmp_path).restores == "iteration 2"
    for rank in range(verify_places.WORLD_SIZE):
        shutil.rmtree(tmp_path / SnapshotId(1, rank, "expertsa").name)
    assert looked_at(tmp_path).restores == ""
    assert "no intact copy of layer0.expert1 is left" in found(tmp_path)[-1]


def test_what_attempts_left_that_were_given_up_is_told_and_is_no_damage(tmp_path: Path) -> None:
    with closing(FilesystemStore(tmp_path, 0)) as store:
        for rank in range(verify_places.WORLD_SIZE):
            write(store, random.Random(rank), SnapshotId(1, rank), 1)
            write(store, random.Random(rank), SnapshotId(2, rank), 1, timeline=(("first", 0), ("second", 1)))
        write(store, random.Random(9), SnapshotId(3, 0), 1)
    result = looked_at(tmp_path)
    assert (result.findings, result.restores) == ((), "iteration 2")
    assert "went back to an older state" in result.unchecked[0]


def test_snapshots_behind_a_url_are_verified(tmp_path: Path) -> None:
    url = f"file://{tmp_path}/run of today"
    store = ObjectStore(url, 0)
    for rank in range(verify_places.WORLD_SIZE):
        write(store, random.Random(rank), SnapshotId(1, rank), 1)
    assert found(url) == []
    (segment,) = (tmp_path / "run of today").glob("*-rank_00001-*/*.bin")
    content = bytearray(segment.read_bytes())
    content[0] ^= 1
    segment.write_bytes(content)
    assert any("record weight 0" in line for line in found(url))


def test_one_snapshot_by_itself_is_verified_and_the_rest_said_to_be_unasked(tmp_path: Path) -> None:
    root = verify_places.storage(tmp_path, 13)
    folder = sorted(root.iterdir())[0]
    result = looked_at(folder)
    assert (result.findings, result.restores) == ((), None)
    assert "was not asked" in result.unchecked[0]
    assert [one.part for one in result.checked] == [folder.name]


def test_memory_of_a_job_that_runs_is_verified_without_an_accusation(tmp_path: Path) -> None:
    (tmp_path / "node").mkdir()
    with closing(MemoryStore(tmp_path / "node", "job", 0, (1 << 14,) * 3)) as store:
        write(store, random.Random(0), SnapshotId(1, 0), 1)
        writer = store.reserve(SnapshotId(2, 0), Layout.of([Field("w", "uint8", (10,))]))
        result = looked_at(tmp_path)
        writer.abandon()
    assert (result.findings, result.restores) == ((), None)
    assert "1 of 2 ranks have snapshots here" in result.unchecked[0]


def test_memory_with_nothing_sealed_is_nothing_to_restore_from(tmp_path: Path) -> None:
    (tmp_path / "node").mkdir()
    MemoryStore(tmp_path / "node", "job", 0, (1 << 14,)).close()
    (line,) = found(tmp_path)
    assert "job job: there is nothing to restore from" in line


@pytest.mark.parametrize("kind", PLACES)
def test_progress_ends_at_about_what_was_announced(kind: str, tmp_path: Path) -> None:
    location = locate(str(PLACES[kind](tmp_path, 14)))
    steps: list[int] = []
    location.verify(steps.append)
    assert 0 < sum(steps) <= location.size_bytes()


@pytest.fixture
def output(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    def call(*arguments: str | Path) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["moe-ckpt", "verify", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            main()
        return int(ended.value.code or 0), *capsys.readouterr()

    return call


def test_the_command_says_what_was_checked_and_exits_with_0(output: Any, tmp_path: Path) -> None:
    root = verify_places.dense(tmp_path / "with a space", 15)
    code, out, err = output(root)
    assert (code, err) == (0, "")
    assert "intact" in out
    assert "iter_0000012   every byte by its checksum" in out


def test_the_command_exits_with_1_and_one_line_for_each_finding(output: Any, tmp_path: Path) -> None:
    root = verify_places.dense(tmp_path / "with a space", 16)
    for folder in root.glob("iter_*"):
        (folder / ".metadata").write_bytes(b"x")
    code, out, _ = output(root)
    lines = [line for line in out.splitlines() if line.startswith("finding: ")]
    assert (code, len(lines)) == (1, 3)
    assert str(root / "iter_0000024" / ".metadata") in out


def test_findings_beside_a_state_that_can_be_restored_have_their_own_exit_code(output: Any, tmp_path: Path) -> None:
    root = verify_places.dense(tmp_path, 20)
    (root / "iter_0000012" / ".metadata").write_bytes(b"x")
    code, out, _ = output(root)
    assert (code, "usable, with findings" in out, "iteration 24" in out) == (3, True, True)
    (root / "iter_0000024" / ".metadata").write_bytes(b"x")
    code, out, _ = output(root)
    assert (code, "usable" in out) == (1, False)


def test_json_has_the_findings_with_paths_and_what_was_expected(output: Any, tmp_path: Path) -> None:
    root = verify_places.dense(tmp_path, 17)
    (root / "iter_0000012" / ".metadata").write_bytes(b"x")
    code, out, _ = output(root, "--json")
    said = json.loads(out)
    assert (code, said["verdict"], said["newest_state"]) == (3, "usable, with findings", "iteration 24")
    (finding,) = said["findings"]
    assert finding["path"] == str(root / "iter_0000012" / ".metadata")
    assert finding["found"] == "it has 1 bytes"
    assert finding["expected"].endswith(" bytes")


@pytest.mark.parametrize(("name", "code"), [("nowhere", 2), ("empty", 1)])
def test_a_place_that_is_nothing_is_one_line(name: str, code: int, output: Any, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    got, out, err = output(tmp_path / name)
    assert (got, out) == (code, "")
    assert len(err.splitlines()) == 1


def test_a_later_format_is_a_finding_by_name_and_the_other_iterations_are_verified(output: Any, tmp_path: Path) -> None:
    root = verify_places.dense(tmp_path, 18)
    path = root / "iter_0000012" / integrity.NAME
    body = unframed("integrity", path.read_bytes())
    assert body is not None
    path.write_bytes(framed("integrity", body.replace(b'"format":1', b'"format":2')))
    code, out, _ = output(root)
    (line,) = [line for line in out.splitlines() if line.startswith("finding: ")]
    assert code == 3
    assert "written in format 2, this version reads up to 1" in line
    assert "iter_0000024   every byte by its checksum" in out


def test_a_reader_that_has_left_ends_the_command_quietly(tmp_path: Path) -> None:
    root = verify_places.storage(tmp_path, 19)
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-c", "from moe_ckpt import main; main()", "verify", str(root)]
    ended = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, check=False)
    os.close(writer)
    assert (ended.returncode, ended.stderr) == (1, "")


def test_what_the_system_refuses_is_one_line(output: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = verify_places.storage(tmp_path, 19)

    def refused(*_: object) -> int:
        raise PermissionError(13, "Permission denied", str(root / "private"))

    monkeypatch.setattr(StorageLocation, "size_bytes", refused)
    code, out, err = output(root)
    assert (code, out, err) == (1, "", f"moe-ckpt: {root}/private cannot be read: Permission denied\n")
