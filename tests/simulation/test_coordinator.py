"""The real coordinator, tracker and recovery in a simulated world: crashes at every event, lost nodes, bad wires."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from simulated import RANKS, Simulation
from simulated_world.job import SimulatedJob
from simulated_world.network import Network
from simulated_world.world import Event, World

from megatron.core.dist_checkpointing.moe.config import MoECheckpointConfig
from megatron.core.dist_checkpointing.moe.policy.lifecycle import ProtectionState
from megatron.core.dist_checkpointing.moe.ports import PeerLost
from megatron.core.dist_checkpointing.moe.snapshot.coordinator import Coordinator, ProtectionReport
from megatron.core.dist_checkpointing.moe.types import StepJournal

full = pytest.mark.full
FULL = MoECheckpointConfig(strategy="full", interval=2, replicas=1, timeout_s=60.0)
DURABLE = MoECheckpointConfig(
    strategy="full", interval=2, replicas=1, persist_dir="disk", persist_interval=4, timeout_s=60.0
)
EACH = replace(FULL, interval=1)


def test_an_undisturbed_job_is_protected_to_its_end() -> None:
    simulation = Simulation(FULL)
    _, _, starts = simulation.run(0)
    assert len(starts) == 1
    reports = simulation.told.reports.values()
    assert {report.protection.state for report in reports} == {ProtectionState.PROTECTED}
    (newest,) = {report.protected_iteration for report in reports}
    assert newest is not None and newest % 2 == 0 and newest > 0
    assert {(report.reason, report.persisted_iteration) for report in reports} == {("", None)}


@pytest.mark.parametrize("event", [None, 2000, 2600])
def test_all_ranks_choose_the_same_interval_and_one_of_them_says_which(
    event: int | None, caplog: pytest.LogCaptureFixture
) -> None:
    """That they plan the same snapshots is checked by the coordinator in each iteration."""
    caplog.set_level("INFO")
    simulation = Simulation(replace(FULL, interval="auto"), iterations=60)
    _, _, starts = simulation.run(4, **({} if event is None else {"crash": {2: event}}))
    assert len(starts) == (1 if event is None else 2)
    said = [int(record.getMessage().split()[1]) for record in caplog.records if "interval: " in record.getMessage()]
    assert said
    chosen = {coordinator._strategy._interval_policy.interval for coordinator in simulation.told.coordinators.values()}
    assert chosen == {said[-1]}


def test_the_same_seed_tells_the_same_story() -> None:
    one, _, _ = Simulation(FULL).run(7)
    other, _, _ = Simulation(FULL).run(7)
    assert one.trace == other.trace


@pytest.mark.parametrize("step", [pytest.param(167, id="sample"), pytest.param(19, id="full", marks=full)])
@pytest.mark.parametrize("wipe", [False, True], ids=["process lost", "node lost with its memory"])
def test_a_crash_at_any_event_leaves_no_trace(wipe: bool, step: int) -> None:
    world, _, _ = Simulation(FULL).run(1)
    recovered = 0
    for rank in (0, 3):
        for event in range(1, world.events_of(rank), step):
            simulation = Simulation(FULL, wipe=wipe)
            simulation.run(event, crash={rank: event})
            recovered += bool(simulation.told.outcomes)
    assert recovered > 3


@pytest.mark.parametrize("step", [pytest.param(67, id="sample"), pytest.param(23, id="full", marks=full)])
def test_ranks_that_move_to_other_nodes_find_their_state(step: int) -> None:
    world, _, _ = Simulation(FULL).run(2)
    recovered = 0
    for event in range(world.events_of(1) // 2, world.events_of(1), step):
        simulation = Simulation(FULL, nodes=lambda start: ((0, 0, 1, 1), (1, 0, 0, 1), (1, 1, 0, 0))[min(start, 2)])
        _, _, starts = simulation.run(event, crash={1: event})
        # The job of another seed may end before this event.
        assert bool(simulation.told.outcomes) == bool(starts[0].killed)
        recovered += bool(simulation.told.outcomes)
    assert recovered > 3


@pytest.mark.parametrize("step", [pytest.param(19, id="sample"), pytest.param(9, id="full", marks=full)])
def test_a_second_crash_during_recovery_is_survived(step: int) -> None:
    world, _, _ = Simulation(FULL).run(3)
    first = world.events_of(2) * 2 // 3
    for second in range(1, 160, step):
        simulation = Simulation(FULL)
        simulation.run(second, crash={2: first, 1: first + second})
        assert simulation.told.outcomes


@pytest.mark.parametrize("seeds", [range(4), pytest.param(range(4, 12), marks=full)], ids=["sample", "full"])
def test_bits_that_flip_on_the_way_never_reach_the_state(seeds: range) -> None:
    networks: list[Network] = []

    def flipping(world: World, n: int) -> Network:
        networks.append(Network(world, n, flip_rate=0.03))
        return networks[-1]

    recovered = 0
    for seed in seeds:
        simulation = Simulation(FULL, network=flipping, wipe=True)
        simulation.run(seed, crash={seed % RANKS: 300 + 11 * seed})
        recovered += bool(simulation.told.outcomes)
        simulation = Simulation(FULL, network=flipping, wipe=True)
        simulation.run(seed, crash={seed % RANKS: 1500 + 11 * seed})
        recovered += bool(simulation.told.outcomes)
    assert recovered and sum(network.flipped for network in networks) > 10


@pytest.mark.parametrize("step", [pytest.param(97, id="sample"), pytest.param(41, id="full", marks=full)])
def test_persistent_snapshots_bring_back_a_job_whose_memory_is_all_gone(step: int) -> None:
    world, _, _ = Simulation(DURABLE).run(5)
    recovered = 0
    for event in range(world.events_of(0) // 2, world.events_of(0), step):
        simulation = Simulation(DURABLE, nodes=lambda start: (start,) * RANKS, wipe=True)
        simulation.run(event, crash={0: event})
        recovered += bool(simulation.told.outcomes)
    assert recovered, "some crash came after the first persistent snapshot"


def test_a_store_that_refuses_costs_protection_and_never_training() -> None:
    refused: list[str] = []

    def fails(at: int, rank: int, n: int, name: str) -> bool:
        is_refused = (n + rank) % 13 == at and not name.startswith("list")
        refused.extend([name] * is_refused)
        return is_refused

    for seed in range(10):
        simulation = Simulation(DURABLE, store_fails=lambda rank, _, n, name, at=seed: fails(at, rank, n, name))
        simulation.run(seed)
    assert len(refused) > 100


def test_of_a_copy_that_one_rank_could_not_write_the_others_leave_nothing_in_storage() -> None:
    def fails(rank: int, persistent: bool, _: int, name: str) -> bool:
        return persistent and rank == 1 and name == "seal"

    _, whole, _ = Simulation(DURABLE).run(6)
    assert [segment for segment in whole.disk.segments.values() if segment.manifest]
    _, job, _ = Simulation(DURABLE, store_fails=fails).run(6)
    assert not [segment for segment in job.disk.segments.values() if segment.manifest]


def stored(job: SimulatedJob) -> dict[int, set[int]]:
    """By iteration the ranks whose part lies in storage."""
    found: dict[int, set[int]] = {}
    for segment in job.disk.segments.values():
        if segment.snapshot and segment.manifest:
            found.setdefault(segment.snapshot.iteration, set()).add(segment.snapshot.rank)
    return found


def test_of_a_copy_that_a_fault_interrupted_nothing_is_left_once_a_newer_one_is_written() -> None:
    def is_half_written(rank: int, _: Event) -> bool:
        job = simulation.job
        return job is not None and not job.starts and bool(stored(job)) and rank not in stored(job)[8]

    simulation = Simulation(replace(DURABLE, persist_interval=8), iterations=20)
    _, job, starts = simulation.run(6, should_crash=is_half_written)
    assert len(starts) == 2
    (target,) = {outcome.plan.target for _, outcome in simulation.told.outcomes}
    assert target >= 8, "or the copy is written again"
    assert 8 not in stored(job) and set(range(RANKS)) in stored(job).values()


def test_what_one_rank_cannot_list_is_not_taken_for_half_written_by_the_others() -> None:
    asked: list[str] = []

    def fails(rank: int, persistent: bool, _: int, name: str) -> bool:
        job = simulation.job
        if rank != 1 or not persistent or not name.startswith("list") or job is None or not job.starts:
            return False
        asked.append(name)
        return len(asked) == 1  # as kept pieces are listed; all there is to restore was found by then

    simulation = Simulation(replace(DURABLE, persist_interval=8), iterations=20, store_fails=fails)

    def has_persisted(rank: int, _: Event) -> bool:
        job = simulation.job
        return rank == 1 and job is not None and not job.starts and stored(job) == {8: set(range(RANKS))}

    _, job, starts = simulation.run(6, should_crash=has_persisted)
    assert len(starts) == 2 and asked
    assert stored(job)[8] == set(range(RANKS)) and len(stored(job)) > 1


def test_reports_say_why_there_is_less_protection_than_asked_for() -> None:
    told: list[ProtectionReport] = []

    def heard(_job: object, rank: int) -> None:
        told.append(simulation.told.coordinators[rank].report())

    flipping = partial(Network, flip_rate=0.2)
    simulation = Simulation(FULL, network=flipping, each=heard)
    simulation.run(3)
    told += simulation.told.reports.values()
    poor = [report for report in told if report.protection.state is not ProtectionState.PROTECTED]
    for why in ("no snapshot of iteration 6: still under way", "has too few replicas: "):
        assert any(why in report.reason for report in poor), why
    assert {report.reason for report in told if report.protection.state is ProtectionState.PROTECTED} <= {""}


def slow(**given: Any) -> Simulation:
    """Snapshots of all iterations, each of which takes 14 s to its peers and is waited for beside the next one."""

    def takes_20_s(job: SimulatedJob, rank: int) -> None:
        job.world.sleep(20.0)

    def slow_links(world: World, ranks: int) -> Network:
        return Network(world, ranks, bytes_per_s=400)

    return Simulation(EACH, **{"network": slow_links, "each": takes_20_s, "data_timeout_s": 60.0} | given)


def own_sealed(job: SimulatedJob, rank: int) -> set[int]:
    """The iterations of a rank's own sealed snapshots."""
    there = [one.snapshot for one in job.memory_of(rank).segments.values() if one.snapshot and one.manifest]
    return {snapshot.iteration for snapshot in there if snapshot.rank == rank}


def test_replicas_wait_for_room_as_long_as_an_iteration_takes(caplog: pytest.LogCaptureFixture) -> None:
    simulation = slow()
    simulation.run(8)
    assert "too few replicas" not in caplog.text
    assert {report.protection.state for report in simulation.told.reports.values()} == {ProtectionState.PROTECTED}


def test_a_restart_that_finds_three_snapshots_replicates_again_what_it_keeps(caplog: pytest.LogCaptureFixture) -> None:
    def has_three(rank: int, _: Event) -> bool:
        job = simulation.job
        if rank != 1 or job is None or job.starts:
            return False
        return len(set.intersection(*(own_sealed(job, one) for one in range(RANKS)))) == 3

    simulation = slow(iterations=20)
    _, _, starts = simulation.run(9, should_crash=has_three)
    assert len(starts) == 2
    assert "there is no room" not in caplog.text
    assert {report.protection.state for report in simulation.told.reports.values()} == {ProtectionState.PROTECTED}


def test_no_message_waits_for_storage_as_long_as_an_evaluation_took(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    step_end = Coordinator.step_end

    def behind_an_evaluation(coordinator: Coordinator, iteration: int, journal: StepJournal) -> None:
        assert simulation.job is not None
        simulation.job.world.sleep(8 * DURABLE.timeout_s)
        step_end(coordinator, iteration, journal)

    def takes_long(rank: int, persistent: bool, number: int, name: str) -> bool:
        if persistent and simulation.job is not None:
            simulation.job.world.sleep(3 * DURABLE.timeout_s)
        return False

    monkeypatch.setattr(Coordinator, "step_end", behind_an_evaluation)
    simulation = Simulation(DURABLE, store_fails=takes_long)
    simulation.run(3)
    assert "until the job restarts" not in caplog.text
    assert {report.protection.state for report in simulation.told.reports.values()} == {ProtectionState.PROTECTED}


def test_nothing_waits_for_room_any_more_once_training_has_failed() -> None:
    waited: list[float] = []

    def fail(job: SimulatedJob, rank: int) -> None:
        job.world.sleep(20.0)
        coordinator = simulation.told.coordinators[rank]
        if job.starts or job.models[rank].iteration < 6:
            return
        job.world.sleep(20.0)
        coordinator.failure()
        begun_s = job.world.now_s()
        assert coordinator.abandon()
        waited.append(job.world.now_s() - begun_s)
        raise PeerLost("another rank has failed")

    simulation = slow(each=fail, data_timeout_s=600.0)
    simulation.run(12)
    assert len(waited) == RANKS
    assert max(waited) < 20.0
