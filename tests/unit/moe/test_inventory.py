"""The inventory: what every rank found, told to all, and what the planner sees of it."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Collection, Mapping
from functools import reduce
from operator import or_
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest
from simulated_world.memory import Memory
from simulated_world.storage import FakeStore

from megatron.core.dist_checkpointing.moe.policy.availability import Survey
from megatron.core.dist_checkpointing.moe.policy.lineage import Identity
from megatron.core.dist_checkpointing.moe.ports import Facts, Field, Json, Layout, OlderMemory, SnapshotId, StoreFailure
from megatron.core.dist_checkpointing.moe.recovery.findings import Digest, Judge, Overview, digest, overview
from megatron.core.dist_checkpointing.moe.recovery.inventory import (
    Catalogue,
    CopyLocation,
    JudgedRow,
    SentRows,
    catalogue,
    listing,
)
from megatron.core.dist_checkpointing.moe.recovery.local_inventory import LocalInventory
from megatron.core.dist_checkpointing.moe.storage import manifest
from megatron.core.dist_checkpointing.moe.storage.filesystem import FilesystemStore
from megatron.core.dist_checkpointing.moe.storage.memory import MemoryStore
from megatron.core.dist_checkpointing.moe.storage.objects import ObjectStore
from megatron.core.dist_checkpointing.moe.storage.system import OperatingSystem
from megatron.core.dist_checkpointing.moe.types import (
    CONSTANT,
    GRADIENTS,
    LOG,
    PARKED,
    Direction,
    OperatorId,
    OperatorKind,
    Part,
    Tier,
    expert,
)
from megatron.core.dist_checkpointing.moe.types.layout import MANIFEST

TOPOLOGY: dict[str, Json] = {"world_size": 2, "ep": 2}
ROUTER, EXPERTS = OperatorId(0, OperatorKind.ROUTER), (expert(0, 0), expert(0, 1))
OWN = ({ROUTER, EXPERTS[0]}, {ROUTER, EXPERTS[1]})
FIRST, SECOND = (("one", 0),), (("one", 0), ("two", 2))
LAYOUT = Layout.of([Field("w", "uint8", (10,))])


class Node:
    """A memory and a disk that ranks share in these tests, with two slots."""

    def __init__(self) -> None:
        self.memories = [Memory(), Memory()]
        self.disk = Memory()
        self.stores = [FakeStore(memory, rank, (4096,) * 8) for rank, memory in enumerate(self.memories)]
        self.disks = [FakeStore(self.disk, rank) for rank in range(2)]

    def seal(
        self, store: FakeStore, iteration: int, owner: int, *, kind: str = "snapshot", digest: str = "d",
        job: str = "job", topology: Mapping[str, Json] = TOPOLOGY,
        operators: tuple[OperatorId, ...] | None = None, timeline: tuple[tuple[str, int], ...] = FIRST,
        more: Mapping[str, Json] | None = None,
    ) -> SnapshotId:  # fmt: skip
        snapshot = SnapshotId(iteration, owner, kind)
        held = sorted(OWN[owner]) if operators is None else operators
        rows: list[Json] = [[one.layer, one.kind.value, one.expert, Part.MASTER_AND_MOMENTS.value] for one in held]
        writer = store.reserve(snapshot, LAYOUT)
        writer.put("w", bytes(range(10)))
        scalars: dict[str, Json] = {"operators": rows, "timeline": list(map(list, timeline)), **(more or {})}
        writer.seal(Facts(job, digest, topology, scalars))
        return snapshot

    def rows(self, takes_over: Callable[[str], bool] = lambda job: True) -> tuple[Judge, list[list[JudgedRow]]]:
        """What each rank finds, judged by what all know."""
        rows = [
            listing(self.stores[rank], Tier.OWN_MEMORY, TOPOLOGY, job="job")
            + listing(self.disks[rank], Tier.PERSISTENT, TOPOLOGY, owner=rank)
            for rank in range(2)
        ]
        judge = Judge(reduce(or_, map(overview, rows)), "job", takes_over)
        return judge, [list(map(judge.judged, found)) for found in rows]

    def told(self, nodes: tuple[str, str] = ("a", "b")) -> Catalogue:
        """What is known of the state of both ranks."""
        sent = [(rank, SentRows.of(rows)) for rank, rows in enumerate(self.rows()[1])]
        return catalogue(sent, {rank: frozenset(OWN[rank]) for rank in range(2)}, tuple(map("ab".index, nodes)))

    def digest(self, damaged: Collection[CopyLocation] = (), first: Collection[int] = ()) -> Digest:
        """What both ranks tell all."""
        known, nothing = self.told(), Survey({}, frozenset())
        rows = enumerate(self.rows()[1])
        return reduce(or_, (digest(rank, nothing, known, found, damaged, first) for rank, found in rows))


@pytest.fixture
def node() -> Node:
    return Node()


def test_nothing_found_is_told_as_no_iteration(node: Node) -> None:
    found = node.told()
    assert not found.found
    assert node.rows()[0].overview.newest == -1
    assert found.required == {rank: frozenset(OWN[rank]) for rank in range(2)}


def test_what_was_sealed_is_found_with_its_operators_and_digest(node: Node) -> None:
    snapshot = node.seal(node.stores[0], 4, 0, digest="abc")
    (one,), (row,) = node.told().found, node.rows()[1][0]
    assert (one.finder, one.snapshot, one.tier, row.digest, one.why) == (0, snapshot, Tier.OWN_MEMORY, "abc", "")
    assert one.timeline == FIRST
    assert one.plan.parts == dict.fromkeys(OWN[0], Part.MASTER_AND_MOMENTS)


def test_a_replica_is_peer_memory_only_when_it_lies_on_another_node(node: Node) -> None:
    node.seal(node.stores[1], 4, 0)
    for nodes, tier in ((("a", "b"), Tier.PEER_MEMORY), (("a", "a"), Tier.OWN_MEMORY)):
        (copy,) = node.told(nodes).inventory().copies[0]
        assert (copy.rank, copy.tier, copy.holder) == (0, tier, 1 if nodes[1] == "b" else 0)


def test_each_rank_tells_of_its_own_persistent_snapshots_only(node: Node) -> None:
    node.seal(node.disks[0], 4, 0)
    node.seal(node.disks[1], 4, 1)
    found = node.told().found
    assert [(one.finder, one.snapshot.rank) for one in found] == [(0, 0), (1, 1)]
    assert {copy.holder for copies in node.told().inventory().copies.values() for copy in copies} == {None}


def test_a_damaged_manifest_is_told_as_a_copy_that_is_not_sealed(node: Node) -> None:
    snapshot = node.seal(node.stores[0], 4, 0)
    node.memories[0].flip(snapshot, 2000, manifest=True)
    found = node.told()
    assert node.rows()[0].overview.newest == 4
    assert found.found[0].why
    (copy,) = found.inventory().copies[0]
    assert not copy.sealed


class Away(OperatingSystem):
    """Storage that does not answer for the manifests of one iteration, or of all, so many times."""

    def __init__(self, times: int, iteration: str = "") -> None:
        self.times, self.iteration = times, iteration

    def open(self, path: Path, flags: int) -> int:
        if self.times and path.name == MANIFEST and self.iteration in path.parent.name:
            self.times -= 1
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), str(path))
        return super().open(path, flags)


@pytest.fixture
def two_stored(tmp_path: Path) -> Path:
    store = FilesystemStore(tmp_path, 0)
    for iteration in (3, 4):
        with store.reserve(SnapshotId(iteration, 0), LAYOUT) as writer:
            writer.put("w", bytes(10))
            writer.seal(Facts("job", "d", TOPOLOGY, {"operators": [], "timeline": [["one", 0]]}))
    return tmp_path


def test_a_manifest_that_cannot_be_read_for_a_moment_does_not_count_as_damaged(two_stored: Path) -> None:
    """Else a recovery goes back further than it has to, and says that the newest state is damaged."""
    waited = list[float]()
    store = FilesystemStore(two_stored, 0, system=Away(2, "iter_0000004"))
    rows = listing(store, Tier.PERSISTENT, TOPOLOGY, wait=waited.append)
    assert [(row.snapshot.iteration, row.why) for row in rows] == [(3, ""), (4, "")]
    assert waited == [0.5, 2.0]


def test_one_manifest_that_stays_away_is_told_with_its_reason(two_stored: Path) -> None:
    store = FilesystemStore(two_stored, 0, system=Away(1000, "iter_0000004"))
    rows = listing(store, Tier.PERSISTENT, TOPOLOGY, wait=lambda _: None)
    assert {row.snapshot.iteration: os.strerror(errno.ESTALE) in row.why for row in rows} == {3: False, 4: True}


def test_storage_of_which_no_manifest_can_be_read_now_is_not_taken_for_damaged(two_stored: Path) -> None:
    """Else a job with --load trains on from an older checkpoint, where another start would find everything."""
    store = FilesystemStore(two_stored, 0, system=Away(1000))
    with pytest.raises(StoreFailure, match=r"no snapshot can be read now, .*iter_0000003.*Stale file handle"):
        listing(store, Tier.PERSISTENT, TOPOLOGY, wait=lambda _: None)


def test_an_object_store_tells_what_does_not_answer_from_what_is_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = ObjectStore(f"memory://{tmp_path.name}", 0)
    with store.reserve(SnapshotId(3, 0), LAYOUT) as writer:
        writer.put("w", bytes(10))
        writer.seal(Facts("job", "d", TOPOLOGY, {}))

    def late(*_: object) -> bytes:
        raise OSError(errno.ETIMEDOUT, os.strerror(errno.ETIMEDOUT))

    for cat_file, may_pass in ((late, True), (lambda *_: b"{", False)):
        monkeypatch.setattr(store.files, "cat_file", cat_file)
        assert [one.may_pass for one in store.snapshots().torn] == [may_pass]


def test_a_snapshot_that_was_never_sealed_is_told_too(node: Node) -> None:
    snapshot = node.seal(node.stores[0], 6, 0)
    segment = node.memories[0].sealed(snapshot)
    assert segment is not None
    segment.manifest = b""
    (one,) = node.told().found
    assert "never sealed" in one.why
    assert node.rows()[0].overview.newest == 6


def test_snapshots_of_another_layout_cannot_be_used_and_both_layouts_are_named(node: Node) -> None:
    node.seal(node.disks[0], 4, 0, topology={"world_size": 2, "ep": 1})
    (one,) = node.told().found
    assert "'ep': 1" in one.why and "'ep': 2" in one.why
    assert not node.told().inventory().copies[0][0].sealed


def test_memory_of_another_job_cannot_be_used_but_storage_can(node: Node) -> None:
    node.seal(node.stores[0], 4, 0, job="other")
    node.seal(node.disks[0], 2, 0, job="other")
    assert {one.tier: one.why for one in node.told().found} == {
        Tier.OWN_MEMORY: "it belongs to job other",
        Tier.PERSISTENT: "",
    }


@pytest.mark.parametrize("in_memory", [True, False])
def test_what_storage_shows_of_memory_in_another_layout_counts_too(in_memory: bool, node: Node, tmp_path: Path) -> None:
    disk = FilesystemStore(tmp_path / "other", 0)
    node.seal(cast("Any", disk), 7, 0, more={"made_by": "full"})
    older: Any = OlderMemory()
    older.is_shown = lambda snapshot: in_memory and snapshot == SnapshotId(7, 0)
    rank, identity = cast("Any", SimpleNamespace(rank=0)), Identity("job", TOPOLOGY, frozenset(), "sparse")
    own = LocalInventory(MemoryStore(tmp_path, "job", 0, (4096,)), disk, rank, identity, older=older)
    assert overview(own.rows()).foreign[0] == (7 if in_memory else -1)


@pytest.mark.parametrize(
    ("other", "expected"),
    [
        ({}, 5),
        ({"job": "other"}, -1),
        ({"topology": {"world_size": 2, "ep": 1}}, -1),
        ({"kind": LOG}, -1),
        ({"kind": CONSTANT}, -1),
        ({"more": {"window": [5, 6]}}, 6),
    ],
)
def test_memory_of_slots_that_no_process_has_is_told_to_all_and_not_used(
    other: dict[str, Any], expected: int, node: Node, tmp_path: Path
) -> None:
    """The end of the oldest window of such a slot: newer ones may be of this slot alone."""
    for iteration in (5, 6):
        node.seal(node.stores[1], iteration, 1, **other)
    older: Any = OlderMemory()
    older.strays = lambda: [node.stores[1]]
    rank, identity = cast("Any", SimpleNamespace(rank=0)), Identity("job", TOPOLOGY, frozenset())
    own = LocalInventory(MemoryStore(tmp_path, "job", 0, (4096,)), None, rank, identity, older=older)
    assert overview(own.rows()).foreign[0] == expected
    assert all(row.why.startswith("it lies where no process of this start looks") for row in own.rows())


@pytest.mark.parametrize(
    ("other", "expected"),
    [({}, 6), ({"job": "other"}, -1), ({"topology": {"world_size": 2, "ep": 1}}, -1), ({"kind": LOG}, -1)],
)
def test_memory_of_another_strategy_is_told_to_all_where_nothing_else_speaks_against_it(
    other: dict[str, Any], expected: int, node: Node
) -> None:
    for store, iteration in ((node.stores[1], 6), (node.disks[1], 8)):
        node.seal(store, iteration, 1, more={"made_by": "full"}, **other)
    node.seal(node.stores[0], 9, 0)
    iteration, why = node.rows()[0].overview.foreign
    assert iteration == expected
    assert why == ("it was made with --moe-ckpt-strategy full, this job has " if expected > 0 else "")


@pytest.mark.parametrize(("tier", "kind"), [(Tier.OWN_MEMORY, "snapshot"), (Tier.PARKED, PARKED)])
@pytest.mark.parametrize(
    ("by", "says"),
    [("a later version", "written in format"), ("a process with a secret", "it is sealed with the secret of its job")],
)
def test_memory_that_another_version_or_secret_reads_is_told_to_all_and_not_freed(
    by: str, says: str, tier: Tier, kind: str, node: Node, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = MemoryStore(tmp_path, "job", 0, (4096,) * 2)
    node.seal(cast("Any", store), 4, 0, kind=kind)
    with monkeypatch.context() as other:
        if by == "a later version":
            other.setattr(manifest, "FORMAT_VERSION", manifest.FORMAT_VERSION + 1)
        else:
            manifest.use_secret(b"secret" * 8)
        node.seal(cast("Any", store), 6, 0, kind=kind)
    manifest.use_secret(None)
    rows = listing(store, tier, TOPOLOGY, job="job")
    iteration, why = overview(rows).foreign
    assert iteration == 6 and says in why
    own = LocalInventory(
        store, None, cast("Any", SimpleNamespace(rank=0)), Identity("job", {}, frozenset()), standby=store
    )
    own.collect_garbage((), ()) if kind == "snapshot" else own.collect_standby_garbage()
    assert [one.snapshot.iteration for one in store.snapshots().torn] == [6]
    assert not store.snapshots().sealed


def test_a_copy_that_proved_damaged_is_corrupt_in_the_next_plan_and_gives_nothing(node: Node) -> None:
    node.seal(node.stores[0], 4, 0)
    node.seal(node.stores[1], 4, 0)
    found = node.told()
    damaged = {one.place for one in found.found if one.finder == 0}
    own, replica = found.inventory(damaged).copies[0]
    assert own.corrupt == OWN[0]
    assert not replica.corrupt
    assert [one.finder for one in found.without(damaged).found] == [1]


def test_copies_of_the_same_operators_share_one_plan_object(node: Node) -> None:
    node.seal(node.stores[0], 4, 0)
    node.seal(node.stores[1], 4, 0)
    one, other = node.told().found
    assert one.plan is other.plan


def test_the_owners_own_slot_gives_before_another_process_of_its_node(node: Node) -> None:
    node.seal(node.stores[1], 4, 0)
    node.seal(node.stores[0], 4, 0)
    found = node.told(("a", "a"))
    for copy in found.inventory().copies[0]:
        assert [one.finder for one in found.sources_for(copy, OWN[0])] == [0]


def test_every_kind_that_has_wanted_operators_gives_and_no_other(node: Node) -> None:
    node.seal(node.stores[0], 4, 0, kind="dense", operators=(ROUTER,))
    node.seal(node.stores[0], 4, 0, kind="expertsa", operators=(EXPERTS[0],))
    found = node.told()
    copy = found.inventory().copies[0][0]
    assert [one.snapshot.kind for one in found.sources_for(copy, OWN[0])] == ["dense", "expertsa"]
    assert [one.snapshot.kind for one in found.sources_for(copy, {ROUTER})] == ["dense"]


def test_ranks_that_the_job_does_not_have_are_no_part_of_the_inventory(node: Node) -> None:
    node.seal(node.stores[0], 4, 5, operators=(ROUTER,))
    found = node.told()
    assert [one.snapshot.rank for one in found.found] == [5]
    assert not found.inventory().copies


def test_a_manifest_that_lacks_what_a_recovery_needs_is_told_and_not_used(node: Node) -> None:
    writer = node.stores[0].reserve(SnapshotId(4, 0), LAYOUT)
    writer.put("w", bytes(10))
    writer.seal(Facts("job", "d", TOPOLOGY, {"operators": []}))
    (one,) = node.told().found
    assert "missing required field `timeline`" in one.why


def test_copies_of_a_future_that_was_given_up_are_left_out(node: Node) -> None:
    node.seal(node.stores[0], 2, 0, timeline=FIRST)
    node.seal(node.stores[0], 4, 0, timeline=FIRST)
    node.seal(node.stores[1], 4, 0, timeline=SECOND)
    left = node.told().within(SECOND).found
    assert [(one.snapshot.iteration, one.timeline) for one in left] == [(2, FIRST), (4, SECOND)]


JOURNALED: dict[str, Json] = {"trainer": {}, "journal": {"grad_norm": 1.0, "skipped": False, "lm_loss": None}}


def test_a_snapshot_says_which_iterations_restore_a_state_together(node: Node) -> None:
    node.seal(node.stores[0], 4, 0, more={"window": [3, 5]})
    node.seal(node.stores[1], 4, 1)
    assert [one.span for one in node.told().found] == [range(3, 6), range(4, 5)]


def test_an_iteration_is_journaled_when_every_rank_has_its_outcome(node: Node) -> None:
    for iteration in (4, 5, 6):
        node.seal(node.stores[0], iteration, 0, more=JOURNALED)
    node.seal(node.stores[1], 4, 1, more=JOURNALED)
    node.seal(node.stores[1], 5, 1)
    assert (node.digest().journaled | node.digest().kept) == {4}


def test_a_rank_without_operators_in_a_snapshot_has_its_outcome_all_the_same(node: Node) -> None:
    node.seal(node.stores[0], 4, 0, operators=(), more=JOURNALED)
    node.seal(node.stores[1], 4, 1, more=JOURNALED)
    assert (node.digest().journaled | node.digest().kept) == {4}
    assert [one.snapshot.rank for one in node.told().trainer_sources(0, 4)] == [0]


def test_what_proved_damaged_journals_nothing_unless_another_copy_does(node: Node) -> None:
    node.seal(node.stores[0], 4, 0, more=JOURNALED)
    node.seal(node.stores[1], 4, 1, more=JOURNALED)
    damaged = {one.place for one in node.told().found if one.finder == 0}
    assert not node.digest(damaged).journaled
    node.seal(node.stores[1], 4, 0, more=JOURNALED)
    assert node.digest(damaged).journaled == {4}


def test_a_state_without_its_trainer_is_no_witness_of_an_iteration(node: Node) -> None:
    node.seal(node.stores[0], 4, 0, more={"journal": JOURNALED["journal"]})
    assert not node.told().trainer_sources(0, 4)


def test_the_nearest_witness_comes_first(node: Node) -> None:
    node.seal(node.disks[0], 4, 0, more=JOURNALED)
    node.seal(node.stores[1], 4, 0, more=JOURNALED)
    node.seal(node.stores[0], 4, 0, more=JOURNALED)
    assert [(one.finder, one.tier) for one in node.told().trainer_sources(0, 4)] == [
        (0, Tier.OWN_MEMORY),
        (1, Tier.OWN_MEMORY),
        (0, Tier.PERSISTENT),
    ]


THIRD = (("one", 0), ("two", 2), ("three", 4))


def test_logs_are_seen_as_runs_without_gaps_of_both_directions_where_they_lie(node: Node) -> None:
    for iteration in (3, 4, 6):
        node.seal(node.stores[1], iteration, 0, kind=LOG, operators=())
    logs = node.told().inventory().logs
    assert [(one.iterations, one.holder) for one in logs[0] if one.direction is Direction.FORWARD] == [
        (range(3, 5), 1),
        (range(6, 7), 1),
    ]
    assert len(logs[0]) == 4


def test_a_log_tells_everybody_how_its_iteration_came_out_but_is_no_state_of_its_sender(node: Node) -> None:
    node.seal(node.stores[0], 4, 0, kind=LOG, operators=(), more=JOURNALED)
    found = node.told()
    assert node.digest().kept == node.digest().logged == {4}
    assert not found.trainer_sources(0, 4)
    assert not found.inventory().copies


def test_a_log_without_a_journal_is_a_log_all_the_same(node: Node) -> None:
    node.seal(node.stores[0], 4, 0, kind=LOG, operators=())
    seen = node.told().inventory()
    assert (node.digest().kept, len(seen.logs[0])) == (frozenset(), 2)


def test_a_log_that_proved_damaged_is_gone_from_the_next_plan(node: Node) -> None:
    for iteration in (3, 4, 5):
        node.seal(node.stores[0], iteration, 0, kind=LOG, operators=())
    found = node.told()
    damaged = {one.place for one in found.found if one.snapshot.iteration == 4}
    assert {one.iterations for one in found.inventory(damaged).logs[0]} == {range(3, 4), range(5, 6)}


def test_parked_state_is_a_tier_of_its_own_wherever_it_lies(node: Node) -> None:
    node.seal(node.stores[1], 4, 0, kind=PARKED)
    (copy,) = node.told().inventory().copies[0]
    assert (copy.tier, copy.holder, copy.sealed) == (Tier.PARKED, 1, True)
    assert [one.snapshot.kind for one in node.told().sources_for(copy, OWN[0])] == [PARKED]


def test_parked_state_that_was_interrupted_is_torn(node: Node) -> None:
    snapshot = node.seal(node.stores[0], 4, 0, kind=PARKED)
    segment = node.memories[0].sealed(snapshot)
    assert segment is not None
    segment.manifest = b""
    (copy,) = node.told().inventory().copies[0]
    assert (copy.tier, copy.sealed) == (Tier.PARKED, False)


def test_gradients_of_the_iteration_after_the_newest_parked_one_let_a_rank_roll_forward(node: Node) -> None:
    node.seal(node.stores[0], 4, 0, kind=PARKED)
    assert not node.told().inventory().can_roll_forward
    node.seal(node.stores[0], 5, 0, kind=GRADIENTS, operators=())
    assert node.told().inventory().can_roll_forward == {0}


def test_gradients_do_not_belong_to_an_older_parked_state(node: Node) -> None:
    node.seal(node.stores[0], 4, 0, kind=PARKED)
    node.seal(node.stores[0], 5, 0, kind=GRADIENTS, operators=())
    node.seal(node.stores[0], 6, 0, kind=PARKED)
    assert not node.told().inventory().can_roll_forward
    node.seal(node.stores[0], 7, 0, kind=GRADIENTS, operators=())
    seen = node.told().inventory()
    assert seen.can_roll_forward == {0}
    assert [copy.plan.iteration for copy in seen.copies[0]] == [6]


@pytest.mark.parametrize("kind", [LOG, PARKED, GRADIENTS])
def test_what_was_kept_in_a_future_that_was_given_up_is_never_used(kind: str, node: Node) -> None:
    node.seal(node.stores[0], 4, 0, kind=kind, timeline=FIRST, more=JOURNALED)
    node.seal(node.stores[1], 3, 1, timeline=SECOND)
    left = node.told().within(SECOND)
    assert [one.snapshot.iteration for one in left.found] == [3]


def test_state_parked_before_its_attempt_trained_anything_is_that_of_the_attempt_before(node: Node) -> None:
    node.seal(node.stores[0], 4, 0, kind=PARKED, timeline=THIRD)
    assert [one.snapshot.kind for one in node.told().within(SECOND).found] == [PARKED]
    assert [one.snapshot.kind for one in node.told().within(THIRD).found] == [PARKED]
    assert not node.told().within(FIRST).found


def test_without_what_stands_by_only_snapshots_are_left(node: Node) -> None:
    for kind in (LOG, PARKED, GRADIENTS, "window"):
        node.seal(node.stores[0], 4, 0, kind=kind)
    assert [one.snapshot.kind for one in node.told().without_standby().found] == ["window"]


def test_of_several_copies_of_a_log_the_readers_own_comes_first(node: Node) -> None:
    node.seal(node.stores[0], 4, 0, kind=LOG, operators=())
    node.seal(node.stores[1], 4, 0, kind=LOG, operators=())
    assert [one.finder for one in node.told().of_kind(LOG, 0, 4, reader=1)] == [1, 0]


def test_who_knows_most_tells_how_an_iteration_came_out(node: Node) -> None:
    node.seal(node.stores[0], 4, 0, kind=LOG, operators=(), more=JOURNALED)
    node.seal(node.stores[1], 4, 1, kind=LOG, operators=(), more=JOURNALED)
    for first, speaks in (((), 0), ((1,), 1)):
        place = node.digest(first=first).journal(4)
        assert place is not None and place[0] == speaks
    assert node.digest().journal(5) is None


def test_the_lowest_rank_that_remembers_speaks_for_the_strategy(node: Node) -> None:
    node.seal(node.stores[1], 4, 1, kind=PARKED, more={"strategy": {"a": 1}})
    snapshot = node.seal(node.stores[1], 4, 0, more={"strategy": {"a": 1}})
    node.seal(node.stores[0], 4, 0, kind=PARKED)
    place = 1, snapshot, Tier.OWN_MEMORY
    assert node.digest().strategy(4) == place
    assert node.digest({place}).strategy(4) == (1, SnapshotId(4, 1, PARKED), Tier.OWN_MEMORY)


def test_a_rank_has_logged_what_lies_in_its_own_store(node: Node) -> None:
    node.seal(node.stores[0], 4, 0, kind=LOG, operators=())
    node.seal(node.stores[1], 5, 0, kind=LOG, operators=())
    assert node.told().logged(0) == {4}
    assert not node.told().logged(1)


def test_a_manifest_with_fields_of_another_kind_is_told_and_not_used(node: Node) -> None:
    node.seal(node.stores[0], 4, 0, more={"window": "all of them"})
    (one,) = node.told().found
    assert "something else made it" in one.why
    assert not node.told().inventory().copies[0][0].sealed


def test_what_a_row_says_arrives_on_the_other_ranks(node: Node) -> None:
    node.seal(node.disks[1], 4, 1, digest="abc", more={**JOURNALED, "strategy": {"a": 1}, "window": [3, 4]})
    (row,) = node.rows()[1][1]
    (found,) = node.told().found
    kept = set(row.__struct_fields__) - {"digest", "job"}  # of use where the snapshot lies
    assert {name: getattr(found, name) for name in kept} == {name: getattr(row, name) for name in kept}
    assert (row.digest, found.span, found.has_journal, found.has_strategy) == ("abc", range(3, 5), True, True)


def strange(rows: list[list[JudgedRow]]) -> list[tuple[int, str]]:
    """What is not used because of its job, by iteration."""
    return sorted({(one.snapshot.iteration, one.why) for found in rows for one in found if one.why})


def test_what_another_job_stored_is_of_no_use_unless_it_is_asked_for(node: Node) -> None:
    for rank in range(2):
        node.seal(node.disks[rank], 60, rank, job="elder")
    judge, rows = node.rows(lambda job: False)
    assert strange(rows) == [(60, "it belongs to job elder")]
    assert not judge.timelines
    assert judge.newest_stranger == (60, "elder")
    judge, rows = node.rows(lambda job: job == "elder")
    assert not strange(rows) and judge.newest_stranger == (-1, "") and judge.timelines == [FIRST]


def test_what_a_job_has_come_from_is_its_own_from_then_on(node: Node) -> None:
    """As of experts that only the job before has stored."""
    for rank in range(2):
        node.seal(node.disks[rank], 2, rank, job="elder", timeline=FIRST)
        node.seal(node.disks[rank], 3, rank, job="elder", timeline=FIRST)
        node.seal(node.disks[rank], 4, rank, timeline=SECOND)
    _, rows = node.rows(lambda job: False)
    assert strange(rows) == [(3, "it belongs to job elder")], "the past ends where this job continued from"


@pytest.mark.parametrize(
    "strange",
    [
        {"operators": [[10**30, 1, -1, 6]]},
        {"operators": [[0, 9, -1, 6]]},
        {"operators": [[0, 1, -1, 16]]},
        {"timeline": [["one", 10**20]]},
        {"window": [0, 10**20]},
        {"window": [3, 2]},
    ],
    ids=lambda strange: " ".join(map(str, strange.items())),
)
def test_numbers_that_nobody_stores_cost_their_snapshot_and_are_told_to_nobody(strange: dict[str, Json]) -> None:
    node = Node()
    node.seal(node.disks[0], 3, 0, more=strange)
    usable = node.seal(node.disks[0], 2, 0)
    judge, rows = node.rows()
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(judge.overview), type=Overview) == judge.overview
    assert [row.why.partition(":")[0] for row in rows[0]] == ["", "its manifest does not fit"]
    assert [one.snapshot for one in node.told().found if not one.why] == [usable]


def test_a_folder_whose_name_has_too_large_a_number_is_none_of_a_snapshot() -> None:
    assert SnapshotId.parse(SnapshotId(10**18 - 1, 0).name) == SnapshotId(10**18 - 1, 0)
    assert SnapshotId.parse(SnapshotId(10**20, 0).name) is None
    assert SnapshotId.parse(SnapshotId(1, 10**20).name) is None
