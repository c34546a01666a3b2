"""Each family has the tensors, by name and shape, of the model that transformers makes of the same config."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from examples_of_folders import CONFIGS, config_of

from moe_ckpt.hugging_face.config import Config
from moe_ckpt.hugging_face.families import read_model

EXPERTS = re.compile(r"\.experts\.(\d+\.|gate_up_proj$|down_proj$)")
"""Alone, or in one tensor as transformers 5 has them."""


@pytest.mark.ci
@pytest.mark.parametrize("family", CONFIGS)
def test_tensors_are_those_of_the_model_that_transformers_makes(family: str) -> None:
    transformers = pytest.importorskip("transformers")
    config = config_of(family, num_nextn_predict_layers=0)  # layers ahead are published, and not in transformers
    theirs = transformers.AutoConfig.for_model(**config)
    with torch.device("meta"):
        made: Any = transformers.AutoModelForCausalLM.from_config(theirs)
    tied = {"lm_head.weight"} if theirs.tie_word_embeddings else set()
    expected = {name: tuple(tensor.shape) for name, tensor in made.state_dict().items() if name not in tied}
    weights = read_model(Config(config, family)).weights()
    found = {name.replace("block_sparse_moe", "mlp"): shape for weight in weights for name, shape in weight.parts}
    assert found == expected if family == "gpt_oss" else _apart(found) == _apart(expected)


def _apart(tensors: dict[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """Without routed experts that have a tensor each on one side."""
    return {name: shape for name, shape in tensors.items() if not EXPERTS.search(name)}


@pytest.mark.ci
@pytest.mark.parametrize(
    "more", [{}, {"beta_fast": 16, "beta_slow": 2, "truncate": False}, {"mscale": 0.8, "mscale_all_dim": 0.4}]
)
def test_yarn_stretches_in_megatron_as_in_transformers(more: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    transformers = pytest.importorskip("transformers")
    yarn = pytest.importorskip("megatron.core.models.common.embeddings.yarn_rotary_pos_embedding")
    rope = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512, "rope_theta": 10000.0} | more
    config = config_of("qwen3_moe", head_dim=16, rope_parameters=rope, max_position_embeddings=2048)
    compute = transformers.modeling_rope_utils.ROPE_INIT_FUNCTIONS["yarn"]
    frequencies, scale = compute(transformers.AutoConfig.for_model(**config), torch.device("cpu"))

    values = read_model(Config(config, "qwen3_moe")).arguments
    monkeypatch.setattr(torch.cuda, "current_device", lambda: torch.device("cpu"))
    module = yarn.YarnRotaryEmbedding(
        values["kv_channels"],
        rotary_base=values["rotary_base"],
        use_cpu_initialization=True,
        scaling_factor=values["rotary_scaling_factor"],
        original_max_position_embeddings=values["yarn_original_max_position_embeddings"],
        beta_fast=values["yarn_beta_fast"],
        beta_slow=values["yarn_beta_slow"],
        mscale=values["mscale"],
        mscale_all_dim=values["mscale_all_dim"],
        correction_range_round_to_int=values["yarn_correction_range_round_to_int"],
    )
    angles, factor = module.get_emb(2)
    torch.testing.assert_close(angles[1, 0, 0, : len(frequencies)], frequencies)
    assert factor == pytest.approx(scale)


@pytest.mark.ci
def test_experts_of_gpt_oss_compute_in_megatron_what_they_compute_in_transformers() -> None:
    transformers = pytest.importorskip("transformers")
    quick_gelu = pytest.importorskip("megatron.core.activations").quick_gelu
    config = config_of("gpt_oss")
    draw = torch.Generator().manual_seed(3)
    theirs = transformers.models.gpt_oss.modeling_gpt_oss.GptOssExperts(transformers.AutoConfig.for_model(**config))
    tensors = {
        f"model.layers.0.mlp.experts.{name}": torch.randn(parameter.shape, generator=draw) * 3
        for name, parameter in theirs.named_parameters()
    }
    theirs.load_state_dict({name.rpartition(".")[2]: tensor for name, tensor in tensors.items()})
    model = read_model(Config(config, "gpt_oss"))
    ours = {
        weight.names[0].rpartition("experts.")[2]: weight.form.join([tensors[weight.parts[0][0]]])
        for weight in model.weights()
        if weight.parts[0][0] in tensors
    }
    hidden = torch.randn(5, model.arguments["hidden_size"], generator=draw)
    limit, offset = model.arguments["activation_func_clamp_value"], model.arguments["glu_linear_offset"]
    for expert in range(model.arguments["num_experts"]):
        # As `MLP.forward` of Megatron-Core computes `glu`.
        between = hidden @ ours["linear_fc1.weight"][expert].T + ours["linear_fc1.bias"][expert]
        gate, linear = torch.chunk(between, 2, dim=-1)
        gated = quick_gelu(gate.clamp(max=limit)) * (linear.clamp(min=-limit, max=limit) + offset)
        found = gated @ ours["linear_fc2.weight"][expert].T + ours["linear_fc2.bias"][expert]
        chosen, weights = torch.full((5, 1), expert), torch.ones(5, 1)
        torch.testing.assert_close(found, theirs(hidden, chosen, weights))
