"""Which state is the newest follows from what led to what, however the clocks of the nodes step."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from simulated import OPERATORS
from simulated_world.memory import Memory
from simulated_world.storage import FakeStore

from megatron.core.dist_checkpointing.moe.config import MoECheckpointConfig
from megatron.core.dist_checkpointing.moe.policy.lineage import Identity, Lineage, attempt_name, continued
from megatron.core.dist_checkpointing.moe.ports import Field, Layout, SnapshotId
from megatron.core.dist_checkpointing.moe.recovery.recovery import Recovery
from megatron.core.dist_checkpointing.moe.recovery.restoring import RecoveryPorts
from megatron.core.dist_checkpointing.moe.strategies import STRATEGIES, Job, Piece
from megatron.core.dist_checkpointing.moe.types import Part, SnapshotPlan, Topology
from moe_ckpt.checkpoints.location import GcLimits
from moe_ckpt.checkpoints.persist_dir import PersistDir
from moe_ckpt.checkpoints.storage_gc import storage_gc_plan
from moe_ckpt.dense.integrity import unwatched

LAYOUT = Layout.of([Field("w", "uint8", (8,))])
IDENTITY = Identity("job", {"world_size": 1}, frozenset(OPERATORS), "full")
DAY_NS = 86_400_000_000_000
STRIPES, PER_STRIPE = 10, 100


class Storage(PersistDir):
    """Of a job, in memory; `moe-ckpt gc` tidies it."""

    def last_written_s(self) -> float | None:
        return 0.0

    def disk_bytes(self, path: str) -> int:
        return 0

    def is_link(self, name: str) -> bool:
        return False

    def half_deleted(self) -> list[Any]:
        return []

    def length_bytes(self) -> int:
        return 0

    def copied_to(self, folder: Path, snapshots: Sequence[SnapshotId]) -> str:
        raise NotImplementedError


@dataclass
class History:
    """Starts of one job that keep what they train in a storage, and what is true of it.

    earlier: How many of the first starts are of a version that named attempts by the clock of rank 0.
    stored: The whole states, in the order in which they came to be; the last one is the newest.
    """

    draw: random.Random
    earlier: int
    store: FakeStore = field(default_factory=lambda: FakeStore(Memory(), 0))
    stored: list[tuple[int, Lineage]] = field(default_factory=list)
    starts: int = 0

    def start(self, *, again: bool = False) -> None:
        """Recover the newest state, train on, and end somewhere; or begin again from a checkpoint, as `--load` asks."""
        recovery = self._recovery()
        plan = recovery.look()
        newest = self.stored[-1] if self.stored else None
        assert (plan.target if plan else None) == (newest[0] if newest else None), self.stored
        at = plan.target if plan and not again else 0
        timeline = continued(() if again else recovery.timeline, self._name(recovery), at)
        for iteration in range(at + 1, at + 1 + self.draw.randrange(5)):
            self._store(iteration, timeline, seals=True)
        if self.draw.random() < 0.3:
            self._store(at + 6, timeline, seals=False)
        self.starts += 1

    def lose_newest(self) -> None:
        """The newest state proves damaged and is removed: training goes back."""
        if self.stored:
            iteration, _ = self.stored.pop()
            self.store.free(SnapshotId(iteration, 0, "snapshot"))

    def tidy(self) -> None:
        """`moe-ckpt gc --apply`, which frees anything but the newest state."""
        plan = storage_gc_plan(
            Storage("storage", cast("Any", self.store)), GcLimits(1, 0.0, frozenset(), 1e9), unwatched
        )
        for item in plan.freed:
            assert item.remove is not None
            item.remove()
        there = {snapshot.iteration for snapshot in self.store.snapshots().sealed}
        if self.stored:
            assert self.stored[-1][0] in there, f"the newest of {self.stored} was freed"
        self.stored = [(iteration, timeline) for iteration, timeline in self.stored if iteration in there]

    def _name(self, recovery: Recovery) -> str:
        if self.starts < self.earlier:
            return f"{20_000 * DAY_NS + self.draw.randrange(-9, 9) * DAY_NS + self.starts:020d}-old"
        return attempt_name(recovery.next_attempt, f"{self.draw.getrandbits(32):08x}")

    def _store(self, iteration: int, timeline: Lineage, *, seals: bool) -> None:
        snapshot = SnapshotId(iteration, 0, "snapshot")
        self.store.free(snapshot)  # of an attempt that went back, as a persister does
        self.stored = [state for state in self.stored if state[0] != iteration]
        plan = SnapshotPlan(iteration, dict.fromkeys(OPERATORS, Part.MASTER_AND_MOMENTS))
        identity = Identity(IDENTITY.job, IDENTITY.topology, IDENTITY.operators, "full", timeline)
        scalars: dict[str, Any] = {"journal": {}, "trainer": {"iteration": iteration}, "strategy": {}}
        with self.store.reserve(snapshot, LAYOUT) as writer:
            writer.put("w", bytes(8))
            if seals:
                writer.seal(identity.facts(Piece("snapshot", plan), scalars))
                self.stored.append((iteration, timeline))

    def _recovery(self) -> Recovery:
        config = MoECheckpointConfig(strategy="full")
        job = Job(config, OPERATORS, Topology(1), 64, 100, topk=2)
        memory = FakeStore(Memory(), 0, (4096,))
        alone = SimpleNamespace(
            rank=0, merge=lambda value, combine: value, exchange=lambda outgoing: sorted(outgoing.items())
        )
        nothing = cast("Any", None)
        ports = RecoveryPorts(
            memory=cast("Any", memory),
            persistent=self.store,
            transport=cast("Any", alone),
            restorer=nothing,
            trainer=nothing,
            clock=nothing,
        )
        return Recovery(job, STRATEGIES["full"](job), ports, IDENTITY, (0,))


@pytest.mark.parametrize("stripe", range(STRIPES))
def test_no_history_of_starts_restores_an_older_state_or_frees_the_newest(stripe: int) -> None:
    for seed in range(stripe * PER_STRIPE, (stripe + 1) * PER_STRIPE):
        draw = random.Random(seed)
        history = History(draw, earlier=draw.choice([0, 0, 1, 3]))
        try:
            for _ in range(draw.randrange(3, 8)):
                history.start(again=history.starts >= history.earlier and draw.random() < 0.2)
                if draw.random() < 0.3:
                    history.lose_newest()
                if draw.random() < 0.4:
                    history.tidy()
        except BaseException as error:
            error.add_note(f"seed {seed}")
            raise
