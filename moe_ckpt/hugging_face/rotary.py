"""Rotary embeddings outside of latent attention, plain or stretched by YaRN, as both sides describe them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from megatron.core.dist_checkpointing.moe.errors import UsageError

from .arguments import resolved
from .config import Config, base_of

_NAMES = {
    "rotary_scaling_factor": "factor",
    "yarn_original_max_position_embeddings": "original_max_position_embeddings",
    "yarn_beta_fast": "beta_fast",
    "yarn_beta_slow": "beta_slow",
    "yarn_correction_range_round_to_int": "truncate",
}


def rotary(config: Config, part: float = 1.0) -> dict[str, Any]:
    """Megatron's arguments for the rotary embeddings of a config.

    Args:
        config: The config.
        part: How much of each head is rotated.

    Raises UsageError for types, and factors of attention, that Megatron does not compute.
    """
    rope = config.rope()
    found: dict[str, Any] = {"rotary_base": base_of(rope, config.place)}
    if rope["rope_type"] == "default":
        return found
    if rope["rope_type"] != "yarn" or part != 1:
        of_part = f" of {part:g} of each head" if part != 1 else ""
        raise UsageError(
            f"{config.place}: rotary embeddings of type {rope['rope_type']!r}{of_part} cannot be converted"
        )
    if missing := [name for name in ("factor", "original_max_position_embeddings") if rope.get(name) is None]:
        raise UsageError(f"{config.place}: rope_scaling has no {', '.join(missing)}")
    return found | scales(rope, config.place) | {
        "position_embedding_type": "yarn",
        "rotary_scaling_factor": float(rope["factor"]),
        "yarn_original_max_position_embeddings": int(rope["original_max_position_embeddings"]),
        "yarn_beta_fast": float(rope.get("beta_fast") or 32),
        "yarn_beta_slow": float(rope.get("beta_slow") or 1),
        "yarn_correction_range_round_to_int": bool(rope.get("truncate", True)),
    }  # fmt: skip


def scales(rope: Mapping[str, Any], place: str) -> dict[str, float]:
    """`mscale` and `mscale_all_dim` with which Megatron scales as transformers does: by both or none of them.

    Args:
        rope: Parameters of rotary embeddings that YaRN stretches.
        place: Name of the config in the error.

    Raises UsageError for an `attention_factor` that Megatron does not compute.
    """
    mscale, of_all = rope.get("mscale"), rope.get("mscale_all_dim")
    mscale, of_all = (float(mscale), float(of_all)) if mscale and of_all else (1.0, 0.0)
    factor, attention = float(rope["factor"]), rope.get("attention_factor")
    computed = _scale(factor, mscale) / _scale(factor, of_all)
    if attention is not None and not math.isclose(attention, computed, rel_tol=1e-6):
        raise UsageError(
            f"{place}: attention_factor {attention} cannot be converted: Megatron computes {computed:.6g} of factor"
            f" {factor:g}"
        )
    return {"mscale": mscale, "mscale_all_dim": of_all}


def rotary_config(saved: Mapping[str, Any]) -> dict[str, Any]:
    """What `rotary` reads, from Megatron's arguments. Raises UsageError."""
    values = resolved(saved)
    found: dict[str, Any] = {"rope_theta": float(values["rotary_base"])}
    if values["position_embedding_type"] != "yarn":
        return found
    scaling = {"rope_type": "yarn"} | {theirs: values[ours] for ours, theirs in _NAMES.items()}
    mscale, of_all = values["mscale"], values["mscale_all_dim"]
    if mscale and of_all:
        scaling |= {"mscale": mscale, "mscale_all_dim": of_all}
    elif (mscale, of_all) != (1, 0):
        raise UsageError(
            f"--mscale {mscale} with --mscale-all-dim {of_all} cannot be converted: transformers takes both or neither"
        )
    return found | {"rope_scaling": scaling}


def _scale(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0
