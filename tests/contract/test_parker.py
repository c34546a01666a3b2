"""Parking on real memory with live tensors: what is sealed, what is put back, and what is told when it cannot be."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.core.dist_checkpointing.moe.boot_clock import SystemClock
from megatron.core.dist_checkpointing.moe.errors import UnreadableCheckpoint
from megatron.core.dist_checkpointing.moe.local_recovery.park import Parked, Parker, ParkPorts
from megatron.core.dist_checkpointing.moe.local_recovery.step_guard import LiveBuffers
from megatron.core.dist_checkpointing.moe.megatron_state.operators import GlobalName, Shard, StateTensor
from megatron.core.dist_checkpointing.moe.policy.lineage import Identity
from megatron.core.dist_checkpointing.moe.policy.parking import Decision
from megatron.core.dist_checkpointing.moe.ports import RANDOM, Field, Json, Layout, SnapshotId, StoreFailure
from megatron.core.dist_checkpointing.moe.snapshot.capturer import LiveCapturer
from megatron.core.dist_checkpointing.moe.snapshot.copy_engines import ThreadEngine
from megatron.core.dist_checkpointing.moe.storage.memory import MemoryStore
from megatron.core.dist_checkpointing.moe.types import (
    GRADIENTS,
    LOG,
    PARKED,
    OperatorId,
    OperatorKind,
    Part,
    expert,
)

ROUTER, EXPERT = OperatorId(0, OperatorKind.ROUTER), expert(0, 1)
RANK, WAIT_S = 3, 60.0
BEFORE, WITH_GRADIENTS, AFTER = Decision(4, False, ""), Decision(4, True, ""), Decision(5, False, "")


def piece(operator: OperatorId, name: str, tensor: torch.Tensor) -> StateTensor:
    shard = Shard(GlobalName(operator, f"{operator}.weight"), 0, tensor.numel(), tensor.numel())
    part = Part.MASTER if name in ("master", "buffer") else Part.MOMENTS
    return StateTensor(shard, name, part, tensor, (RANK,), in_forward=name == "buffer")


@dataclass
class Trainer:
    """A trainer's state of two numbers and a few random bytes."""

    values: dict[str, Json] = field(default_factory=lambda: {"iteration": 4, "scale": 2.0})
    random: bytes = b"before the passes"

    def scalars(self) -> dict[str, Json]:
        return dict(self.values)

    def tensors(self) -> Mapping[str, memoryview]:
        return {"torch": memoryview(self.random)}

    def restore(self, scalars: Mapping[str, Json], tensors: Mapping[str, memoryview]) -> None:
        self.values, self.random = dict(scalars), bytes(tensors["torch"])

    def misfit(self, scalars: Mapping[str, Json]) -> str:
        """There are no flags."""
        return ""

    def difference(self, tensors: Mapping[str, memoryview]) -> str:
        """Nothing is made again but state of operators."""
        return ""

    def restore_common(self, scalars: Mapping[str, Json]) -> None:
        self.values = dict(scalars)


class Gradients:
    """The gradients of two weights."""

    def __init__(self) -> None:
        self.values = {"one/gradient": torch.arange(5.0), "two/gradient": torch.arange(9.0)}
        self.refuses = ""

    def fields(self) -> Sequence[Field]:
        return [Field(key, "float32", (value.numel(),)) for key, value in self.values.items()]

    def copy(self, buffer: Callable[[str], memoryview]) -> None:
        if self.refuses:
            raise StoreFailure(self.refuses)
        for key, value in self.values.items():
            torch.frombuffer(buffer(key), dtype=torch.float32).copy_(value)


class Rank:
    """A rank whose state after iteration 4 is whole, in front of the passes of iteration 5."""

    def __init__(
        self, folder: Path, spare: Sequence[int] = (), attempts: Sequence[tuple[str, int]] = (("a", 0),)
    ) -> None:
        self.folder, self.attempts = folder, tuple(attempts)
        self.counts, self.master, self.moment = torch.arange(8.0), torch.randn(50), torch.randn(50)
        self.tensors = [
            piece(ROUTER, "buffer", self.counts),
            piece(EXPERT, "master", self.master),
            piece(EXPERT, "exp_avg", self.moment),
        ]
        self.trainer, self.gradients = Trainer(), Gradients()
        self.store = MemoryStore(folder, "job", RANK, [1], area="standby")
        self.capturer = LiveCapturer(self.tensors, self.trainer, ThreadEngine())
        self.parker = self.begun()
        self.store.resize([*self.parker.sizes(), *spare])
        self.parker.note(4)

    def begun(self, store: Any = None, capturer: Any = None) -> Parker:
        """A parker of this rank, as a new process has one."""
        identity = Identity("job", {"pp": 2}, self.capturer.operators, timeline=self.attempts)
        ports = ParkPorts(
            store=store or self.store,
            capturer=capturer or self.capturer,
            trainer=self.trainer,
            clock=SystemClock(),
            rank=RANK,
            facts=identity.facts,
            moving=LiveBuffers(self.tensors),
            gradients=self.gradients,
        )
        return Parker(ports)

    def pass_through(self) -> None:
        """Forward and backward passes of iteration 5."""
        self.counts += 100
        self.trainer.random = b"after the passes!"

    def update(self) -> None:
        """The optimizer's step, and what belongs to it."""
        self.master += 1
        self.moment *= 2
        self.trainer.values = {"iteration": 5, "scale": 4.0}

    def park(self, decision: Decision) -> Parked:
        return self.parker.park(decision, {"journal": {"grad_norm": 0.5}}, WAIT_S)

    def read(self, iteration: int, kind: str = PARKED) -> dict[str, bytes]:
        with self.store.open(SnapshotId(iteration, RANK, kind)) as reader:
            return {record.key: bytes(reader.read(record.key)) for record in reader.manifest.records}

    def live(self) -> dict[str, bytes]:
        """What a snapshot of the state as it is has to hold."""
        found = {one.key: one.tensor.numpy().tobytes() for one in self.tensors}
        return found | {f"{RANDOM}torch": self.trainer.random}

    def sealed(self) -> list[SnapshotId]:
        return list(self.store.snapshots().sealed)


@pytest.fixture
def rank(tmp_path: Path) -> Iterator[Rank]:
    made = Rank(tmp_path)
    yield made
    made.store.close()


def test_a_state_that_passes_have_moved_is_parked_as_it_was_before_them(rank: Rank) -> None:
    before, scalars = rank.live(), rank.trainer.scalars()
    rank.pass_through()
    parked = rank.park(BEFORE)
    assert (parked.iteration, parked.gradients, parked.why) == (4, False, "")
    assert parked.nbytes == rank.parker.sizes()[0]
    assert rank.read(4) == before
    with rank.store.open(SnapshotId(4, RANK, PARKED)) as reader:
        told = reader.manifest.facts.scalars
    assert told["trainer"] == scalars
    assert told["journal"] == {"grad_norm": 0.5}
    assert told["timeline"] == [["a", 0]]


def test_what_was_noted_is_put_back_into_the_live_state(rank: Rank) -> None:
    before = rank.live()
    rank.pass_through()
    rank.park(BEFORE)
    assert rank.live() == before


def test_a_state_after_the_update_is_parked_as_it_is(rank: Rank) -> None:
    rank.pass_through()
    rank.update()
    after = rank.live()
    assert rank.park(AFTER).iteration == 5
    assert rank.read(5) == after
    with rank.store.open(SnapshotId(5, RANK, PARKED)) as reader:
        assert reader.manifest.facts.scalars["trainer"] == {"iteration": 5, "scale": 4.0}


def test_gradients_are_kept_with_what_the_passes_left_beside_them(rank: Rank) -> None:
    before = rank.live()
    rank.pass_through()
    moved = rank.live()
    assert rank.park(WITH_GRADIENTS).gradients
    assert rank.read(4) == before
    counts = rank.tensors[0].key
    gradients = {key: value.numpy().tobytes() for key, value in rank.gradients.values.items()}
    random = f"{RANDOM}torch"
    assert rank.read(5, GRADIENTS) == gradients | {counts: moved[counts], random: moved[random]}


def test_nothing_is_parked_where_nothing_is_to_be(rank: Rank) -> None:
    parked = rank.park(Decision(None, False, "Some master weights are newer."))
    assert (parked.iteration, parked.why) == (None, "Some master weights are newer.")
    assert rank.sealed() == []


def test_what_is_parked_already_is_not_copied_again(rank: Rank) -> None:
    rank.park(BEFORE)
    again = rank.park(BEFORE)
    assert (again.iteration, again.nbytes, again.why) == (4, 0, "")


def test_a_state_that_was_parked_in_a_past_that_is_left_behind_is_replaced(rank: Rank) -> None:
    rank.park(BEFORE)
    rank.attempts = (("a", 0), ("b", 2))
    rank.parker = rank.begun()
    rank.parker.note(4)
    rank.master += 7
    live = rank.live()
    again = rank.park(BEFORE)
    assert again.nbytes > 0
    assert rank.read(4) == live


def test_a_state_that_a_later_attempt_only_waited_with_is_known_again(rank: Rank) -> None:
    rank.park(BEFORE)
    for attempt in ("b", "c"):
        rank.attempts += ((attempt, 4),)
        rank.parker = rank.begun()
        rank.parker.note(4)
        assert rank.park(BEFORE).nbytes == 0
    rank.parker.keep_only(None)
    rank.parker.note(4)
    assert rank.park(BEFORE).nbytes > 0
    with rank.store.open(SnapshotId(4, RANK, PARKED)) as reader:
        assert reader.manifest.facts.scalars["timeline"] == [["a", 0]]


def test_without_room_for_both_the_older_state_gives_way(rank: Rank) -> None:
    rank.park(WITH_GRADIENTS)
    rank.parker.note(5)
    live = rank.live()
    parked = rank.park(Decision(5, True, ""))
    assert (parked.iteration, parked.gradients, parked.why) == (5, True, "")
    assert rank.read(5) == live
    assert rank.sealed() == [SnapshotId(5, RANK, PARKED), SnapshotId(6, RANK, GRADIENTS)]


def test_with_room_for_both_the_older_state_stays(tmp_path: Path) -> None:
    rank = Rank(tmp_path, spare=[10_000])
    rank.park(BEFORE)
    rank.parker.note(5)
    rank.park(Decision(5, False, ""))
    assert rank.sealed() == [SnapshotId(4, RANK, PARKED), SnapshotId(5, RANK, PARKED)]


def test_segments_that_others_hold_are_told_as_missing_room(rank: Rank) -> None:
    for iteration in (8, 9):
        rank.store.reserve(SnapshotId(iteration, RANK, LOG), Layout.of([Field("one", "uint8", (1,))]))
    parked = rank.park(BEFORE)
    assert parked.iteration is None
    assert f"rank {RANK}: the state was not parked" in parked.why
    assert "free" in parked.why
    assert rank.sealed() == []


def test_a_failure_to_keep_gradients_leaves_the_parked_state(rank: Rank) -> None:
    rank.gradients.refuses = "the device is gone"
    parked = rank.park(WITH_GRADIENTS)
    assert (parked.iteration, parked.gradients) == (4, False)
    assert parked.why == f"rank {RANK}: its gradients were not parked: the device is gone"
    assert rank.sealed() == [SnapshotId(4, RANK, PARKED)]


def test_where_gradients_may_not_be_final_only_the_state_is_parked(rank: Rank) -> None:
    rank.gradients = None  # type: ignore[assignment]
    rank.parker = rank.begun()
    rank.parker.note(4)
    parked = rank.park(WITH_GRADIENTS)
    assert (parked.iteration, parked.gradients, parked.why) == (4, False, "")
    assert len(rank.parker.sizes()) == 1


def test_a_state_of_which_nothing_was_noted_is_not_parked(rank: Rank) -> None:
    parked = rank.park(Decision(9, False, ""))
    assert parked.iteration is None
    assert "what was noted last is iteration 4" in parked.why
    rank.parker = rank.begun()
    assert "what was noted last is nothing" in rank.park(BEFORE).why


class SlowCapturer:
    """Copies that do not end in time."""

    states = None

    def __init__(self, inner: LiveCapturer) -> None:
        self.inner, self.begun = inner, False
        self.operators, self.layout = inner.operators, inner.layout

    def begin(self, copies: Any, pace: Any = None) -> None:
        self.begun = True

    def end(self, timeout_s: float) -> None:
        if self.begun:
            raise TimeoutError(f"the copy did not end within {timeout_s:.0f} s")


def test_a_copy_that_does_not_end_in_time_is_told_and_leaves_nothing(rank: Rank) -> None:
    rank.parker = rank.begun(capturer=SlowCapturer(rank.capturer))
    rank.parker.note(4)
    parked = rank.park(BEFORE)
    assert parked.iteration is None
    assert "the copy did not end within" in parked.why
    assert rank.sealed() == []


class FailedCapturer:
    """An earlier copy has failed, which is told once when its end is waited for."""

    states = None

    def __init__(self, inner: LiveCapturer) -> None:
        self.inner, self.told = inner, False
        self.operators, self.layout, self.begin = inner.operators, inner.layout, inner.begin

    def end(self, timeout_s: float) -> None:
        if not self.told:
            self.told = True
            raise StoreFailure("the memory of an earlier snapshot is gone")
        self.inner.end(timeout_s)


def test_the_failure_of_an_earlier_copy_does_not_keep_the_state_from_being_parked(rank: Rank) -> None:
    rank.parker = rank.begun(capturer=FailedCapturer(rank.capturer))
    rank.parker.note(4)
    live = rank.live()
    assert rank.park(BEFORE).why == ""
    assert rank.read(4) == live


class Killed(BaseException):
    """Ends a process at this point, as far as its memory can tell."""


class DyingCapturer(SlowCapturer):
    """The process is killed while it copies."""

    def end(self, timeout_s: float) -> None:
        if self.begun:
            raise Killed


@pytest.mark.parametrize("capturer", [DyingCapturer])
def test_a_park_that_was_interrupted_by_a_kill_is_torn_and_never_read(
    rank: Rank, capturer: type[DyingCapturer], monkeypatch: pytest.MonkeyPatch
) -> None:
    rank.parker = rank.begun(capturer=capturer(rank.capturer))
    rank.parker.note(4)
    # A killed process abandons nothing.
    monkeypatch.setattr("megatron.core.dist_checkpointing.moe.storage.base.SnapshotWriter.abandon", lambda self: None)
    with pytest.raises(Killed):
        rank.park(BEFORE)
    rank.store.close()
    later = MemoryStore(rank.folder, "job", RANK, rank.parker.sizes(), area="standby")
    listing = later.snapshots()
    assert listing.sealed == ()
    assert [torn.snapshot for torn in listing.torn] == [SnapshotId(4, RANK, PARKED)]
    with pytest.raises(UnreadableCheckpoint):
        later.open(SnapshotId(4, RANK, PARKED))
    later.close()


def test_only_what_belongs_to_an_iteration_is_kept_when_that_is_asked(tmp_path: Path) -> None:
    rank = Rank(tmp_path, spare=[10_000] * 2)
    rank.park(WITH_GRADIENTS)
    rank.parker.note(5)
    rank.park(Decision(5, True, ""))
    rank.parker.keep_only(5)
    assert rank.sealed() == [SnapshotId(5, RANK, PARKED), SnapshotId(6, RANK, GRADIENTS)]
    rank.parker.keep_only(None)
    assert rank.sealed() == []
