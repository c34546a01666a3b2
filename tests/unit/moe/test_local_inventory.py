"""What is kept and given up of parked state, logs and gradients once a recovery is over."""

from __future__ import annotations

from typing import Any, cast

import pytest
from simulated_world.memory import Memory
from simulated_world.storage import FakeStore

from megatron.core.dist_checkpointing.moe.policy.lineage import Identity, Lineage
from megatron.core.dist_checkpointing.moe.ports import Facts, Field, Json, Layout, SnapshotId
from megatron.core.dist_checkpointing.moe.recovery.local_inventory import LocalInventory
from megatron.core.dist_checkpointing.moe.storage.base import HostBuffer
from megatron.core.dist_checkpointing.moe.types import GRADIENTS, LOG, PARKED

LAYOUT = Layout.of([Field("w", "uint8", (10,))])
FIRST, SECOND = (("one", 0),), (("one", 0), ("two", 4))
JOURNAL: dict[str, Json] = {"journal": {"grad_norm": 1.0, "skipped": False, "lm_loss": None}, "trainer": {}}


class Rank:
    """Of a transport only this is asked."""

    rank = 1


class Slot:
    """The standby store of rank 1."""

    def __init__(self, segments: int = 8) -> None:
        self.memory = Memory()
        self.store = FakeStore(self.memory, 1, (4096,) * segments)
        identity = Identity("job", {}, frozenset())
        spare = FakeStore(Memory(), 1, (4096,))
        self.inventory = LocalInventory(spare, None, cast("Any", Rank()), identity, standby=self.store)

    def seal(self, kind: str, iteration: int, rank: int = 1, timeline: Lineage = FIRST, **scalars: Json) -> SnapshotId:
        snapshot = SnapshotId(iteration, rank, kind)
        with self.store.reserve(snapshot, LAYOUT) as writer:
            writer.put("w", bytes(range(10)))
            writer.seal(Facts("job", "", {}, {"timeline": [[name, after] for name, after in timeline], **scalars}))
        return snapshot

    @property
    def held(self) -> list[SnapshotId]:
        return list(self.store.snapshots().sealed)


@pytest.fixture
def slot() -> Slot:
    return Slot()


def test_logs_of_the_iterations_that_a_replay_may_need_stay_whoever_sent_them(slot: Slot) -> None:
    logs = [slot.seal(LOG, iteration, rank) for iteration in (2, 3, 4, 5) for rank in (0, 1)]
    slot.inventory.collect_standby_garbage((), range(3, 5), timeline=FIRST)
    assert slot.held == [one for one in logs if one.iteration in (3, 4)]


def test_only_named_parked_state_and_gradients_stay(slot: Slot) -> None:
    parked, gradients = slot.seal(PARKED, 4), slot.seal(GRADIENTS, 5)
    for kind, iteration, rank in ((PARKED, 3, 1), (PARKED, 4, 0), (GRADIENTS, 4, 1)):
        slot.seal(kind, iteration, rank)
    slot.inventory.collect_standby_garbage({parked, gradients}, range(0), timeline=FIRST)
    assert slot.held == [parked, gradients]


@pytest.mark.parametrize("kind", [PARKED, LOG])
def test_what_a_given_up_future_left_goes_even_where_its_name_is_wanted(kind: str, slot: Slot) -> None:
    wanted = slot.seal(kind, 5, timeline=FIRST)
    slot.inventory.collect_standby_garbage({wanted}, range(4, 7), timeline=SECOND)
    assert not slot.held


def test_what_was_torn_goes(slot: Slot) -> None:
    torn = slot.memory.sealed(slot.seal(PARKED, 4))
    assert torn is not None
    torn.manifest = b""
    slot.inventory.collect_standby_garbage((), range(0), timeline=FIRST)
    assert not slot.store.snapshots().torn


def test_parked_state_that_arrived_outside_takes_the_place_of_what_is_given_up() -> None:
    slot, elsewhere = Slot(segments=1), Slot()
    arrived = elsewhere.seal(PARKED, 4)
    reader = elsewhere.store.open(arrived)
    arrival = HostBuffer(0, reader.manifest)
    arrival.buffer[:] = reader.raw()[: len(arrival.buffer)]
    arrival.seal()
    slot.seal(PARKED, 4, rank=0)
    slot.inventory.collect_standby_garbage({arrived}, range(0), [cast("HostBuffer", arrival.reader())], timeline=FIRST)
    assert slot.held == [arrived]
    with slot.store.open(arrived) as moved:
        assert bytes(moved.read("w")) == bytes(range(10))


def test_a_log_that_was_sealed_before_its_outcome_was_known_gets_it(slot: Slot) -> None:
    snapshot = slot.seal(LOG, 4)
    slot.inventory.journal_log(4, JOURNAL, FIRST)
    with slot.store.open(snapshot) as reader:
        assert reader.manifest.facts.scalars["journal"] == JOURNAL["journal"]
        assert reader.manifest.facts.scalars["timeline"] == [["one", 0]]
        assert bytes(reader.read("w")) == bytes(range(10))


def test_a_log_that_knows_its_outcome_or_is_of_another_future_is_left_as_it_is(slot: Slot) -> None:
    known, other = slot.seal(LOG, 4, journal={"mine": 1}), slot.seal(LOG, 5)
    slot.inventory.journal_log(4, JOURNAL, FIRST)
    slot.inventory.journal_log(5, JOURNAL, SECOND)
    with slot.store.open(known) as reader:
        assert reader.manifest.facts.scalars["journal"] == {"mine": 1}
    with slot.store.open(other) as reader:
        assert "journal" not in reader.manifest.facts.scalars


def test_without_a_standby_store_there_is_nothing_to_do() -> None:
    inventory = LocalInventory(
        FakeStore(Memory(), 1, (4096,)), None, cast("Any", Rank()), Identity("job", {}, frozenset())
    )
    inventory.collect_standby_garbage()
    inventory.journal_log(4, JOURNAL, FIRST)
