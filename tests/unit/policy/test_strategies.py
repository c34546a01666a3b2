"""What holds for every strategy: ranks decide alike, pieces make up the plan, and rooms always suffice."""

from __future__ import annotations

from dataclasses import replace

import pytest
from strategy_cases import World, job_of

from megatron.core.dist_checkpointing.moe.config import MoECheckpointConfig
from megatron.core.dist_checkpointing.moe.strategies import STRATEGIES, Job
from megatron.core.dist_checkpointing.moe.types import Topology
from megatron.core.dist_checkpointing.moe.types.layout import SnapshotId

CONFIG = MoECheckpointConfig(interval=1, persist_dir="/storage", persist_interval=7)
WIDE = Topology(8, pp=2, ep=2, ranks_per_node=4)
JOBS = {
    "full": job_of(replace(CONFIG, strategy="full")),
    "full at an interval that adapts": job_of(replace(CONFIG, strategy="full", interval_policy="checkfreq")),
    "pec in turn": job_of(replace(CONFIG, strategy="pec"), WIDE, layers=6),
    "pec by load": job_of(replace(CONFIG, strategy="pec", pec_selection="load-aware"), WIDE, layers=6),
    "pec with three of eight": job_of(replace(CONFIG, strategy="pec", pec_k_snapshot=3, pec_k_persist=2)),
    "pec that keeps master weights": job_of(
        replace(CONFIG, strategy="pec", pec_scope="optimizer", pec_selection="load-aware", pec_k_snapshot=2)
    ),
    "pec that keeps moments": job_of(replace(CONFIG, strategy="pec", pec_scope="weights")),
    "pec with dynamic K": job_of(replace(CONFIG, strategy="pec", plt_threshold=0.05), WIDE, layers=6),
    "pec with dynamic K by load": job_of(
        replace(CONFIG, strategy="pec", plt_threshold=0.05, pec_selection="load-aware", pec_k_snapshot=3)
    ),
    "sparse in windows of one": job_of(replace(CONFIG, strategy="sparse", window="1")),
    "selective": job_of(
        replace(CONFIG, strategy="selective", budget_local="300000000", budget_remote="200000000"), WIDE, layers=6
    ),
    "pec of one layer": job_of(replace(CONFIG, strategy="pec", pec_selection="load-aware"), layers=1),
}
each_job = pytest.mark.parametrize("job", JOBS.values(), ids=JOBS.keys())


def run(job: Job, seed: int, steps: int, *, failing: float = 0.2, partial: bool = False) -> World:
    """Trains with failed snapshots, late settlements and faults; ranks that disagree end it."""
    world = World(job, seed, failing, partial)
    while world.steps < steps:
        world.step()
        if world.random.random() < 0.04:
            world.fault(lose_node=world.random.random() < 0.4)
    return world


def test_every_strategy_has_a_job_here() -> None:
    assert {job.config.strategy for job in JOBS.values()} == STRATEGIES.keys()


@each_job
def test_instances_that_are_told_the_same_decide_the_same_and_rooms_always_suffice(job: Job) -> None:
    for seed in range(2):
        world = run(job, seed, 80, partial=seed == 1 and job.config.pec_scope == "both")
        assert len(world.plans) > 70


@each_job
def test_rooms_suffice_when_most_snapshots_fail(job: Job) -> None:
    run(job, 5, 40, failing=0.7)


@each_job
def test_pieces_make_up_the_plan_and_none_overlap(job: Job) -> None:
    world = run(job, 1, 30)
    for plan in world.plans:
        pieces = world.strategy.pieces(plan)
        parts = [item for piece in pieces for item in piece.plan.parts.items()]
        assert len(parts) == len(plan.parts)
        assert dict(parts) == plan.parts
        assert {piece.plan.iteration for piece in pieces} == {plan.iteration}


@each_job
def test_each_piece_of_a_plan_has_a_kind_of_its_own_that_names_snapshots(job: Job) -> None:
    world = run(job, 1, 30)
    for plan in world.plans:
        kinds = [piece.kind for piece in world.strategy.pieces(plan)]
        assert len(set(kinds)) == len(kinds)
        assert [SnapshotId(1, 0, kind).kind for kind in kinds] == kinds


@each_job
def test_the_first_piece_alone_goes_to_the_room_for_the_state_of_the_trainer(job: Job) -> None:
    world = run(job, 1, 30)
    (room,) = (room for room in world.strategy.buffer_specs() if room.trainer)
    for plan in world.plans:
        first, *others = world.strategy.pieces(plan)
        assert all(part in room.largest.parts[operator] for operator, part in first.plan.parts.items())
        assert any(not operator.is_expert for operator in first.plan.parts)
        assert all(operator.is_expert for piece in others for operator in piece.plan.parts)


@each_job
def test_a_resumed_strategy_continues_as_the_one_that_was_stored(job: Job) -> None:
    world = run(job, 3, 40, failing=0)
    while world.fault(lose_node=False) is None:
        world.step()
    before = world.strategy.to_data()
    plan = world.recoveries[-1]
    again = world.new()
    again.resumed(plan, before, world.iteration)
    assert again.to_data()["rhythm"] == before["rhythm"]
