"""A job without machines that runs any strategy: memory, storage, delays, failures and faults, and what they cost."""

from __future__ import annotations

import json
import random
from collections import Counter
from dataclasses import dataclass, field, replace

from megatron.core.dist_checkpointing.moe.config import MoECheckpointConfig
from megatron.core.dist_checkpointing.moe.errors import RecoveryImpossible
from megatron.core.dist_checkpointing.moe.policy.lifecycle import WindowState
from megatron.core.dist_checkpointing.moe.policy.tracking import TrackedPiece, TrackedWindow, covered_pieces
from megatron.core.dist_checkpointing.moe.strategies import STRATEGIES, Job, Strategy
from megatron.core.dist_checkpointing.moe.types import (
    Copy,
    Inventory,
    Level,
    Lost,
    OperatorId,
    OperatorKind,
    RecoveryPlan,
    SnapshotPlan,
    Tier,
    Topology,
    expert,
)

TOKENS = 30


def job_of(
    config: MoECheckpointConfig,
    topology: Topology | None = None,
    *,
    layers: int = 4,
    experts: int = 8,
    iterations: int = 100,
    topk: int = 2,
) -> Job:
    """A model whose first layer is dense, unless it is the only one."""
    operators = [OperatorId(-1, OperatorKind.EMBEDDING), OperatorId(layers, OperatorKind.HEAD)]
    for layer in range(layers):
        operators.append(OperatorId(layer, OperatorKind.NON_EXPERT))
        if (layer or layers == 1) and experts:
            operators.append(OperatorId(layer, OperatorKind.ROUTER))
            operators += [expert(layer, index) for index in range(experts)]
    topology = topology or Topology(4, ep=4, ranks_per_node=2)
    return Job(config, tuple(sorted(operators)), topology, TOKENS, iterations, topk)


def owned(job: Job) -> dict[int, frozenset[OperatorId]]:
    """Operators of each rank."""
    topology, layers = job.topology, max(operator.layer for operator in job.operators)
    stages = [set(some) for some in topology.layers_of_stages(layers)]
    stages[0].add(-1)
    stages[-1].add(layers)
    each = job.num_experts // topology.ep
    found = {}
    for rank in range(topology.world_size):
        place = topology.coordinates(rank)
        found[rank] = frozenset(
            operator
            for operator in job.operators
            if operator.layer in stages[place.pp] and (not operator.is_expert or operator.expert // each == place.ep)
        )
    return found


@dataclass
class Flight:
    plan: SnapshotPlan
    level: Level


@dataclass
class World:
    """Runs two instances of a strategy side by side on all ranks; `check` is told each recovery."""

    job: Job
    seed: int
    failing: float = 0.2
    partial: bool = False  # whether a fault can leave parts of snapshots that were not agreed on
    sends: bool = False  # whether a lost node's snapshots are found at peers, as far as these acknowledged them
    overstates: bool = (
        False  # whether more tokens may be said to be lost than are: of an old copy that peers alone have
    )
    iteration: int = 0
    flights: list[Flight] = field(default_factory=list)
    memory: dict[int, list[TrackedWindow]] = field(default_factory=dict)
    replicas: dict[int, list[TrackedWindow]] = field(default_factory=dict)
    stored: list[SnapshotPlan] = field(default_factory=list)
    data: dict[int, str] = field(default_factory=dict)
    live: dict[OperatorId, dict[int, int]] = field(default_factory=dict)
    held: dict[int, dict[OperatorId, dict[int, int]]] = field(default_factory=dict)
    losses: list[tuple[int, Counter[int]]] = field(default_factory=list)
    plans: list[SnapshotPlan] = field(default_factory=list)
    steps: int = 0
    writes: list[SnapshotPlan] = field(default_factory=list)
    recoveries: list[RecoveryPlan] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self.owned = owned(self.job)
        self.begin()
        kinds = {room_kind(room.largest): room for room in self.strategy.buffer_specs()}
        self.rooms = kinds

    def begin(self) -> None:
        """From scratch: nothing is known, nothing is kept."""
        self.strategy, self.twin = (self.new() for _ in range(2))
        self.iteration, self.flights, self.stored, self.losses = 0, [], [], []
        self.memory = {rank: [] for rank in self.owned}
        self.replicas = {rank: [] for rank in self.owned}
        self.live = {operator: {} for operator in self.job.operators if operator.is_expert}

    def new(self) -> Strategy:
        return STRATEGIES[self.job.config.strategy](self.job)

    def step(self) -> None:
        """One iteration: train, plan, count, settle."""
        self.iteration += 1
        self.steps += 1
        now = self.iteration
        counts = self.train()
        plan = self.strategy.plan(now) if self.has_room() else None
        assert plan == (self.twin.plan(now) if self.has_room() else None)
        if plan is not None:
            self.plans.append(plan)
            self.capture(plan)
        if self.strategy.counts_tokens:
            self.strategy.on_token_counts(now, counts)
            self.twin.on_token_counts(now, counts)
        while self.flights and (len(self.flights) > 1 or self.random.random() < 0.6):
            self.settle()
        if plan is not None:
            data = self.strategy.to_data()
            assert data == self.twin.to_data()
            self.data[now] = json.dumps(data)

    def has_room(self) -> bool:
        """As `policy.tracking.may_begin`, where what lacks replicas takes the place of what is kept."""
        if not self.sends:
            return True
        kinds = (Counter(window.pieces[0].piece.kind for window in windows) for windows in self.memory.values())
        return max((held for some in kinds for held in some.values()), default=0) < self.strategy.places

    def train(self) -> list[list[int]]:
        rows = []
        for layer in self.job.moe_layers:
            row, left = [0] * self.job.num_experts, TOKENS * self.job.topk
            while left:  # popular experts differ from layer to layer; no token goes to an expert twice
                index = (min(self.random.randrange(64), self.random.randrange(64)) // 8 + layer) % self.job.num_experts
                row[index] += (tokens := min(left, TOKENS - row[index], 1 + self.random.randrange(TOKENS)))
                left -= tokens
            rows.append(row)
            for index, tokens in enumerate(row):
                self.live[expert(layer, index)][self.steps] = tokens
        return rows

    def capture(self, plan: SnapshotPlan) -> None:
        self.held[plan.iteration] = {operator: dict(updates) for operator, updates in self.live.items()}
        self.flights.append(Flight(plan, Level.SNAPSHOT))
        self.keep(self.memory, plan, WindowState.COPYING)
        for rank, windows in self.memory.items():
            self.check_room(windows, "own", rank)

    def keep(self, where: dict[int, list[TrackedWindow]], plan: SnapshotPlan, state: WindowState) -> None:
        for piece in self.strategy.pieces(plan):
            for rank, operators in self.owned.items():
                share = {operator: part for operator, part in piece.plan.parts.items() if operator in operators}
                if share and (piece.replicated or where is self.memory):
                    held = TrackedPiece(replace(piece, plan=SnapshotPlan(plan.iteration, share)))
                    where[rank].append(TrackedWindow(held.piece.span, state, (held,)))

    def check_room(self, windows: list[TrackedWindow], which: str, rank: int) -> None:
        """Each piece has a room that is large enough, and no room is asked for more pieces than it has."""
        number: Counter[str] = Counter()
        for window in windows:
            kind = room_kind(plan_of(window), self.rooms)
            largest = self.rooms[kind].largest.parts
            for operator, part in plan_of(window).parts.items():
                assert part in largest[operator]
            number[kind] += 1
            assert number[kind] <= getattr(self.rooms[kind], which), (kind, which, rank, windows)

    def settle(self) -> None:
        """The oldest thing under way ends, well or not."""
        flight = self.flights.pop(0)
        ok = self.random.random() >= self.failing
        now = flight.plan.iteration
        sent = ok and not (self.sends and self.random.random() < self.failing)
        if flight.level is Level.SNAPSHOT:
            self.ended(now, ok, sent)
        for strategy in (self.strategy, self.twin):
            strategy.on_commit(flight.plan, flight.level, ok)
            if flight.level is Level.SNAPSHOT and ok:
                strategy.on_commit(flight.plan, Level.REPLICAS, sent)
        if flight.level is Level.SNAPSHOT and ok:
            parts = self.strategy.persistent(flight.plan)
            assert parts == self.twin.persistent(flight.plan)
            for part in parts:
                for operator, stored in part.parts.items():
                    assert stored in flight.plan.parts[operator]
                self.writes.append(part)
                self.flights.insert(0, Flight(part, Level.PERSIST))
        elif ok:
            self.stored.append(flight.plan)
        self.retain()

    def ended(self, now: int, ok: bool, sent: bool) -> None:
        if sent:
            plan = next(plan for plan in reversed(self.plans) if plan.iteration == now)
            self.keep(self.replicas, plan, WindowState.PROTECTED)
            for rank, windows in self.replicas.items():
                self.check_room(windows, "replica", rank)
        for rank, windows in self.memory.items():
            state = WindowState.PROTECTED if sent else WindowState.UNDER_REPLICATED
            self.memory[rank] = [
                replace(window, state=state) if now in window.span else window
                for window in windows
                if ok or now not in window.span
            ]

    def retain(self) -> None:
        """Frees what the policy frees; what is being persisted is in use."""
        writing = {flight.plan.iteration for flight in self.flights if flight.level is Level.PERSIST}
        for held in (self.memory, self.replicas):
            for rank, windows in held.items():
                covered = covered_pieces(windows)
                held[rank] = [
                    window
                    for window in windows
                    if window.pieces[0].name not in covered or (held is self.memory and window.span[0] in writing)
                ]

    def fault(self, lose_node: bool) -> RecoveryPlan | None:
        """Kill all; the memory of a node may be gone too. All come back, or begin again."""
        lost = self.random.randrange(2) if lose_node else None
        under_way = {flight.plan.iteration for flight in self.flights if flight.level is Level.SNAPSHOT}
        whole = {now: self.random.random() < 0.5 for now in under_way}
        copies: dict[int, tuple[Copy, ...]] = {}
        for rank, operators in self.owned.items():
            node, found = self.job.topology.node(rank), []
            kept = []
            for window in self.memory[rank]:
                now = window.span[-1]
                sealed = self.random.random() < 0.7 if self.partial else whole.get(now, True)
                if node != lost and (now not in under_way or sealed):
                    kept.append(window)
                    found.append(Copy(rank, plan_of(window), Tier.OWN_MEMORY, node))
            if node == lost and self.sends:
                kept = list(self.replicas[rank])
                found += [Copy(rank, plan_of(window), Tier.PEER_MEMORY, 1 - node) for window in kept]
            self.memory[rank] = kept
            for plan in self.stored:
                share = {operator: part for operator, part in plan.parts.items() if operator in operators}
                found.append(Copy(rank, SnapshotPlan(plan.iteration, share), Tier.PERSISTENT, None))
            copies[rank] = tuple(found)
        self.strategy, self.twin = self.new(), self.new()
        try:
            plan = self.strategy.recover(Inventory(self.owned, copies), Lost(), self.job.topology)
        except RecoveryImpossible:
            self.begin()
            return None
        data = json.loads(self.data[plan.target])
        twin = self.twin.resumed(plan, data, self.iteration)
        plan = self.strategy.resumed(plan, data, self.iteration)
        assert plan == twin
        self.recovered(plan)
        for strategy in (self.strategy, self.twin):
            strategy.on_stored(self.stored)
        return plan

    def recovered(self, plan: RecoveryPlan) -> None:
        used: dict[OperatorId, int] = {}
        for source in plan.sources:
            for operator in source.operators:
                used[operator] = min(source.iteration, used.get(operator, source.iteration))
        lost: Counter[int] = Counter()
        for operator in self.live:
            before, now = self.held[plan.target][operator], self.held[used[operator]][operator]
            tokens = sum(count for step, count in before.items() if step not in now)
            lost[operator.layer] += tokens
            if self.strategy.counts_tokens:
                told = plan.lost_tokens.get(operator, 0)
                assert told == tokens or (self.overstates and told > tokens), f"seed {self.seed}, {operator}"
            self.live[operator] = dict(now)
        # What was lost at the target or after it was lost by a state that is trained again from before that loss.
        self.losses = [(at, tokens) for at, tokens in self.losses if at < plan.target] + [(plan.target, lost)]
        self.iteration, self.flights = plan.target, []
        for held in (self.memory, self.replicas):
            for rank, windows in held.items():
                held[rank] = [
                    replace(window, state=WindowState.PROTECTED) for window in windows if window.span[-1] <= plan.target
                ]
        self.stored = [one for one in self.stored if one.iteration <= plan.target]
        self.recoveries.append(plan)
        if self.sends:
            self.send_again()
        self.retain()

    def send_again(self) -> None:
        """What all ranks have is sent to peers that lack it, which may fail."""
        sent = self.random.random() >= self.failing
        for strategy in (self.strategy, self.twin):
            strategy.on_commit(SnapshotPlan(self.iteration, {}), Level.REPLICAS, sent)
        for rank, windows in self.memory.items():
            self.memory[rank] = [
                replace(
                    window,
                    pieces=tuple(replace(one, piece=replace(one.piece, replicated=True)) for one in window.pieces),
                )
                for window in windows
            ]
            if sent:
                self.replicas[rank] = list(self.memory[rank])

    @property
    def lost_tokens(self) -> tuple[int, ...]:
        """Tokens per MoE layer that the faults on the way to the live state have cost, counted from raw counts."""
        return tuple(sum(tokens[layer] for _, tokens in self.losses) for layer in self.job.moe_layers)


def plan_of(window: TrackedWindow) -> SnapshotPlan:
    """Of a window of one piece."""
    return window.pieces[0].piece.plan


def room_kind(plan: SnapshotPlan, rooms: dict[str, object] | None = None) -> str:
    """Which room a piece goes to: that of the kind that has its experts, or the one with the rest."""
    name = "+".join(str(operator) for operator in sorted(plan.parts))
    if rooms is None or name in rooms:
        return name
    for kind, room in rooms.items():
        if plan.parts.keys() <= room.largest.parts.keys() and all(  # type: ignore[attr-defined]
            part in room.largest.parts[operator]  # type: ignore[attr-defined]
            for operator, part in plan.parts.items()
        ):
            return kind
    raise AssertionError(f"no room for {name}")
