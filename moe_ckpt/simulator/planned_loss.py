"""What a planned job goes back to when it loses ranks or nodes: the recovery that its own strategy plans."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

from megatron.core.dist_checkpointing.moe.errors import UsageError
from megatron.core.dist_checkpointing.moe.policy.placement import place_replicas
from megatron.core.dist_checkpointing.moe.strategies import Piece
from megatron.core.dist_checkpointing.moe.types import (
    BoundaryLog,
    Copy,
    Direction,
    Inventory,
    Lost,
    RecoveryPlan,
    SnapshotPlan,
    Tier,
    full_plan,
)

from .driver import COPIED_AFTER, Driver, SettledSnapshot, newest_usable
from .planning import LAST, PlannedJob


def recovery_of(planned: PlannedJob, lost: Lost, iteration: int | None) -> tuple[RecoveryPlan, int]:
    """The recovery that the strategy plans after a loss, and the iteration after which the job failed.

    The newest snapshot may still be under way (`newest_usable`). Lost ranks lose their process, lost nodes their memory
    as well; where boundary logs are kept, all others have parked their state.

    Raises UsageError where nothing was snapshotted by then, UnreadableCheckpoint where no state is left.

    Args:
        planned: The job with its strategy.
        lost: Ranks and nodes that failed.
        iteration: The last iteration before the failure; None: the worst one.
    """
    history = _history(planned, iteration)
    strategy = Driver(planned.job).strategy
    plan = strategy.recover(_inventory(planned, history, lost.ranks), lost, planned.job.topology)
    if plan.target in history.data:
        plan = strategy.resumed(plan, history.data[plan.target], history.target)
    return plan, history.target


@dataclass
class _History:
    """What a job has in memory when it fails: of each kind of piece the newest ones that together restore a state.

    target: the last iteration that ended. data: what the strategy had to remember, by iteration of a snapshot.
    """

    target: int = 0
    kept: dict[str, list[Piece]] = field(default_factory=dict)
    data: dict[int, Mapping[str, Any]] = field(default_factory=dict)
    under_way: dict[str, list[Piece]] = field(default_factory=dict)

    def take(self, snapshot: SettledSnapshot) -> None:
        """One more snapshot, which all ranks have sealed and replicated."""
        for piece in snapshot.pieces:
            pieces = [other for other in self.under_way.get(piece.kind, ()) if other.span == piece.span]
            self.under_way[piece.kind] = [*pieces, piece]
            if len(pieces) + 1 == len(piece.span):
                self.kept[piece.kind] = self.under_way.pop(piece.kind)
        self.data[snapshot.plan.iteration] = snapshot.stored.to_data()
        oldest = min((piece.plan.iteration for pieces in self.kept.values() for piece in pieces), default=0)
        self.data = {iteration: data for iteration, data in self.data.items() if iteration >= oldest}

    @property
    def pieces(self) -> list[Piece]:
        """All that is kept, oldest first."""
        return sorted(chain.from_iterable(self.kept.values()), key=lambda piece: piece.plan.iteration)


def _history(planned: PlannedJob, iteration: int | None) -> _History:
    """What there is after `iteration`; None takes the worst one: the last before another state is complete, once the
    strategy has settled. Only then are the experts of `pec` as old as they get."""
    history = _History()
    for snapshot in planned.start().snapshots(LAST if iteration is None else newest_usable(iteration)):
        completes = snapshot.plan.iteration == snapshot.pieces[0].span[-1]
        if iteration is None and completes and snapshot.plan.iteration > planned.turn[-1].plan.iteration:
            return replace(history, target=snapshot.plan.iteration - 1 + COPIED_AFTER)
        history.take(snapshot)
    if not history.kept:
        first = next(planned.start().snapshots(LAST)).pieces[0].span[-1] + COPIED_AFTER
        raise UsageError(f"--iteration is {iteration}, but the first snapshot is complete after iteration {first}")
    return replace(history, target=iteration or 0)


def _inventory(planned: PlannedJob, history: _History, lost: frozenset[int]) -> Inventory:
    """What would be found: every rank's own copies and replicas, the state of those that parked, and the logs."""
    topology, target, pieces = planned.job.topology, history.target, history.pieces
    placed = place_replicas(topology, planned.replicas)
    lanes = {}
    for lane, operators in planned.lanes.items():
        shares = [
            (
                SnapshotPlan(piece.plan.iteration, {one: part for one, part in parts if one in operators}),
                piece.replicated,
            )
            for piece in pieces
            for parts in [piece.plan.parts.items()]
        ]
        lanes[lane] = frozenset(operators), [one for one in shares if one[0].parts], full_plan(target, operators)
    span = range(pieces[0].plan.iteration + 1, target + 1) if planned.logs else range(0)
    required, copies, logs = {}, {}, {}
    for rank, peers in enumerate(placed.peers):
        at = topology.coordinates(rank)
        required[rank], shares, parked = lanes[at.pp, at.ep]
        own_node = [(Tier.OWN_MEMORY, at.node)]
        everywhere = dict.fromkeys([*own_node, *((Tier.PEER_MEMORY, placed.nodes[peer]) for peer in peers)])
        found = [
            Copy(rank, plan, tier, holder)
            for plan, replicated in shares
            for tier, holder in (everywhere if replicated else own_node)
        ]
        if rank not in lost:
            found.append(Copy(rank, parked, Tier.PARKED, at.node))
        copies[rank] = tuple(found)
        logs[rank] = tuple(BoundaryLog(rank, direction, span, at.node) for direction in Direction)
    return Inventory(required, copies, logs, frozenset(range(target + 1)))
