"""What the simulator has strategies plan is what they plan in a job under the real coordinator."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest
from simulated import EXPERTS, LAYERS, RANKS, Simulation, journal_of

from megatron.core.dist_checkpointing.moe.config import MoECheckpointConfig
from megatron.core.dist_checkpointing.moe.strategies import STRATEGIES, Job, Strategy, Throughput
from megatron.core.dist_checkpointing.moe.types import FP16_FP32, SnapshotPlan, Topology
from moe_ckpt.simulator.driver import Driver, strategy_job
from moe_ckpt.simulator.inputs import TrainingJob
from moe_ckpt.simulator.models import preset
from moe_ckpt.simulator.shards import shard_sizes

ITERATIONS = 18


def counts_of(rank: int, iteration: int) -> Mapping[int, tuple[int, ...]]:
    """A rank's share of the tokens of any iteration: the higher the expert, the more."""
    return {layer: tuple(2 * expert + 1 for expert in range(EXPERTS)) for layer in range(LAYERS)}


def summed(iteration: int) -> list[list[int]]:
    """Those of all ranks; none where the step was skipped."""
    ranks = 0 if journal_of(0, iteration).skipped else RANKS
    return [[ranks * count for count in counts_of(0, 1)[layer]] for layer in range(LAYERS)]


class Recorded:
    """The jobs that strategies of a simulated job were made for, and what the coordinators got from each of them."""

    def __init__(self) -> None:
        self.jobs: list[Job] = []
        self.plans: list[list[SnapshotPlan]] = []

    def making(self, make: type[Strategy]) -> Callable[[Job], Strategy]:
        """`make`, with an eye on what the strategy plans."""

        def made(job: Job) -> Strategy:
            strategy, plans = make(job), []
            plan = strategy.plan

            def planned(iteration: int) -> SnapshotPlan | None:
                found = plan(iteration)
                plans.extend([] if found is None else [found])
                return found

            strategy.plan = planned  # type: ignore[method-assign]
            self.jobs.append(job)
            self.plans.append(plans)
            return strategy

        made.plans_by_sizes = make.plans_by_sizes  # type: ignore[attr-defined]
        return made


@pytest.mark.parametrize(
    "flags",
    [
        {"strategy": "full", "interval": 3},
        {"strategy": "sparse", "window": "3"},
        {"strategy": "sparse", "window": "4", "ordering": "time-decayed"},
        {"strategy": "pec", "pec_k_snapshot": 1},
        {"strategy": "pec", "pec_k_snapshot": 2, "pec_selection": "load-aware"},
        {"strategy": "pec", "pec_k_snapshot": 1, "plt_threshold": 0.05},
    ],
    ids=lambda flags: "-".join(map(str, flags.values())),
)
def test_plans_are_those_of_a_job_under_the_real_coordinator(
    monkeypatch: pytest.MonkeyPatch, flags: dict[str, Any]
) -> None:
    config = MoECheckpointConfig(replicas=1, **flags)
    recorded = Recorded()
    with monkeypatch.context() as patched:
        making = recorded.making(STRATEGIES[config.strategy])
        patched.setattr(type(STRATEGIES), "__getitem__", lambda _, name: making)
        # Iterations take long enough for copies and replicas, as where memory and links are not too slow.
        Simulation(config, iterations=ITERATIONS, counts=counts_of, each=lambda job, rank: job.world.sleep(1.0)).run(
            seed=0
        )
    driver = Driver(recorded.jobs[0], summed)
    plans = [plan for plan in (driver.iterate() for _ in range(ITERATIONS)) if plan is not None]
    of_ranks = [of_rank for of_rank in recorded.plans if of_rank]
    assert len(of_ranks) == RANKS
    for of_rank in of_ranks:
        assert [(plan.iteration, dict(plan.parts)) for plan in of_rank] == [
            (plan.iteration, dict(plan.parts)) for plan in plans
        ]
    assert len(plans) > 5


def test_one_rank_of_each_stage_and_expert_parallel_rank_stands_for_all_that_own_the_same() -> None:
    training = TrainingJob(preset("GPT-125M-8E"), Topology(16, pp=2, ep=4), FP16_FP32, 32, 4, 2048)
    config = MoECheckpointConfig(strategy="sparse")
    few = strategy_job(training.shape, training.topology, training.precision, config, tokens=training.tokens)
    sizes = shard_sizes(training.shape, training.topology, training.precision)
    every = {}
    for rank in range(16):
        at = training.topology.coordinates(rank)
        every[rank] = {one: sizes[one] for one in few.sizes[at.pp * 4 + at.ep]}
    windows = []
    for job in (few, replace(few, sizes=every)):
        driver = Driver(job, lambda iteration: [[1] * 8] * 6, pace=Throughput(1.0, 40e6))
        windows.append([plan.parts for plan in (driver.iterate() for _ in range(12)) if plan is not None])
    assert windows[0] == windows[1]
    assert len(windows[0]) > 3
