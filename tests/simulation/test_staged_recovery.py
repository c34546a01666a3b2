"""Pipelines in simulated jobs: after any fault the stages that kept their state wait, the others replay, all exactly.

Live bytes are known for every iteration; a rank whose state or whose input is not right sends on garbage and makes
garbage of what it updates. So each recovery here compares all state, and so does the end of every job.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import pytest
from simulated_world.job import SimulatedJob
from simulated_world.world import Event
from staged import PER_STAGE, Staged
from test_guarantees import Vandal

from megatron.core.dist_checkpointing.moe.types import GRADIENTS, LOG, PARKED, Scope
from megatron.core.dist_checkpointing.moe.types.layout import SnapshotId

ci, full = pytest.mark.ci, pytest.mark.full
BY_STAGE = (0, 0, 1, 1, 2, 2, 3, 3)
MIXED = (0, 1, 0, 1, 0, 1, 0, 1)


def by_stage(start: int) -> tuple[int, ...]:
    """A node for each of four stages."""
    return BY_STAGE


def killed(job: Staged, victims: dict[int, int], seed: int = 5) -> Staged:
    """The job after these ranks were killed at these events of theirs."""
    job.run(seed, crash=victims)
    return job


def at_once(job: Staged, event: int, *ranks: int) -> Staged:
    """The job after all these ranks were killed when the first of them came to an event."""

    def strike(rank: int, now: Event) -> bool:
        if (rank, now.number) == (ranks[0], event) and job.job is not None:
            for other in ranks[1:]:
                job.job.world.kill(other)
            return True
        return False

    job.run(5, should_crash=strike)
    return job


def late(job: Staged) -> int:
    """An event after the second window has settled."""
    world, _ = job.run(5)
    return world.events_of(0) * 3 // 4


@pytest.fixture(scope="module")
def when() -> dict[int, int]:
    """By number of stages, when a job has come far enough."""
    return {stages: late(Staged(stages=stages)) for stages in (2, 3, 4)}


def replaying(job: Staged) -> set[int]:
    """Stages that ran iterations again."""
    return {rank // PER_STAGE for _, rank, _ in job.seen.replayed}


@pytest.mark.parametrize(("stages", "victim"), [(2, 0), (2, 1), (4, 0), (4, 1), (4, 2), (4, 3)])
def test_only_the_stage_of_the_killed_rank_runs_anything_again(stages: int, victim: int, when: dict[int, int]) -> None:
    job = killed(Staged(stages=stages), {victim * PER_STAGE: when[stages]})
    assert job.seen.scopes() == [Scope.LOCAL]
    assert replaying(job) == {victim}
    assert {rank // PER_STAGE for _, rank in job.seen.waited} == set(range(stages)) - {victim}


def test_neighbouring_stages_replay_jointly_and_what_they_send_each_other_is_real(when: dict[int, int]) -> None:
    job = at_once(Staged(stages=4), when[4] + 10, 2, 4)  # at when[4] itself too few ranks park, and all stages replay
    assert replaying(job) == {1, 2}
    (plan,) = {outcome.plan.segments for _, _, outcome in job.seen.outcomes}
    assert [(one.stages, one.logs_from) for one in plan] == [((1, 2), (0, 3))]


def test_stages_apart_from_each_other_replay_at_the_same_time_each_from_logs(when: dict[int, int]) -> None:
    job = at_once(Staged(stages=4), when[4], 0, 5)
    assert replaying(job) == {0, 2}
    assert {len(outcome.plan.segments) for _, _, outcome in job.seen.outcomes} == {2}


def test_with_recovery_global_all_stages_roll_back_and_nothing_beside_the_windows_is_used(when: dict[int, int]) -> None:
    job = killed(Staged(stages=3, recovery="global"), {2: when[3]})
    assert job.seen.scopes() == [Scope.GLOBAL]
    assert not job.seen.waited


def test_where_ranks_of_all_stages_are_lost_all_roll_back(when: dict[int, int]) -> None:
    job = at_once(Staged(stages=2), when[2], 0, 2)
    assert job.seen.scopes() == [Scope.GLOBAL]


@pytest.mark.parametrize("clips", [True, False], ids=["norm", "no norm to wait for"])
@pytest.mark.parametrize("step", [pytest.param(311, id="sample"), pytest.param(23, id="full", marks=full)])
def test_a_kill_at_any_event_costs_at_most_the_iterations_of_its_own_stage(step: int, clips: bool) -> None:
    world, _ = Staged(clips=clips).run(1)
    scopes, rolled = [], 0
    for rank in (1, 2):
        for event in range(2 + rank, world.events_of(rank), step):
            job = killed(Staged(clips=clips), {rank: event}, seed=event)
            scopes += job.seen.scopes()
            rolled += len(job.seen.rolled)
            if job.seen.scopes() == [Scope.LOCAL]:
                assert replaying(job) <= {rank // PER_STAGE}
    assert scopes.count(Scope.LOCAL) > len(scopes) // 2
    if clips and step < 100:
        assert rolled


@pytest.mark.parametrize("step", [pytest.param(331, id="sample", marks=ci), pytest.param(17, id="full", marks=full)])
def test_a_second_kill_while_others_park_restart_or_replay_is_survived(step: int, when: dict[int, int]) -> None:
    """Of a rank that waits, and of one that replays; counted from the first kill on."""
    for victim in (2, 4):
        twice = 0
        for second in range(1, 1000, step):
            job = Staged(stages=3)
            job.run(second, crash={2: when[3]} | ({victim: when[3] + second} if victim != 2 else {}),
                    should_crash=again(2, when[3] + second) if victim == 2 else None)  # fmt: skip
            twice += len({start for start, _, _ in job.seen.outcomes}) > 1
        assert twice


@dataclass
class KilledBetween:
    """Kills a rank of the first stage in a backward pass, and another once that stage has run an iteration again."""

    job: Staged
    first: int
    since: int
    """Which event of `first` comes before that backward pass."""
    victim: int
    is_struck: bool = False
    is_done: bool = False

    def __call__(self, rank: int, event: Event) -> bool:
        # What comes back from the next stage has been through all: none is in its step, where it could not park.
        comes = event.text.startswith("train: receive") and event.text.endswith(f"rank {self.first + PER_STAGE}")
        if not self.is_struck and rank == self.first and event.number > self.since and comes:
            self.is_struck = True
            return True
        again = {who for start, who, _ in self.job.seen.iterations if start == 1 and who < PER_STAGE}
        if not self.is_done and len(again) == PER_STAGE and self.job.job is not None:
            self.is_done = True
            self.job.job.notice_s = 0.0  # the replay takes less than the time in which others park
            self.job.job.world.kill(self.victim)
            self.job.job.standby_of(self.victim).wipe()  # or its stage would have nothing to run again
        return False


@pytest.mark.parametrize("seed", [0, 1, 2, *(pytest.param(seed, marks=ci) for seed in range(3, 20))])
def test_a_replay_continues_where_it_was_when_a_stage_apart_from_it_lost_a_rank(
    seed: int, when: dict[int, int]
) -> None:
    draw = random.Random(seed)
    job = Staged(stages=4, notice_s=1.0)  # time for all to park
    between = KilledBetween(job, draw.randrange(PER_STAGE), when[4] + draw.randrange(100), draw.randrange(4, 8))
    job.run(seed, should_crash=between)
    assert between.is_done
    assert job.seen.scopes() == [Scope.LOCAL]
    run = {(start, iteration) for start, rank, iteration in job.seen.iterations if rank < PER_STAGE}
    iterations = sorted(iteration for _, iteration in run)
    assert {start for start, _ in run} == {1, 2}, "the fault came between two iterations of the replay"
    assert iterations == list(range(iterations[0], iterations[-1] + 1)), "none is run twice"
    assert replaying(job) == {0, between.victim // PER_STAGE}


def again(rank: int, number: int) -> Callable[[int, Event], bool]:
    """Kills a rank at a later event of its own too."""
    return lambda who, event: who == rank and event.number == number


def test_the_loss_of_a_stages_node_is_made_up_for_by_replicas_and_the_neighbours_logs(when: dict[int, int]) -> None:
    job = killed(Staged(stages=4, nodes=by_stage, wipe=True), {2: when[4]})
    assert job.seen.scopes() == [Scope.LOCAL]
    assert replaying(job) == {1}


def test_logs_that_went_with_a_node_are_made_again_by_the_replay_that_follows(when: dict[int, int]) -> None:
    job = Staged(stages=4, nodes=by_stage, wipe=True, iterations=12)
    first = when[4]
    job.run(5, crash={2: first}, should_crash=soon_after(job, 4))
    assert job.seen.scopes() == [Scope.LOCAL, Scope.LOCAL]
    assert replaying(job) == {1, 2}, "stage 2 is fed from logs that stage 1 made again"


def soon_after(job: Staged, rank: int) -> Callable[[int, Event], bool]:
    """Kills a rank in the first iteration after the first recovery."""

    done = False

    def strike(who: int, event: Event) -> bool:
        nonlocal done
        recovered = {start for start, _, _ in job.seen.outcomes} == {1}
        done, before = done or (who == rank and recovered and event.text.startswith("step changes")), done
        return done and not before

    return strike


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=full) for seed in (1, 2))])
def test_ranks_that_come_back_on_other_nodes_find_what_they_parked(seed: int, when: dict[int, int]) -> None:
    places = (MIXED, (1, 0, 0, 1, 1, 0, 0, 1))
    job = Staged(stages=4, nodes=lambda start: places[min(start, 1)])
    killed(job, {3: when[4] + 40 * seed}, seed)
    assert job.seen.scopes() == [Scope.LOCAL]
    assert replaying(job) == {1}


@dataclass
class Damage:
    """Flips a bit of all snapshots of one kind and rank that lie in standby stores, before the job starts again."""

    kind: str
    rank: int
    done: list[SnapshotId] = field(default_factory=list)

    def __call__(self, job: SimulatedJob) -> None:
        for memory in job.standbys.values():
            for segment in list(memory.segments.values()):
                one = segment.snapshot
                if one is not None and segment.manifest and (one.kind, one.rank) == (self.kind, self.rank):
                    memory.flip(one, 77)
                    self.done.append(one)


def test_logs_that_prove_damaged_widen_the_scope_to_the_stage_that_sent_them(when: dict[int, int]) -> None:
    job = Staged(stages=4, between=Damage(LOG, 2))
    killed(job, {0: when[4]})
    assert job.seen.scopes() == [Scope.LOCAL]
    assert replaying(job) == {0, 1}
    assert {outcome.table.wider for _, _, outcome in job.seen.outcomes if outcome.table.wider}


def test_parked_state_that_proves_damaged_lets_its_stage_replay_too(when: dict[int, int]) -> None:
    job = Staged(stages=4, between=Damage(PARKED, 7))
    killed(job, {0: when[4]})
    assert job.seen.scopes() == [Scope.LOCAL]
    assert replaying(job) == {0, 3}


@pytest.mark.parametrize("most", [pytest.param(1, id="sample", marks=ci), pytest.param(2, id="full", marks=full)])
def test_gradients_that_prove_damaged_are_made_again_from_the_parked_state(most: int) -> None:
    world, _ = Staged(stages=3).run(1)
    remade = 0
    for event in range(world.events_of(0) // 2, world.events_of(0), 19):
        if remade == most:
            break
        rolled = killed(Staged(stages=3), {5: event}, seed=event).seen.rolled
        if rolled:
            start, rank = rolled[0]
            job = killed(Staged(stages=3, between=Damage(GRADIENTS, rank)), {5: event}, seed=event)
            assert (start, rank) not in job.seen.rolled
            assert {rank // PER_STAGE, 2} <= replaying(job)
            remade += 1
    assert remade


def striking(seed: int, lives: int) -> Callable[[int, Event], bool]:
    """Kills a rank `lives` times, soon after the last time or when the job has come further."""
    draw = random.Random(seed)
    left, due = lives, draw.randrange(1500, 5000)

    def strike(rank: int, _: Event) -> bool:
        nonlocal left, due
        due -= 1
        if due > 0 or not left or rank < 0:
            return False
        left, due = left - 1, draw.choice([draw.randrange(20, 300), draw.randrange(300, 2500), draw.randrange(6000)])
        return True

    return strike


class Vandals(Vandal):
    """Damage in standby stores as well."""

    def __call__(self, job: SimulatedJob) -> None:
        draw = random.Random(f"standby {self.seed} {len(job.starts)}")
        for memory in job.standbys.values():
            if draw.random() < 0.5:
                self._damage(draw, memory)
        if draw.random() < 0.3:
            super().__call__(job)


def trouble(seed: int) -> Staged:
    """Jobs that differ in all that can go wrong, alone and together."""
    draw = random.Random(f"trouble {seed}")
    stages = draw.choice([2, 2, 3, 4])
    moved = [tuple(draw.randrange(2) for _ in range(stages * PER_STAGE)) for _ in range(2)]
    return Staged(
        stages=stages,
        window=draw.choice([1, 2, 3, 3]),
        recovery=draw.choice(["auto", "auto", "local", "global"]),
        clips=draw.random() < 0.7,
        wipe=draw.random() < 0.4,
        nodes=draw.choice(
            [
                lambda start: MIXED[: stages * PER_STAGE],
                lambda start: BY_STAGE[: stages * PER_STAGE],
                lambda start: moved[start % 2] if len(set(moved[start % 2])) > 1 else MIXED[: stages * PER_STAGE],
            ]
        ),
        between=Vandals(seed) if draw.random() < 0.4 else None,
        notice_s=draw.choice([0.0, 0.0005, 0.01, 0.05]),
    )


PARTS = [
    pytest.param((2, 10, 16), id="sample"),
    pytest.param(range(12), id="full-0", marks=full),
    *(pytest.param(range(first, first + 50), id=f"full-{first}", marks=full) for first in range(12, 412, 50)),
]


@pytest.mark.parametrize("seeds", PARTS)
def test_whatever_goes_wrong_what_comes_back_is_exact_and_training_ends(seeds: Sequence[int]) -> None:
    local = 0
    for seed in seeds:
        job = trouble(seed)
        try:
            job.run(seed, should_crash=striking(seed, 4))
        except BaseException as error:
            error.add_note(f"seed {seed}: {job.config}; damage: {getattr(job.between, 'done', [])}")
            raise
        assert job.between or not job.seen.refused, f"seed {seed}: nothing was damaged"
        local += Scope.LOCAL in job.seen.scopes()
    assert local
