"""Hybrids of Mamba, delta-net, attention and MoE layers over pipeline stages, also behind a vision tower, killed and
brought back."""

from __future__ import annotations

from functools import partial

import pytest
from hybrid_model import hybrid_shape, seeing
from stock_jobs import FULL, KILLED, RECOMPUTED, SPARSE, Shape, Tied, without_state

UNEVEN = hybrid_shape("ME*M|E")
CHUNKS = hybrid_shape("M|E*|ME|M*E", more=("--global-batch-size", "4"))
NET = "--linear-key-head-dim 8 --linear-value-head-dim 8 --linear-num-key-heads 2 --linear-num-value-heads 4"
DELTA = hybrid_shape("GE*|GE", more=tuple(NET.split()))
AHEAD = hybrid_shape("M*E|ME/*E")
"""The last stage predicts a further token, with a copy of the embedding."""
AGAIN = hybrid_shape("M*E|ME", more=RECOMPUTED)
SEEING = hybrid_shape("*E|ME", hook=seeing)
EXPERTS = hybrid_shape("M*E|ME", ranks=4, ep=2)


TIED = Tied(2, 2, 1, more=UNEVEN.more, hooks=UNEVEN.hooks)


@pytest.mark.parametrize(
    ("shape", "protection", "fault"),
    [
        pytest.param(UNEVEN, SPARSE, "1@5:step", id="sparse", marks=pytest.mark.ci),
        pytest.param(UNEVEN, FULL, "1@4:forward-backward", id="full", marks=pytest.mark.full),
        pytest.param(DELTA, SPARSE, "1@5:step", id="sparse-delta-net", marks=pytest.mark.ci),
        pytest.param(DELTA, FULL, "0@4:forward-backward", id="full-delta-net", marks=pytest.mark.full),
        pytest.param(CHUNKS, FULL, "0@5:step", id="full-interleaved", marks=pytest.mark.full),
        pytest.param(CHUNKS, SPARSE, "1@5:step", id="sparse-interleaved", marks=pytest.mark.full),
        pytest.param(EXPERTS, SPARSE, "3@5:step", id="sparse-experts", marks=pytest.mark.full),
        pytest.param(AGAIN, SPARSE, "0@5:step", id="sparse-recomputed", marks=pytest.mark.ci),
        pytest.param(AHEAD, SPARSE, "1@5:step", id="sparse-mtp", marks=pytest.mark.full),
        pytest.param(AHEAD, FULL, "0@5:step", id="full-mtp", marks=pytest.mark.full),
        pytest.param(SEEING, SPARSE, "0@5:step", id="sparse-vision", marks=pytest.mark.full),
        pytest.param(SEEING, FULL, "0@4:forward-backward", id="full-vision", marks=pytest.mark.ci),
        pytest.param(TIED, SPARSE, "1@5:step", id="sparse-tied", marks=pytest.mark.full),
        pytest.param(TIED, FULL, "0@5:step", id="full-tied", marks=pytest.mark.full),
    ],
)
def test_a_killed_job_of_a_hybrid_over_stages_ends_as_the_undisturbed_one(
    new_job, undisturbed, shape, protection, fault
) -> None:
    job = new_job(shape)
    job.run(*protection, "--moe-ckpt-inject-fault", fault, codes={KILLED, 1})
    outcome = job.run(*protection, "--moe-ckpt-inject-fault", fault)
    assert job.records() == undisturbed(shape)
    assert job.began_again() == []
    struck = int(fault[0])
    if protection == SPARSE and shape is UNEVEN:
        assert any("local rollback" in line for line in outcome.lines), outcome.said
        assert [rank for rank in range(2) if len(set(job.ran(rank))) < len(job.ran(rank))] == [struck]


@pytest.mark.ci
@pytest.mark.parametrize(("shape", "name"), [(UNEVEN, "decoder.layers.3.mixer."), (DELTA, "self_attention.A_log")])
def test_a_layer_that_is_left_out_is_noticed(new_job, shape: Shape, name: str) -> None:
    outcome = new_job(shape).start(*FULL, hooks=[partial(without_state, name)]).wait_or_restart()
    assert set(outcome.codes) == {2}, outcome.codes
    assert name in outcome.said
