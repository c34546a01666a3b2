"""Windows of sparse snapshots in simulated jobs: whatever is lost, damaged or refused, what comes back is exact.

Live bytes are known for every iteration, and a replayed iteration makes garbage of what it updates unless all that it
reads is right; so every recovery here compares all of its state, and so does the end of every job.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

import pytest
from simulated import EXPERTS, LAYERS, RANKS, Simulation, protected
from simulated_world.job import SimulatedJob
from simulated_world.network import Network
from simulated_world.world import Event
from test_guarantees import Vandal

from megatron.core.dist_checkpointing.moe.config import MoECheckpointConfig
from megatron.core.dist_checkpointing.moe.policy.lifecycle import ProtectionState

WINDOWS = (1, 2, 3, 5)
ITERATIONS = 16
PLACES = ((0, 0, 1, 1), (1, 0, 0, 1), (1, 1, 0, 0))
full = pytest.mark.full


def sparse(window: int | str, **more: object) -> MoECheckpointConfig:
    """One replica in memory; nothing in storage."""
    config = MoECheckpointConfig(strategy="sparse", window=str(window), replicas=1, timeout_s=60.0)
    return replace(config, **more)  # type: ignore[arg-type]


def durable(window: int | str, **more: object) -> MoECheckpointConfig:
    """Windows go to storage as soon as the one before has been written."""
    return sparse(window, persist_dir="disk", persist_interval=1, **more)


def counts(rank: int, iteration: int) -> dict[int, tuple[int, ...]]:
    """Tokens that are spread otherwise every few iterations, so that the order of anchoring changes."""
    draw = random.Random(f"{rank} {iteration // 4}")
    return {layer: tuple(draw.randrange(40) for _ in range(EXPERTS)) for layer in range(LAYERS)}


def simulation(config: MoECheckpointConfig, **more: object) -> Simulation:
    return Simulation(config, iterations=ITERATIONS, counts=counts, max_starts=14, **more)  # type: ignore[arg-type]


@dataclass
class Promises:
    """What was said to be protected when a start ended must come back, unless more was lost than it is good for."""

    job: Simulation
    newest: int = -1
    kept: int = 0

    def __call__(self, _: SimulatedJob) -> None:
        """Between two starts."""
        for coordinator in self.job.told.coordinators.values():
            self.newest = max(self.newest, *protected(coordinator), -1)

    def check(self) -> None:
        """At the end of a job with a single fault."""
        if self.newest >= 0:
            target = max(outcome.plan.target for _, outcome in self.job.told.outcomes)
            assert target >= self.newest, f"iteration {self.newest} was protected, but {target} came back"
            self.kept += 1


def crashed_once(config: MoECheckpointConfig, rank: int, event: int, **more: object) -> tuple[Simulation, Promises]:
    job = simulation(config, **more)
    job.between = promises = Promises(job)
    job.run(event, crash={rank: event})
    promises.check()
    return job, promises


def events(config: MoECheckpointConfig, rank: int, step: int, offset: int = 0, **more: object) -> Iterable[int]:
    """Every `step`-th event of a rank in a run without faults."""
    world, _, starts = simulation(config, **more).run(1)
    assert len(starts) == 1
    return range(1 + offset, world.events_of(rank), step)


@pytest.mark.parametrize("window", [*WINDOWS, "auto"])
def test_an_undisturbed_job_is_protected_to_its_end(window: int | str) -> None:
    job = simulation(durable(window))
    _, _, starts = job.run(0)
    assert len(starts) == 1
    reports = job.told.reports.values()
    assert {report.protection.state for report in reports} == {ProtectionState.PROTECTED}
    assert {report.persistent.state for report in reports if report.persistent} == {ProtectionState.PROTECTED}


def test_the_same_seed_tells_the_same_story() -> None:
    one, _, _ = simulation(sparse(3)).run(7)
    other, _, _ = simulation(sparse(3)).run(7)
    assert one.trace == other.trace


SAMPLED = [pytest.param(window, 1201, id=f"{window}-sample") for window in (2, 5)]
DENSELY = [pytest.param(window, 83, id=f"{window}-full", marks=full) for window in WINDOWS]


@pytest.mark.parametrize("wipe", [False, True], ids=["process lost", "node lost with its memory"])
@pytest.mark.parametrize(("window", "step"), [*SAMPLED, *DENSELY])
def test_a_crash_at_any_event_leaves_no_trace_and_costs_nothing_that_was_protected(
    window: int, wipe: bool, step: int
) -> None:
    kept = replayed = 0
    for rank in (0, 3):
        for event in events(sparse(window), rank, step, offset=7 * window + rank):
            job, promises = crashed_once(sparse(window), rank, event, wipe=wipe)
            kept += promises.kept
            replayed += len(job.told.replayed)
    assert kept
    assert bool(replayed) == (window > 1)


def test_replay_takes_no_more_iterations_than_the_window_has() -> None:
    lengths = [
        len(iterations)
        for event in events(sparse(5), 1, 700)
        for _, iterations in crashed_once(sparse(5), 1, event)[0].told.replayed
    ]
    assert max(lengths) == 4


@pytest.mark.parametrize("step", [pytest.param(797, id="sample"), pytest.param(151, id="full", marks=full)])
@pytest.mark.parametrize("window", [2, 3])
def test_ranks_that_move_to_other_nodes_find_their_state(window: int, step: int) -> None:
    for event in events(sparse(window), 1, step, offset=900):
        job, _ = crashed_once(sparse(window), 1, event, nodes=lambda start: PLACES[min(start, 2)], wipe=event % 2 == 0)
        assert job.told.outcomes


@pytest.mark.parametrize(
    "when",
    [
        pytest.param(range(80, 700, 200), id="sample"),
        pytest.param(range(1, 700, 13), id="full", marks=full),
    ],
)
@pytest.mark.parametrize("wipe", [False, True], ids=["process lost", "node lost with its memory"])
def test_a_second_crash_during_recovery_and_replay_is_survived(wipe: bool, when: range) -> None:
    config = sparse(3)
    world, _, _ = simulation(config).run(3)
    first = world.events_of(2) * 2 // 3
    undisturbed = simulation(config, wipe=wipe)
    world, _, _ = undisturbed.run(3, crash={2: first})
    begun = [at for at, event in enumerate(world.trace) if event.rank == 1 and "merge" in event.text]
    assert undisturbed.told.replayed and begun
    replaying = 0
    for second in when:
        job = simulation(config, wipe=wipe)
        job.run(second, crash={2: first, 1: first + second})
        replaying += len(job.told.replayed) > RANKS
    assert replaying


@pytest.mark.parametrize("seeds", [range(4), pytest.param(range(4, 40), marks=full)], ids=["sample", "full"])
def test_bits_that_flip_on_the_way_never_reach_the_state(seeds: range) -> None:
    for seed in seeds:
        job = simulation(sparse(1 + seed % 5), network=lambda world, n: Network(world, n, flip_rate=0.03), wipe=True)
        job.run(seed, crash={seed % RANKS: 1500 + 211 * seed})


@pytest.mark.parametrize("step", [pytest.param(701, id="sample"), pytest.param(101, id="full", marks=full)])
@pytest.mark.parametrize("window", [1, 3])
def test_windows_in_storage_bring_back_a_job_whose_memory_is_all_gone(window: int, step: int) -> None:
    config, recovered = durable(window), 0
    for event in events(config, 0, step, offset=1500):
        job = simulation(config, nodes=lambda start: (start,) * RANKS, wipe=True)
        job.run(event, crash={0: event})
        recovered += bool(job.told.outcomes)
    assert recovered, "some crash came after the first window in storage"


@pytest.mark.parametrize("seeds", [range(4), pytest.param(range(4, 60), marks=full)], ids=["sample", "full"])
def test_a_store_that_refuses_costs_protection_and_never_training(seeds: range) -> None:
    for seed in seeds:
        refused: list[str] = []
        job = simulation(durable(1 + seed % 5), store_fails=refusing(seed, refused))
        job.run(seed, crash={seed % RANKS: 2500 + 97 * seed} if seed % 2 else {})
        assert len(refused) > 10


def refusing(seed: int, refused: list[str]) -> Callable[[int, bool, int, str], bool]:
    """One of so many operations, but not to list what is there: without that no attempt begins."""
    every = (13, 29, 61)[seed % 3]

    def fails(rank: int, _: bool, number: int, name: str) -> bool:
        is_refused = (number + rank) % every == seed % every and not name.startswith("list")
        refused.extend([name] * is_refused)
        return is_refused

    return fails


def striking(seed: int, lives: int) -> Callable[[int, Event], bool]:
    """Kills a rank `lives` times, soon after the last time or when the job has come further."""
    draw = random.Random(seed)
    left, due = lives, draw.randrange(4000, 8000)

    def strike(rank: int, _: Event) -> bool:
        nonlocal left, due
        due -= 1
        if due > 0 or not left or rank < 0:
            return False
        left, due = left - 1, draw.choice([draw.randrange(200, 3000), draw.randrange(3000, 9000)])
        return True

    return strike


def trouble(seed: int) -> Simulation:
    """Jobs that differ in all that can go wrong, alone and together."""
    draw = random.Random(f"trouble {seed}")
    window = draw.choice([*WINDOWS, "auto"])
    stored = draw.random() < 0.6
    config = (durable if stored else sparse)(window, replicas=draw.choice([0, 1, 1] if stored else [1, 1, 2]))
    if draw.random() < 0.5:
        config = replace(config, reorder_threshold=0.0, reorder_fraction=0.01)
    flips, slow = draw.random() < 0.2, draw.random() < 0.2
    job = simulation(
        config,
        wipe=draw.random() < 0.5,
        nodes=draw.choice(
            [lambda start: PLACES[0], lambda start: PLACES[min(start, 2)]]
            + ([lambda start: (start // 3,) * RANKS] if stored else [])
        ),
        store_fails=refusing(seed, []) if draw.random() < 0.2 else None,
        between=Vandal(seed) if draw.random() < 0.4 else None,
        network=lambda world, n: Network(
            world, n, flip_rate=0.02 if flips else 0.0, bytes_per_s=2e5 if slow else 1e9, resets=bool(seed % 2)
        ),
        notice_s=draw.choice([0.0, 0.001, 0.01]),
    )
    return job


def outcomes(seeds: Iterable[int]) -> Iterator[Simulation]:
    for seed in seeds:
        job = trouble(seed)
        try:
            job.run(seed, should_crash=striking(seed, 5))
        except BaseException as error:
            error.add_note(f"seed {seed}: {job.config}; damage: {getattr(job.between, 'done', [])}")
            raise
        yield job


PARTS = [
    pytest.param(range(5), id="sample"),
    *(pytest.param(range(first, first + 50), id=f"full-{first}", marks=full) for first in range(5, 505, 50)),
]


@pytest.mark.parametrize("seeds", PARTS)
def test_whatever_goes_wrong_what_comes_back_is_exact_and_training_ends(seeds: range) -> None:
    told = [job.told for job in outcomes(seeds)]
    assert sum(bool(one.outcomes) for one in told) > len(seeds) // 4
    assert any(one.replayed for one in told)
