"""The operators of any tree of Megatron's modules: its layers, what MoE layers they hold, and what is around them.

A GPT goes by the names of its parameters (`operators.locate`), also over pipeline stages. What is said here is for the
rest: vision encoders, Mamba layers, several blocks one after the other with something between them. Checked: core
0.17.1, 0.19.2.

    layers       the outermost modules that are layers, numbered over all stages (`stage_layers`)
    in a layer   what an MoE layer calls `router` and `experts`; all else is the layer's non-expert operator

Where a tree is not registered in the order of its forward pass, an operator may be called by the name of another place;
nothing depends on it but what people read, for a replay of such a tree lets gradients flow through all of it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch

from megatron.core import parallel_state
from megatron.core.models.common.language_module.language_module import LanguageModule
from megatron.core.models.gpt import GPTModel
from megatron.core.ssm.mamba_layer import MambaLayer
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.multi_token_prediction import MultiTokenPredictionLayer
from megatron.core.transformer.transformer_layer import TransformerLayer
from megatron.core.utils import unwrap_model

from ..errors import UsageError
from ..types import ModelShape, OperatorId, OperatorKind, expert, iterate_operators, moe_layers_of
from .operators import GlobalName, is_constant
from .stage_layers import ChunkLayer, ChunkParts, StageLayers, TreeLayer

_LAYERS = (MultiTokenPredictionLayer, TransformerLayer, MambaLayer, MoELayer)
_EXPERT = re.compile(r"local_experts\.(?P<sequential>\d+)\.(?P<of_module>.+)|(?P<of_group>.+?\D)(?P<grouped>\d+)")


class ModuleTree:
    """The operators of the parameters and buffers of an unwrapped model chunk.

    Args:
        model: The chunk.
        stages: The layers of all chunks; None: there are no others.
        chunk: Its number among them.

    Raises:
        UsageError: Its experts cannot be told apart.
    """

    def __init__(self, model: torch.nn.Module, stages: StageLayers | None = None, chunk: int = 0) -> None:
        self._model, self._chunk = model, chunk
        self.stages = stages or StageLayers([chunk_parts(model)])
        self.layers = self.stages.layers[chunk]

    @property
    def operators(self) -> tuple[OperatorId, ...]:
        """Those of the whole model, ascending."""
        return self.stages.operators

    def locate(self, name: str, first_expert: int) -> GlobalName:
        """The operator and the global name of the parameter or buffer that the model calls `name`.

        Args:
            name: As `named_parameters` and `named_buffers` give it.
            first_expert: Global id of this rank's local expert 0, in every MoE layer.

        Raises:
            UsageError: It holds several experts at once.
        """
        for layer in self.layers:
            if name.startswith(f"{layer.of.path}."):
                return _in_layer(name, layer, first_expert)
        return self.stages.around(name, self._chunk)

    def layer_of(self, module: torch.nn.Module) -> int:
        """The number of the layer that a module of the model is in. Raises KeyError for one that is in none."""
        path = next((path for path, found in self._model.named_modules() if found is module), "")
        for layer in self.layers:
            if f"{path}.".startswith(f"{layer.of.path}."):
                return layer.number
        raise KeyError(path)


def chunk_parts(model: torch.nn.Module) -> ChunkParts:
    """The layers of an unwrapped model chunk, and what is around them.

    Raises:
        UsageError: A layer has several MoE layers.
    """
    modules = dict(model.named_modules())
    layers = tuple(_layers(modules))
    names = [name for name, _ in model.named_parameters()]
    # Buffers stand beside the parameters of their module, or before all where that has none.
    for name, _ in model.named_buffers():
        if not is_constant(name):
            module = name.rpartition(".")[0]
            at = next((index for index, other in enumerate(names) if other.startswith(f"{module}.")), 0)
            names.insert(at, name)
    around, passed = dict[str, int](), set[str]()
    for name in names:
        inside = next((layer.path for layer in layers if name.startswith(f"{layer.path}.")), None)
        if inside is None:
            around[name] = len(passed)
        else:
            passed.add(inside)
    language = next((path for path, module in modules.items() if isinstance(module, LanguageModule)), "")
    return ChunkParts(layers, around, f"{language}." if language else "", ties_embeddings(model))


def ties_embeddings(model: Any) -> bool:
    """Whether the output layer uses the weights of the word embeddings."""
    return bool(getattr(model, "share_embeddings_and_output_weights", False))


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


# By the first chunk of a rank: the layers of all chunks, and which of them are this rank's.
_NUMBERED: WeakKeyDictionary[torch.nn.Module, tuple[StageLayers, tuple[int, ...]]] = WeakKeyDictionary()


def number_layers(chunks: Sequence[torch.nn.Module]) -> None:
    """Number the layers of a model that is no plain GPT over the stages of the pipeline.

    A collective of the ranks of these stages. They all have to call it whenever one of them has a new model.

    Raises:
        UsageError: On all of them: the layers or experts of the model cannot be told apart.
    """
    models = unwrap_model(list(chunks))
    if is_plain_gpt(models[0]):
        return
    own: list[ChunkParts] | str
    try:
        own = [chunk_parts(model) for model in models]
    except UsageError as error:
        own = str(error)  # the other stages wait for an answer, and end with it
    stages, stage = [own], 0
    if models[0].config.pipeline_model_parallel_size > 1:
        group = parallel_state.get_pipeline_model_parallel_group()
        stages, stage = [own] * group.size(), group.rank()
        torch.distributed.all_gather_object(stages, own, group=group)
    if refused := next((answer for answer in stages if isinstance(answer, str)), None):
        raise UsageError(refused)
    # A microbatch passes the first chunk of each stage before the second of any.
    in_order = [parts for chunk in zip(*stages, strict=True) for parts in chunk]
    numbers = tuple(range(stage, len(in_order), len(stages)))
    _NUMBERED[models[0]] = StageLayers(in_order), numbers


def trees_of(chunks: Sequence[torch.nn.Module]) -> tuple[ModuleTree, ...]:
    """The trees of the chunks of a model that is no plain GPT; none for one that is.

    Raises:
        UsageError: It has no layers, or is cut over stages and `number_layers` was not called.
    """
    models = unwrap_model(list(chunks))
    if is_plain_gpt(models[0]):
        return ()
    kind = type(models[0]).__name__
    if models[0] in _NUMBERED:
        stages, numbers = _NUMBERED[models[0]]
        trees = tuple(ModuleTree(model, stages, number) for model, number in zip(models, numbers, strict=True))
    elif models[0].config.pipeline_model_parallel_size > 1 or len(models) > 1:
        raise UsageError(f"the layers of a {kind} on several pipeline stages have no numbers: call number_layers first")
    else:
        trees = (ModuleTree(models[0]),)
    if not any(trees[0].stages.layers):
        raise UsageError(f"a {kind} has no transformer layer: there is nothing to snapshot by layer")
    return trees


def layers_of_routers(chunks: Sequence[torch.nn.Module]) -> dict[TopKRouter, int]:
    """The layer of the whole model that each router of this rank is in, counted from 0."""
    modules = [module for chunk in chunks for module in chunk.modules()]
    # Routers that stand alone know their own numbers, as those of a GPT do.
    if trees := trees_of(chunks) if any(isinstance(module, _LAYERS) for module in modules) else ():
        of_chunks = zip(trees, chunks, strict=True)
        return {router: tree.layer_of(router) for tree, chunk in of_chunks for router in routers_of([chunk])}
    return {router: _layer_of_gpt(router) for router in modules if isinstance(router, TopKRouter)}


def _layer_of_gpt(router: TopKRouter) -> int:
    """Routers of layers that predict further tokens are numbered from 1 again."""
    return int(router.layer_number) - 1 + (router.config.num_layers if getattr(router, "is_mtp_layer", False) else 0)


def _layers(modules: dict[str, torch.nn.Module]) -> Iterator[ChunkLayer]:
    outer = ""
    for path, module in modules.items():
        if isinstance(module, _LAYERS) and not (outer and path.startswith(f"{outer}.")):
            outer = path
            inside = [(name, each) for name, each in module.named_modules() if isinstance(each, MoELayer)]
            if len(inside) > 1:
                raise UsageError(f"{path} has {len(inside)} MoE layers, but experts are told apart by layer: one each")
            names = [f"{path}.{name}" for name, _ in module.named_parameters()]
            if not inside:
                yield ChunkLayer(path)
            for name, moe in inside:
                at = f"{path}.{name}" if name else path
                more = any(not one.startswith((f"{at}.router.", f"{at}.experts.")) for one in names)
                yield ChunkLayer(path, at, moe.config.num_moe_experts, more)


def _in_layer(name: str, layer: TreeLayer, first_expert: int) -> GlobalName:
    own, whole = layer.of.path, layer.path
    moe = layer.of.moe
    if moe and name.startswith(f"{moe}.router."):
        return GlobalName(OperatorId(layer.number, OperatorKind.ROUTER), whole + name.removeprefix(own))
    routed = f"{moe}.experts."
    if not moe or not name.startswith(routed):
        return GlobalName(OperatorId(layer.number, OperatorKind.NON_EXPERT), whole + name.removeprefix(own))
    found = _EXPERT.fullmatch(name.removeprefix(routed))
    # `weight1` of core's GroupedMLP holds all experts; of the group of Transformer Engine each has its own, by number.
    if found is None or "." not in name.removeprefix(routed):
        raise UsageError(
            f"parameter {name!r} holds all experts in one tensor: use sequential experts, or Transformer Engine"
        )
    index, of_all = first_expert + int(found["sequential"] or found["grouped"]), whole + routed.removeprefix(own)
    return GlobalName(expert(layer.number, index), f"{of_all}{index}.{found['of_module'] or found['of_group']}")


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
    trees = trees_of(chunks)
    return trees[0].operators if trees else gpt_operators(unwrap_model(list(chunks))[0].config)


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
