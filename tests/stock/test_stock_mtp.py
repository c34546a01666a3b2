"""Layers that predict further tokens (`--mtp-num-layers`) over pipeline stages, killed and brought back."""

from __future__ import annotations

from functools import partial

import pytest
from stock_jobs import FULL, KILLED, RECOMPUTED, SPARSE, Shape, Tied, without_state

AHEAD = ("--mtp-num-layers", "1")
THREE = Shape(ranks=3, pp=3, ep=1, more=AHEAD)
PAIR = Shape(ranks=2, pp=2, ep=1, more=AHEAD)
EXPERTS = Shape(ranks=4, pp=2, ep=2, more=("--mtp-num-layers", "2"))
WITHOUT_STAGES = Shape(ranks=2, pp=1, ep=2, more=(*AHEAD, *RECOMPUTED))
REPEATED = Shape(ranks=2, pp=2, ep=1, more=("--mtp-num-layers", "2", "--mtp-use-repeated-layer"))
ALONE_ON_A_CHUNK = Shape(
    ranks=2, pp=2, ep=1, more=(*AHEAD, "--pipeline-model-parallel-layout", "Et|t|tt|mL", "--global-batch-size", "4")
)
"""The last chunk has no other layer, and the norm of the last one is on another stage."""


TIED = Tied(ranks=2, pp=2, ep=1, more=AHEAD)


@pytest.mark.parametrize(
    ("shape", "protection", "fault"),
    [
        pytest.param(THREE, SPARSE, "2@5:step", id="sparse-both-ends-replay"),
        pytest.param(EXPERTS, FULL, "3@4:forward-backward", id="full", marks=pytest.mark.ci),
        pytest.param(EXPERTS, SPARSE, "3@5:step", id="sparse-two-depths", marks=pytest.mark.full),
        pytest.param(WITHOUT_STAGES, SPARSE, "1@5:step", id="sparse-recomputed", marks=pytest.mark.ci),
        pytest.param(THREE, SPARSE, "1@5:step", id="sparse-the-middle-replays", marks=pytest.mark.full),
        pytest.param(THREE, FULL, "2@5:step", id="full-three-stages", marks=pytest.mark.full),
        pytest.param(ALONE_ON_A_CHUNK, SPARSE, "0@5:step", id="sparse-interleaved", marks=pytest.mark.full),
        pytest.param(ALONE_ON_A_CHUNK, FULL, "0@5:step", id="full-interleaved", marks=pytest.mark.full),
        pytest.param(REPEATED, SPARSE, "1@5:step", id="sparse-repeated", marks=pytest.mark.full),
        pytest.param(TIED, SPARSE, "1@5:step", id="sparse-tied", marks=pytest.mark.full),
        pytest.param(TIED, FULL, "1@5:step", id="full-tied", marks=pytest.mark.full),
    ],
)
def test_a_killed_job_that_predicts_further_tokens_ends_as_the_undisturbed_one(
    new_job, undisturbed, shape, protection, fault
) -> None:
    job = new_job(shape)
    job.run(*protection, "--moe-ckpt-inject-fault", fault, codes={KILLED, 1})
    outcome = job.run(*protection, "--moe-ckpt-inject-fault", fault)
    assert job.records() == undisturbed(shape)
    assert job.began_again() == []
    if shape is THREE and protection == SPARSE:
        # The embedding's copy has the last stage replay where the first does.
        waiting = {2: [1], 1: [0, 2]}[int(fault[0])]
        assert any("local rollback" in line for line in outcome.lines), outcome.said
        assert [rank for rank in range(3) if len(set(job.ran(rank))) == len(job.ran(rank))] == waiting


@pytest.mark.ci
def test_an_operator_that_predicts_further_tokens_and_is_left_out_is_noticed(new_job) -> None:
    outcome = (
        new_job(PAIR)
        .start(*FULL, hooks=[partial(without_state, "mtp.layers.0.mtp_model_layer.mlp.router")])
        .wait_or_restart()
    )
    assert set(outcome.codes) == {2}, outcome.codes
    assert "mtp.layers.0.mtp_model_layer.mlp.router.weight" in outcome.said
