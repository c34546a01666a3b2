"""The training jobs of MoEvement's evaluation: models, layouts and batches of its sections 5.1, 5.4 and 5.7."""

from __future__ import annotations

from dataclasses import dataclass, replace

from megatron.core.dist_checkpointing.moe.types import FP16_FP32, ModelShape, Precision, Topology
from moe_ckpt.simulator.inputs import TrainingJob
from moe_ckpt.simulator.models import preset

SEQ_LENGTH = 2048
"""Tokens of a sample (5.1). MoE-LLaVa's are not published; the same is assumed."""

GLOBAL_BATCH = 512
MICRO_BATCH = 32
"""Samples of one pipeline's microbatch, split over the ranks of a stage (5.1)."""

MODELS = ("MoE-LLaVa", "GPT-MoE", "QWen-MoE", "DeepSeek-MoE")
MTBF_S = (7200, 3600, 1800, 1200, 600)

_PIPELINES = {"MoE-LLaVa": (6, 2), "GPT-MoE": (3, 4), "QWen-MoE": (6, 2), "DeepSeek-MoE": (12, 1)}
_EP = 8


def azure_shape(model: str) -> ModelShape:
    """The shape of a model of Table 2.

    Of QWen-MoE's 60 routed experts 8 expert-parallel ranks cannot have equal parts. Table 2 gives it 64 experts, 8 of
    them active: its shared expert, as large as 4, counted as 4 more that each token goes to. Parameters, all and
    active, stay the same. Raises UsageError for a model that is not known.
    """
    shape = preset(model)
    if model != "QWen-MoE":
        return shape
    return replace(
        shape, num_experts=64, moe_router_topk=8, moe_shared_expert_intermediate_size=0, moe_shared_expert_gate=False
    )


def azure_job(model: str) -> TrainingJob:
    """One of the four jobs on 96 A100 GPUs (5.1). What the paper calls DP counts pipelines, each of EP ranks a stage.

    MoE-LLaVa has 4 experts, so that its published EP of 8 becomes 4, with twice as many data-parallel ranks of experts.
    Raises KeyError for other models.
    """
    stages, pipelines = _PIPELINES[model]
    shape = azure_shape(model)
    topology = Topology(stages * pipelines * _EP, pp=stages, ep=min(_EP, shape.num_experts))
    return _job(shape, topology, pipelines, FP16_FP32)


def h100_job(precision: Precision) -> TrainingJob:
    """DeepSeek-MoE on 128 H100 GPUs, 8 stages, 2 pipelines, 8-way expert parallel (5.7)."""
    stages, pipelines = 8, 2
    return _job(preset("DeepSeek-MoE"), Topology(stages * pipelines * _EP, pp=stages, ep=_EP), pipelines, precision)


def _job(shape: ModelShape, topology: Topology, pipelines: int, precision: Precision) -> TrainingJob:
    microbatches = GLOBAL_BATCH // (MICRO_BATCH * pipelines)
    return TrainingJob(shape, topology, precision, GLOBAL_BATCH, microbatches, SEQ_LENGTH)


_V3 = preset("DeepSeek-V3-671B")
_MOE_16B = preset("DeepSeek-MoE")
_NOTE = (
    "Not a published shape. Layers are a multiple of the pipeline stages of MoEvement 5.4, hidden size and number of"
    " experts lie between those of DeepSeekMoE 16B and 145B, and the width of an expert is chosen so that the total"
    " matches."
)


@dataclass(frozen=True)
class ScaleOut:
    """A model of Fig. 11 and its layout; experts are 8-way parallel."""

    shape: ModelShape
    stages: int
    pipelines: int


def _between(size: str, layers: int, hidden: int, experts: int, width: int) -> ModelShape:
    """DeepSeekMoE with other sizes: the first layer dense, 2 shared experts, heads of 128."""
    return replace(
        _MOE_16B,
        name=f"DeepSeek-MoE-{size}",
        num_layers=layers,
        hidden_size=hidden,
        num_attention_heads=hidden // 128,
        num_experts=experts,
        moe_ffn_hidden_size=width,
        moe_shared_expert_intermediate_size=2 * width,
        moe_layer_freq=(0,) + (1,) * (layers - 1),
        note=_NOTE,
    )


_671B = replace(
    _V3,
    name="DeepSeek-MoE-671B",
    num_layers=64,
    moe_ffn_hidden_size=1944,
    moe_shared_expert_intermediate_size=1944,
    moe_layer_freq=(0,) * 3 + (1,) * 61,
    note=(
        "DeepSeek-V3 with 64 layers, because 61 cannot fill the 64 stages of MoEvement 5.4, and with experts narrower"
        " by as much as keeps the total."
    ),
)

SCALE_OUT = {
    "32B": ScaleOut(_between("32B", 32, 3072, 64, 1600), 16, 4),
    "67B": ScaleOut(_between("67B", 48, 3584, 96, 1280), 24, 8),
    "145B": ScaleOut(_between("145B", 64, 4096, 128, 1384), 32, 16),
    "671B": ScaleOut(_671B, 64, 32),
}


def scale_out_job(size: str) -> TrainingJob:
    """A job of Fig. 11 (5.4), on 512 to 16,384 GPUs.

    The paper gives no batch for these. Assumed: one sample per rank in a microbatch and twice as many microbatches as
    stages, which gives the largest model 67 million tokens per iteration (DeepSeek-V3 trained with 63 million).
    Raises KeyError for a size that the figure does not have.
    """
    model = SCALE_OUT[size]
    topology = Topology(model.stages * model.pipelines * _EP, pp=model.stages, ep=_EP)
    microbatches = 2 * model.stages
    return TrainingJob(model.shape, topology, FP16_FP32, microbatches * model.pipelines * _EP, microbatches, SEQ_LENGTH)
