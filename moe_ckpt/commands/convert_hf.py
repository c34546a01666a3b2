"""`moe-ckpt convert --to hf` and `--from hf`."""

from __future__ import annotations

import re
import shlex
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron.core.dist_checkpointing.moe.errors import MoECheckpointError, UsageError
from moe_ckpt.megatron_core import load_megatron_core
from moe_ckpt.report import shown
from moe_ckpt.report.progress import progress

if TYPE_CHECKING:
    from ..hugging_face.exporting import Exported

_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9}


def to_hugging_face(
    source: Path, out: Path, hf_model: Path | None, max_shard_size: str | None
) -> tuple[str, dict[str, Any]]:
    """Export a dense checkpoint. Returns a sentence for the user, and the same as data.

    Args:
        source: Folder of the dense checkpoint.
        out: Folder to write.
        hf_model: Folder with the config and tokenizer to carry along; None: the files that an import left
            next to the checkpoint, else a config made from its arguments.
        max_shard_size: Most bytes of a file of weights, such as `2GB`; None: as `ExportRequest.most_bytes`.
    """
    most_bytes = None if max_shard_size is None else _bytes(max_shard_size)
    load_megatron_core()
    from ..hugging_face.exporting import ExportRequest, export

    try:
        made = export(ExportRequest(source, out, hf_model, most_bytes), partial(progress, "converting"))
    except OSError as error:
        raise _unwritable(error, out) from error
    return f"{out} holds a {_described(made)}", {"folder": str(out)} | asdict(made)


def _described(made: Exported) -> str:
    said = f"{made.model}: {made.tensors} tensors in {' and '.join(made.dtypes)}, {shown(made.nbytes, 'bytes')}"
    said += f", {made.files} file{'s' * (made.files > 1)}"
    said += f"; {made.padding} tokens only pad the vocabulary" if made.padding else ""
    said += f"; {made.caveat}" if made.caveat else ""
    return said + ("" if made.has_tokenizer else "; no tokenizer: give --hf-model a folder that has one")


def from_hugging_face(source: Path, out: Path) -> tuple[str, dict[str, Any]]:
    """Import a folder of Hugging Face. Returns a sentence for the user, and the same as data.

    Args:
        source: Folder of Hugging Face with config and weights.
        out: Folder to write, for `--load`.
    """
    load_megatron_core()
    from ..hugging_face.importing import flags, import_weights

    try:
        target, arguments = import_weights(source, out, partial(progress, "converting"))
    except OSError as error:
        raise _unwritable(error, out) from error
    said = f"{target} holds the weights; train on with {shlex.join(['--load', str(out), *flags(arguments)])}"
    if arguments["multi_latent_attention"] and arguments["q_lora_rank"] is None:
        said += "; under Megatron-Core 0.17 or 0.18: without --q-lora-rank 0.19 has a second norm before the queries"
    return said, {"checkpoint": str(target), "flags": flags(arguments)}


def _unwritable(error: OSError, out: Path) -> MoECheckpointError:
    return MoECheckpointError(f"{error.filename or out} cannot be written: {error.strerror or error}")


def _bytes(text: str) -> int:
    found = re.fullmatch(r"([0-9]+)([KMG]?B?)", text.upper())
    if not found or found[2] not in _UNITS or not int(found[1]):
        raise UsageError(f"--max-shard-size {text} is no number of bytes such as 500MB or 2GB")
    return int(found[1]) * _UNITS[found[2]]
