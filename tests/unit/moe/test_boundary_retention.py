"""Whatever happens to boundary logs, what is said to be covered can be read, and memory stays within its bound."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from effort import examples
from hypothesis import example, given, settings
from hypothesis import strategies as st

from megatron.core.dist_checkpointing.moe.boot_clock import SystemClock
from megatron.core.dist_checkpointing.moe.local_recovery.boundary_copies import BoundaryRecorder
from megatron.core.dist_checkpointing.moe.local_recovery.boundary_logs import BoundaryLogs, LogPlan, LogPorts
from megatron.core.dist_checkpointing.moe.policy.lineage import Identity
from megatron.core.dist_checkpointing.moe.ports import Layout, SnapshotId, StoreFailure
from megatron.core.dist_checkpointing.moe.snapshot.copy_engines import ThreadEngine
from megatron.core.dist_checkpointing.moe.storage.memory import MemoryStore
from megatron.core.dist_checkpointing.moe.types import LOG, Direction, StepJournal, Topology

SHAPE = (4, 1, 4)
LOOKBACK = 4
WAIT_S = 60.0

WELL, UNDONE, LATE, BROKEN = "well", "undone", "late", "broken"
"""How the log of an iteration fares: as it should, a tensor is missing, it is sealed later, or the store refuses."""


class Lane:
    """Does at once what is submitted, or later."""

    def __init__(self) -> None:
        self.late = False
        self._waiting: list[tuple[Future[Any], Callable[[], Any]]] = []

    def submit(self, work: Callable[[], Any], /) -> Future[Any]:
        future: Future[Any] = Future()
        self._waiting.append((future, work))
        if not self.late:
            self.catch_up()
        return future

    def catch_up(self) -> None:
        while self._waiting:
            future, work = self._waiting.pop(0)
            try:
                future.set_result(work())
            except Exception as error:
                future.set_exception(error)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        self.catch_up()


class Refusing:
    """A store whose snapshots cannot be sealed while it is told so."""

    def __init__(self, store: MemoryStore) -> None:
        self._store, self.refuses = store, False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def reserve(self, snapshot: SnapshotId, layout: Layout) -> Any:
        writer = self._store.reserve(snapshot, layout)
        if self.refuses:

            def refused(*_: Any) -> None:
                raise StoreFailure("no space left")

            writer.seal = refused  # type: ignore[method-assign, assignment]
        return writer


@dataclass(frozen=True)
class Step:
    """One iteration: how its log fares, by how much the oldest base moves on, and whether the process starts again."""

    fares: str = WELL
    base_moves: int = 0
    restarts: bool = False
    rewinds: int = 0


@dataclass
class World:
    """A rank, its node's memory, and what its logs must hold."""

    folder: Path
    lane: Lane = field(default_factory=Lane)
    sent: dict[int, int] = field(default_factory=dict)
    draws: int = 0

    def __post_init__(self) -> None:
        self.plan = LogPlan(Topology(2, pp=2), 0, SHAPE, "float32", LOOKBACK)
        self.start()

    def start(self, newest: int = 1 << 30) -> None:
        """newest: the iteration that a recovery went back to; it has freed later logs."""
        self.store = MemoryStore(self.folder, "job", 0, self.plan.sizes(2), area="standby")
        for snapshot in self.store.snapshots().sealed:
            if snapshot.iteration > newest:
                self.store.free(snapshot)
        self.refusing, self.recorder = Refusing(self.store), BoundaryRecorder(ThreadEngine("boundary-copy"))
        ports = LogPorts(store=self.refusing, lane=self.lane, recorder=self.recorder, clock=SystemClock())
        self.logs = BoundaryLogs(self.plan, Identity("job", {}, frozenset()), ports, timeout_s=WAIT_S)

    def end(self) -> None:
        self.lane.catch_up()
        assert "sealed within" not in self.logs.drain(WAIT_S)
        self.recorder.close()
        self.store.close()

    def iterate(self, iteration: int, fares: str, base: int) -> None:
        self.refusing.refuses, self.lane.late = fares == BROKEN, fares == LATE
        if not self.lane.late:
            self.lane.catch_up()
        self.draws += 1
        self.sent[iteration] = self.draws
        self.logs.begins(iteration, 2)
        for microbatch in range(1 if fares == UNDONE else 2):
            self.recorder.sent(Direction.FORWARD, torch.full(SHAPE, float(self.draws * 2 + microbatch)))
        self.logs.passed()
        self.logs.on_commit(iteration, StepJournal(), {}, base)

    def check(self, newest: int, base: int, fared: str) -> None:
        """Held against what can be read once all is sealed; that sealing the newest failed is known one later."""
        claimed = self.logs.coverage
        self.lane.catch_up()
        readable = set()
        for snapshot in self.store.snapshots().sealed:
            with self.store.open(snapshot) as reader:
                sent = (one for one in reader.manifest.layout.fields if not one.key.startswith("received/"))
                found = [bytes(reader.read(one.key)) for one in sent]
            first = self.sent[snapshot.iteration] * 2
            assert found == [torch.full(SHAPE, float(first + one)).numpy().tobytes() for one in range(2)]
            assert snapshot.kind == LOG
            readable.add(snapshot.iteration)
        assert claimed.newest == newest
        known = range(newest + 1)[: -1 if fared == BROKEN else None]
        if not claimed.why:
            assert set(known[base + 1 :]) <= readable
        if claimed.since is not None:
            assert set(known[claimed.since :]) <= readable
        assert len(readable) <= self.plan.segments


@contextmanager
def world() -> Iterator[World]:
    shared = Path("/dev/shm")
    folder = Path(tempfile.mkdtemp(prefix="moe-ckpt-test-", dir=shared if shared.is_dir() else None))
    made = World(folder)
    try:
        yield made
    finally:
        made.end()
        shutil.rmtree(folder)


STEPS = st.lists(
    st.builds(
        Step,
        st.sampled_from([WELL, WELL, WELL, UNDONE, LATE, BROKEN]),
        st.sampled_from([0, 0, 1, 3]),
        st.sampled_from([False, False, False, True]),
        st.sampled_from([0, 0, 0, 0, 1, 3]),
    ),
    max_size=20,
)


@settings(max_examples=examples(60))
@given(STEPS)
@example([Step(LATE)] * 12)
@example([Step(), Step(BROKEN), Step(restarts=True), Step(base_moves=3), Step()])
def test_what_is_said_to_be_covered_can_be_read_and_no_more_is_kept_than_the_bound(steps: list[Step]) -> None:
    with world() as rank:
        iteration = base = 0
        for step in steps:
            if step.restarts:
                rank.end()
                # A recovery goes back at most as far as a replay can start.
                iteration = max(iteration - step.rewinds, base)
                rank.start(iteration)
            iteration += 1
            base = min(base + step.base_moves, iteration - 1)
            rank.iterate(iteration, step.fares, base)
            rank.check(iteration, base, step.fares)


@settings(max_examples=examples(40))
@given(STEPS)
def test_a_loss_is_made_good_as_soon_as_no_replay_needs_what_was_lost(steps: list[Step]) -> None:
    with world() as rank:
        for iteration, step in enumerate(steps, 1):
            rank.iterate(iteration, step.fares, 0)
        newest = len(steps)
        for iteration in range(newest + 1, newest + 3):
            rank.iterate(iteration, WELL, newest)
            assert rank.logs.coverage.why == ""
