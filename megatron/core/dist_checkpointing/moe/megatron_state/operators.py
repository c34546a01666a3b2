"""Which operator a tensor of a live model belongs to, and the key under which its state is found again.

Names of parameters and buffers are Megatron-Core's, as `named_parameters` of an unwrapped model chunk gives them. From
such a name to a record of a snapshot in four steps:

    "decoder.layers.1.mlp.experts.linear_fc1.weight0"      what this chunk, on this rank, calls it
    GlobalName: layer 5, expert 12, "...12.linear_fc1..."  what it is in the whole model (`locate`)
    Shard: its elements 0 to 4096, partition 1 of 2        what of it this rank's optimizer steps
    StateTensor: of these the field "exp_avg"              one tensor of training state, one record

`holders` tells which other ranks have the same values, so that they need not all be stored.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING

from ..errors import UsageError
from ..ports import Field
from ..types import OperatorId, OperatorKind, Part, Topology, expert

if TYPE_CHECKING:
    import torch

WORD_EMBEDDINGS = "embedding.word_embeddings.weight"
OUTPUT_WEIGHTS = "output_layer.weight"

POSITION_EMBEDDINGS = "embedding.position_embeddings.weight"
SINKS = ".core_attention.softmax_offset"

_IN_LAYER = re.compile(r"decoder\.layers\.(?P<layer>\d+)\.(?P<rest>.+)")
# A layer that predicts further tokens: what is around the transformer layer in it, and that layer.
_AHEAD = re.compile(r"mtp\.layers\.(?P<layer>\d+)\.(?:(?P<inner>mtp_model_layer|transformer_layer)\.)?(?P<rest>.+)")
_AROUND_AHEAD = ("enorm.", "hnorm.", "eh_proj.", "final_layernorm.")
# Experts in a module of their own each (SequentialMLP), and as numbered parameters of one module (TEGroupedMLP).
_SEQUENTIAL = re.compile(r"mlp\.experts\.local_experts\.(?P<expert>\d+)\.(?P<tensor>linear_fc[12]\.(?:weight|bias))")
_GROUPED = re.compile(r"mlp\.experts\.(?P<tensor>linear_fc[12]\.(?:weight|bias))(?P<expert>\d+)")
# Core's GroupedMLP keeps all experts of a rank in one tensor, which cannot be saved expert by expert.
_LEGACY = re.compile(r"mlp\.experts\.(?:weight|bias)[12]")
_ROUTER = "mlp.router."
# Whatever else a layer may have. Modules of other names might be cut over ranks in ways that are not known here.
_NORM = re.compile(r"(?:mlp\.)?\w+_layernorm\..+")
_NON_EXPERT = (
    "layer_scalar",
    "self_attention.",
    "mlp.linear_fc1.",
    "mlp.linear_fc2.",
    "mlp.shared_experts.",
    "mlp.fc1_latent_proj.",
    "mlp.fc2_latent_proj.",
)
# The configuration determines rotary angles: they are no training state, though they are registered as buffers, of the
# model or, with latent attention, of each layer, which registers them again where it needs others.
_CONSTANT = re.compile(r"(?:.+\.)?rotary_pos_emb\..+")


@dataclass(frozen=True, slots=True)
class ChunkPlace:
    """Where a model chunk sits in the whole model.

    Attributes:
        first_layer: Global number of the chunk's `decoder.layers.0`, counted from 0.
        num_layers: Layers of the whole model, not of the chunk, without those that predict further tokens.
        first_expert: Global id of this rank's local expert 0, in every MoE layer.
        tied: Whether the output layer uses the weights of the word embeddings.
        layers_ahead: Layers of the whole model that predict further tokens, numbered after the others.
        copies_embedding: Whether this chunk has them and so a copy of the embedding, which another stage has too.
    """

    first_layer: int
    num_layers: int
    first_expert: int = 0
    tied: bool = False
    layers_ahead: int = 0
    copies_embedding: bool = False


@dataclass(frozen=True, slots=True)
class GlobalName:
    """A parameter or buffer of the whole model: global layer number, global expert id, one spelling for all experts.

    Tied embeddings: with several pipeline stages Megatron keeps the word embeddings twice, on the first stage and as
    `output_layer.weight` on the last, reduces both gradients together and steps both copies alike. Both are state of
    the embedding operator under one name; each copy names the ranks of the other among its holders. One of them has to
    be stored, and a restore writes both. Layers that predict further tokens have such a copy too, whether or not the
    output is tied; of learned positions their copy is trained apart.
    """

    operator: OperatorId
    name: str


@dataclass(frozen=True, slots=True)
class Shard:
    """Elements `start` to `end` of a tensor of the model as one tensor-parallel rank has it, flattened.

    Attributes:
        of: The parameter or buffer.
        start: First element.
        end: One past the last element.
        numel: Elements of that flattened tensor.
        tp_rank: Which of `tp_size` partitions it is; 0 of 1 where all tensor-parallel ranks hold the whole.
        tp_size: See `tp_rank`.
        own_of: The rank for a tensor in which every rank has values of its own, else None.
    """

    of: GlobalName
    start: int
    end: int
    numel: int
    tp_rank: int = 0
    tp_size: int = 1
    own_of: int | None = None

    def key(self, field: str) -> str:
        """Unique within a rank; the same key on two ranks names the same values."""
        # Sizes are part of the key: a snapshot of another layout of ranks has no record of this key at all.
        partition = f"/tp{self.tp_rank}of{self.tp_size}" if self.tp_size > 1 else ""
        own = f"/rank{self.own_of}" if self.own_of is not None else ""
        return f"{self.of.name}{partition}{own}[{self.start}:{self.end}]/{field}"


@dataclass(frozen=True, slots=True)
class ShardSpread:
    """How a tensor is spread over ranks.

    Attributes:
        is_expert: Whether over the dimensions of experts (etp, ep, edp) or of all else (tp, cp, dp).
        partitioned: Cut over tensor-parallel ranks, else whole on each of them.
        sharded: Cut over data-parallel ranks by the distributed optimizer, else whole on each of them.
        tied: On the first and the last pipeline stage (word embeddings), else on one.
    """

    is_expert: bool
    partitioned: bool
    sharded: bool
    tied: bool = False


@lru_cache
def holders(topology: Topology, rank: int, spread: ShardSpread) -> tuple[int, ...]:
    """The ranks that hold the same values as `rank`, itself among them, ascending.

    Args:
        topology: The rank layout.
        rank: A rank that holds the tensor.
        spread: How the tensor is spread over ranks.
    """
    here = topology.coordinates(rank)

    def holds(other: int) -> bool:
        there = topology.coordinates(other)
        # Other expert-parallel ranks hold other experts; to the rest of the model they are data-parallel ranks.
        same_partition = there.etp == here.etp if spread.is_expert else there.tp == here.tp
        theirs, ours = (topology.shard_of(one, is_expert=spread.is_expert) for one in (there, here))
        # Cut over ranks: the same piece is on the ranks of the same place in the cut. Whole: it is on all of them.
        return (
            (same_partition or not spread.partitioned)
            and (theirs == ours or not spread.sharded)
            and (there.ep == here.ep or not spread.is_expert)
        )

    # Tied word embeddings are stepped alike on the first and on the last stage, from one reduced gradient.
    stages = sorted({0, topology.pp - 1}) if spread.tied else (here.pp,)
    return tuple(other for stage in stages for other in topology.stage_ranks(stage) if holds(other))


@dataclass(frozen=True, eq=False)
class StateTensor:
    """One tensor of training state that this rank owns, as a view into the live storage.

    Attributes:
        shard: Which elements of which tensor of the model it belongs to.
        field: `compute`, `master`, `buffer`, or the optimizer's name (`exp_avg`, `exp_avg_sq`, `step`); of the scale
            beside such a tensor its name with `_scale` (`quantized.py`).
        part: The one component of the operator's state that it is. Where compute weights and master weights are one
            tensor (fp32, and frozen parameters) it is MASTER. Router buffers are MASTER too, step counts MOMENTS. So
            are compute weights that are not the cast of what is kept as master weights: masters of less than 32 bits.
            NOTHING for compute weights of which no snapshot has a copy, because they may be those of the step before.
        tensor: Flat, contiguous, of the live dtype and device; as long as `shard`, but step counts and scales have one
            element. A copy of it is a snapshot, and copying into it is a restore.
        holders: Ranks that hold the same values, this one among them, ascending. One of them has to store it.
        in_forward: Whether a forward pass reads it or a cast of it that is no state itself: compute weights, fp32
            masters, router buffers, masters of weights with a scale for each block.
    """

    shard: Shard
    field: str
    part: Part
    tensor: torch.Tensor
    holders: tuple[int, ...]
    in_forward: bool = False

    @property
    def operator(self) -> OperatorId:
        """The one operator to whose state this belongs."""
        return self.shard.of.operator

    @cached_property
    def key(self) -> str:
        """See `Shard.key`."""
        return self.shard.key(self.field)

    @property
    def record(self) -> Field:
        """How a snapshot stores it."""
        dtype = str(self.tensor.dtype).removeprefix("torch.")
        return Field(self.key, dtype, tuple(self.tensor.shape), self.part, self.operator)

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        count: int = self.tensor.numel() * self.tensor.element_size()
        return count

    def serves(self, part: Part) -> bool:
        """Whether a snapshot of `part` contains this tensor: COMPUTE takes all that a forward pass reads."""
        # fp32 masters and buffers serve as compute weights too: there is no second tensor for that.
        return bool(self.part & part) or (self.in_forward and Part.COMPUTE in part)


def is_partitioned(parameter: torch.nn.Parameter, of: GlobalName) -> bool:
    """Whether tensor-parallel ranks have parts of a parameter that is of no expert.

    Args:
        parameter: The parameter.
        of: Its name in the whole model.
    """
    # Core gives learned sinks no attribute, but a rank has those of its own heads.
    return of.name.endswith(SINKS) or getattr(parameter, "tensor_model_parallel", False)


def is_constant(name: str) -> bool:
    """Whether a buffer is a table that the configuration determines, such as rotary angles: no training state."""
    return _CONSTANT.fullmatch(name) is not None


def locate(name: str, chunk: ChunkPlace) -> GlobalName:
    """The operator and the global name of a parameter or buffer.

    Args:
        name: How the model chunk calls it.
        chunk: Where the chunk sits in the whole model.

    Raises:
        UsageError: The name fits no operator.
    """
    in_layer = _IN_LAYER.fullmatch(name)
    if in_layer:
        layer = chunk.first_layer + int(in_layer["layer"])
        return _in_layer(name, layer, f"decoder.layers.{layer}", in_layer["rest"], chunk)
    ahead = _AHEAD.fullmatch(name)
    if ahead:
        layer, prefix = chunk.num_layers + int(ahead["layer"]), f"mtp.layers.{ahead['layer']}"
        if ahead["inner"]:
            return _in_layer(name, layer, f"{prefix}.{ahead['inner']}", ahead["rest"], chunk)
        if ahead["rest"].startswith(_AROUND_AHEAD):
            return GlobalName(OperatorId(layer, OperatorKind.NON_EXPERT), name)
    # The last stage's copy of tied embeddings is the embedding's state, not the head's. With layers that predict
    # further tokens the output reads their copy of the embedding, and core leaves these weights as they are.
    if name == OUTPUT_WEIGHTS and chunk.tied and not chunk.copies_embedding:
        return GlobalName(OperatorId(-1, OperatorKind.EMBEDDING), WORD_EMBEDDINGS)
    if name.startswith("embedding."):
        if chunk.copies_embedding and name == POSITION_EMBEDDINGS:
            name = f"mtp.{name}"
        return GlobalName(OperatorId(-1, OperatorKind.EMBEDDING), name)
    if name.startswith(("decoder.final_layernorm.", "output_layer.")):
        return GlobalName(OperatorId(chunk.num_layers + chunk.layers_ahead, OperatorKind.HEAD), name)
    raise UsageError(
        f"parameter or buffer {name!r} belongs to no operator: expected embedding.*, decoder.layers.<n>.*,"
        " decoder.final_layernorm.*, mtp.layers.<n>.* or output_layer.*; a model with other modules cannot be protected"
    )


def _in_layer(name: str, layer: int, prefix: str, rest: str, chunk: ChunkPlace) -> GlobalName:
    routed = _SEQUENTIAL.fullmatch(rest) or _GROUPED.fullmatch(rest)
    if routed:
        # One spelling for both kinds of modules, and global ids: snapshots do not depend on how experts are computed.
        index = chunk.first_expert + int(routed["expert"])
        return GlobalName(expert(layer, index), f"{prefix}.mlp.experts.{index}.{routed['tensor']}")
    if rest.startswith(_ROUTER):
        return GlobalName(OperatorId(layer, OperatorKind.ROUTER), f"{prefix}.{rest}")
    if rest.startswith(_NON_EXPERT) or _NORM.fullmatch(rest):
        return GlobalName(OperatorId(layer, OperatorKind.NON_EXPERT), f"{prefix}.{rest}")
    if _LEGACY.fullmatch(rest):
        raise UsageError(
            f"parameter {name!r} holds all experts in one tensor: experts are protected one by one, use sequential"
            " experts or --moe-grouped-gemm with Transformer Engine"
        )
    raise UsageError(
        f"parameter or buffer {name!r} belongs to no operator of layer {layer}: expected mlp.router.*,"
        " mlp.experts.local_experts.<n>.linear_fc1|2.weight|bias, mlp.experts.linear_fc1|2.weight<n>|bias<n>, a norm"
        f" (*_layernorm.*, mlp.*_layernorm.*), or one of {', '.join(f'{known}*' for known in _NON_EXPERT)}"
    )
