"""Checkpoints of other frameworks, known by the names of their files. No torch."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class _Stranger:
    """names: patterns of which one must match a file or folder, `within` of its folders if not empty."""

    names: tuple[str, ...]
    sentence: str
    within: str = ""


_DEEPSPEED = "convert it with DeepSpeed's universal checkpoint or zero_to_fp32.py"
_DEEPSPEED_STEP = r"global_step\d+"
_LEGACY = "in Megatron's legacy format 'torch': load it with Megatron-LM and save with --ckpt-format torch_dist"
_LEGACY_FILES = (r"model_optim_rng\.pt", r"model_rng\.pt", r"distrib_optim\.pt")
_STRANGERS = (
    _Stranger(
        (r"(?:bf16_)?zero_pp_rank_.*", r"mp_rank_\d+_model_states\.pt", r"layer_\d+-model_\d+-model_states\.pt"),
        f"a DeepSpeed checkpoint: {_DEEPSPEED}",
    ),
    _Stranger(
        (r"(?:bf16_)?zero_pp_rank_.*", r"mp_rank_\d+_model_states\.pt"),
        f"a folder of DeepSpeed checkpoints: {_DEEPSPEED}",
        within=_DEEPSPEED_STEP,
    ),
    _Stranger(_LEGACY_FILES, f"a checkpoint {_LEGACY}", within=r"mp_rank_\d\d.*"),
    _Stranger(_LEGACY_FILES, f"a part of a checkpoint {_LEGACY}"),
    _Stranger(
        (r".+\.nemo", r"model_config\.yaml"),
        "a NeMo checkpoint: NeMo reads it; its model_weights folder can be a torch_dist checkpoint after unpacking",
    ),
    _Stranger(
        (r"\.zarray", r"\.zgroup"),
        "a checkpoint in the zarr format: load it with the Megatron-Core that saved it and save with --ckpt-format"
        " torch_dist",
        within=r".+",
    ),
    _Stranger(
        (r".+\.safetensors", r".+\.safetensors\.index\.json", r"pytorch_model.*\.bin", r"pytorch_model.*\.index\.json"),
        "a Hugging Face model: convert it to Megatron first, as with Megatron-LM's tools/checkpoint/convert.py",
    ),
    _Stranger(
        (r".+\.ckpt",),
        "a PyTorch Lightning checkpoint: read it with what saved it, only torch_dist is read here",
    ),
)
_HUGGING_FACE = {"config.json", "generation_config.json", "tokenizer_config.json"}


def foreign(folder: Path, names: Sequence[str]) -> str:
    """Whose checkpoint a folder with these names is and what to do with it, to go on after "X is"; empty if unknown.

    Raises OSError where a folder in it cannot be listed.
    """
    for stranger in _STRANGERS:
        if _matches(stranger, folder, names):
            return stranger.sentence
    if "latest" in names and _any_named((_DEEPSPEED_STEP,), names):
        return f"a folder of DeepSpeed checkpoints: {_DEEPSPEED}"
    if {"weights", "context"} <= set(names):
        return "a NeMo checkpoint: give its weights folder, if that was saved as torch_dist"
    if _HUGGING_FACE & set(names):
        return "a Hugging Face model without weights; give a checkpoint of Megatron"
    return ""


def _matches(stranger: _Stranger, folder: Path, names: Sequence[str]) -> bool:
    if not stranger.within:
        return _any_named(stranger.names, names)
    for name in names:
        inner = folder / name
        if (
            re.fullmatch(stranger.within, name)
            and inner.is_dir()
            and _any_named(stranger.names, [path.name for path in inner.iterdir()])
        ):
            return True
    return False


def _any_named(patterns: Sequence[str], names: Sequence[str]) -> bool:
    return any(re.fullmatch(pattern, name) for pattern in patterns for name in names)
