"""Small models of Hugging Face with random weights, made without transformers."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from moe_ckpt.hugging_face.config import Config
from moe_ckpt.hugging_face.families import read_model

_COMMON = {
    "hidden_act": "silu", "hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 30,
    "max_position_embeddings": 64, "num_experts_per_tok": 2, "rms_norm_eps": 1e-6,
}  # fmt: skip
CONFIGS: dict[str, dict[str, Any]] = {
    "mixtral": {
        "architectures": ["MixtralForCausalLM"], "head_dim": 4, "intermediate_size": 12, "num_key_value_heads": 2,
        "num_local_experts": 3, "rope_theta": 1e6,
    },
    "qwen3_moe": {
        "architectures": ["Qwen3MoeForCausalLM"], "head_dim": 4, "intermediate_size": 12, "num_key_value_heads": 2,
        "mlp_only_layers": [0], "moe_intermediate_size": 6, "norm_topk_prob": True, "num_experts": 3,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}, "tie_word_embeddings": True,
    },
    "deepseek_v3": {
        "architectures": ["DeepseekV3ForCausalLM"], "first_k_dense_replace": 1, "intermediate_size": 12,
        "kv_lora_rank": 6, "moe_intermediate_size": 6, "n_group": 1, "topk_group": 1, "n_routed_experts": 4,
        "n_shared_experts": 2, "q_lora_rank": None, "qk_nope_head_dim": 4, "qk_rope_head_dim": 2, "v_head_dim": 4,
        "routed_scaling_factor": 2.5,
    },
    "deepseek_v2": {
        "architectures": ["DeepseekV2ForCausalLM"], "first_k_dense_replace": 1, "intermediate_size": 12,
        "kv_lora_rank": 6, "moe_intermediate_size": 6, "n_routed_experts": 4, "n_shared_experts": 2,
        "norm_topk_prob": False, "q_lora_rank": None, "qk_nope_head_dim": 4, "qk_rope_head_dim": 2,
        "topk_method": "greedy", "v_head_dim": 4,
    },
    "glm4_moe": {
        "architectures": ["Glm4MoeForCausalLM"], "attention_bias": True, "first_k_dense_replace": 1, "head_dim": 4,
        "intermediate_size": 12, "moe_intermediate_size": 6, "n_routed_experts": 4, "n_shared_experts": 1,
        "num_key_value_heads": 2, "num_nextn_predict_layers": 1, "partial_rotary_factor": 0.5, "use_qk_norm": True,
    },
    "gpt_oss": {
        "architectures": ["GptOssForCausalLM"], "attention_bias": True, "head_dim": 4, "intermediate_size": 6,
        "layer_types": ["sliding_attention", "full_attention"], "num_key_value_heads": 2, "num_local_experts": 3,
        "rms_norm_eps": 1e-5, "rope_theta": 150000, "sliding_window": 16, "swiglu_limit": 7.0,
        "rope_scaling": {"rope_type": "yarn", "factor": 2.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
                         "original_max_position_embeddings": 32},
    },
}  # fmt: skip


def config_of(family: str, **changes: Any) -> dict[str, Any]:
    """The config of a model of this family; changes: of its keys."""
    return copy.deepcopy({"model_type": family} | _COMMON | CONFIGS[family] | changes)  # transformers changes them


def folder_of(family: str, folder: Path, **changes: Any) -> Path:
    """Writes a model of this family with weights in bf16, biases of experts in fp32; changes: of its config."""
    config = config_of(family, **changes)
    draw = torch.Generator().manual_seed(4)
    weights = list(read_model(Config(config, family)).weights())
    parts = [part for weight in weights for part in weight.parts]
    tensors = {
        name: torch.randn(shape, generator=draw).to(torch.float32 if "e_score" in name else torch.bfloat16)
        for name, shape in parts
    }
    for weight in weights:
        if weight.is_copy:
            (original,) = [one for one in weights if one.names == weight.names and not one.is_copy]
            ((name, _),), ((first, _),) = weight.parts, original.parts
            tensors[name] = tensors[first].clone()
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder
