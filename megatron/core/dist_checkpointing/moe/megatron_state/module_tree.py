"""The operators of any tree of Megatron's modules: its layers, what MoE layers they hold, and what is around them.

A GPT goes by the names of its parameters (`operators.locate`), also over pipeline stages. What is said here is for the
rest, on one pipeline stage: vision encoders, several blocks one after the other with something between them. Checked:
core 0.17.1, 0.19.2.

    layers       the outermost modules that are layers, numbered in the order in which they were registered
    in a layer   what an MoE layer calls `router` and `experts`; all else is the layer's non-expert operator
    around       by a table of known names, else: what comes before the first layer is the embedding, what comes after
                 the last one is the head, and what is between belongs to the layer before it

Where a tree is not registered in the order of its forward pass, an operator may be called by the name of another place;
nothing depends on it but what people read, for a replay of such a tree lets gradients flow through all of it.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.multi_token_prediction import MultiTokenPredictionLayer
from megatron.core.transformer.transformer_layer import TransformerLayer
from megatron.core.utils import unwrap_model

from ..errors import UsageError
from ..types import ModelShape, OperatorId, OperatorKind, expert, iterate_operators, moe_layers_of
from .operators import GlobalName

_LAYERS = (MultiTokenPredictionLayer, TransformerLayer, MoELayer)
_KNOWN = {
    "embedding.": OperatorKind.EMBEDDING,
    "decoder.final_layernorm.": OperatorKind.HEAD,
    "output_layer.": OperatorKind.HEAD,
}
_EXPERT = re.compile(r"local_experts\.(?P<sequential>\d+)\.(?P<of_module>.+)|(?P<of_group>.+?\D)(?P<grouped>\d+)")


@dataclass(frozen=True)
class TreeLayer:
    """A layer of the tree: the path of its module, and that of the MoE layer in it; `experts` is 0 without one."""

    path: str
    number: int
    moe: str = ""
    experts: int = 0


class ModuleTree:
    """The layers of an unwrapped model chunk, and the operators of its parameters and buffers."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        self.layers = tuple(_layers(model))

    @cached_property
    def operators(self) -> tuple[OperatorId, ...]:
        """All of them, ascending."""
        found = {self.locate(name, 0).operator for name, _ in self._model.named_parameters()}
        for layer in self.layers:
            # Experts that other ranks have are in the tree of none of this rank's.
            found.update(expert(layer.number, index) for index in range(layer.experts))
        return tuple(sorted(found))

    def locate(self, name: str, first_expert: int) -> GlobalName:
        """The operator and the global name of the parameter or buffer that the model calls `name`.

        Args:
            name: As `named_parameters` and `named_buffers` give it.
            first_expert: Global id of this rank's local expert 0, in every MoE layer.

        Raises:
            UsageError: It holds several experts at once.
        """
        for layer in self.layers:
            if name.startswith(f"{layer.path}."):
                return _in_layer(name, layer, first_expert)
        return GlobalName(self._around(name), name)

    def layer_of(self, module: torch.nn.Module) -> int:
        """The number of the layer that a module of the model is in. Raises KeyError for one that is in none."""
        path = next(path for path, found in self._model.named_modules() if found is module)
        return next(layer.number for layer in self.layers if f"{path}.".startswith(f"{layer.path}."))

    def _around(self, name: str) -> OperatorId:
        last = len(self.layers)
        known = next((kind for prefix, kind in _KNOWN.items() if name.startswith(prefix)), None)
        before = bisect_right(self._positions, self._order.get(name, last))
        if known is OperatorKind.EMBEDDING or (known is None and before == 0):
            return OperatorId(-1, OperatorKind.EMBEDDING)
        if known is OperatorKind.HEAD or before == last:
            return OperatorId(last, OperatorKind.HEAD)
        return OperatorId(before - 1, OperatorKind.NON_EXPERT)

    @cached_property
    def _order(self) -> dict[str, int]:
        names = [name for name, _ in self._model.named_parameters()]
        # Buffers stand beside the parameters of their module, or before all where that has none.
        for name, _ in self._model.named_buffers():
            module = name.rpartition(".")[0]
            at = next((index for index, other in enumerate(names) if other.startswith(f"{module}.")), 0)
            names.insert(at, name)
        return {name: index for index, name in enumerate(names)}

    @cached_property
    def _positions(self) -> list[int]:
        """Where in that order each layer begins."""
        return [
            min(index for name, index in self._order.items() if name.startswith(f"{layer.path}."))
            for layer in self.layers
        ]


def is_plain_gpt(model: Any) -> bool:
    """Whether the names of its parameters say what they are, on any pipeline stage."""
    return isinstance(model, GPTModel)


def layers_ahead(config: Any) -> int:
    """How many layers of a GPT predict further tokens; one that is run repeatedly counts once."""
    depth: int = config.mtp_num_layers or 0
    return min(depth, 1) if getattr(config, "mtp_use_repeated_layer", False) else depth


def gpt_operators(config: Any) -> tuple[OperatorId, ...]:
    """All operators of a GPT, ascending. Layers that predict further tokens come after the others and are as the last
    of them."""
    layers, ahead = config.num_layers, layers_ahead(config)
    moe = set(moe_layers_of(config.moe_layer_freq, layers))
    pattern = [int(min(layer, layers - 1) in moe) for layer in range(layers + ahead)]
    return tuple(iterate_operators(layers + ahead, config.num_moe_experts or 0, pattern))


def refuse_stages(model: str, stages: int, chunks: int = 1) -> None:
    """Refuse a model that is no plain GPT where it is cut: its layers are numbered on one stage only.

    Args:
        model: Its kind.
        stages: Of the pipeline.
        chunks: Of a stage.

    Raises:
        UsageError: It is cut.
    """
    if stages > 1 or chunks > 1:
        raise UsageError(
            f"a {model} on {stages} pipeline stages cannot be protected: layers are numbered over"
            " stages in a GPT only; use --pipeline-model-parallel-size 1"
        )


def tree_of(chunks: Sequence[torch.nn.Module]) -> ModuleTree | None:
    """The tree of a model that is no plain GPT; None for one that is.

    Raises:
        UsageError: It is cut into several chunks or stages, of which each knows its own layers only.
    """
    models = unwrap_model(list(chunks))
    if is_plain_gpt(models[0]):
        return None
    refuse_stages(type(models[0]).__name__, models[0].config.pipeline_model_parallel_size, len(models))
    tree = ModuleTree(models[0])
    if len({layer.experts for layer in tree.layers if layer.moe}) > 1:
        counts = ", ".join(f"{layer.path} {layer.experts}" for layer in tree.layers if layer.moe)
        raise UsageError(f"MoE layers have different numbers of experts ({counts}): give all of them as many")
    if not tree.layers:
        raise UsageError(
            f"a {type(models[0]).__name__} has no transformer layer: there is nothing to snapshot by layer"
        )
    return tree


def layers_of_routers(chunks: Sequence[torch.nn.Module]) -> dict[TopKRouter, int]:
    """The layer of the whole model that each router of this rank is in, counted from 0."""
    modules = [module for chunk in chunks for module in chunk.modules()]
    # Routers that stand alone know their own numbers, as those of a GPT do.
    tree = tree_of(chunks) if any(isinstance(module, _LAYERS) for module in modules) else None
    routers = (module for module in modules if isinstance(module, TopKRouter))
    return {router: _layer_of_gpt(router) if tree is None else tree.layer_of(router) for router in routers}


def _layer_of_gpt(router: TopKRouter) -> int:
    """Routers of layers that predict further tokens are numbered from 1 anew."""
    return int(router.layer_number) - 1 + (router.config.num_layers if getattr(router, "is_mtp_layer", False) else 0)


def _layers(model: torch.nn.Module) -> Iterator[TreeLayer]:
    paths: list[str] = []
    for path, module in model.named_modules():
        if isinstance(module, _LAYERS) and not any(path.startswith(f"{outer}.") for outer in paths):
            paths.append(path)
            inside = [(name, each) for name, each in module.named_modules() if isinstance(each, MoELayer)]
            if len(inside) > 1:
                raise UsageError(f"{path} has {len(inside)} MoE layers, but experts are told apart by layer: one each")
            for name, moe in inside:
                yield TreeLayer(path, len(paths) - 1, f"{path}.{name}" if name else path, moe.config.num_moe_experts)
            if not inside:
                yield TreeLayer(path, len(paths) - 1)


def _in_layer(name: str, layer: TreeLayer, first_expert: int) -> GlobalName:
    if layer.moe and name.startswith(f"{layer.moe}.router."):
        return GlobalName(OperatorId(layer.number, OperatorKind.ROUTER), name)
    routed = f"{layer.moe}.experts."
    if not layer.moe or not name.startswith(routed):
        return GlobalName(OperatorId(layer.number, OperatorKind.NON_EXPERT), name)
    found = _EXPERT.fullmatch(name.removeprefix(routed))
    # `weight1` of core's GroupedMLP holds all experts; of the group of Transformer Engine each has its own, by number.
    if found is None or "." not in name.removeprefix(routed):
        raise UsageError(
            f"parameter {name!r} holds all experts in one tensor: use sequential experts, or Transformer Engine"
        )
    index = first_expert + int(found["sequential"] or found["grouped"])
    return GlobalName(expert(layer.number, index), f"{routed}{index}.{found['of_module'] or found['of_group']}")


def routers_of(chunks: Sequence[torch.nn.Module]) -> list[TopKRouter]:
    """All routers in the model chunks of this rank."""
    return [module for chunk in chunks for module in chunk.modules() if isinstance(module, TopKRouter)]


def drops_tokens(chunks: Sequence[torch.nn.Module]) -> bool:
    """Whether routers drop tokens beyond a capacity that can differ from expert to expert; padded ones are alike."""
    configs = [router.config for router in routers_of(chunks)]
    return any(
        one.moe_expert_capacity_factor is not None and not one.moe_pad_expert_input_to_capacity for one in configs
    )


# All operators of a model and their sizes, also of those that other ranks own, from its configuration.


def model_operators(chunks: Sequence[torch.nn.Module]) -> tuple[OperatorId, ...]:
    """The operators of the whole model that these chunks are a part of, ascending; the same on all ranks."""
    tree = tree_of(chunks)
    return gpt_operators(unwrap_model(list(chunks))[0].config) if tree is None else tree.operators


def model_shape(chunks: Sequence[torch.nn.Module]) -> ModelShape:
    """The whole model that these chunks are a part of, as the policies see it; the same on all ranks.

    Options that ModelShape does not know may make the live model larger: compare the counts of parameters before
    relying on them.

    Raises:
        UsageError: ModelShape cannot describe the model.
    """
    chunk = unwrap_model(list(chunks))[0]
    config = chunk.config
    if not is_plain_gpt(chunk) or config.mtp_num_layers:
        kind = f"{type(chunk).__name__}{' with --mtp-num-layers' if config.mtp_num_layers else ''}"
        raise UsageError(f"the sizes of a {kind} are not known: only a plain GPT can be shared out by them")
    frequency, learned = config.moe_layer_freq, chunk.position_embedding_type == "learned_absolute"
    latent = ("q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim")
    same_names = (
        "num_layers",
        "hidden_size",
        "num_attention_heads",
        "ffn_hidden_size",
        "moe_router_topk",
        "moe_ffn_hidden_size",
        "num_query_groups",
        "kv_channels",
        "gated_linear_unit",
        "add_bias_linear",
        "add_qkv_bias",
        "qk_layernorm",
        "normalization",
        "multi_latent_attention",
        *(latent if config.multi_latent_attention else ()),
    )
    return ModelShape(
        name="in training",
        vocab_size=chunk.vocab_size,
        num_experts=config.num_moe_experts or 0,
        moe_layer_freq=frequency if isinstance(frequency, int) else tuple(frequency),
        moe_shared_expert_intermediate_size=config.moe_shared_expert_intermediate_size or 0,
        moe_shared_expert_gate=config.moe_shared_expert_gate,
        max_position_embeddings=chunk.max_sequence_length if learned else 0,
        untie_embeddings_and_output_weights=not chunk.share_embeddings_and_output_weights,
        **{name: getattr(config, name) for name in same_names},
    )
