"""The jobs of the evaluation: sizes, layouts, and what had to be derived."""

from __future__ import annotations

import pytest

from megatron.core.dist_checkpointing.moe.types import LOW_PRECISIONS
from moe_ckpt.simulator.models import PUBLISHED, preset
from reproduce.jobs import (
    MODELS,
    SCALE_OUT,
    azure_job,
    azure_shape,
    h100_job,
    scale_out_job,
)


@pytest.mark.parametrize("model", MODELS)
def test_each_job_of_the_tables_fills_96_gpus_with_the_published_parameters(model: str) -> None:
    job = azure_job(model)
    assert job.topology.world_size == 96
    assert job.shape.total_parameters == pytest.approx(PUBLISHED[model].total_parameters, rel=0.025)


def test_microbatches_of_32_samples_make_the_batch_of_512() -> None:
    assert [azure_job(model).microbatches for model in MODELS] == [8, 4, 8, 16]


def test_counting_the_shared_expert_as_four_keeps_the_parameters_of_qwen() -> None:
    with_64, with_60 = azure_shape("QWen-MoE"), preset("QWen-MoE")
    assert with_64.num_experts == 64
    assert with_64.total_parameters == pytest.approx(with_60.total_parameters, rel=0.001)


@pytest.mark.parametrize(("size", "gpus"), [("32B", 512), ("67B", 1536), ("145B", 4096), ("671B", 16384)])
def test_the_scaled_models_have_their_names_parameters_on_the_published_clusters(size: str, gpus: int) -> None:
    job = scale_out_job(size)
    assert job.topology.world_size == gpus
    assert job.shape.total_parameters == pytest.approx(float(size[:-1]) * 1e9, rel=0.01)


def test_no_stage_of_a_scaled_model_has_more_layers_than_another() -> None:
    for size, model in SCALE_OUT.items():
        layers = scale_out_job(size).topology.layers_of_stages(model.shape.num_layers)
        assert len({len(stage) for stage in layers}) == 1


def test_the_low_precision_job_fills_128_gpus() -> None:
    job = h100_job(LOW_PRECISIONS[0])
    assert (job.topology.world_size, job.microbatches) == (128, 8)
