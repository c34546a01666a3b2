"""Operators, the units of a snapshot, and the parts of their state."""

from __future__ import annotations

import enum
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from ..errors import UsageError
from .topology import Topology


class OperatorKind(enum.IntEnum):
    """What an operator does in its layer; the values give the order of operators within a layer."""

    EMBEDDING = 0
    NON_EXPERT = 1  # attention, norms, a dense or shared-expert FFN: all of a layer but its router and routed experts
    ROUTER = 2  # the gate
    EXPERT = 3
    HEAD = 4  # final norm and output layer


@dataclass(frozen=True, order=True, slots=True)
class OperatorId:
    """One operator of the model: MoEvement section 3.2 calls it the independently snapshotable unit.

    `layer` counts from 0 over the whole model, whatever the pipeline layout; the embedding has layer -1 and the head
    has the number of layers, so that ids sort from the input of the model to its output. `expert` is the global expert
    id, and -1 for operators that are no experts. Every tie between operators is broken by this order.
    """

    layer: int
    kind: OperatorKind
    expert: int = -1

    @property
    def is_expert(self) -> bool:
        """Whether this is a routed expert."""
        return self.kind is OperatorKind.EXPERT

    def __str__(self) -> str:
        if self.kind in (OperatorKind.EMBEDDING, OperatorKind.HEAD):
            return self.kind.name.lower()
        suffix = str(self.expert) if self.is_expert else ""
        return f"layer{self.layer}.{self.kind.name.lower()}{suffix}"


def expert(layer: int, index: int) -> OperatorId:
    """The operator of a routed expert.

    Args:
        layer: The layer, counted from 0 over the whole model.
        index: The global id of the expert in it.
    """
    return OperatorId(layer, OperatorKind.EXPERT, index)


class Part(enum.Flag):
    """Which components of an operator's training state a snapshot holds.

    Three bits name the components as MoEvement Table 7 does: compute weights, master weights, and the moments of the
    optimizer. A snapshot of a whole operator is `MASTER_AND_MOMENTS`, what the papers call its full state: the compute
    weights are left out where they are the cast of the master weights, and count as MASTER where they are not, with
    master weights of less than 32 bits. `EVERYTHING` is what the checkpoints of MoC
    eq. 5 store (B_w + B_o bytes per parameter). `CONSTANT` is no component: it says that training does not change the
    operator, so that this copy is its state after any later iteration as well.
    """

    NOTHING = 0
    COMPUTE = 1
    MASTER = 2
    MOMENTS = 4
    CONSTANT = 8
    MASTER_AND_MOMENTS = MASTER | MOMENTS
    EVERYTHING = COMPUTE | MASTER | MOMENTS


@dataclass(frozen=True)
class Precision:
    """Bytes per parameter of each component of the training state (MoEvement Table 7).

    `source` says where the setting comes from. `recasts` says whether compute weights are the cast of what is kept as
    master weights, so that a full state can leave them out. The table takes that for granted in all rows.
    """

    name: str
    compute_bytes: int
    master_bytes: int
    first_moment_bytes: int
    second_moment_bytes: int
    source: str = ""
    recasts: bool = True

    def __post_init__(self) -> None:
        for field in ("compute_bytes", "master_bytes", "first_moment_bytes", "second_moment_bytes"):
            if getattr(self, field) < 1:
                raise UsageError(f"precision {self.name}: {field} is {getattr(self, field)}, but must be at least 1")

    @property
    def moments_bytes(self) -> int:
        """Bytes per parameter of both moments."""
        return self.first_moment_bytes + self.second_moment_bytes

    @property
    def full_bytes(self) -> int:
        """Bytes per parameter of a full state, from which training continues exactly."""
        return self.bytes_per_parameter(Part.MASTER_AND_MOMENTS) + (0 if self.recasts else self.compute_bytes)

    def exact(self) -> Precision:
        """As it is in training: an optimizer casts the weights before it rounds the masters to less than 32 bits."""
        return replace(self, recasts=self.master_bytes >= 4)

    def bytes_per_parameter(self, part: Part) -> int:
        """Bytes that one parameter takes in a snapshot with this part."""
        return (
            (self.compute_bytes if Part.COMPUTE in part else 0)
            + (self.master_bytes if Part.MASTER in part else 0)
            + (self.moments_bytes if Part.MOMENTS in part else 0)
        )


FP16_FP32 = Precision("fp16-fp32", 2, 4, 4, 4, "mixed precision, also bf16: MoEvement section 3.2")
FP32 = Precision("fp32", 4, 4, 4, 4, "no mixed precision: the compute weights are the master weights")
LOW_PRECISIONS = (
    Precision("fp16-fp16", 2, 2, 2, 2, "Collage; MoEvement Table 7, row 1"),
    Precision("fp8-fp32", 1, 4, 4, 4, "Micikevicius et al. 2022; MoEvement Table 7, row 2"),
    Precision("fp8-fp16-fp32", 1, 2, 4, 4, "Mellempudi et al. 2019; MoEvement Table 7, row 3"),
    Precision("fp8-fp16-fp8", 1, 2, 1, 2, "FP8-LM, Peng et al. 2023; MoEvement Table 7, row 4"),
    Precision("fp8-fp8", 1, 1, 1, 2, "FP8-LM, Peng et al. 2023; MoEvement Table 7, row 5"),
)
PRECISIONS = {precision.name: precision for precision in (FP16_FP32, FP32, *LOW_PRECISIONS)}


@dataclass(frozen=True, slots=True)
class OperatorSize:
    """Bytes of one operator's state where they are copied: a whole operator, or one rank's shard of it."""

    full_bytes: int
    weights_bytes: int


def scaled(nbytes: float) -> str:
    """Bytes as people read them, in decimal units: `74.8 MB`, `0 B`."""
    size, unit = float(nbytes), "B"
    for larger in ("kB", "MB", "GB", "TB"):
        if abs(size) < 999.5:
            break
        size, unit = size / 1000, larger
    return f"{size:.3g} {unit}"


def moe_layers_of(frequency: int | Sequence[int], num_layers: int) -> tuple[int, ...]:
    """The MoE layers by Megatron's `--moe-layer-freq`.

    Args:
        frequency: Every n-th layer from the first, or a pattern with a 1 for each MoE layer.
        num_layers: Layers of the model.
    """
    if isinstance(frequency, int):
        return tuple(range(0, num_layers, frequency))
    return tuple(layer for layer, is_moe in enumerate(frequency) if is_moe)


def iterate_operators(num_layers: int, num_experts: int, frequency: int | Sequence[int]) -> Iterator[OperatorId]:
    """All operators of a model, ascending, that is from its input to its output.

    Args:
        num_layers: Layers of the model.
        num_experts: Routed experts of each MoE layer; 0 for a dense model.
        frequency: Which layers are MoE layers, as in `moe_layers_of`.
    """
    moe = set(moe_layers_of(frequency, num_layers) if num_experts else ())
    yield OperatorId(-1, OperatorKind.EMBEDDING)
    for layer in range(num_layers):
        yield OperatorId(layer, OperatorKind.NON_EXPERT)
        if layer in moe:
            yield OperatorId(layer, OperatorKind.ROUTER)
            yield from (expert(layer, index) for index in range(num_experts))
    yield OperatorId(num_layers, OperatorKind.HEAD)


@dataclass(frozen=True)
class ModelShape:
    """A GPT or MoE model in the words of Megatron's TransformerConfig.

    `ffn_hidden_size` is that of dense layers, `moe_ffn_hidden_size` that of one routed expert (None: as the dense).
    `moe_layer_freq` is Megatron's: every n-th layer is an MoE layer (layer 0 first), or a pattern with one 0 or 1 per
    layer. `kv_channels` None means hidden_size / num_attention_heads. With `multi_latent_attention` the `*_lora_rank`
    and head dimensions of DeepSeek's attention apply. `max_position_embeddings` counts learned positions and is 0 with
    rotary ones. A router's expert bias is a buffer, not a parameter. `note` tells where published figures differ.
    Raises UsageError for values that no model can have.
    """

    name: str
    num_layers: int
    hidden_size: int
    num_attention_heads: int
    vocab_size: int
    ffn_hidden_size: int
    num_experts: int = 0
    moe_router_topk: int = 2
    moe_ffn_hidden_size: int | None = None
    moe_layer_freq: int | tuple[int, ...] = 1
    moe_shared_expert_intermediate_size: int = 0
    moe_shared_expert_gate: bool = False
    num_query_groups: int | None = None
    kv_channels: int | None = None
    gated_linear_unit: bool = False
    max_position_embeddings: int = 0
    untie_embeddings_and_output_weights: bool = False
    add_bias_linear: bool = False
    add_qkv_bias: bool = False
    qk_layernorm: bool = False
    normalization: str = "RMSNorm"
    multi_latent_attention: bool = False
    q_lora_rank: int | None = None
    kv_lora_rank: int = 512
    qk_head_dim: int = 128
    qk_pos_emb_head_dim: int = 64
    v_head_dim: int = 128
    note: str = ""

    def __post_init__(self) -> None:
        positive = ("num_layers", "hidden_size", "num_attention_heads", "vocab_size", "ffn_hidden_size")
        latent = ("q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim")
        for name in (*positive, "moe_ffn_hidden_size", "num_query_groups", "kv_channels", *latent):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise UsageError(f"model {self.name}: {name} is {getattr(self, name)}, but must be at least 1")
        for name in ("num_experts", "moe_shared_expert_intermediate_size", "max_position_embeddings"):
            if getattr(self, name) < 0:
                raise UsageError(f"model {self.name}: {name} is {getattr(self, name)}, but must be at least 0")
        if self.num_experts and not 1 <= self.moe_router_topk <= self.num_experts:
            raise UsageError(
                f"model {self.name}: moe_router_topk is {self.moe_router_topk}, but must be from 1 to num_experts ="
                f" {self.num_experts}"
            )
        if self.normalization not in ("RMSNorm", "LayerNorm"):
            raise UsageError(f"model {self.name}: normalization is {self.normalization!r}, not RMSNorm or LayerNorm")
        frequency = self.moe_layer_freq
        if isinstance(frequency, int) and frequency < 1:
            raise UsageError(f"model {self.name}: moe_layer_freq is {frequency}, but must be at least 1")
        if isinstance(frequency, tuple) and (len(frequency) != self.num_layers or set(frequency) - {0, 1}):
            raise UsageError(
                f"model {self.name}: moe_layer_freq must have one 0 or 1 for each of the {self.num_layers} layers"
            )
        if self.num_attention_heads % (self.num_query_groups or 1):
            raise UsageError(
                f"model {self.name}: num_query_groups is {self.num_query_groups}, but must divide num_attention_heads ="
                f" {self.num_attention_heads}"
            )
        if self.kv_channels is None and self.hidden_size % self.num_attention_heads:
            raise UsageError(
                f"model {self.name}: hidden_size {self.hidden_size} is not a multiple of num_attention_heads"
                f" {self.num_attention_heads}: give kv_channels"
            )

    @cached_property
    def moe_layers(self) -> tuple[int, ...]:
        """Layers with routed experts, ascending."""
        return moe_layers_of(self.moe_layer_freq, self.num_layers) if self.num_experts else ()

    @cached_property
    def parameters(self) -> dict[OperatorId, int]:
        """Parameters of each operator, in the order of OperatorId."""
        moe = set(self.moe_layers)
        counts = {
            OperatorKind.EMBEDDING: (self.vocab_size + self.max_position_embeddings) * self.hidden_size,
            OperatorKind.ROUTER: (self.hidden_size + self.add_bias_linear) * self.num_experts,
            OperatorKind.EXPERT: self._ffn(self.moe_ffn_hidden_size or self.ffn_hidden_size),
            OperatorKind.HEAD: self._norm
            + (self.vocab_size * self.hidden_size if self.untie_embeddings_and_output_weights else 0),
        }
        return {
            operator: self._non_expert(operator.layer in moe)
            if operator.kind is OperatorKind.NON_EXPERT
            else counts[operator.kind]
            for operator in iterate_operators(self.num_layers, self.num_experts, self.moe_layer_freq)
        }

    @property
    def operators(self) -> tuple[OperatorId, ...]:
        """All operators from the input of the model to its output."""
        return tuple(self.parameters)

    @property
    def total_parameters(self) -> int:
        """Parameters of the whole model."""
        return sum(self.parameters.values())

    @property
    def expert_parameters(self) -> int:
        """P_e of MoC eq. 5: parameters of all routed experts."""
        return sum(count for operator, count in self.parameters.items() if operator.is_expert)

    def sizes(self, precision: Precision) -> dict[OperatorId, OperatorSize]:
        """Bytes of each whole operator: in full, and its compute weights."""
        full, weights = precision.full_bytes, precision.compute_bytes
        return {operator: OperatorSize(count * full, count * weights) for operator, count in self.parameters.items()}

    def operators_of_stages(self, topology: Topology) -> tuple[tuple[OperatorId, ...], ...]:
        """Operators of each pipeline stage, ascending; the embedding on the first and the head on the last.

        Raises UsageError when the layers cannot fill the stages.
        """
        stage_of = {
            layer: stage for stage, layers in enumerate(topology.layers_of_stages(self.num_layers)) for layer in layers
        } | {-1: 0, self.num_layers: topology.pp - 1}
        stages: list[list[OperatorId]] = [[] for _ in range(topology.pp)]
        for operator in self.operators:
            stages[stage_of[operator.layer]].append(operator)
        return tuple(map(tuple, stages))

    def expert_rank(self, index: int, topology: Topology) -> int:
        """Expert-parallel rank of expert `index`: contiguous blocks of num_experts / ep.

        Args:
            index: The global id of the expert in its layer.
            topology: The rank layout, with the expert-parallel degree.

        Raises:
            UsageError: `ep` does not divide the number of experts.
        """
        if self.num_experts % topology.ep:
            raise UsageError(f"model {self.name}: ep {topology.ep} does not divide num_experts {self.num_experts}")
        return index // (self.num_experts // topology.ep)

    @property
    def _per_normalized(self) -> int:
        return 2 if self.normalization == "LayerNorm" else 1

    @property
    def _norm(self) -> int:
        return self.hidden_size * self._per_normalized

    def _non_expert(self, is_moe: bool) -> int:
        attention = self._latent_attention if self.multi_latent_attention else self._attention
        if not is_moe:
            return attention + 2 * self._norm + self._ffn(self.ffn_hidden_size)
        shared_size = self.moe_shared_expert_intermediate_size
        shared = self._ffn(shared_size) + self.hidden_size * self.moe_shared_expert_gate if shared_size else 0
        return attention + 2 * self._norm + shared

    def _ffn(self, size: int) -> int:
        inner = size * (2 if self.gated_linear_unit else 1)
        return self.hidden_size * (inner + size) + (inner + self.hidden_size if self.add_bias_linear else 0)

    @property
    def _head_dim(self) -> int:
        return self.kv_channels or self.hidden_size // self.num_attention_heads

    @property
    def _attention(self) -> int:
        queries = self.num_attention_heads * self._head_dim
        keys_values = 2 * (self.num_query_groups or self.num_attention_heads) * self._head_dim
        biases = (queries + keys_values if self.add_bias_linear or self.add_qkv_bias else 0) + (
            self.hidden_size if self.add_bias_linear else 0
        )
        norms = 2 * self._head_dim * self._per_normalized if self.qk_layernorm else 0
        return self.hidden_size * (2 * queries + keys_values) + biases + norms

    @property
    def _latent_attention(self) -> int:
        heads, rank = self.num_attention_heads, self.kv_lora_rank
        query_size = heads * (self.qk_head_dim + self.qk_pos_emb_head_dim)
        queries = (
            self.hidden_size * query_size
            if self.q_lora_rank is None
            else self.q_lora_rank * (self.hidden_size + self._per_normalized + query_size)
        )
        keys_values = self.hidden_size * (rank + self.qk_pos_emb_head_dim) + rank * (
            self._per_normalized + heads * (self.qk_head_dim + self.v_head_dim)
        )
        return queries + keys_values + heads * self.v_head_dim * self.hidden_size
