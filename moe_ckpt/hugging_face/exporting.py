"""Hugging Face weights from a dense checkpoint, one file of safetensors in memory at a time."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megatron.core.dist_checkpointing.moe.errors import UnreadableCheckpoint, UsageError

from ..dense.dense import DenseCheckpoint
from ..dense.integrity import damaged, identities, refuse_saved_again, sums_of
from ..dense.merged import open_alone
from ..dense.names import refuse_existing
from ..dense.staging import staging
from .config import Config
from .families import read_model, written_config
from .folder import (
    CONFIG,
    INDEX,
    SINGLE,
    carry,
    read_config,
    read_weight_map,
    safetensors,
    sharding,
    unquantized,
    write_json,
    write_shard,
)
from .saved import SavedWeight, places, read
from .weights import Weight

BESIDE = "hugging_face"
"""Folder in a --save folder with the config and the tokenizer of the weights that training began with."""

_EMBEDDING = "embedding.word_embeddings.weight"
DEFAULT_SHARD_BYTES = 5 * 10**9
Watch = Callable[[int], AbstractContextManager[Callable[[int], None]]]


@dataclass(frozen=True)
class ExportRequest:
    """What to export.

    source: An iteration, or a --save folder.
    target: The new folder.
    like: A folder with the config and tokenizer to carry along; None makes a config from the checkpoint's arguments.
    most_bytes: Of a file; None for that of `like`, or `DEFAULT_SHARD_BYTES`.
    """

    source: Path
    target: Path
    like: Path | None = None
    most_bytes: int | None = None


@dataclass(frozen=True)
class Exported:
    """What was written. model: As transformers names it. padding: Tokens that only pad the vocabulary. caveat: What
    transformers computes otherwise; empty for nothing."""

    model: str
    tensors: int
    dtypes: tuple[str, ...]
    files: int
    nbytes: int
    has_tokenizer: bool
    padding: int
    caveat: str


def export(request: ExportRequest, watch: Watch) -> Exported:
    """Write the folder, and publish it by one rename.

    Args:
        request: what from where to where.
        watch: is called with the bytes to be read and written; what it yields is called with those that are done.

    Returns:
        What was written. Raises UsageError, UnreadableCheckpoint, OSError.
    """
    safetensors()  # before anything is read
    refuse_existing(request.target)
    folder = open_alone(request.source).directory
    before = identities([folder])
    # Once more, now that its files are known: a job that goes back saves an iteration again, and swaps the folder.
    checkpoint = open_alone(folder)
    like = request.like or _beside(checkpoint)
    config = _config(checkpoint, like)
    model = read_model(config)
    arguments = _arguments(checkpoint)
    model.require(arguments)
    tokens = _tokens(checkpoint, arguments, model.vocabulary)
    if tokens > model.vocabulary:
        raise UsageError(
            f"{checkpoint.directory} has rows of {tokens} tokens, of which {config.place} has {model.vocabulary}: set"
            " its vocab_size, and give it the tokenizer of the training"
        )
    embedding = checkpoint.tensors.get(_EMBEDDING)
    if embedding is not None and (rows := embedding.shape[0]) < model.vocabulary:
        raise UsageError(
            f"{checkpoint.directory} has rows of {rows} tokens, fewer than the vocab_size {model.vocabulary} of"
            f" {config.place}: train with --padded-vocab-size {model.vocabulary}, or give --hf-model a folder whose"
            f" config.json has {rows}"
        )
    found = places(checkpoint, model.weights())
    sizes = [
        (name, math.prod(shape) * place.dtype.itemsize)
        for weight, place in found.items()
        for name, shape in weight.parts
    ]
    files = _files(sizes, like, request.most_bytes)
    sums = sums_of([checkpoint])
    with watch(sum(saved.nbytes for saved in sums.values()) + sum(nbytes for _, nbytes in sizes)) as advance:
        if damage := damaged(sums, advance):
            raise UnreadableCheckpoint(f"{damage[0]}; restore the file or take another iteration")
        with staging(request.target, "exporting") as target:
            for file, tensors in _shards(checkpoint, found, files):
                write_shard(target / file, tensors)
                advance(sum(tensor.nbytes for tensor in tensors.values()))
            _write_rest(target, config, like, files, sum(nbytes for _, nbytes in sizes))
            if odd := {path.name for path in target.glob("*.safetensors")} ^ set(files.values()):
                raise UnreadableCheckpoint(f"{target} was changed while it was written ({min(odd)}); try again")
            refuse_saved_again(before)
    dtypes = sorted({str(place.dtype).removeprefix("torch.") for place in found.values()})
    return Exported(
        model=model.name,
        tensors=len(sizes),
        dtypes=tuple(dtypes),
        files=len(set(files.values())),
        nbytes=sum(nbytes for _, nbytes in sizes),
        has_tokenizer=(request.target / "tokenizer_config.json").exists()
        or (request.target / "tokenizer.json").exists(),
        padding=model.vocabulary - tokens,
        caveat=_UNSCALED if model.name == "DeepseekV2ForCausalLM" and config.rope().get("mscale_all_dim") else "",
    )


_UNSCALED = (
    "DeepseekV2ForCausalLM of transformers (5.12) leaves mscale_all_dim of YaRN out of attention, which Megatron and"
    " DeepSeek's own code do not"
)


def _beside(checkpoint: DenseCheckpoint) -> Path | None:
    beside = checkpoint.directory.parent / BESIDE
    return beside if (beside / CONFIG).is_file() else None


def _arguments(checkpoint: DenseCheckpoint) -> dict[str, Any]:
    found = checkpoint.common.get("args")
    if found is None:
        instead = "save them with it as a Namespace under 'args'"
        if (checkpoint.directory / "run_config.yaml").exists():
            instead = "it is of Megatron-Bridge; use export_ckpt of its AutoBridge"
        raise UsageError(f"{checkpoint.directory} has no arguments of Megatron-LM: {instead}")
    return dict(vars(found))


def _tokens(checkpoint: DenseCheckpoint, arguments: Mapping[str, Any], known: int) -> int:
    """How many a checkpoint was trained with, of which the config knows some. A tokenizer of Hugging Face is not asked
    for it in Megatron-LM: then all rows count where they are more than padding makes of those."""
    tokens, embedding = arguments.get("vocab_size"), checkpoint.tensors.get(_EMBEDDING)
    if isinstance(tokens, int) or embedding is None:
        return tokens or known
    multiple = arguments.get("make_vocab_size_divisible_by", 128) * arguments.get("tensor_model_parallel_size", 1)
    rows = embedding.shape[0]
    return rows if rows > math.ceil(known / multiple) * multiple else known


def _config(checkpoint: DenseCheckpoint, like: Path | None) -> Config:
    if like is not None:
        return read_config(like)
    embedding = checkpoint.tensors.get(_EMBEDDING)
    if embedding is None:
        raise UsageError(f"{checkpoint.directory} has no {_EMBEDDING}")
    dtype = str(embedding.dtype).removeprefix("torch.")
    written = written_config(_arguments(checkpoint), embedding.shape[0], dtype)
    return Config(written, f"the model of {checkpoint.directory}")


def _files(sizes: list[tuple[str, int]], like: Path | None, most_bytes: int | None) -> dict[str, str]:
    known = read_weight_map(like) if like is not None and most_bytes is None else None
    if known is not None and known.keys() == {name for name, _ in sizes}:
        return known
    return sharding(sizes, most_bytes or DEFAULT_SHARD_BYTES)


def _shards(
    checkpoint: DenseCheckpoint, found: Mapping[Weight, SavedWeight], files: Mapping[str, str]
) -> Iterator[tuple[str, dict[str, torch.Tensor]]]:
    """File after file; a tensor of Megatron whose parts go to two files is read twice."""
    for file in sorted(set(files.values())):
        tensors: dict[str, torch.Tensor] = {}
        for weight, place in found.items():
            wanted = [name for name, _ in weight.parts if files[name] == file]
            if wanted:
                parts = weight.form.split(read(checkpoint, place), weight.shapes)
                by_name = dict(zip((name for name, _ in weight.parts), parts, strict=True))
                # A view would keep the whole of it in memory.
                tensors |= {name: by_name[name].clone() for name in wanted}
        yield file, tensors


def _write_rest(target: Path, config: Config, like: Path | None, files: Mapping[str, str], nbytes: int) -> None:
    if like is not None:
        carry(like, target, config=True)
    if like is None or unquantized(config.values) != config.values:
        write_json(target / CONFIG, unquantized(config.values))
    if set(files.values()) == {SINGLE}:
        (target / INDEX).unlink(missing_ok=True)
    elif like is None or read_weight_map(like) != files:
        write_json(target / INDEX, {"metadata": {"total_size": nbytes}, "weight_map": dict(files)})
