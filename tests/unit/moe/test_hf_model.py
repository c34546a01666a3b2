"""A model described by its config.json of Hugging Face has the shape of the preset of that model."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatron.core.dist_checkpointing.moe.errors import UsageError
from moe_ckpt.commands.model_file import load_model
from moe_ckpt.simulator.models import PRESETS

COMMON = {"tie_word_embeddings": False, "torch_dtype": "bfloat16"}
CONFIGS: dict[str, dict[str, Any]] = {
    "Qwen3-235B-A22B": {
        "model_type": "qwen3_moe", "num_hidden_layers": 94, "hidden_size": 4096, "num_attention_heads": 64,
        "num_key_value_heads": 4, "head_dim": 128, "vocab_size": 151936, "intermediate_size": 12288,
        "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 1536, "decoder_sparse_step": 1,
        "mlp_only_layers": [], "attention_bias": False,
    },
    "Kimi-K2": {
        "model_type": "kimi_k2", "num_hidden_layers": 61, "hidden_size": 7168, "num_attention_heads": 64,
        "num_key_value_heads": 64, "vocab_size": 163840, "intermediate_size": 18432, "n_routed_experts": 384,
        "num_experts_per_tok": 8, "moe_intermediate_size": 2048, "n_shared_experts": 1, "first_k_dense_replace": 1,
        "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
    },
    "GPT-OSS-120B": {
        "model_type": "gpt_oss", "num_hidden_layers": 36, "hidden_size": 2880, "num_attention_heads": 64,
        "num_key_value_heads": 8, "head_dim": 64, "vocab_size": 201088, "intermediate_size": 2880,
        "num_local_experts": 128, "experts_per_token": 4, "attention_bias": True,
    },
    "Mixtral-8x7B": {
        "model_type": "mixtral", "num_hidden_layers": 32, "hidden_size": 4096, "num_attention_heads": 32,
        "num_key_value_heads": 8, "vocab_size": 32000, "intermediate_size": 14336, "num_local_experts": 8,
        "num_experts_per_tok": 2,
    },
    "Llama-3-70B": {
        "model_type": "llama", "num_hidden_layers": 80, "hidden_size": 8192, "num_attention_heads": 64,
        "num_key_value_heads": 8, "vocab_size": 128256, "intermediate_size": 28672, "attention_bias": False,
    },
}  # fmt: skip


def loaded(folder: Path, content: dict[str, Any]) -> Any:
    path = folder / "config.json"
    path.write_text(json.dumps(COMMON | content))
    return load_model(str(path))


@pytest.mark.parametrize("name", CONFIGS)
def test_a_config_json_gives_the_parameters_of_the_preset_operator_by_operator(name: str, tmp_path: Path) -> None:
    found, known = loaded(tmp_path, CONFIGS[name]), PRESETS[name]
    assert found.parameters == known.parameters
    assert found.moe_router_topk == known.moe_router_topk
    assert found.name == tmp_path.name


def test_the_text_part_of_a_model_of_several_kinds_is_read(tmp_path: Path) -> None:
    inner = COMMON | CONFIGS["Llama-3-70B"]
    found = loaded(tmp_path, {"model_type": "seeing_llama", "text_config": inner})
    assert replace(found, name="", note="").parameters == PRESETS["Llama-3-70B"].parameters


def test_layers_that_predict_further_tokens_are_said_not_to_be_modelled(tmp_path: Path) -> None:
    ahead = loaded(tmp_path, CONFIGS["Kimi-K2"] | {"num_nextn_predict_layers": 2})
    assert "further tokens (2) are not modelled" in ahead.note
    assert not loaded(tmp_path, CONFIGS["Kimi-K2"] | {"num_nextn_predict_layers": 0}).note


def test_a_family_that_is_not_known_is_refused_with_those_that_are(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"model_type 'mamba' is not known .known: llama"):
        loaded(tmp_path, CONFIGS["Llama-3-70B"] | {"model_type": "mamba"})


@pytest.mark.parametrize("layers", [3, [[1]], "abc"])
def test_dense_layers_that_are_no_list_of_numbers_are_named(layers: Any, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"config\.json: mlp_only_layers is .*, which must be a list of whole numbers"):
        loaded(tmp_path, CONFIGS["Qwen3-235B-A22B"] | {"mlp_only_layers": layers})


def test_more_layers_than_any_model_has_are_refused_before_they_are_listed(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="num_hidden_layers is 3000000000, but must be at most 100000"):
        loaded(tmp_path, CONFIGS["Qwen3-235B-A22B"] | {"num_hidden_layers": 3_000_000_000})


def test_layers_of_another_attention_are_said_to_be_counted_as_usual_ones(tmp_path: Path) -> None:
    assert "gated DeltaNet" in loaded(tmp_path, CONFIGS["Qwen3-235B-A22B"] | {"model_type": "qwen3_next"}).note


def test_a_size_that_is_no_number_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"config\.json: hidden_size is 'wide'"):
        loaded(tmp_path, CONFIGS["Llama-3-70B"] | {"hidden_size": "wide"})
