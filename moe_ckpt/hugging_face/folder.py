"""A folder as transformers writes it: `config.json`, safetensors with their index, files of the tokenizer."""

from __future__ import annotations

import importlib
import json
import re
import shutil
import stat
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from megatron.core.dist_checkpointing.moe.errors import UnreadableCheckpoint, UsageError
from megatron.core.dist_checkpointing.moe.storage.system import write_atomically

from ..dense.names import SUMS_BYTES, read_beside
from .config import Config
from .weights import Shape

CONFIG, INDEX, SINGLE = "config.json", "model.safetensors.index.json", "model.safetensors"
CARRIED = (
    "tokenizer.json", "tokenizer.model", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
    "vocab.json", "merges.txt", "chat_template.jinja", "chat_template.json", "generation_config.json",
)  # fmt: skip
"""Beside weights and config: what of a folder belongs to its tokenizer and to generation."""


def safetensors() -> Any:
    """The package, which not every image has. Raises UsageError without it."""
    try:
        return importlib.import_module("safetensors.torch") and importlib.import_module("safetensors")
    except ImportError:
        raise UsageError("weights of Hugging Face need the package safetensors: pip install safetensors") from None


_PICKLED = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")
_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
_SCALED, _SCALE = "F8_E4M3", "_scale_inv"
_FUSED = re.compile(r"(.*)\.mlp\.experts\.(gate_up_proj|down_proj)")


@dataclass(frozen=True)
class Stored:
    """Where a tensor is and what its file says of it.

    dtype: With which it is read. part: The tensor of the file that it is a part of: its name, an expert and its rows.
    is_scaled: It is in fp8 there, with a tensor of scales. renamed: Its name there, if that is another.
    """

    file: str
    shape: Shape
    dtype: torch.dtype
    part: tuple[str, int, slice] | None = None
    is_scaled: bool = False
    renamed: str = ""


class Folder:
    """The weights of a folder, of which only the headers are read.

    Args:
        path: The folder.
        scale_block: Rows and columns that share a scale, for weights in fp8; None: none are.

    Attributes:
        tensors: By name. Raises UnreadableCheckpoint for what is not there or cut short, UsageError for pickles.
    """

    def __init__(self, path: Path, scale_block: tuple[int, int] | None = None) -> None:
        self.path, self._scale_block = path, scale_block
        self.tensors: dict[str, Stored] = {}
        for file in self._files():
            with self._opened(file) as opened:
                for name in opened.keys():  # noqa: SIM118 # it is no dict
                    self._note(name, file, opened.get_slice(name))
        for name, file in (read_weight_map(path) or {}).items():
            if name not in self.tensors or self.tensors[name].file != file:
                raise UnreadableCheckpoint(f"{path / file} lacks {name}, which {INDEX} promises; copy the folder again")

        self._scales = {name: self.tensors.pop(name) for name in list(self.tensors) if self._is_scale(name)}
        bare = [name for name, one in self.tensors.items() if one.is_scaled and name + _SCALE not in self._scales]
        if bare:
            raise UnreadableCheckpoint(f"{path} has no {bare[0]}{_SCALE}; copy the folder again")
        for name, scale in self._scales.items():
            assert scale_block is not None
            shape = self.tensors[name.removesuffix(_SCALE)].shape
            needed = tuple(-(-size // block) for size, block in zip(shape, scale_block, strict=True))
            if scale.shape != needed:
                raise UnreadableCheckpoint(
                    f"{path}: {name} is {scale.shape}, but weights of {shape} have {needed} blocks of {scale_block}, as"
                    f" {CONFIG} says"
                )

    def _is_scale(self, name: str) -> bool:
        weight = self.tensors.get(name.removesuffix(_SCALE)) if name.endswith(_SCALE) else None
        return weight is not None and weight.is_scaled

    def read(self, name: str) -> torch.Tensor:
        """One tensor, on the CPU; of fp8 what it stands for, in bf16. Raises UnreadableCheckpoint."""
        stored = self.tensors[name]
        with self._opened(stored.file) as opened:
            if stored.part is None:
                found: torch.Tensor = opened.get_tensor(stored.renamed or name)
            else:
                fused, expert, rows = stored.part
                found = opened.get_slice(fused)[expert : expert + 1, rows][0]
        if not stored.is_scaled:
            return found
        with self._opened(self._scales[name + _SCALE].file) as opened:
            scales = opened.get_tensor(name + _SCALE).float()
        assert self._scale_block is not None
        for axis, size in enumerate(self._scale_block):
            scales = scales.repeat_interleave(size, dim=axis).narrow(axis, 0, found.shape[axis])
        return (found.float() * scales).to(stored.dtype)

    def unfuse(self, module: str, names: tuple[str, str, str]) -> None:
        """Give experts that are one tensor, as transformers 5 holds them, the names that each has alone.

        Args:
            module: Which has the experts of a layer, by its published name.
            names: Of gate, up and down projection of one expert.
        """
        gate, up, down = names
        for fused in [name for name in self.tensors if _FUSED.fullmatch(name)]:
            stored, at = self.tensors.pop(fused), fused.partition(".mlp.experts.")[0]
            if len(stored.shape) != 3:
                raise UsageError(f"{self.path}: {fused} {stored.shape} is not one matrix for each expert")
            experts, rows, width = stored.shape
            parts = {gate: slice(0, rows // 2), up: slice(rows // 2, rows)}
            for part, taken in ({down: slice(0, rows)} if fused.endswith("down_proj") else parts).items():
                shape = taken.stop - taken.start, width
                for expert in range(experts):
                    own = f"{at}.{module}.experts.{expert}.{part}.weight"
                    self.tensors[own] = replace(stored, shape=shape, part=(fused, expert, taken))
            router = self.tensors.pop(f"{at}.mlp.gate.weight", None)
            if router is not None:
                self.tensors[f"{at}.{module}.gate.weight"] = replace(router, renamed=f"{at}.mlp.gate.weight")

    def _files(self) -> list[str]:
        weight_map = read_weight_map(self.path)
        named = sorted(set(weight_map.values())) if weight_map is not None else [SINGLE]
        missing = [name for name in named if not (self.path / name).is_file()]
        if not missing:
            return named
        if weight_map is not None:
            raise UnreadableCheckpoint(f"{self.path} lacks {', '.join(missing[:3])}, which {INDEX} names")
        pickled = sorted(file.name for pattern in _PICKLED for file in self.path.glob(pattern))
        if pickled:
            raise UsageError(
                f"{self.path} has pickled weights only ({', '.join(pickled[:3])}), which run code when they are read;"
                " save them with safetensors"
            )
        raise UnreadableCheckpoint(f"{self.path} has no weights: neither {INDEX} nor {SINGLE}")

    def _note(self, name: str, file: str, found: Any) -> None:
        kind = found.get_dtype()
        is_scaled = kind == _SCALED and self._scale_block is not None
        if kind not in _DTYPES and not is_scaled:
            raise UsageError(f"{self.path / file}: {name} is {kind}; only {', '.join(_DTYPES)} can be converted")
        if is_scaled and len(found.get_shape()) != 2:
            raise UsageError(
                f"{self.path / file}: {name} {tuple(found.get_shape())} is {kind} and no matrix: give the experts of a"
                " layer one by one, or in bf16"
            )
        if name in self.tensors:
            raise UnreadableCheckpoint(f"{self.path}: {name} is in {self.tensors[name].file} and in {file}")
        dtype = torch.bfloat16 if is_scaled else _DTYPES[kind]
        self.tensors[name] = Stored(file, tuple(found.get_shape()), dtype, is_scaled=is_scaled)

    @contextmanager
    def _opened(self, file: str) -> Iterator[Any]:
        path, library = self.path / file, safetensors()
        try:
            with library.safe_open(path, framework="pt", device="cpu") as opened:
                yield opened
        except (library.SafetensorError, OSError) as error:
            raise UnreadableCheckpoint(f"{path} cannot be read: {error}; copy it again") from error


def read_config(path: Path) -> Config:
    """The `config.json` of a folder. Raises UnreadableCheckpoint."""
    found = _read_json(path / CONFIG)
    if found is None:
        raise UnreadableCheckpoint(f"{path} has no {CONFIG}: give a folder as save_pretrained writes it")
    return Config(found, str(path / CONFIG))


def unquantized(config: Mapping[str, Any]) -> dict[str, Any]:
    """A config of the same model with weights that are not quantized."""
    return {name: value for name, value in config.items() if name != "quantization_config"}


def read_weight_map(path: Path) -> dict[str, str] | None:
    """In which file each tensor is, as the index says; None without an index. Raises UnreadableCheckpoint."""
    index = _read_json(path / INDEX)
    if index is None:
        return None
    found = index.get("weight_map")
    if not isinstance(found, dict) or not all(
        isinstance(file, str) and Path(file).name == file and file.endswith(".safetensors") for file in found.values()
    ):
        raise UnreadableCheckpoint(f"{path / INDEX} has no weight_map to safetensors beside it")
    return found


def _read_json(path: Path) -> dict[str, Any] | None:
    try:
        found = json.loads(read_beside(path, SUMS_BYTES))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        raise UnreadableCheckpoint(f"{path} cannot be read: {error}") from error
    if not isinstance(found, dict):
        raise UnreadableCheckpoint(f"{path} holds no JSON object")
    return found


def carry(source: Path, target: Path, *, config: bool = False) -> None:
    """Copy the files of a tokenizer that are there. Raises OSError.

    Args:
        source: Folder to copy from.
        target: Folder to copy to.
        config: Whether to copy `config.json` and the index of weights too.
    """
    for name in (*CARRIED, *((CONFIG, INDEX) if config else ())):
        if (source / name).is_file():
            shutil.copyfile(source / name, target / name)


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Write JSON in the form of transformers' own files. Raises OSError.

    Args:
        path: File to replace.
        value: The JSON object.
    """
    write_atomically(path, (json.dumps(value, indent=2, sort_keys=True) + "\n").encode())


def write_shard(path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Write one file of weights. Raises OSError.

    Args:
        path: File to write, in the format of safetensors.
        tensors: The tensors on the CPU, by their names in Hugging Face.
    """
    library = safetensors()
    whole = {name: tensor.contiguous() for name, tensor in tensors.items()}
    path.touch()
    mode = stat.S_IMODE(path.stat().st_mode)
    try:
        library.torch.save_file(whole, path, metadata={"format": "pt"})
    except library.SafetensorError as error:
        raise OSError(f"{path}: {error}") from error
    with suppress(OSError):  # storage that has no modes
        path.chmod(mode)  # safetensors renames a temporary file, which only its owner may read


def sharding(sizes: Sequence[tuple[str, int]], most_bytes: int) -> dict[str, str]:
    """The name of the file for each tensor: files are filled in the order of the tensors.

    Args:
        sizes: Names and bytes of the tensors, in order.
        most_bytes: Most bytes of tensors in a file; a larger tensor has a file of its own.
    """
    shards: list[list[str]] = [[]]
    room = most_bytes
    for name, nbytes in sizes:
        if nbytes > room and shards[-1]:
            shards.append([])
            room = most_bytes
        shards[-1].append(name)
        room -= nbytes
    if len(shards) == 1:
        return dict.fromkeys(shards[0], SINGLE)
    return {
        name: f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        for number, names in enumerate(shards, 1)
        for name in names
    }
