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
    assert _apart(found) == _apart(expected)


def _apart(tensors: dict[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """Without routed experts that have a tensor each on one side."""
    return {name: shape for name, shape in tensors.items() if not EXPERTS.search(name)}
