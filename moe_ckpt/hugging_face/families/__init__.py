"""The models that can be converted: one file for each family, with its tensors and what they are made of."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import ModuleType
from typing import Any

from megatron.core.dist_checkpointing.moe.errors import UsageError

from ..arguments import require_same, resolved
from ..config import Config
from ..weights import Weight
from . import deepseek_v2, deepseek_v3, glm4_moe, gpt_oss, mixtral, qwen3_moe
from .layers import LLAMA_NAMES

FAMILIES = {family.MODEL_TYPE: family for family in (mixtral, qwen3_moe, deepseek_v2, deepseek_v3, glm4_moe, gpt_oss)}
REFUSED = {
    "qwen3_next": "one --apply-layernorm-1p makes Megatron keep all its norms around zero, and this model has those of"
    " gated delta nets around one, so its numbers would change",
}
"""Families of which Megatron has the layers, and why they are not converted exactly."""


class Model:
    """A model of one family, as both sides describe it.

    Attributes:
        arguments: of Megatron.
        vocabulary: tokens, without padding.
        experts: module with the experts of a layer, and names of gate, up and down projection, in Hugging Face; None
            where they have no names of their own.
    """

    def __init__(self, family: ModuleType, config: Config) -> None:
        self.name = str(family.ARCHITECTURE)
        self.arguments: dict[str, Any] = family.arguments(config)
        self.vocabulary = config.number("vocab_size")
        self.experts: tuple[str, tuple[str, str, str]] | None = getattr(family, "EXPERTS", ("mlp", LLAMA_NAMES))
        self._family = family

    def weights(self) -> Iterator[Weight]:
        """All tensors, in the order in which they are written."""
        found: Iterator[Weight] = self._family.weights(self.arguments, self.vocabulary)
        return found

    def require(self, saved: Mapping[str, Any]) -> None:
        """Raises UsageError where a checkpoint with these arguments of Megatron is of another model."""
        require_same(saved, self.arguments, self.name)


def read_model(config: Config) -> Model:
    """The model that a `config.json` describes. Raises UsageError for one that cannot be converted."""
    try:
        return _model(config)
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise UsageError(f"{config.place} does not describe a model: {error!r}") from error


def _model(config: Config) -> Model:
    kind = config.get("model_type")
    if kind not in FAMILIES:
        named = ", ".join(config.get("architectures", [])) or kind
        if kind in REFUSED:
            raise UsageError(f"{config.place} is of {named}, which cannot be converted: {REFUSED[kind]}")
        raise UsageError(f"{config.place} is of {named}: only {', '.join(FAMILIES)} can be converted")
    scale_block(config)
    return Model(FAMILIES[kind], config)


def scale_block(config: Config) -> tuple[int, int] | None:
    """Rows and columns that share a scale in weights published in fp8, as DeepSeek-V3's; None for others.

    Raises UsageError for weights that are quantized in another way.
    """
    found = config.get("quantization_config")
    if found is None:
        return None
    method = found.get("quant_method") if isinstance(found, dict) else None
    is_known = method == "fp8"
    block = tuple(found.get("weight_block_size") or ()) if is_known else ()
    if len(block) != 2 or not all(isinstance(size, int) and size > 0 for size in block):
        raise UsageError(
            f"{config.place}: quantized weights ({method}) cannot be converted, except fp8 with a weight_block_size;"
            " give those in bf16, fp16 or fp32"
        )
    return block[0], block[1]


def written_config(saved: Mapping[str, Any], vocabulary: int, dtype: str) -> dict[str, Any]:
    """`config.json` for a checkpoint with these arguments of Megatron.

    Args:
        saved: the arguments, as the checkpoint records them.
        vocabulary: rows of its embedding.
        dtype: as torch calls it.

    Raises UsageError for a model that no family computes.
    """
    values = resolved(saved)
    if not values.get("num_experts"):
        raise UsageError("a model without experts cannot be converted, only those of " + ", ".join(FAMILIES))
    if values.get("experimental_attention_variant") == "gated_delta_net":
        raise UsageError(f"a model with gated delta nets cannot be converted: {REFUSED['qwen3_next']}")
    by_sigmoid = values["moe_router_score_function"] == "sigmoid"
    if values["multi_latent_attention"]:
        family = deepseek_v3 if by_sigmoid else deepseek_v2
    elif values["softmax_type"] == "learnable":
        family = gpt_oss
    else:
        family = glm4_moe if by_sigmoid else qwen3_moe if values["qk_layernorm"] else mixtral
    found: dict[str, Any] = family.config(saved)
    found |= {"architectures": [family.ARCHITECTURE], "model_type": family.MODEL_TYPE}
    found |= {"vocab_size": vocabulary, "torch_dtype": dtype, "use_cache": True}
    Model(family, Config(found, family.ARCHITECTURE)).require(saved)
    return found
