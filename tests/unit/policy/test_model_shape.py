"""Shapes of models: parameters against published totals and against Megatron-Core's own models, and bad values."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from megatron.core import parallel_state
from megatron.core.dist_checkpointing.moe.errors import UsageError
from megatron.core.dist_checkpointing.moe.types import (
    FP16_FP32,
    LOW_PRECISIONS,
    PRECISIONS,
    ModelShape,
    OperatorId,
    OperatorKind,
    OperatorSize,
    Part,
    Precision,
    Topology,
    expert,
)
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.transformer import MLATransformerConfig, TransformerConfig, multi_latent_attention
from megatron.pretrain.testing import cpu_device
from moe_ckpt.simulator.models import PRESETS, PUBLISHED, preset

SMALL = ModelShape("small", 3, 16, 4, 32, 24, 4, moe_layer_freq=(0, 1, 1))

# Published models


@pytest.mark.parametrize("name", [name for name in PRESETS if name != "GPT-350M-16E"])
def test_total_parameters_are_the_published_ones_within_two_percent(name: str) -> None:
    assert PRESETS[name].total_parameters == pytest.approx(PUBLISHED[name].total_parameters, rel=0.02)


def test_the_deviation_of_gpt_350m_16e_from_its_published_total_is_known_and_told() -> None:
    shape, published = PRESETS["GPT-350M-16E"], PUBLISHED["GPT-350M-16E"].total_parameters
    assert published == 1_700_000_000
    assert shape.total_parameters == pytest.approx(1_865_890_000, rel=1e-5)
    assert "1.87 G parameters, not the published 1.7 G" in shape.note


@pytest.mark.parametrize(
    ("name", "total_g"),
    [
        ("GPT-125M-8E", 0.3228),
        ("MoE-LLaVa", 2.890),
        ("GPT-MoE", 7.445),
        ("QWen-MoE", 14.316),
        ("DeepSeek-MoE", 16.376),
        ("DeepSeek-V3-671B", 671.03),
        ("Mixtral-8x7B", 46.703),
        ("Mixtral-8x22B", 140.621),
        ("Qwen3-30B-A3B", 30.532),
    ],
)
def test_total_parameters_are_those_checked_by_hand(name: str, total_g: float) -> None:
    assert PRESETS[name].total_parameters / 1e9 == pytest.approx(total_g, rel=2e-4)


def test_every_preset_has_a_published_total_with_its_source_and_a_note() -> None:
    assert list(PUBLISHED) == list(PRESETS)
    assert all(published.source for published in PUBLISHED.values())
    assert all(shape.note for shape in PRESETS.values())


def test_the_two_papers_of_gpt2_moe_small_describe_one_shape() -> None:
    one, other = PRESETS["GPT-125M-8E"], PRESETS["GPT2-MoE-Small"]
    assert replace(one, name="", note="") == replace(other, name="", note="")


def test_a_preset_is_found_in_any_case_and_a_wrong_name_is_told_the_closest() -> None:
    assert preset("deepseek-v3-671b") is PRESETS["DeepSeek-V3-671B"]
    with pytest.raises(UsageError, match=r"'deepseek-v3' is not known \(did you mean DeepSeek-V3-671B\?\)"):
        preset("deepseek-v3")


def test_deepseek_v3_has_at_least_14000_operators() -> None:
    shape = PRESETS["DeepSeek-V3-671B"]
    assert len(shape.operators) == 1 + 61 + 58 * (1 + 256) + 1
    assert len(shape.operators) >= 14_000


def test_expert_state_is_most_of_a_moe_model() -> None:
    shape = PRESETS["GPT-350M-16E"]
    assert shape.expert_parameters / shape.total_parameters == pytest.approx(0.86, abs=0.01)  # MoC Fig. 2


# Against Megatron-Core


@pytest.fixture(scope="module")
def one_process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    store = tmp_path_factory.mktemp("rendezvous") / "store"
    torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    with cpu_device.installed():
        parallel_state.initialize_model_parallel()
        try:
            yield
        finally:
            parallel_state.destroy_model_parallel()
            torch.distributed.destroy_process_group()


class WithoutParameters(torch.nn.Module):
    """In the place of the core attention, which has no parameters, and of which only CUDA's kernels do latent ones."""

    def __init__(self, *_: object, **__: object) -> None:
        super().__init__()


def megatron_parameters(shape: ModelShape) -> Counter[OperatorId]:
    """Parameters of the operators of a real GPTModel, by the names that Megatron-Core gives them."""
    settings: dict[str, Any] = {
        name: getattr(shape, name)
        for name in (
            "num_layers hidden_size num_attention_heads ffn_hidden_size moe_router_topk moe_ffn_hidden_size"
            " moe_shared_expert_gate num_query_groups kv_channels gated_linear_unit add_bias_linear add_qkv_bias"
            " qk_layernorm normalization"
        ).split()
    }
    settings |= {
        "num_moe_experts": shape.num_experts or None,
        "moe_shared_expert_intermediate_size": shape.moe_shared_expert_intermediate_size or None,
        "moe_layer_freq": shape.moe_layer_freq if isinstance(shape.moe_layer_freq, int) else list(shape.moe_layer_freq),
        "use_cpu_initialization": True,
    }
    kind: type[TransformerConfig] = TransformerConfig
    if shape.multi_latent_attention:
        kind = MLATransformerConfig
        settings |= {
            name: getattr(shape, name)
            for name in ("q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim")
        } | {"multi_latent_attention": True, "rope_type": "rope"}
    config = kind(**settings)
    spec = get_gpt_decoder_block_spec(config, use_transformer_engine=False, normalization=shape.normalization)
    for layer in spec.layer_specs:
        layer.submodules.self_attention.submodules.core_attention = WithoutParameters
    model = GPTModel(
        config,
        spec,
        vocab_size=shape.vocab_size,
        max_sequence_length=shape.max_position_embeddings,
        position_embedding_type="learned_absolute" if shape.max_position_embeddings else "rope",
        share_embeddings_and_output_weights=not shape.untie_embeddings_and_output_weights,
    )
    found: Counter[OperatorId] = Counter()
    for name, parameter in model.named_parameters():
        found[operator_of(name, shape.num_layers)] += parameter.numel()
    return found


def operator_of(name: str, num_layers: int) -> OperatorId:
    if name.startswith("embedding."):
        return OperatorId(-1, OperatorKind.EMBEDDING)
    layer = re.match(r"decoder\.layers\.(\d+)\.(?:mlp\.experts\.local_experts\.(\d+)\.|(mlp\.router)\.)?", name)
    if layer is None:
        assert name.startswith(("decoder.final_layernorm.", "output_layer."))
        return OperatorId(num_layers, OperatorKind.HEAD)
    if layer[2] is not None:
        return expert(int(layer[1]), int(layer[2]))
    return OperatorId(int(layer[1]), OperatorKind.ROUTER if layer[3] else OperatorKind.NON_EXPERT)


@pytest.mark.parametrize(
    "shape",
    [
        replace(SMALL, add_bias_linear=True, normalization="LayerNorm", max_position_embeddings=8),
        replace(
            SMALL,
            num_experts=0,
            moe_layer_freq=1,
            add_bias_linear=True,
            normalization="LayerNorm",
            max_position_embeddings=8,
        ),
        replace(SMALL, num_experts=0, moe_layer_freq=1, gated_linear_unit=True, num_query_groups=2),
        replace(SMALL, untie_embeddings_and_output_weights=True, gated_linear_unit=True, moe_ffn_hidden_size=6),
        replace(SMALL, moe_shared_expert_intermediate_size=12, moe_shared_expert_gate=True, add_qkv_bias=True),
        replace(SMALL, kv_channels=6, num_query_groups=2, qk_layernorm=True, moe_layer_freq=2),
        replace(SMALL, qk_layernorm=True, normalization="LayerNorm"),
        replace(
            SMALL,
            multi_latent_attention=True,
            q_lora_rank=10,
            kv_lora_rank=6,
            qk_head_dim=5,
            qk_pos_emb_head_dim=2,
            v_head_dim=7,
            qk_layernorm=True,
        ),
    ],
    ids=[
        "gpt",
        "dense gpt",
        "gated dense",
        "gated",
        "shared expert",
        "grouped queries",
        "normalized queries",
        "latent attention",
    ],
)
def test_each_operator_has_the_parameters_that_megatron_core_gives_it(
    shape: ModelShape, one_process: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Without Transformer Engine this name is None, which core nevertheless asks isinstance about.
    monkeypatch.setattr(multi_latent_attention, "TELinear", torch.nn.Identity)
    assert megatron_parameters(shape) == Counter(shape.parameters)


# Operators and stages


def test_operators_run_from_the_input_of_the_model_to_its_output() -> None:
    names = [str(operator) for operator in SMALL.operators]
    assert names[:2] == ["embedding", "layer0.non_expert"]
    assert names[2:5] == ["layer1.non_expert", "layer1.router", "layer1.expert0"]
    assert names[-1] == "head"
    assert list(SMALL.operators) == sorted(SMALL.operators)


def test_an_integer_frequency_begins_with_the_first_layer() -> None:
    assert replace(SMALL, num_layers=5, moe_layer_freq=2).moe_layers == (0, 2, 4)
    assert replace(SMALL, num_experts=0, moe_layer_freq=1).moe_layers == ()


@pytest.mark.parametrize("topology", [Topology(8, pp=2, ep=4), Topology(3, pp=3), Topology(1)])
def test_each_operator_is_on_exactly_one_stage(topology: Topology) -> None:
    stages = SMALL.operators_of_stages(topology)
    assert sorted(operator for stage in stages for operator in stage) == list(SMALL.operators)
    assert stages[0][0].kind is OperatorKind.EMBEDDING
    assert stages[-1][-1].kind is OperatorKind.HEAD


def test_experts_are_spread_over_expert_parallel_ranks_in_contiguous_blocks() -> None:
    assert [SMALL.expert_rank(index, Topology(2, ep=2)) for index in range(4)] == [0, 0, 1, 1]
    with pytest.raises(UsageError, match="ep 3 does not divide num_experts 4"):
        SMALL.expert_rank(0, Topology(3, ep=3))


# Precision (MoEvement Table 7)


@pytest.mark.parametrize(
    ("name", "compute", "master", "moments", "full"),
    [
        ("fp16-fp32", 2, 4, 8, 12),
        ("fp32", 4, 4, 8, 12),
        ("fp16-fp16", 2, 2, 4, 6),
        ("fp8-fp32", 1, 4, 8, 12),
        ("fp8-fp16-fp32", 1, 2, 8, 10),
        ("fp8-fp16-fp8", 1, 2, 3, 5),
        ("fp8-fp8", 1, 1, 3, 4),
    ],
)
def test_bytes_per_parameter_are_those_of_the_table(
    name: str, compute: int, master: int, moments: int, full: int
) -> None:
    precision = PRECISIONS[name]
    parts = (Part.COMPUTE, Part.MASTER, Part.MOMENTS, Part.MASTER_AND_MOMENTS, Part.EVERYTHING, Part.NOTHING)
    bytes_of_parts = [precision.bytes_per_parameter(part) for part in parts]
    assert bytes_of_parts == [compute, master, moments, full, full + compute, 0]


@pytest.mark.parametrize(
    ("name", "full"),
    [("fp16-fp32", 12), ("fp16-fp16", 8), ("fp8-fp32", 12), ("fp8-fp16-fp32", 11), ("fp8-fp16-fp8", 6), ("fp8-fp8", 5)],
)
def test_an_exact_full_state_has_the_weights_that_masters_of_few_bits_do_not_tell(name: str, full: int) -> None:
    precision = PRECISIONS[name]
    assert precision.full_bytes == precision.bytes_per_parameter(Part.MASTER_AND_MOMENTS)
    assert precision.exact().full_bytes == full
    parameters = SMALL.total_parameters
    assert sum(size.full_bytes for size in SMALL.sizes(precision.exact()).values()) == parameters * full


def test_all_five_low_precisions_are_there() -> None:
    assert len(LOW_PRECISIONS) == 5
    assert all(f"row {row}" in precision.source for row, precision in enumerate(LOW_PRECISIONS, 1))


def test_sizes_are_parameters_times_bytes() -> None:
    sizes = SMALL.sizes(FP16_FP32)
    assert list(sizes) == list(SMALL.operators)
    parameters = 2 * SMALL.hidden_size * SMALL.ffn_hidden_size
    assert sizes[expert(1, 0)] == OperatorSize(12 * parameters, 2 * parameters)


def test_a_precision_without_bytes_is_refused() -> None:
    with pytest.raises(UsageError, match="precision none: master_bytes is 0, but must be at least 1"):
        Precision("none", 1, 0, 1, 1)


# Bad input


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("num_layers", 0, "num_layers is 0, but must be at least 1"),
        ("hidden_size", -1, "hidden_size is -1, but must be at least 1"),
        ("moe_ffn_hidden_size", 0, "moe_ffn_hidden_size is 0, but must be at least 1"),
        ("num_experts", -1, "num_experts is -1, but must be at least 0"),
        ("moe_router_topk", 5, "moe_router_topk is 5, but must be from 1 to num_experts = 4"),
        ("moe_router_topk", 0, "moe_router_topk is 0, but must be from 1 to num_experts = 4"),
        ("normalization", "rms", "normalization is 'rms', not RMSNorm or LayerNorm"),
        ("moe_layer_freq", 0, "moe_layer_freq is 0, but must be at least 1"),
        ("moe_layer_freq", (0, 1), "moe_layer_freq must have one 0 or 1 for each of the 3 layers"),
        ("moe_layer_freq", (0, 1, 2), "moe_layer_freq must have one 0 or 1 for each of the 3 layers"),
        ("num_attention_heads", 3, "hidden_size 16 is not a multiple of num_attention_heads 3: give kv_channels"),
    ],
)
def test_values_that_no_model_can_have_are_refused(field: str, value: object, message: str) -> None:
    with pytest.raises(UsageError, match=f"model small: {re.escape(message)}"):
        replace(SMALL, **{field: value})


def test_more_stages_than_layers_are_refused() -> None:
    with pytest.raises(UsageError, match="3 layers cannot fill pp x vpp = 4 stages"):
        SMALL.operators_of_stages(Topology(4, pp=4))
