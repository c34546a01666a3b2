"""A dense checkpoint, which any layout loads, from weights of Hugging Face, tensor by tensor."""

from __future__ import annotations

import argparse
import io
import re
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from megatron.core.dist_checkpointing.moe.errors import UnreadableCheckpoint, UsageError
from megatron.core.dist_checkpointing.moe.storage.system import write_atomically

from ..dense.dcp_metadata import Chunk, ChunkExtent
from ..dense.dense_writer import DenseWriter
from ..dense.integrity import FORMAT_VERSION, MARK, identities, refuse_saved_again, seal
from ..dense.names import COMMON, RELEASE, TRACKER, read_tracker, refuse_existing
from ..dense.staging import staging
from .exporting import BESIDE
from .families import Model, read_model, scale_block
from .folder import CARRIED, CONFIG, INDEX, Folder, carry, read_config, unquantized, write_json
from .saved import few
from .weights import ExpertsOfLayer, Weight

CHECKPOINT_VERSION = 3.0
MULTIPLE = 128
"""Of which Megatron makes the rows of a vocabulary; tensor-parallel ranks share them."""

Watch = Callable[[int], AbstractContextManager[Callable[[int], None]]]


def import_weights(source: Path, root: Path, watch: Watch) -> tuple[Path, dict[str, Any]]:
    """Write the weights as a release that training begins with, and config and tokenizer beside it.

    Args:
        source: a folder as `save_pretrained` writes it.
        root: the --save folder to make.
        watch: is called with the bytes to be read; what it yields is called with those that are done.

    Returns:
        `root/release`, and Megatron's arguments for the model. Raises UsageError, UnreadableCheckpoint, OSError.
    """
    if not source.is_dir():
        raise UsageError(f"{source} is not a folder: give one as save_pretrained writes it")
    before = identities([source])
    config = read_config(source)
    model = read_model(config)
    if (positions := model.arguments.get("original_max_position_embeddings", 4096)) != 4096:
        raise UsageError(
            f"{config.place}: rope_scaling with original_max_position_embeddings {positions} cannot be converted with"
            " latent attention: Megatron-LM has no flag for it and would compute with 4096"
        )
    folder = Folder(source, scale_block(config))
    if model.experts is not None:
        folder.unfuse(*model.experts)
    weights = list(model.weights())
    dtype = _check(folder, weights)
    final = _release(root)
    with (
        watch(sum(weight_bytes(folder, weight) for weight in weights)) as advance,
        staging(final, "importing") as release,
    ):
        _write(folder, model, dtype, release, advance)
        refuse_existing(final)  # or config and tokenizer of another one were replaced
        with staging(root / BESIDE, "importing", replaces=True) as carried:
            _carry(source, carried)
            refuse_saved_again(before)
    write_atomically(root / TRACKER, RELEASE.encode())
    return final, _arguments(model)


def _release(root: Path) -> Path:
    """The release to make. Raises UsageError."""
    final, kept = root / RELEASE, root / BESIDE
    try:
        named = read_tracker(root)
    except UnreadableCheckpoint as error:
        raise UsageError(f"{root} has checkpoints of its own ({error}); give an empty folder") from error
    if named is not None or final.exists():
        raise UsageError(f"{root} has checkpoints of its own ({named or RELEASE}); give an empty folder")
    known = (*CARRIED, CONFIG, INDEX)
    other = next((path for path in kept.iterdir() if path.name not in known), None) if kept.is_dir() else None
    if other is not None:
        raise UsageError(f"{other} would be lost, as {kept} is replaced; move it, or give an empty folder")
    return final


def _check(folder: Folder, weights: list[Weight]) -> torch.dtype:
    """The dtype of the weights. Raises UsageError naming tensors that are missing, of another shape, or too many."""
    expected = {name: shape for weight in weights for name, shape in weight.parts}
    copies = {name for weight in weights if weight.is_copy for name, _ in weight.parts}
    missing = [name for name in expected if name not in folder.tensors and name not in copies]
    wrong = [
        f"{name} {folder.tensors[name].shape}, not {shape}"
        for name, shape in expected.items()
        if name in folder.tensors and folder.tensors[name].shape != shape
    ]
    extra = [name for name in folder.tensors if name not in expected]
    for problem, names in (("has no", missing), ("has another shape:", wrong), ("has, and its config not,", extra)):
        if names:
            raise UsageError(f"{folder.path} {problem} {few(names)}; nothing was written")
    for weight in weights:
        if len({folder.tensors[name].dtype for name, _ in weight.parts if name in folder.tensors}) > 1:
            raise UsageError(f"{folder.path}: {few([name for name, _ in weight.parts])} are not of one dtype")
    return folder.tensors[weights[0].parts[0][0]].dtype


def weight_bytes(folder: Folder, weight: Weight) -> int:
    """Bytes of a weight, as Hugging Face stores it.

    Args:
        folder: The folder with its tensors; gives the dtypes.
        weight: The weight, whose parts are all in the folder.
    """
    parts = [(name, shape) for name, shape in weight.parts if name in folder.tensors]  # all, but for copies
    return sum(folder.tensors[name].dtype.itemsize * torch.Size(shape).numel() for name, shape in parts)


def _write(folder: Folder, model: Model, dtype: torch.dtype, staging: Path, advance: Callable[[int], None]) -> None:
    layers = model.arguments["num_layers"] if model.arguments["moe_layer_freq"] == 1 else None
    sizes = layers, int(model.arguments["num_experts"])
    originals = {weight.names: weight for weight in model.weights() if not weight.is_copy}
    with DenseWriter(staging, advance) as writer:
        for weight in model.weights():
            if weight.is_copy:
                _check_copy(folder, weight, originals[weight.names])
                continue
            tensor = weight.form.join([folder.read(name) for name, _ in weight.parts])
            place = None
            for name in weight.names:
                full, leading, index = _stacked(weight, name, *sizes)
                writer.tensor(full, (*leading, *tensor.shape), tensor.dtype)
                shape = (*(1 for _ in leading), *tensor.shape)
                # Under each of its names, once in the file.
                place = place or writer.saved(tensor.reshape(shape))
                chunk = Chunk((*index, *(0 for _ in tensor.shape)), shape, ChunkExtent("", 0, 0))
                writer.piece(full, chunk, place)
        _write_extra_states(writer, model, sizes)
    write_atomically(staging / COMMON, _common(model, dtype))
    writer.write_index(staging)
    seal(staging)


def _check_copy(folder: Folder, copy: Weight, original: Weight) -> None:
    """Raises UsageError where Hugging Face's second copy has other numbers: Megatron has one tensor for both."""
    for (name, _), (first, _) in zip(copy.parts, original.parts, strict=True):
        if name in folder.tensors and not torch.equal(folder.read(name), folder.read(first)):
            raise UsageError(
                f"{folder.path}: {name} differs from {first}, but Megatron shares one; nothing was written"
            )


def _stacked(
    weight: Weight, name: str, layers: int | None, experts: int
) -> tuple[str, tuple[int, ...], tuple[int, ...]]:
    """As Megatron saves it: the name, and length and index along the axes of layers and experts."""
    leading: tuple[int, ...] = ()
    index: tuple[int, ...] = ()
    if weight.ahead is not None:
        name = f"mtp.layers.{weight.ahead}.{name}"
    elif weight.layer is not None:
        if layers is None:
            name = f"decoder.layers.{weight.layer}.{name}"
        else:
            name, leading, index = f"decoder.layers.{name}", (layers,), (weight.layer,)
    if weight.expert is not None:
        leading, index = (*leading, experts), (*index, weight.expert)
    return name, leading, index


def _write_extra_states(writer: DenseWriter, model: Model, sizes: tuple[int | None, int]) -> None:
    """What modules of Transformer Engine expect beside their weights; empty before any eight-bit training."""
    content = io.BytesIO()
    torch.save([torch.empty(0, dtype=torch.uint8)], content)
    place, known = writer.put(content.getvalue()), set()
    for weight in model.weights():
        for name in weight.names:
            module = re.sub(r"\.(layer_norm_)?weight$|\.(expert_)?bias$|\.softmax_offset$", "._extra_state", name)
            for expert in range(sizes[1]) if isinstance(weight.form, ExpertsOfLayer) else (weight.expert,):
                full, leading, index = _stacked(replace(weight, expert=expert), module, *sizes)
                key = f"{full}/shard_{'.'.join(map(str, index)) or 0}_{'.'.join(map(str, leading)) or 1}"
                if key not in known:
                    known.add(key)
                    writer.object(key, place)


def _arguments(model: Model) -> dict[str, Any]:
    """With rows for all tokens of the config: a tokenizer may have fewer, and Megatron counts its own."""
    return model.arguments | {"padded_vocab_size": -(-model.vocabulary // MULTIPLE) * MULTIPLE}


def _common(model: Model, dtype: torch.dtype) -> bytes:
    values = _arguments(model) | {"bf16": dtype == torch.bfloat16, "fp16": dtype == torch.float16}
    common = {
        "args": argparse.Namespace(**values),
        "checkpoint_version": CHECKPOINT_VERSION,
        "iteration": 0,
        "content_metadata": {"singleton_local_shards": False, MARK: FORMAT_VERSION},
    }
    content = io.BytesIO()
    torch.save(common, content)
    return content.getvalue()


def _carry(source: Path, kept: Path) -> None:
    carry(source, kept, config=True)
    config = read_config(source)
    if scale_block(config) is not None:  # what is exported from here is not
        write_json(kept / CONFIG, unquantized(config.values))
        (kept / INDEX).unlink(missing_ok=True)


def flags(arguments: Mapping[str, Any]) -> list[str]:
    """The driver's flags for a model with these arguments of Megatron, as a job on them needs."""
    return [text for name, value in arguments.items() for text in _flag(name, value)]


_SWITCHES = {
    "add_bias_linear": ("--disable-bias-linear", False),
    "yarn_correction_range_round_to_int": ("--no-yarn-correction-range-round-to-int", False),
}
_LEFT_OUT = {
    "moe_shared_expert_intermediate_size": 0,
    "mtp_num_layers": 0,
    "moe_router_num_groups": 1,
    "moe_router_group_topk": 1,
    "softmax_type": "vanilla",
    "glu_linear_offset": 0.0,
}
_NOT_FLAGS = ("moe_shared_expert_gate", "original_max_position_embeddings")  # of the latter 4096 alone is converted


def _flag(name: str, value: Any) -> list[str]:
    if name in _NOT_FLAGS or value is None:
        return []
    option, when = _SWITCHES.get(name, (f"--{name.replace('_', '-')}", True))
    if isinstance(value, bool):
        return [option] if value is when else []
    if name == "num_query_groups":
        return ["--group-query-attention", option, str(value)]
    if _LEFT_OUT.get(name) == value:
        return []
    return [option, str(value).replace(" ", "")]
