"""What the simulated memory tier promises as the real one does, and that it tears, damages and loses as asked."""

from __future__ import annotations

from typing import Any

import pytest
from simulated_world.memory import Memory
from simulated_world.storage import FakeStore
from simulated_world.world import World
from test_memory_store import (  # noqa: F401 - the same promises, kept by another implementation
    test_a_resize_keeps_segments_of_the_same_size,
    test_a_snapshot_larger_than_every_segment_is_refused_with_both_numbers,
    test_a_whole_segment_is_copied_and_verified_at_once,
    test_after_a_resize_there_is_room_for_as_many_snapshots_as_were_asked_for,
    test_an_abandoned_buffer_is_not_used_again_while_somebody_holds_it,
    test_buffers_are_written_in_place,
    test_freeing_never_waits_and_the_memory_returns_with_the_last_view,
    test_nothing_is_sealed_while_its_bytes_could_still_be_changed,
    test_what_is_being_written_outlives_a_resize,
    test_what_is_read_outlives_a_resize_and_its_end,
    test_what_is_sealed_outlives_a_resize_and_its_segment_goes_when_it_is_freed,
    test_where_the_segments_suffice_a_resize_changes_nothing,
    test_without_a_free_segment_the_refusal_says_what_holds_them,
)
from workload import FACTS, LAYOUT, RANK, SEGMENTS, Expected, content, read, run, write

from megatron.core.dist_checkpointing.moe.errors import UnreadableCheckpoint, UsageError
from megatron.core.dist_checkpointing.moe.ports import SnapshotId, StoreFailure

FIRST, SECOND, THIRD = (SnapshotId(iteration, RANK) for iteration in (10, 11, 12))


@pytest.fixture
def kind() -> str:
    return "simulated memory"


def opened(memory: Memory, segments: Any = SEGMENTS, **named: Any) -> FakeStore:
    return FakeStore(memory, RANK, segments, **named)


def killed_at(event: int, segments: Any, work: Any) -> tuple[Memory, World]:
    """What is left after a rank was killed at this event of its work; events begin with the opening of the store."""
    memory, world = Memory(), World(event, crash={RANK: event})
    world.spawn(RANK, "main", lambda: work(opened(memory, segments, world=world)))
    world.run()
    return memory, world


def use(store: FakeStore, seed: int, expected: Expected) -> None:
    run(store, seed, lambda what, *operation: getattr(expected, what)(*operation))
    store.close()


@pytest.mark.parametrize("segments", [SEGMENTS, None])
@pytest.mark.parametrize("seed", range(5))
def test_a_rank_killed_at_any_event_leaves_only_whole_snapshots_and_torn_ones(seed: int, segments: Any) -> None:
    reached = 0
    for event in range(1, 10_000):
        expected = Expected()
        memory, world = killed_at(event, segments, lambda store: use(store, seed, expected))  # noqa: B023
        store = opened(memory, segments)
        expected.compare(store)
        store.sweep()
        assert store.snapshots().torn == ()
        if not world.is_dead(RANK):
            break
        reached += 1
    assert reached > 60


def test_a_rank_killed_between_the_halves_of_a_record_leaves_it_torn_and_its_segment_free() -> None:
    memory, world = Memory(), World(0, should_crash=lambda rank, event: "second half of rng" in event.text)
    world.spawn(RANK, "main", lambda: write(opened(memory, world=world), FIRST))
    world.run()
    store = opened(memory)
    assert ([one.snapshot for one in store.snapshots().torn], store.snapshots().sealed) == ([FIRST], ())
    for snapshot in (FIRST, SECOND, THIRD):
        write(store, snapshot)
    assert read(store, FIRST) == content(FIRST)


def test_a_failed_operation_leaves_nothing_or_a_whole_snapshot() -> None:
    empty = []
    for at in range(1, 9):
        memory = Memory()
        store = opened(memory, fails=lambda number, name, at=at: number == at)
        with pytest.raises(StoreFailure, match=f"operation {at} of the store of slot {RANK}"):
            write(store, FIRST)
        store.close()
        again = opened(memory)
        assert again.snapshots().torn == ()
        assert all(read(again, one) == content(one) for one in again.snapshots().sealed)
        empty.append(not again.snapshots().sealed)
    # Reserve, five records and seal leave nothing; once it is committed, it is there in spite of an error.
    assert empty == [True] * 7 + [False]


@pytest.mark.parametrize("manifest", [False, True])
def test_every_flipped_bit_is_found(manifest: bool) -> None:
    memory = Memory()
    store = opened(memory)
    write(store, FIRST)
    for bit in range(0, 8 * 1200, 7):
        memory.flip(FIRST, bit, manifest=manifest)
        if manifest:
            with pytest.raises(UnreadableCheckpoint):
                store.open(FIRST)
        else:
            with store.open(FIRST) as reader:
                assert len(reader.verify()) == 1
        memory.flip(FIRST, bit, manifest=manifest)
    assert read(store, FIRST) == content(FIRST)


def test_a_wiped_memory_is_empty() -> None:
    memory = Memory()
    write(opened(memory), FIRST)
    memory.wipe()
    store = opened(memory)
    assert (store.snapshots().sealed, store.total_bytes) == ((), 3 * 4096)


def test_a_memory_has_one_live_store() -> None:
    memory = Memory()
    store = opened(memory)
    with pytest.raises(UsageError, match="in use"):
        opened(memory)
    store.close()
    opened(memory)


def test_a_killed_reader_pins_nothing() -> None:
    memory, world = Memory(), World(3, should_crash=lambda rank, event: "step" in event.text)
    kept = []
    for snapshot in (FIRST, SECOND, THIRD):
        write(store := opened(memory), snapshot)
        store.close()

    def read_and_die() -> None:
        kept.append(opened(memory, world=world).open(FIRST))
        kept[0].read("step")

    world.spawn(RANK, "main", read_and_die)
    world.run()
    store = opened(memory)
    store.free(FIRST)
    write(store, SnapshotId(13, RANK))


def test_segments_of_other_sizes_stay_until_what_they_hold_is_freed() -> None:
    memory = Memory()
    before = opened(memory, (100, 100, 5000))
    write(before, FIRST)
    before.close()
    store = opened(memory, (9000,) * 2)
    assert read(store, FIRST) == content(FIRST)
    assert (store.total_bytes, len(memory.segments)) == (6 * 4096, 3)
    store.free(FIRST)
    assert len(memory.segments) == 2


def test_slots_share_a_disk_and_sweep_only_their_own() -> None:
    disk = Memory()
    mine, other = FakeStore(disk, 0), FakeStore(disk, 1)
    writer = other.reserve(SnapshotId(5, 1), LAYOUT)
    mine.sweep()
    mine.free(SnapshotId(5, 1))
    for key, data in content(SnapshotId(5, 1)).items():
        writer.put(key, data)
    writer.seal(FACTS)
    write(mine, SnapshotId(5, 0))
    assert mine.snapshots().sealed == (SnapshotId(5, 0), SnapshotId(5, 1))
    assert read(mine, SnapshotId(5, 1)) == content(SnapshotId(5, 1))
