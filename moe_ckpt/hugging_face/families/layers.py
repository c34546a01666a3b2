"""What families of models have in common: embeddings, attention and experts, by the names of Llama and its heirs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ..arguments import resolved
from ..weights import GroupedHeads, Vocabulary, Weight

NORM_BEFORE_EXPERTS = ("mlp.linear_fc1.layer_norm_weight", "pre_mlp_layernorm.weight")
"""Megatron-Core's own modules save it as if it were fused with the experts, those of Transformer Engine do not."""


def ends(vocabulary: int, arguments: Mapping[str, Any]) -> Iterator[Weight]:
    """Embedding, last norm and output layer; a tied one has no tensor in either.

    Args:
        vocabulary: Rows of the embedding in Hugging Face's tensors, without Megatron's padding.
        arguments: Arguments of Megatron for this model.
    """
    hidden = arguments["hidden_size"]
    table = (vocabulary, hidden)
    yield Weight(("embedding.word_embeddings.weight",), (("model.embed_tokens.weight", table),), Vocabulary())
    yield Weight(("decoder.final_layernorm.weight",), (("model.norm.weight", (hidden,)),))
    if arguments["untie_embeddings_and_output_weights"]:
        yield Weight(("output_layer.weight",), (("lm_head.weight", table),), Vocabulary())


def attention(layer: int, arguments: Mapping[str, Any]) -> Iterator[Weight]:
    """Grouped-query attention of one layer with the norm before it, and those of queries and keys if there are.

    Args:
        layer: Number of the layer, from 0.
        arguments: Arguments of Megatron for this model.
    """
    at, values = f"model.layers.{layer}.", resolved(arguments)
    hidden, size, groups = values["hidden_size"], values["kv_channels"], values["num_query_groups"]
    heads = values["num_attention_heads"]
    shapes = {"q": (heads * size, hidden), "k": (groups * size, hidden), "v": (groups * size, hidden)}
    three = tuple((f"{at}self_attn.{name}_proj.weight", shape) for name, shape in shapes.items())
    yield Weight(("self_attention.linear_qkv.weight",), three, GroupedHeads(groups), layer)
    if values["add_qkv_bias"]:
        biases = tuple((f"{at}self_attn.{name}_proj.bias", shape[:1]) for name, shape in shapes.items())
        yield Weight(("self_attention.linear_qkv.bias",), biases, GroupedHeads(groups), layer)
    output = (f"{at}self_attn.o_proj.weight", (hidden, heads * size))
    yield Weight(("self_attention.linear_proj.weight",), (output,), layer=layer)
    norm = (f"{at}input_layernorm.weight", (hidden,))
    yield Weight(("self_attention.linear_qkv.layer_norm_weight",), (norm,), layer=layer)
    if values["qk_layernorm"]:
        for name in ("q", "k"):
            part = (f"{at}self_attn.{name}_norm.weight", (size,))
            yield Weight((f"self_attention.{name}_layernorm.weight",), (part,), layer=layer)


def norm_before_mlp(layer: int, hidden: int, *, experts: bool) -> Weight:
    """The norm behind the attention of one layer.

    Args:
        layer: Number of the layer, from 0.
        hidden: Hidden size of the model.
        experts: Whether the layer has experts: Megatron then names the norm otherwise.
    """
    names = NORM_BEFORE_EXPERTS if experts else NORM_BEFORE_EXPERTS[:1]
    return Weight(names, ((f"model.layers.{layer}.post_attention_layernorm.weight", (hidden,)),), layer=layer)


def gated_mlp(
    layer: int, ours: str, theirs: str, sizes: tuple[int, int], names: tuple[str, str, str], expert: int | None = None
) -> Iterator[Weight]:
    """A gated linear unit: in Megatron gate and gated are one tensor.

    Args:
        layer: In which it is.
        ours: What Megatron calls it, below the layer.
        theirs: What Hugging Face calls it, likewise.
        sizes: Of the hidden state, and between the two linear layers.
        names: Of gate, gated and the layer back, in Hugging Face.
        expert: Its number, if it is one.
    """
    hidden, between = sizes
    at = f"model.layers.{layer}.{theirs}."
    gate, up, down = (f"{at}{name}.weight" for name in names)
    both = ((gate, (between, hidden)), (up, (between, hidden)))
    yield Weight((f"{ours}.linear_fc1.weight",), both, layer=layer, expert=expert)
    yield Weight((f"{ours}.linear_fc2.weight",), ((down, (hidden, between)),), layer=layer, expert=expert)


LLAMA_NAMES = ("gate_proj", "up_proj", "down_proj")


def routed_experts(
    layer: int, theirs: str, arguments: Mapping[str, Any], names: tuple[str, str, str] = LLAMA_NAMES
) -> Iterator[Weight]:
    """The router and the experts of one layer.

    Args:
        layer: Number of the layer, from 0.
        theirs: Name of the layer's MLP module in Hugging Face.
        arguments: Arguments of Megatron for this model.
        names: Names of the gate, up and down projections of an expert in Hugging Face.
    """
    hidden, experts = arguments["hidden_size"], arguments["num_experts"]
    gate = (f"model.layers.{layer}.{theirs}.gate.weight", (experts, hidden))
    yield Weight(("mlp.router.weight",), (gate,), layer=layer)
    sizes = hidden, resolved(arguments)["moe_ffn_hidden_size"]
    for expert in range(experts):
        yield from gated_mlp(layer, "mlp.experts.experts", f"{theirs}.experts.{expert}", sizes, names, expert)
