"""Muon, over whole parameters and in core's layer-wise optimizer, killed and brought back."""

from __future__ import annotations

from functools import partial
from importlib.util import find_spec

import pytest
from fp8_hooks import restored_without
from recipes import changed
from stock_jobs import FULL, KILLED, SPARSE, Shape, without_state

PEC = ("--moe-ckpt-strategy", "pec", "--moe-ckpt-pec-k-snapshot", "4")
MUON = ("--bf16", "--optimizer", "muon")
GATHERED_LATE = (*MUON, "--overlap-grad-reduce", "--overlap-param-gather")
LAYER_WISE = Shape(ranks=4, pp=1, ep=2, more=MUON)
STAGES = Shape(ranks=4, pp=2, ep=2, more=MUON)
LATE = Shape(ranks=4, pp=2, ep=2, more=GATHERED_LATE)
SPLIT = Shape(
    ranks=4,
    pp=1,
    ep=2,
    tp=2,
    more=(*MUON, "--sequence-parallel", *"--expert-tensor-parallel-size 1 --muon-tp-mode distributed".split()),
)

needs_package = pytest.mark.skipif(
    find_spec("emerging_optimizers") is None, reason="emerging-optimizers is not installed: pip install .[muon]"
)


class Whole(Shape):
    """Each data-parallel rank steps all parameters."""

    @property
    def flags(self) -> list[str]:
        return changed(super().flags, {"--use-distributed-optimizer": None})


WHOLE = Whole(ranks=4, pp=2, ep=1, more=MUON)
ALONE = Whole(ranks=2, pp=2, ep=1, more=MUON[1:])


@needs_package
@pytest.mark.parametrize(
    ("shape", "protection"),
    [
        pytest.param(LAYER_WISE, FULL, id="layer-wise", marks=pytest.mark.full),
        pytest.param(WHOLE, FULL, id="whole", marks=pytest.mark.ci),
        pytest.param(STAGES, FULL, id="layer-wise-stages", marks=pytest.mark.full),
        pytest.param(LAYER_WISE, PEC, id="layer-wise-pec", marks=pytest.mark.full),
        pytest.param(ALONE, FULL, id="fp32", marks=pytest.mark.full),
    ],
)
def test_a_killed_job_with_muon_ends_as_the_undisturbed_one_to_the_last_bit(
    new_job, undisturbed, shape, protection
) -> None:
    job, fault = new_job(shape), ("--moe-ckpt-inject-fault", "1@4:step")
    job.run(*protection, *fault, codes={KILLED, 1})
    job.run(*protection, *fault)
    assert job.records() == undisturbed(shape)
    assert job.ran(1)[0] == 1
    assert 1 not in job.ran(1)[1:], "nothing begins again"


@needs_package
@pytest.mark.parametrize(
    ("shape", "recovery"),
    [
        pytest.param(LATE, "global", id="layer-wise-stages", marks=pytest.mark.ci),
        pytest.param(STAGES, "auto", id="layer-wise-one-stage-replays", marks=pytest.mark.full),
        pytest.param(WHOLE, "global", id="whole", marks=pytest.mark.full),
        pytest.param(WHOLE, "auto", id="whole-one-stage-replays", marks=pytest.mark.full),
        pytest.param(SPLIT, "global", id="tensor-parallel", marks=pytest.mark.full),
        pytest.param(ALONE, "global", id="fp32", marks=pytest.mark.full),
    ],
)
def test_a_replay_steps_active_matrices_alone_and_ends_as_the_undisturbed_job(
    new_job, undisturbed, shape, recovery
) -> None:
    job, protection = new_job(shape), (*SPARSE, "--moe-ckpt-recovery", recovery)
    fault = ("--moe-ckpt-inject-fault", "1@5:step")
    job.run(*protection, *fault, codes={KILLED, 1})
    job.run(*protection, *fault)
    assert job.records() == undisturbed(shape)
    assert len(set(job.ran(1))) < len(job.ran(1)), "an iteration ran again"


@needs_package
@pytest.mark.ci
def test_a_momentum_that_a_replay_lacks_is_noticed(new_job, undisturbed) -> None:
    job, protection = new_job(ALONE), (*SPARSE, "--moe-ckpt-recovery", "global")
    fault = ("--moe-ckpt-inject-fault", "1@5:step")
    job.run(*protection, *fault, codes={KILLED, 1})
    lost = partial(restored_without, "momentum_buffer", "decoder.layers.2.self_attention.linear_proj.weight")
    outcome = job.start(*protection, *fault, hooks=[lost]).wait_or_restart()
    assert not job.began_again() and "recovered" in outcome.said, outcome.said
    assert job.records() != undisturbed(ALONE)


@needs_package
@pytest.mark.ci
def test_a_momentum_that_is_left_out_is_noticed(new_job) -> None:
    outcome = new_job(WHOLE).run(
        *FULL,
        hooks=[partial(without_state, "decoder.layers.0.self_attention.linear_proj", "momentum_buffer")],
        codes={2},
    )
    assert "momentum_buffer of decoder.layers.0.self_attention.linear_proj.weight" in outcome.said
