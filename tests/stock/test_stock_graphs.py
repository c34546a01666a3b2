"""CUDA graphs of whole iterations under `sparse`: killed jobs run iterations again eagerly, and capture behind that."""

from __future__ import annotations

import pytest
from graph_hooks import replayed_through_graphs, whole_iterations
from stock_jobs import KILLED, SPARSE, Shape

FAULT = ("--moe-ckpt-inject-fault", "1@4:step")
CAPTURED = Shape(
    ranks=2,
    pp=2,
    ep=1,
    more=(*"--cuda-graph-impl full_iteration --cuda-graph-warmup-steps 1 --no-check-for-nan-in-loss-and-grad".split(),),
    hooks=(whole_iterations,),
)

pytestmark = pytest.mark.ci


def test_a_killed_job_with_graphs_of_whole_iterations_ends_as_the_undisturbed_one(new_job, undisturbed) -> None:
    job = new_job(CAPTURED)
    job.run(*SPARSE, *FAULT, codes={KILLED, 1})
    outcome = job.run(*SPARSE, *FAULT)
    assert "localized recovery: unavailable with CUDA graphs of whole iterations" in outcome.said
    assert all(len(job.ran(rank)) > len(set(job.ran(rank))) for rank in range(2)), "both stages ran iterations again"
    assert job.records() == undisturbed(CAPTURED)


@pytest.mark.full
def test_iterations_that_are_run_again_through_a_graph_are_noticed(new_job, undisturbed) -> None:
    # The second iteration is captured; of three in a window it has frozen operators.
    job, flags = new_job(CAPTURED), (*SPARSE[:3], "3", "--moe-ckpt-inject-fault", "1@5:step")
    job.run(*flags, codes={KILLED, 1})
    job.start(*flags, hooks=[replayed_through_graphs]).wait_or_restart()
    assert job.records() != undisturbed(CAPTURED)
