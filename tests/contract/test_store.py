"""What every store promises, checked against each of them."""

from __future__ import annotations

import gc
import os
import random
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash
from workload import FACTS, LAYOUT, RANK, SEGMENTS, content, new_store, read, write

from megatron.core.dist_checkpointing.moe.errors import UnreadableCheckpoint, UsageError
from megatron.core.dist_checkpointing.moe.ports import Facts, Field, Layout, NoRoom, SnapshotId
from megatron.core.dist_checkpointing.moe.storage import base, slot_reader
from megatron.core.dist_checkpointing.moe.storage.manifest import decode

FIRST, SECOND, THIRD = (SnapshotId(iteration, RANK) for iteration in (10, 11, 12))
SURVIVING = ("memory", "filesystem", "objects in files")  # what does not end with the process
OpenStore = Callable[[], Any]


def sealed(store: Any) -> tuple[SnapshotId, ...]:
    return store.snapshots().sealed


def torn(store: Any) -> list[SnapshotId]:
    return [one.snapshot for one in store.snapshots().torn]


def in_child(act: Callable[[], Any]) -> int:
    """Runs `act` in a forked process; returns how it ended, as os.waitpid says."""
    child = os.fork()
    if not child:
        try:
            act()
        finally:
            os._exit(99)
    return os.waitpid(child, 0)[1]


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def test_an_empty_store_lists_nothing(store: Any) -> None:
    assert (store.snapshots().sealed, store.snapshots().torn) == ((), ())


def test_the_snapshots_of_one_rank_are_listed_alone(store: Any) -> None:
    other = SnapshotId(FIRST.iteration, RANK + 1)
    for snapshot in (FIRST, other):
        write(store, snapshot)
    assert [store.snapshots(rank).sealed for rank in (RANK, RANK + 1, RANK + 2)] == [(FIRST,), (other,), ()]
    assert sealed(store) == (FIRST, other)


def test_whoever_asks_for_one_rank_reads_no_manifest_of_another(store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """In storage there are those of all ranks: if each read all of them, a job of N ranks would open N x N files."""
    for rank in (RANK, RANK + 1, RANK + 2):
        write(store, SnapshotId(FIRST.iteration, rank))
    opened: list[str] = []

    def noted(content: bytes, name: str) -> Any:
        opened.append(name)
        return decode(content, name)

    for module in (base, slot_reader):
        monkeypatch.setattr(module, "decode", noted)
    assert len(store.snapshots(RANK).sealed) == 1
    assert len(opened) <= 1


def test_what_was_sealed_is_read_back_bit_by_bit(store: Any) -> None:
    write(store, FIRST)
    assert read(store, FIRST) == content(FIRST)


def test_the_manifest_is_read_back_as_seal_returned_it(store: Any) -> None:
    manifest = write(store, FIRST)
    with store.open(FIRST) as reader:
        assert reader.manifest == manifest
        assert reader.manifest.facts == FACTS
        assert [record.xxh3 for record in manifest.records] == [
            xxhash.xxh3_128_hexdigest(data) for data in content(FIRST).values()
        ]


def test_records_may_be_put_in_any_order(store: Any) -> None:
    with store.reserve(FIRST, LAYOUT) as writer:
        for key, data in reversed(content(FIRST).items()):
            writer.put(key, data)
        writer.seal(FACTS)
    assert read(store, FIRST) == content(FIRST)


def test_after_put_the_source_may_change(store: Any) -> None:
    with store.reserve(FIRST, LAYOUT) as writer:
        for key, data in reversed(content(FIRST).items()):
            source = bytearray(data)
            writer.put(key, source)
            source[:] = bytes(len(source))
        writer.seal(FACTS)
    assert read(store, FIRST) == content(FIRST)


def test_arrays_of_any_type_are_taken_as_their_bytes(store: Any) -> None:
    layout = Layout.of([Field("m", "float32", (3, 4)), Field("n", "int64", ()), Field("none", "int8", (0, 2))])
    values = {"m": np.arange(12, dtype=np.float32).reshape(3, 4), "n": np.array(7), "none": np.empty((0, 2), np.int8)}
    with store.reserve(FIRST, layout) as writer:
        for key, value in values.items():
            writer.put(key, value)
        writer.seal(FACTS)
    assert read(store, FIRST) == {key: value.tobytes() for key, value in values.items()}


def test_a_snapshot_without_records_can_be_sealed(store: Any) -> None:
    store.reserve(FIRST, Layout.of([])).seal(FACTS)
    assert read(store, FIRST) == {}


def test_a_snapshot_being_written_is_neither_sealed_nor_torn(store: Any) -> None:
    with store.reserve(FIRST, LAYOUT) as writer:
        writer.put("step", content(FIRST)["step"])
        assert (store.snapshots().sealed, store.snapshots().torn) == ((), ())
        with pytest.raises(UnreadableCheckpoint):
            store.open(FIRST)


def test_an_abandoned_snapshot_leaves_nothing(store: Any) -> None:
    with store.reserve(FIRST, LAYOUT) as writer:
        writer.put("step", content(FIRST)["step"])
    assert (store.snapshots().sealed, store.snapshots().torn) == ((), ())
    write(store, FIRST, version=1)
    assert read(store, FIRST) == content(FIRST, version=1)


def test_a_snapshot_with_a_record_missing_cannot_be_sealed(store: Any) -> None:
    with store.reserve(FIRST, LAYOUT) as writer:
        writer.put("step", content(FIRST)["step"])
        with pytest.raises(UsageError, match="4 records were never put, such as embedding"):
            writer.seal(FACTS)
    assert sealed(store) == ()


@pytest.mark.parametrize(
    ("key", "data", "complaint"),
    [
        ("stop", bytes(8), "not in the layout"),
        ("step", bytes(7), "got 7 bytes"),
        ("step", np.zeros((8, 2), np.uint8)[:, 0], "non-contiguous"),
    ],
)
def test_a_record_that_the_layout_does_not_know_is_refused(store: Any, key: str, data: Any, complaint: str) -> None:
    with store.reserve(FIRST, LAYOUT) as writer, pytest.raises(UsageError, match=complaint):
        writer.put(key, data)


def test_a_record_is_put_once(store: Any) -> None:
    with store.reserve(FIRST, LAYOUT) as writer:
        writer.put("step", bytes(8))
        with pytest.raises(UsageError, match="put already"):
            writer.put("step", bytes(8))


def test_a_sealed_writer_takes_nothing_more(store: Any) -> None:
    writer = store.reserve(FIRST, Layout.of([Field("step", "int64", ())]))
    writer.put("step", bytes(8))
    writer.seal(FACTS)
    with pytest.raises(UsageError, match="sealed or abandoned"):
        writer.put("step", bytes(8))
    with pytest.raises(UsageError, match="sealed or abandoned"):
        writer.seal(FACTS)


def test_facts_that_are_no_json_are_refused_and_can_be_corrected(store: Any) -> None:
    with store.reserve(FIRST, Layout.of([])) as writer:
        with pytest.raises(UsageError, match=r"scalars\.shape is a tuple"):
            writer.seal(Facts("job", scalars={"shape": (1, 2)}))  # type: ignore[dict-item]
        writer.seal(FACTS)
    assert sealed(store) == (FIRST,)


def test_a_sealed_snapshot_is_not_overwritten(store: Any) -> None:
    write(store, FIRST)
    with pytest.raises(UsageError, match="free it before"):
        store.reserve(FIRST, LAYOUT)
    assert read(store, FIRST) == content(FIRST)


def test_a_snapshot_is_written_by_one_writer_at_a_time(store: Any) -> None:
    with store.reserve(FIRST, LAYOUT), pytest.raises(UsageError, match="being written already"):
        store.reserve(FIRST, LAYOUT)


def test_several_snapshots_are_written_side_by_side(store: Any) -> None:
    snapshots = (FIRST, SECOND, SnapshotId(10, RANK, "parked"))
    writers = {snapshot: store.reserve(snapshot, LAYOUT) for snapshot in snapshots}
    for key in LAYOUT.places:
        for snapshot, writer in writers.items():
            writer.put(key, content(snapshot)[key])
    for writer in writers.values():
        writer.seal(FACTS)
    assert sealed(store) == tuple(sorted(snapshots))
    assert all(read(store, snapshot) == content(snapshot) for snapshot in snapshots)


def test_a_copy_keeps_facts_layout_and_checksums(store: Any) -> None:
    original = write(store, FIRST)
    with store.open(FIRST) as reader, store.reserve(SECOND, original.layout) as writer:
        for record in original.records:
            writer.put(record.key, reader.read(record.key))
        copy = writer.seal(original.facts, original.checksums)
    assert (copy.facts, copy.records) == (original.facts, original.records)


def test_a_copy_that_arrived_damaged_is_not_sealed(store: Any) -> None:
    original = write(store, FIRST)
    with store.reserve(SECOND, LAYOUT) as writer:
        for key, data in content(FIRST).items():
            writer.put(key, data if key != "step" else bytes(8))
        with pytest.raises(UnreadableCheckpoint, match=r"1 of 5 records arrived with other bytes.*step"):
            writer.seal(original.facts, original.checksums)
    assert sealed(store) == (FIRST,)
    assert torn(store) == []


def test_a_freed_snapshot_is_gone_and_may_be_written_again(store: Any) -> None:
    write(store, FIRST)
    store.free(FIRST)
    assert sealed(store) == ()
    with pytest.raises(UnreadableCheckpoint):
        store.open(FIRST)
    write(store, FIRST, version=1)
    assert read(store, FIRST) == content(FIRST, version=1)


def test_freeing_what_is_not_there_does_nothing(store: Any) -> None:
    write(store, FIRST)
    store.free(SECOND)
    assert sealed(store) == (FIRST,)


def test_freeing_does_not_disturb_a_writer_of_the_same_snapshot(store: Any) -> None:
    with store.reserve(FIRST, LAYOUT) as writer:
        store.free(FIRST)
        store.sweep()
        for key, data in content(FIRST).items():
            writer.put(key, data)
        writer.seal(FACTS)
    assert read(store, FIRST) == content(FIRST)


def test_unknown_records_and_closed_readers_are_refused(store: Any) -> None:
    write(store, FIRST)
    reader = store.open(FIRST)
    with pytest.raises(UsageError, match="no record stop"):
        reader.read("stop")
    reader.close()
    reader.close()
    for act in (lambda: reader.read("step"), reader.verify):
        with pytest.raises(UsageError, match="was closed"):
            act()


def test_what_is_read_cannot_be_written(store: Any) -> None:
    write(store, FIRST)
    with store.open(FIRST) as reader:
        assert reader.read("rng").readonly


def test_an_intact_snapshot_verifies(store: Any) -> None:
    write(store, FIRST)
    with store.open(FIRST) as reader:
        assert reader.verify() == ()


def test_a_new_store_object_sees_what_was_sealed_before(open_store: OpenStore) -> None:
    write(open_store(), FIRST)
    again = open_store()
    assert sealed(again) == (FIRST,)
    assert read(again, FIRST) == content(FIRST)


def test_every_sealed_snapshot_stays_the_same_while_others_are_written(store: Any) -> None:
    alive: dict[SnapshotId, int] = {}
    source = random.Random(5)
    for iteration in range(60):
        if len(alive) == len(SEGMENTS):
            store.free(freed := source.choice(sorted(alive)))
            del alive[freed]
        snapshot = SnapshotId(iteration, RANK)
        write(store, snapshot, version=iteration)
        alive[snapshot] = iteration
        assert sealed(store) == tuple(sorted(alive))
        for one, version in alive.items():
            assert read(store, one) == content(one, version), f"the {one} changed in round {iteration}"


def test_many_readers_at_once_see_only_whole_snapshots(store: Any) -> None:
    wrong: list[str] = []
    seen = [0] * 4
    done = threading.Event()

    def keep_reading(at: int) -> None:
        while not done.is_set():
            for snapshot in sealed(store):
                try:
                    found = read(store, snapshot)
                except UnreadableCheckpoint:
                    continue  # freed between listing and reading
                seen[at] += 1
                if found != content(snapshot):
                    wrong.append(str(snapshot))

    threads = [threading.Thread(target=keep_reading, args=(at,)) for at in range(len(seen))]
    for thread in threads:
        thread.start()
    written = 0
    while written < 50 or (min(seen) < 5 and written < 5000):
        snapshot = SnapshotId(written, RANK)
        try:
            write(store, snapshot)
        except NoRoom:
            continue  # readers still hold every free segment
        written += 1
        for old in sealed(store)[:-1]:
            store.free(old)
    done.set()
    for thread in threads:
        thread.join()
    assert not wrong
    assert min(seen) >= 5


STEPS = ("reserve", *LAYOUT.places, "seal", "free", "reserve again", "seal again")


@pytest.mark.parametrize("kind", SURVIVING)
@pytest.mark.parametrize("last", range(len(STEPS) + 1))
def test_a_process_killed_between_two_steps_leaves_exactly_what_it_sealed(kind: str, last: int, place: Path) -> None:
    def steps() -> None:
        remaining = iter(range(last))

        def step() -> None:
            if next(remaining, None) is None:
                die()

        store = new_store(kind, place)
        write(store, FIRST)
        step()
        writer = store.reserve(SECOND, LAYOUT)
        for key, data in content(SECOND).items():
            step()
            writer.put(key, data)
        step()
        writer.seal(FACTS)
        step()
        store.free(FIRST)
        step()
        writer = store.reserve(FIRST, LAYOUT)
        for key, data in content(FIRST, version=1).items():
            writer.put(key, data)
        step()
        writer.seal(FACTS)
        die()

    assert in_child(steps) == signal.SIGKILL
    after_seal, after_free, again = last > 6, last > 7, last > 9
    expected = {SECOND: 0} if after_seal else {}
    expected |= {FIRST: 1} if again else {} if after_free else {FIRST: 0}
    store = new_store(kind, place)
    listing = store.snapshots()
    assert {one: read(store, one) for one in listing.sealed} == {
        one: content(one, version) for one, version in expected.items()
    }
    writing = SECOND if 1 <= last <= 6 else FIRST if last == 9 else None
    assert [one.snapshot for one in listing.torn] == ([writing] if writing else [])
    store.sweep()
    assert store.snapshots().torn == ()
    store.close()


@pytest.mark.parametrize("kind", SURVIVING)
def test_a_torn_snapshot_can_be_written_again(open_store: OpenStore) -> None:
    def tear() -> None:
        open_store().reserve(FIRST, LAYOUT).put("step", bytes(8))
        die()

    assert in_child(tear) == signal.SIGKILL
    store = open_store()
    assert torn(store) == [FIRST]
    write(store, FIRST)
    assert (sealed(store), torn(store)) == ((FIRST,), [])
    assert read(store, FIRST) == content(FIRST)


@pytest.mark.parametrize("kind", SURVIVING)
def test_freeing_removes_what_is_torn(open_store: OpenStore) -> None:
    def tear() -> None:
        writer = open_store().reserve(FIRST, LAYOUT)
        writer.put("step", bytes(8))
        die()

    assert in_child(tear) == signal.SIGKILL
    store = open_store()
    store.free(FIRST)
    assert store.snapshots().torn == ()


@pytest.mark.parametrize("kind", ["memory", "filesystem"])
def test_views_stay_as_they_are_after_their_snapshot_is_freed_and_its_space_is_used(store: Any) -> None:
    write(store, FIRST)
    with store.open(FIRST) as reader:
        view = np.frombuffer(reader.read("rng"), np.uint8)
    store.free(FIRST)
    gc.collect()
    for iteration in range(20, 20 + 2 * len(SEGMENTS)):
        write(store, SnapshotId(iteration, RANK))
        store.free(SnapshotId(iteration, RANK))
    assert view.tobytes() == content(FIRST)["rng"]
