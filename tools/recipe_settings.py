"""The settings of Megatron-Bridge's pretraining recipes for MoE models, read from its wheel without models and a GPU.

Real are the recipe functions, Bridge's training settings, and Megatron-Core's defaults. What needs the Internet or a
GPU has stand-ins: data sets and adapters keep what they are given, and so does a model, which gives Megatron-Core's
defaults for all that its recipe does not set. What the configuration of a model on the Hugging Face hub would add is in
`HUB`, by hand, as far as it decides what is protected.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import inspect
import re
import sys
import types
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig
from megatron.core.transformer.transformer_config import MLATransformerConfig

VERSION = "0.6.2"
KINDS = {"recipes": "training", "perf_recipes": "performance"}
REAL = (*KINDS, "training", "utils")
"""Packages of `megatron.bridge` that are imported. All else of it has stand-ins."""
MAYBE_ABSENT = (
    "accelerate", "comet_ml", "datasets", "einops", "energon", "huggingface_hub", "hydra", "mlflow", "modelopt",
    "multistorageclient", "nemo_run", "nvdlfw_inspect", "nvidia_resiliency_ext", "omegaconf", "peft", "qwen_vl_utils",
    "rich", "tqdm", "wandb",
)  # fmt: skip
EXPERTS = re.compile(
    r"-A\d+B|DeepSeek|GLM|Kimi|MiniMax|Moonlight|Nemotron-3-(?:Nano-30B|Super|Ultra)|OlMoE|Step|gpt-oss"
)
"""In the names of models with experts, on the hub or as classes."""

# What configurations on the hub say and recipes do not repeat: layers that predict further tokens.
HUB = {"DeepSeek-V4": 1, "K-EXAONE": 1, "Qwen3.5": 1, "Step-3.5": 3}

ROUTERS = {"MiniMax-M3": "MiniMaxM3TopKRouter"}
"""By model: routers whose `gating` is not core's, which `replay/execution.py` cannot freeze."""

JUDGED: dict[str, Any] = {
    # Of the model, by the names of TransformerConfig and of Megatron-LM's flags.
    **{field.name: field.default for field in dataclasses.fields(MLATransformerConfig) if field.name in {
        "context_parallel_size", "cpu_offloading", "cuda_graph_impl", "cuda_graph_scope",
        "defer_embedding_wgrad_compute", "delay_wgrad_compute", "expert_model_parallel_size",
        "expert_tensor_parallel_size",
        "fine_grained_activation_offloading", "fp4", "fp4_param", "fp4_recipe", "fp8", "fp8_dot_product_attention",
        "fp8_multi_head_attention", "fp8_param", "fp8_recipe", "moe_enable_deepep", "moe_expert_rank_capacity_factor",
        "moe_flex_dispatcher_backend", "moe_input_jitter_eps", "moe_paged_stash", "moe_router_force_biased",
        "moe_router_force_load_balancing", "moe_token_dispatcher_type", "mtp_num_layers",
        "overlap_moe_expert_parallel_comm", "pipeline_model_parallel_size", "qk_clip", "tensor_model_parallel_size",
        "tp_comm_bulk_wgrad", "tp_comm_overlap", "use_grouped_gemm_for_shared_expert",
        "use_transformer_engine_op_fuser",
    }},
    # Of the optimizer.
    **{field.name: field.default for field in dataclasses.fields(OptimizerConfig) if field.name in {
        "optimizer", "optimizer_cpu_offload", "optimizer_cuda_graph", "use_distributed_optimizer",
        "use_layer_wise_distributed_optimizer",
    }},
    # Of DistributedDataParallel, the data sets and the loop.
    **{field.name: field.default for field in dataclasses.fields(DistributedDataParallelConfig) if field.name in {
        "num_distributed_optimizer_instances", "use_megatron_fsdp",
    }},
    "cuda_graph_modules": [], "dataloader_type": "single", "decrease_batch_size_if_needed": False, "eval_iters": 0,
    "iterations_to_skip": None, "mtp_standalone": False, "rampup_batch_size": None, "skip_train": False,
    "timing_log_level": 0, "use_torch_fsdp2": False,
    # Core's default is 0.1; Bridge's models of these recipes, and their configurations on the hub, have 0.
    "attention_dropout": 0.0, "hidden_dropout": 0.0,
}  # fmt: skip
"""The settings by which protection is accepted or refused, and their defaults."""


@dataclasses.dataclass(frozen=True)
class Recipe:
    """A recipe. kind: of `KINDS`. model: on the hub, or the class of its provider. settings: of
    `JUDGED`, those that differ from the default."""

    name: str
    kind: str
    model: str
    settings: dict[str, Any]


def recipes(bridge: Path) -> Iterator[Recipe]:
    """All pretraining recipes for MoE models.

    Args:
        bridge: The folder `megatron/bridge` of the installed wheel.

    Raises:
        ImportError, AttributeError: A recipe needs something that has no stand-in here.
    """
    prepare(bridge)
    for package, kind in KINDS.items():
        for path in sorted((bridge / package).rglob("*.py")):
            if path.stem == "__init__":
                continue
            module = importlib.import_module(
                ".".join(("megatron.bridge", *path.relative_to(bridge).with_suffix("").parts))
            )
            for name, make in vars(module).items():
                is_recipe = inspect.isfunction(make) and make.__module__ == module.__name__
                if is_recipe and "pretrain" in name and name.endswith("_config") and not name.startswith("_"):
                    found = _read(name, kind, make)
                    if found is not None:
                        yield found


def _read(name: str, kind: str, make: Any) -> Recipe | None:
    """A recipe; None where its model has no experts."""
    if "flux" in name or "wan" in name:  # diffusion, whose models are built in other ways
        return None
    config = make()
    model = config.model
    known = model.hub or type(model).__name__
    if not (EXPERTS.search(known) or (not model.hub and model.num_moe_experts)):
        return None
    precision = config.mixed_precision
    if isinstance(precision, str):
        precision = importlib.import_module("megatron.bridge.training.mixed_precision").get_mixed_precision_config(
            precision
        )
    sections = (model, precision, config.comm_overlap, config.optimizer, config.ddp, config.dist)
    settings: dict[str, Any] = {}
    for section in (*sections, config.validation, config.train, config.dataset, config.logger):
        given = {} if section is None else vars(section)
        settings |= {name: value for name, value in given.items() if name in JUDGED and value is not None}
    settings.setdefault("mtp_num_layers", next((layers for part, layers in HUB.items() if part in known), None))
    for captured in ("cuda_graph_modules", "cuda_graph_scope"):
        scope = settings.get(captured) or []
        each = scope if isinstance(scope, list) else [scope]
        settings[captured] = sorted(getattr(one, "name", str(one)) for one in each)
    layout = getattr(model, "pipeline_model_parallel_layout", None) or []
    stages = layout.split("|") if isinstance(layout, str) else layout
    settings["mtp_standalone"] = any({"m", "mtp"} & set(stage) for stage in stages[:-1])
    if "dist_" in settings["optimizer"]:  # as Bridge's own finalization of its settings
        settings.update(
            optimizer=settings["optimizer"].removeprefix("dist_"), use_layer_wise_distributed_optimizer=True
        )
    kept = {
        name: getattr(value, "name", value)
        for name, value in sorted(settings.items())
        if value != JUDGED[name] and not (value in (None, [], 0) and JUDGED[name] in (None, [], 0, False))
    }
    return Recipe(name, kind, known.rpartition("/")[2], kept)


_DEFAULTS = {
    field.name: field.default if field.default is not dataclasses.MISSING else None
    for field in dataclasses.fields(MLATransformerConfig)
} | {"hub": "", "make_vocab_size_divisible_by": 128, "vocab_size": 128}


class Kept:
    """Anything that a recipe configures: keeps what is set, and gives Megatron-Core's defaults."""

    def __init__(self, *_: Any, **given: Any) -> None:
        vars(self).update(given)

    def __getattr__(self, name: str) -> Any:
        if name in _DEFAULTS:
            return _DEFAULTS[name]
        if name.startswith("to_"):  # its providers, of text alone too
            return lambda *_, **__: self
        raise AttributeError(name)


class FromHub:
    """`AutoBridge` and `AutoConfig`: know the name of a model, and nothing of its weights."""

    @classmethod
    def from_hf_pretrained(cls, path: Any, **_: Any) -> Kept:
        return Kept(hub=path)

    @classmethod
    def from_hf_config(cls, config: Kept, **_: Any) -> Kept:
        return Kept(hub=config.hub)

    @classmethod
    def from_pretrained(cls, path: str, **_: Any) -> Kept:
        return Kept(text_config=Kept(hub=path))


class _Anything(type):
    """A class of which any method may be called."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *_, **__: None


class _StandIn(types.ModuleType):
    """A module that has every name."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        known = (
            FromHub
            if name in ("AutoBridge", "AutoConfig")
            else dataclasses.dataclass(init=False)(_Anything(name, (Kept,), {}))
        )
        setattr(self, name, known)
        return known


class _StandIns(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def __init__(self, bridge: Path, real: Sequence[str]) -> None:
        self._bridge, self._real = bridge, real
        self._absent = {"transformers", *(name for name in MAYBE_ABSENT if importlib.util.find_spec(name) is None)}

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: Any = None) -> Any:
        parts = name.split(".")
        if name.removeprefix("megatron.bridge.") in self._real:
            file = self._bridge.joinpath(*parts[2:]).with_suffix(".py")
            return importlib.util.spec_from_file_location(name, file)
        of_bridge = parts[:2] == ["megatron", "bridge"] and len(parts) > 2 and parts[2] not in REAL
        if of_bridge or parts[0] in self._absent:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: Any) -> _StandIn:
        return _StandIn(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        """There is nothing to run."""


def prepare(bridge: Path, real: Sequence[str] = ()) -> None:
    """Make recipes importable.

    Args:
        bridge: The folder `megatron/bridge` of the installed wheel.
        real: Modules of it that get no stand-in, beside `REAL`.
    """
    for name in (
        "megatron.training.training",
        "megatron.core.full_cuda_graph",
    ):  # with what is absent, which they expect
        importlib.import_module(name)
    for name in ("megatron.bridge", "megatron.bridge.training", "megatron.bridge.utils"):
        package = types.ModuleType(name)  # not run: these import all models
        package.__path__ = [str(bridge.joinpath(*name.split(".")[2:]))]
        sys.modules[name] = package
    vars(sys.modules["megatron.bridge"]).update(AutoBridge=FromHub)
    sys.meta_path.insert(0, _StandIns(bridge, real))
    settings: Any = importlib.import_module("megatron.bridge.training.config")
    settings.GPTDatasetConfig = settings.MockGPTDatasetConfig = Kept
    # The wheel lacks the file that some read: which layers are cast is not judged here.
    quantization: Any = importlib.import_module("megatron.core.quantization.utils")
    quantization.load_quantization_recipe = lambda _: None
