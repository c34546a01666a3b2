"""An optimizer on the host (`--optimizer-cpu-offload`), killed and brought back, on a device as asynchronous as a
GPU."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
from device_hooks import asynchronous
from stock_jobs import FULL, KILLED, Shape, without_state
from stock_trainer import after_training

FLAGS = ("--bf16", "--use-precision-aware-optimizer", "--optimizer-cpu-offload")
OVERLAP = "--overlap-cpu-optimizer-d2h-h2d"


@contextlib.contextmanager
def asynchronous_device(schedule: str) -> Iterator[None]:
    """As `device_hooks.asynchronous`, whose facts nobody reads; all of the optimizer's state is on the host."""

    def examine(trained: Any) -> None:
        for member in trained.optimizer.chained_optimizers:
            assert set(member.optimizer.gpu_params_map_cpu_copy) == set(member.optimizer.state)
            state = [value for fields in member.optimizer.state.values() for value in fields.values()]
            assert state
            assert not any(value.is_cuda for value in state)

    with tempfile.TemporaryDirectory() as folder, asynchronous(schedule, 1, folder), after_training(examine):
        yield


STAGES = Shape(2, 2, 1, more=FLAGS, hooks=(partial(asynchronous_device, "starve-copies"),))
EXPERTS = Shape(2, 1, 2, more=(*FLAGS, OVERLAP), hooks=(partial(asynchronous_device, "lazy"),))


@pytest.mark.parametrize(
    ("shape", "fault"),
    [
        pytest.param(STAGES, "1@5:step", id="stages", marks=pytest.mark.ci),
        pytest.param(EXPERTS, "0@4:forward-backward", id="experts-overlap", marks=pytest.mark.full),
    ],
)
def test_a_killed_job_whose_optimizer_is_on_the_host_ends_as_the_undisturbed_one(
    new_job, undisturbed, shape: Shape, fault: str
) -> None:
    job = new_job(shape)
    job.run(*FULL, "--moe-ckpt-inject-fault", fault, codes={KILLED, 1})
    outcome = job.run(*FULL, "--moe-ckpt-inject-fault", fault)
    assert any("recovered iteration" in line and "exactly" in line for line in outcome.lines), outcome.said
    assert job.records() == undisturbed(shape)


@pytest.mark.full
def test_a_moment_on_the_host_that_is_left_out_is_noticed(new_job) -> None:
    outcome = (
        new_job(STAGES)
        .start(*FULL, hooks=[partial(without_state, "decoder.layers.0.mlp.router.weight", "exp_avg")])
        .wait_or_restart()
    )
    assert set(outcome.codes) == {2}, outcome.codes
    assert "exp_avg of " in outcome.said
