"""One rank of a recipe of Megatron-Bridge, made small, in Bridge's own `pretrain` from its set-up to its end.

    bridge_recipe_job.py RECIPE YAML FOLDER

It is protected where the YAML file has `checkpoint.moe_ckpt`. Of WITHOUT=NAME:FIELD the optimizer's state is not found.

Recipe, settings and their overrides, set-up, data loaders, optimizer, schedule and loop are Bridge's own. Stand-ins are
the model, which is core's GPT with the recipe's settings and small sizes, its tokenizer and its data. In the folder
each rank leaves `rank-N`: its process and per iteration loss and gradient norm, at the end a digest of weights, and
counts.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import importlib
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import yaml

if not torch.cuda.is_available():
    from megatron.pretrain.initialize import use_cpu

    use_cpu()  # before anything of Megatron-Core

from bridge_wheel import CORE, folder_of_wheel
from recipe_settings import prepare
from stock_jobs import without_state

from megatron.core import parallel_state
from megatron.core.dist_checkpointing.moe import bridge, wait_for_rank
from megatron.core.distributed import DistributedDataParallel
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec, get_gpt_mtp_block_spec
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_config import TransformerConfig

TOKENS, VOCABULARY = 32, 64
SMALL = {
    "num_layers": 2, "hidden_size": 32, "ffn_hidden_size": 64, "moe_ffn_hidden_size": 32, "num_attention_heads": 4,
    "num_query_groups": 2, "kv_channels": 8, "num_moe_experts": 4, "moe_router_topk": 2, "moe_grouped_gemm": False,
    "moe_permute_fusion": False, "tensor_model_parallel_size": 1, "sequence_parallel": False,
    "pipeline_model_parallel_size": 1, "virtual_pipeline_model_parallel_size": None,
    "expert_model_parallel_size": 2, "expert_tensor_parallel_size": 1, "context_parallel_size": 1,
    "account_for_embedding_in_pipeline_split": False, "account_for_loss_in_pipeline_split": False,
    "cross_entropy_loss_fusion": False, "add_bias_linear": False, "moe_token_dispatcher_type": "alltoall",
    "gated_linear_unit": True, "activation_func": torch.nn.functional.silu, "bias_activation_fusion": False,
    "apply_rope_fusion": False, "cuda_graph_impl": "none", "moe_router_fusion": False,
}  # fmt: skip


@dataclasses.dataclass
class Model(TransformerConfig):
    """Stands for a provider of Bridge's."""

    seq_length: int = TOKENS
    vocab_size: int | None = VOCABULARY
    make_vocab_size_divisible_by: int = 1
    share_embeddings_and_output_weights: bool = False

    def provide_distributed_model(self, ddp_config: Any, **_: Any) -> list[Any]:
        layers = get_gpt_layer_local_spec(num_experts=self.num_moe_experts, moe_grouped_gemm=False)
        ahead = None
        if self.mtp_num_layers:
            ahead = get_gpt_mtp_block_spec(self, layers, use_transformer_engine=False)
        ends = parallel_state.is_pipeline_first_stage(), parallel_state.is_pipeline_last_stage()
        options = {"position_embedding_type": "rope", "mtp_block_spec": ahead}
        model = GPTModel(self, layers, VOCABULARY, TOKENS, *ends, **options).cuda()
        if self.bf16:
            model = Float16Module(self, model)
        return [DistributedDataParallel(self, ddp_config, model)]


class Counting(torch.utils.data.Dataset[torch.Tensor]):
    """Each sample counts in steps of its own."""

    def __len__(self) -> int:
        return 4096

    def __getitem__(self, index: int) -> torch.Tensor:
        return (index + (index % 7) * torch.arange(TOKENS + 1)) % VOCABULARY


def forward_step(state: Any, data_iterator: Any, model: Any) -> Any:
    sample = next(data_iterator).cuda()
    positions = torch.arange(TOKENS, device="cuda")[None]
    mask = torch.triu(torch.ones(1, 1, TOKENS, TOKENS, dtype=torch.bool, device="cuda"), 1)
    output = model(
        sample[:, :-1], positions, mask, labels=sample[:, 1:], loss_mask=torch.ones(1, TOKENS, device="cuda")
    )
    return output, lambda losses: (losses.mean(), {"loss": losses.detach().mean()})


def small(config: Any, overrides: dict[str, Any]) -> Any:
    """The recipe's configuration with a YAML file's overrides, applied as Bridge applies them."""
    known = {field.name for field in dataclasses.fields(TransformerConfig) if field.init}
    of_recipe = {name: value for name, value in vars(config.model).items() if name in known}
    kind = torch.bfloat16 if overrides["optimizer"]["bf16"] else torch.float32
    of_kind = {"bf16": kind is torch.bfloat16, "params_dtype": kind, "pipeline_dtype": kind}
    config.model = Model(**of_recipe | SMALL | of_kind | overrides.pop("model"))
    config.mixed_precision, config.comm_overlap = None, None
    config.data_parallel_size = 2 // config.model.pipeline_model_parallel_size
    config.dataset = SimpleNamespace(**{
        "dataloader_type": "single", "num_workers": 0, "data_sharding": True, "pin_memory": False,
        "persistent_workers": False, "drop_last": True, "random_seed": 1,
    })  # fmt: skip
    vars(config.checkpoint)["moe_ckpt"] = {}
    vars(importlib.import_module("megatron.bridge.training.utils.omegaconf_utils"))["_apply_overrides"](
        config, overrides
    )
    config.optimizer.finalize()
    config.scheduler.finalize()
    vars(type(config))["_calculate_scheduler_steps"](config)
    return config


def record(folder: Path) -> Any:
    """Callbacks."""

    def write(*said: object) -> None:
        with (folder / f"rank-{torch.distributed.get_rank()}").open("a") as file:
            file.write(" ".join(map(str, (os.getpid(), *said))) + "\n")

    def step_ended(context: Any) -> None:
        loss, norm = float(context.loss_dict.get("loss", 0)), float(context.grad_norm)  # none but on the last stage
        write(context.state.train_state.step + 1, loss.hex(), norm.hex())

    def ended(context: Any) -> None:
        weights = [value.detach().float().cpu().numpy().tobytes() for value in context.model[0].parameters()]
        counts = context.state.train_state.consumed_train_samples, context.scheduler.num_steps
        write("end", hashlib.sha256(b"".join(weights)).hexdigest(), *counts)

    callbacks = importlib.import_module("megatron.bridge.training.callbacks").CallbackManager()
    callbacks.register("on_train_step_end", step_ended)
    callbacks.register("on_train_end", ended)
    return callbacks


def main(recipe: str, overrides: str, folder: str) -> None:
    for name in CORE:  # with what is absent, which it expects
        importlib.import_module(name)
    prepare(folder_of_wheel(), ("data.loaders", "data.samplers"))
    module, _, function = recipe.rpartition(".")
    make = getattr(importlib.import_module(f"megatron.bridge.recipes.{module}"), function)
    loop = importlib.import_module("megatron.bridge.training.pretrain")
    setup = importlib.import_module("megatron.bridge.training.setup")
    train = importlib.import_module("megatron.bridge.training.train")
    initialize = importlib.import_module("megatron.bridge.training.initialize")
    wait_for_rank()
    config = small(make(), yaml.safe_load(Path(overrides).read_text(encoding="utf-8")))
    barrier = torch.distributed.barrier
    data = Counting()
    with contextlib.ExitStack() as stack:
        for owner, changed in (
            (loop, {"runtime_config_update": lambda _: None}),  # of a real model
            (loop, {"get_dataset_provider": lambda _: lambda sizes, dataset: (data, None, None)}),
            (setup, {"build_tokenizer": lambda _: SimpleNamespace(vocab_size=VOCABULARY)}),
            (setup, {"maybe_log_and_save_config": lambda _: None, "set_jit_fusion_options": lambda *_: None}),
            (setup, {"initialize_megatron": functools.partial(setup.initialize_megatron, allow_no_cuda=True)}),
            (train, {"get_tensor_shapes_adjust_fn_for_distillation": lambda *_, **__: None}),
            (train.flop_utils, {"num_floating_point_operations": lambda *_, **__: 1000}),
            (train.flop_utils, {"resolve_global_flops_runtime_stats": lambda *_, **__: (0,) * 5}),
            (initialize, {"compile_helpers": lambda: None}),  # the wheel of core has no source of them
            (torch.cuda, {} if torch.cuda.is_available() else {"set_device": lambda _: None}),
            (torch.distributed, {"barrier": lambda *given, device_ids=None, **named: barrier(*given, **named)}),
        ):  # fmt: skip
            for name, value in changed.items():
                stack.enter_context(mock.patch.object(owner, name, value))
        if "WITHOUT" in os.environ:
            stack.enter_context(without_state(*os.environ["WITHOUT"].split(":")))
        pretrain = bridge.protected(loop.pretrain) if config.checkpoint.moe_ckpt else loop.pretrain
        pretrain(config, forward_step, record(Path(folder)))


if __name__ == "__main__":
    main(*sys.argv[1:])
