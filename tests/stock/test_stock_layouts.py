"""Context parallelism, experts that tensor parallelism cuts otherwise than the rest, and several instances of the
distributed optimizer: killed and brought back."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
from context_hooks import gathered_context, warmed_up_apart
from stock_jobs import FULL, KILLED, SHARED, SPARSE, Shape
from world import ROOT

CONTEXT = Shape(
    ranks=4, pp=2, ep=2, more=("--context-parallel-size", "2", "--global-batch-size", "3"), hooks=(gathered_context,)
)
"""The experts of a stage are shared out over its ranks of context parallelism."""
EXPERTS_CUT = Shape(ranks=4, pp=1, ep=2, more=("--expert-tensor-parallel-size", "2"))
"""Attention is whole on each rank. That attention is cut and experts are not, `TENSOR_PARALLEL` has."""

SEQUENCES = ("--attention-dropout", "0.0", "--global-batch-size", "2", "--train-iters", "1", "--lr-decay-iters", "1")
"""Dropped out is what each rank of context parallelism draws for itself."""
WHOLE = Shape(ranks=2, pp=1, ep=2, more=SEQUENCES, hooks=(warmed_up_apart,))
CUT = replace(WHOLE, more=(*SEQUENCES, "--context-parallel-size", "2"), hooks=(gathered_context, warmed_up_apart))


@contextlib.contextmanager
def ranks_rearranged() -> Iterator[None]:
    """In place of einops, with which core cuts groups into instances, and which need not be installed here."""
    from megatron.core import parallel_state

    def rearrange(ranks: Any, _: str, **sizes: int) -> Any:
        many, size, inner = (sizes[name] for name in "lsu")
        return ranks.reshape(many, size, inner).transpose(0, 2, 1).reshape(-1, size)

    einops = SimpleNamespace(rearrange=rearrange)
    with mock.patch.multiple(parallel_state, create=True, HAVE_EINOPS=True, einops=einops):
        yield


INSTANCES = Shape(
    ranks=4,
    pp=1,
    ep=2,
    more=("--num-distributed-optimizer-instances", "2", "--overlap-grad-reduce", "--overlap-param-gather"),
    hooks=(ranks_rearranged,),
)
"""Two ranks share out the state of the rest, and each has that of its experts alone."""


@pytest.mark.parametrize(
    ("shape", "protection", "fault"),
    [
        pytest.param(CONTEXT, SPARSE, "3@5:step", id="context-sparse", marks=pytest.mark.ci),
        pytest.param(CONTEXT, FULL, "2@4:forward-backward", id="context-full", marks=pytest.mark.full),
        pytest.param(EXPERTS_CUT, SPARSE, "1@5:step", id="experts-cut-sparse", marks=pytest.mark.ci),
        pytest.param(EXPERTS_CUT, FULL, "3@4:forward-backward", id="experts-cut-full", marks=pytest.mark.full),
        pytest.param(INSTANCES, SPARSE, "2@5:step", id="instances-sparse", marks=pytest.mark.ci),
        pytest.param(SHARED, SPARSE, "1@5:step", id="shared-experts-sparse", marks=pytest.mark.full),
        pytest.param(INSTANCES, FULL, "3@4:forward-backward", id="instances-full", marks=pytest.mark.full),
    ],
)
def test_a_killed_job_of_this_layout_ends_as_the_undisturbed_one(
    new_job, undisturbed, shape: Shape, protection: tuple[str, ...], fault: str
) -> None:
    job = new_job(shape)
    job.run(*protection, "--moe-ckpt-inject-fault", fault, codes={KILLED, 1})
    outcome = job.run(*protection, "--moe-ckpt-inject-fault", fault)
    assert job.records() == undisturbed(shape)
    assert job.began_again() == []
    if shape is CONTEXT and protection == SPARSE:
        assert any("local rollback" in line for line in outcome.lines), outcome.said
        assert [rank for rank in range(4) if len(set(job.ran(rank))) < len(job.ran(rank))] == [2, 3]


@pytest.mark.ci
def test_two_ranks_of_context_parallelism_compute_logits_and_gradients_of_one(world) -> None:
    job = world.start((), 2, script=ROOT / "tests" / "stock" / "context_job.py")
    outcome = job.wait()
    assert outcome.codes == (0, 0), outcome.said


@pytest.mark.ci
def test_a_step_with_context_parallelism_has_the_loss_and_norm_of_one_without(undisturbed) -> None:
    whole, cut = (undisturbed(shape)[0, 1] for shape in (WHOLE, CUT))
    assert float.fromhex(cut["losses"]["lm loss"]) == pytest.approx(float.fromhex(whole["losses"]["lm loss"]), rel=1e-6)
    assert float.fromhex(cut["grad_norm"]) == pytest.approx(float.fromhex(whole["grad_norm"]), rel=1e-6)
