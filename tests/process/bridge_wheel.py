"""Imports what is real of Megatron-Bridge where most of what it depends on is not installed.

Its training modules are those of the wheel, to the letter. Its models, data sets and adapters, and packages that are
absent, are stand-ins that have every name, each a new class; nothing of them is called by what is tested here.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.metadata
import sys
import types
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

ABSENT = {
    "accelerate", "datasets", "einops", "energon", "huggingface_hub", "hydra", "mlflow", "modelopt",
    "nvidia_resiliency_ext", "nvdlfw_inspect", "omegaconf", "peft", "rich", "safetensors", "tensorboard", "tqdm",
    "transformers", "wandb", "yaml", "comet_ml", "multistorageclient",
}  # fmt: skip
CORE = (
    "megatron.training.training",
    "megatron.core.full_cuda_graph",
    "megatron.core.dist_checkpointing.strategies.nvrx",
)
OTHER_PARTS = ("models", "data", "peft", "diffusion", "inference", "recipes")


class StandIn(types.ModuleType):
    """A module that has every name."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        made = type(name, (), {})
        setattr(self, name, made)
        return made


class StandIns(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds stand-ins for parts of Bridge that are no training modules, and for packages that are not installed."""

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: Any = None) -> Any:
        parts = name.split(".")
        other = parts[:2] == ["megatron", "bridge"] and len(parts) > 2 and parts[2] in OTHER_PARTS
        if other or parts[0] in ABSENT or name.startswith("torch.utils.tensorboard"):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: Any) -> StandIn:
        return StandIn(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        """There is nothing to run."""


def why_not() -> str:
    """Why Bridge cannot be imported here; empty if it can."""
    try:
        version = importlib.metadata.version("megatron-bridge")
    except importlib.metadata.PackageNotFoundError:
        return "megatron-bridge is not installed: pip install --no-deps megatron-bridge==0.6.2 (Python 3.12, core 0.19)"
    return "" if find_spec("megatron.training") else f"megatron-bridge {version} needs a Megatron-Core with a loop"


def prepare() -> None:
    """Make Bridge's training modules importable."""
    for name in CORE:  # with what is absent, which it expects
        importlib.import_module(name)
    folder = folder_of_wheel()
    ABSENT.difference_update(name for name in set(ABSENT) if _is_installed(name))
    for name in ("megatron.bridge", "megatron.bridge.training", "megatron.bridge.utils"):
        # Not run: these import all models.
        package = types.ModuleType(name)
        package.__path__ = [str(folder.joinpath(*name.split(".")[2:]))]
        sys.modules[name] = package
    sys.meta_path.insert(0, StandIns())


def folder_of_wheel() -> Path:
    """Where its package is, the folder `megatron/bridge`."""
    files = importlib.metadata.files("megatron-bridge") or []
    (folder,) = {Path(str(file.locate())).parent for file in files if str(file) == "megatron/bridge/__init__.py"}
    return folder


def _is_installed(name: str) -> bool:
    try:
        return find_spec(name) is not None
    except (ImportError, ValueError):
        return False
