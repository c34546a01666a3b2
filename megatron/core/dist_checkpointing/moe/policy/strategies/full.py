"""`full`: everything at an interval, the way of Gemini and CheckFreq; exact, and all ranks go back together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ...types import Inventory, Lost, RecoveryPlan, SnapshotPlan, Topology, full_plan
from ..copies import Level
from ..recovery import plan_recovery
from .rhythm import Rhythm
from .strategy import Costs, Job, Pace, Piece, Room


class Full:
    """Snapshots the FULL state of all operators every `interval` iterations."""

    counts_tokens = False
    counts_gates = False
    needs_pace = False
    replays = False
    lookback = 0
    plt = None

    def __init__(self, job: Job) -> None:
        self._job = job
        self._rhythm = Rhythm.of(job.config)
        self._rooms = (Room(full_plan(0, job.operators), own=3, replica=2, trainer=True),)

    def due(self, iteration: int) -> bool:
        """As `Strategy.due`."""
        return self._rhythm.due(iteration)[0]

    def plan(self, iteration: int) -> SnapshotPlan | None:
        """As `Strategy.plan`."""
        due, self._rhythm = self._rhythm.due(iteration)
        return full_plan(iteration, self._job.operators) if due else None

    def pieces(self, plan: SnapshotPlan) -> tuple[Piece, ...]:
        """As `Strategy.pieces`: all in one."""
        return (Piece("snapshot", plan),)

    def persistent(self, plan: SnapshotPlan) -> tuple[SnapshotPlan, ...]:
        """As `Strategy.persistent`."""
        due, self._rhythm = self._rhythm.persist_due(plan.iteration)
        return (plan,) if due else ()

    def rooms(self) -> tuple[Room, ...]:
        """As `Strategy.rooms`: the triple buffers of MoC 5.2, and a protected and an arriving replica."""
        return self._rooms

    def no_room(self) -> None:
        """As `Strategy.no_room`: its rooms never change."""

    def counted(self, iteration: int, counts: Sequence[Sequence[int]]) -> None:
        """As `Strategy.counted`."""

    def settled(self, plan: SnapshotPlan, level: Level, ok: bool) -> None:
        """As `Strategy.settled`."""

    def measured(self, costs: Costs) -> None:
        """As `Strategy.measured`."""
        self._rhythm = self._rhythm.measured(costs)

    def paced(self, pace: Pace) -> None:
        """As `Strategy.paced`."""

    def to_data(self) -> dict[str, Any]:
        """As `Strategy.to_data`."""
        return {"rhythm": self._rhythm.to_data()}

    def recover(self, inventory: Inventory, lost: Lost, topology: Topology) -> RecoveryPlan:
        """As `Strategy.recover`."""
        return plan_recovery(inventory, lost, topology, tied_embeddings=self._job.tied_embeddings)

    def resumed(self, plan: RecoveryPlan, data: Mapping[str, Any], fault_iteration: int) -> RecoveryPlan:
        """As `Strategy.resumed`."""
        self._rhythm = self._rhythm.from_data(data["rhythm"])
        return plan
