"""What protection promises, in simulation: sealed bytes never change, and what is called protected is at the peers."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import product
from unittest import mock

import pytest
from simulated import RANKS, Simulation, protected
from simulated_world.job import SimulatedJob
from simulated_world.memory import Memory, Segment
from simulated_world.network import Network
from simulated_world.storage import FakeStore
from simulated_world.world import Event, World
from xxhash import xxh3_128_digest

from megatron.core.dist_checkpointing.moe.config import MoECheckpointConfig
from megatron.core.dist_checkpointing.moe.errors import UnreadableCheckpoint
from megatron.core.dist_checkpointing.moe.policy.lifecycle import ProtectionState
from megatron.core.dist_checkpointing.moe.replication.receiver import StoreReplica
from megatron.core.dist_checkpointing.moe.storage.manifest import checksum, decode
from megatron.core.dist_checkpointing.moe.types.layout import Manifest, SnapshotId

FULL = MoECheckpointConfig(strategy="full", interval=1, replicas=1, timeout_s=60.0)
PEC = replace(FULL, strategy="pec", pec_k_snapshot=2, pec_scope="both")
DURABLE = replace(FULL, interval=2, persist_dir="disk", persist_interval=4)
full = pytest.mark.full
LONG = 215
"""Iterations of a job in which bytes are watched."""


def even_counts(rank: int, iteration: int) -> dict[int, tuple[int, ...]]:
    """Every rank sends as many tokens to each expert of both layers."""
    return {layer: (8, 8, 8, 8) for layer in (0, 1)}


def owners_of(memory: Memory) -> set[SnapshotId]:
    """All that is sealed in a memory, and whose every record matches the checksum of its manifest."""
    return {segment.snapshot for segment in sealed_in(memory) if segment.snapshot and is_intact(segment)}


def sealed_in(memory: Memory) -> list[Segment]:
    return [segment for segment in memory.segments.values() if segment.snapshot and segment.manifest]


def is_intact(segment: Segment) -> bool:
    records = decode(segment.manifest, segment.name).records
    data = memoryview(segment.data)
    return all(checksum(data[one.offset : one.offset + one.nbytes]) == one.xxh3 for one in records)


def fingerprint(segment: Segment) -> bytes:
    """Of the manifest and all bytes that it speaks of, gaps between records included."""
    nbytes = decode(segment.manifest, segment.name).layout.nbytes
    return xxh3_128_digest(segment.manifest + bytes(segment.data[:nbytes]))


@dataclass
class Watch:
    """Hashes every sealed snapshot and replica when it is first seen, and again after each iteration of rank 0."""

    seen: dict[tuple[int, str, SnapshotId], bytes] = field(default_factory=dict)
    looks: Counter[tuple[int, str, SnapshotId]] = field(default_factory=Counter)
    changed: list[str] = field(default_factory=list)
    rounds: int = 0
    replicas: int = 0

    def look(self, job: SimulatedJob, rank: int) -> None:
        if rank != 0:
            return
        self.rounds += 1
        listed = set()
        for at, memory in enumerate(job.memories.values()):
            for segment in sealed_in(memory):
                assert segment.snapshot is not None
                key = at, segment.name, segment.snapshot
                listed.add(key)
                now = fingerprint(segment)
                if self.seen.setdefault(key, now) != now or not is_intact(segment):
                    self.changed.append(f"{segment.snapshot} in {segment.name} of memory {at}, look {self.rounds}")
                self.looks[key] += 1
                self.replicas += segment.snapshot.rank != self._owner(job, at)
        for key in self.seen.keys() - listed:
            del self.seen[key]

    @staticmethod
    def _owner(job: SimulatedJob, at: int) -> int:
        return next(rank for rank in range(RANKS) if job.memory_of(rank) is list(job.memories.values())[at])


def refuses_late(rank: int, persistent: bool, number: int, name: str) -> bool:
    """From some time on a rank can seal nothing: then no newer snapshot ever takes the place of an older one."""
    return rank == 1 and not persistent and name == "seal" and number > 40


def refuses_often(rank: int, _persistent: bool, n: int, name: str) -> bool:
    """Refuses one of 17 operations, but not to list what is there: without that no attempt begins."""
    return (3 * n + rank) % 17 == 5 and not name.startswith("list")


def watched(case: str, iterations: int) -> Watch:
    """What was seen in a job of so many iterations."""
    watch = Watch()
    config = PEC if case == "pec" else FULL
    store_fails = refuses_late if case == "one snapshot stays" else None
    Simulation(config, iterations=iterations, each=watch.look, counts=even_counts, store_fails=store_fails).run(11)
    return watch


@pytest.mark.parametrize(
    ("case", "iterations"),
    [
        ("full", LONG),
        ("one snapshot stays", LONG),
        ("pec", LONG // 3),
        pytest.param("pec", LONG, marks=full),
    ],
)
def test_no_byte_of_a_sealed_snapshot_or_replica_changes_in_all_iterations_of_a_job(case: str, iterations: int) -> None:
    watch = watched(case, iterations)
    assert not watch.changed
    assert watch.rounds == iterations
    assert watch.replicas > iterations
    if case == "one snapshot stays":
        assert max(watch.looks.values()) >= 200


def reuse_early(store: FakeStore, nbytes: int) -> Segment:
    """A segment whose bytes are those of a sealed snapshot that nobody has freed."""
    sealed = [one for one in sealed_in(store.memory) if len(one.data) >= nbytes]
    if not sealed:
        return FREE_SEGMENT(store, nbytes)
    segment = Segment(next(store.memory.names), sealed[0].data)
    store.memory.segments[segment.name] = segment
    return segment


def arrive_on_the_older(
    arrival: StoreReplica, store: FakeStore, writer: object, manifest: Manifest, follow: object = None
) -> None:
    """A replica is received into the buffer of the replica that it is to replace."""
    ARRIVE(arrival, store, writer, manifest, follow)  # type: ignore[arg-type]
    older = [one for one in sealed_in(store.memory) if one.snapshot and one.snapshot.rank == manifest.snapshot.rank]
    if older:
        arrival.buffer = older[0].lend(0, manifest.layout.nbytes)


FREE_SEGMENT, ARRIVE = FakeStore._free_segment, StoreReplica.__init__
BROKEN: dict[str, tuple[type, str, Callable[..., object]]] = {
    "a store lends a buffer before it is freed": (FakeStore, "_free_segment", reuse_early),
    "a keeper receives into a replica that is there": (StoreReplica, "__init__", arrive_on_the_older),
}


@pytest.mark.parametrize("how", BROKEN)
def test_bytes_that_change_after_they_were_sealed_are_noticed(how: str) -> None:
    watch = Watch()
    simulation = Simulation(FULL, iterations=30, each=watch.look)
    owner, name, broken = BROKEN[how]
    with mock.patch.object(owner, name, broken):
        simulation.run(11)
    assert watch.changed


@dataclass
class Claims:
    """At every event: whoever says that an iteration is protected must be right.

    In the moment when a rank begins to say so, all replicas of that iteration are there, and of the others of its
    window. Later they may have made room for those of a newer one, which the others have heard of already.
    """

    replicas: int
    window: int = 1
    simulation: Simulation | None = None
    said: dict[tuple[int, int], int] = field(default_factory=dict)
    checked: int = 0
    unprotected: int = 0

    def look(self, rank: int, event: Event) -> bool:
        simulation = self.simulation
        assert simulation is not None
        if simulation.job is None or any(simulation.job.world.is_dead(one) for one in range(RANKS)):
            return False
        for one, coordinator in simulation.told.coordinators.items():
            tracker = coordinator._tracker
            self.unprotected += tracker.protection.state is not ProtectionState.PROTECTED
            claims = protected(coordinator)
            if self.window == 1 and tracker.protection.state is ProtectionState.PROTECTED:
                claims.append(tracker.protection.since_iteration or -1)
            key, newest = (simulation.job.world.life_of(one), one), max(claims, default=-1)
            if self.said.get(key, -1) < newest:
                self.said[key] = newest
                self.check(simulation.job, one, newest)
        return False

    def check(self, job: SimulatedJob, who: int, iteration: int) -> None:
        self.checked += 1
        memories = {rank: owners_of(job.memory_of(rank)) for rank in range(RANKS)}
        for owner, at in product(range(RANKS), range(iteration - self.window + 1, iteration + 1)):
            own = {one for one in memories[owner] if (one.rank, one.iteration) == (owner, at)}
            keepers = [rank for rank in range(RANKS) if rank != owner and own <= memories[rank]]
            assert own and len(keepers) >= self.replicas, (
                f"rank {who} says that iteration {iteration} is protected, but rank {owner}'s {own or at} is at"
                f" ranks {keepers}\n{job.world.story()}"
            )


def bad_network(seed: int) -> Callable[[World, int], Network]:
    """Links of any speed down to some that need longer than anyone waits, and bits that flip on some of them."""
    draw = random.Random(seed)
    bytes_per_s, latency_s = 10 ** draw.uniform(3.3, 9), 10 ** draw.uniform(-5, -2)
    flip_rate = draw.choice([0.0, 0.0, 0.02, 0.2])
    return lambda world, ranks: Network(
        world, ranks, bytes_per_s=bytes_per_s, latency_s=latency_s, flip_rate=flip_rate, resets=bool(seed % 2)
    )


SPARSE = replace(FULL, strategy="sparse", window="2")


@pytest.mark.parametrize(
    ("replicas", "seeds"),
    [
        pytest.param(1, 16, id="1-sample"),
        pytest.param(2, 16, id="2-sample"),
        pytest.param(1, 50, id="1-full", marks=full),
        pytest.param(2, 50, id="2-full", marks=full),
    ],
)
def test_nothing_is_called_protected_before_all_replicas_are_acknowledged(replicas: int, seeds: int) -> None:
    protected = unprotected = 0
    for seed in range(seeds):
        config = replace({4: PEC, 2: SPARSE}.get(seed % 5, FULL), replicas=replicas)
        claims = Claims(replicas, window=2 if config.strategy == "sparse" else 1)
        refusing = seed % 7 == 3
        simulation = Simulation(
            config, iterations=6, network=bad_network(seed), counts=even_counts, wipe=bool(seed % 2), max_starts=4,
            store_fails=refuses_often if refusing else None,
        )  # fmt: skip
        claims.simulation = simulation
        crash = {seed % RANKS: 150 + 13 * seed} if seed % 3 == 0 else {}
        simulation.run(seed, crash=crash, should_crash=claims.look)
        protected += bool(claims.checked)
        unprotected += bool(claims.unprotected)
    assert protected >= seeds // 2
    assert unprotected >= seeds // 2


def replacing(world: World, keeper: int, owner: int, first: int) -> list[int]:
    """The keeper's events from when it takes room for a replica of `owner` until that is sealed.

    Only of replicas after iteration `first`: there is an older one then.
    """
    windows: list[int] = []
    begun: dict[int, int] = {}
    for event in world.trace:
        for iteration in range(first + 1, 100):
            name = f"the {SnapshotId(iteration, owner)}"
            if event.rank == keeper and event.text == f"reserve {name}":
                begun[iteration] = event.number
            if event.rank == keeper and event.text == f"sync {name}" and iteration in begun:
                windows += range(begun.pop(iteration), event.number + 1)
    return windows


@pytest.mark.parametrize("step", [pytest.param(11, id="sample"), pytest.param(3, id="full", marks=full)])
@pytest.mark.parametrize("notice_s", [0.0, 0.001], ids=["the keeper dies at once", "the keeper has a moment"])
def test_a_kill_while_a_replica_is_replaced_recovers_from_the_older_one(notice_s: float, step: int) -> None:
    config, owner, seed = replace(FULL, interval=2), 0, 21
    undisturbed = Simulation(config, notice_s=notice_s, wipe=True)
    world, job, _ = undisturbed.run(seed)
    keepers = [rank for rank in (2, 3) if any(one.rank == owner for one in owners_of(job.memory_of(rank)))]
    assert keepers, "a replica of rank 0 is on the other node"
    points = replacing(world, keepers[0], owner, first=2)
    assert len(points) > 40
    older = 0
    for point in points[::step]:
        simulation = Simulation(config, notice_s=notice_s, wipe=True)
        newest = 0

        def lose_the_owner(rank: int, event: Event, simulation: Simulation = simulation, point: int = point) -> bool:
            nonlocal newest
            job = simulation.job
            if (rank, event.number) == (keepers[0], point) and job is not None and not job.starts:
                own = owners_of(job.memory_of(owner))
                newest = max(one.iteration for one in own if one.rank == owner)
                job.world.kill(owner)
            return False

        simulation.run(seed, should_crash=lose_the_owner)
        (target,) = {outcome.plan.target for _, outcome in simulation.told.outcomes}
        assert simulation.told.began_again == 1, "only the first start begins again"
        assert target in (newest, newest - config.interval), f"point {point}: {target} instead of {newest}"
        older += target < newest
    assert older > len(points[::step]) // 2


def decodable_records(segment: Segment) -> bool:
    """Whether a bit of its records can be flipped: its manifest is intact and speaks of some bytes."""
    try:
        return any(record.nbytes for record in decode(segment.manifest, segment.name).records)
    except UnreadableCheckpoint:
        return False


@dataclass
class Vandal:
    """Damages what a job has left, before it starts again; `cases` counts the starts after some damage."""

    seed: int
    cases: int = 0
    done: list[str] = field(default_factory=list)

    def __call__(self, job: SimulatedJob) -> None:
        draw = random.Random(f"{self.seed} {len(job.starts)}")
        memories = [*job.memories.values(), job.disk]
        damaged = [self._damage(draw, draw.choice(memories)) for _ in range(draw.choice([1, 1, 2, 3, 5, 9]))]
        self.cases += any(damaged)

    def _damage(self, draw: random.Random, memory: Memory) -> bool:
        sealed = sealed_in(memory)
        if not sealed:
            return False
        segment = draw.choice(sealed)
        snapshot = segment.snapshot
        assert snapshot is not None
        if not decodable_records(segment):
            return False
        how = draw.choice(["record", "record", "manifest", "manifest", "delete", "torn", "short", "long", "zeros"])
        self.done.append(f"{how}: {snapshot}")
        match how:
            case "record" | "manifest":
                memory.flip(snapshot, draw.randrange(1 << 40), manifest=how == "manifest")
            case "delete":
                segment.clear()
            case "torn":
                segment.manifest = b""
            case "short":
                segment.manifest = segment.manifest[: draw.randrange(1, len(segment.manifest))]
            case "long":
                segment.manifest += draw.randbytes(draw.randrange(1, 9))
            case "zeros":
                segment.data[:] = bytes(len(segment.data))
        return True


def unlucky(seed: int, lives: int) -> Callable[[int, Event], bool]:
    """Kills some rank `lives` times, at events that the seed chooses."""
    draw = random.Random(seed)
    left = lives
    due = draw.randrange(600, 2400)

    def strike(rank: int, event: Event) -> bool:
        nonlocal left, due
        due -= 1
        if due > 0 or not left or rank < 0:
            return False
        left, due = left - 1, draw.randrange(300, 2200)
        return True

    return strike


@pytest.mark.parametrize(("part", "enough"), [(0, 25), *(pytest.param(part, 110, marks=full) for part in range(5))])
def test_damaged_copies_never_give_a_wrong_byte(part: int, enough: int) -> None:
    cases = recovered = fresh = 0
    seed = 1000 * part
    while cases < enough:
        seed += 1
        vandal = Vandal(seed)
        config = [DURABLE, FULL, replace(PEC, persist_dir="disk", persist_interval=2)][seed % 3]
        simulation = Simulation(
            config, iterations=8, between=vandal, counts=even_counts, wipe=seed % 4 == 0, max_starts=12
        )
        try:
            simulation.run(seed, should_crash=unlucky(seed, 10))
        except BaseException as error:
            error.add_note(f"seed {seed}; damage: {vandal.done}")
            raise
        cases += vandal.cases
        recovered += len(simulation.told.outcomes)
        fresh += simulation.told.began_again
    assert recovered > enough - 10
    assert fresh
