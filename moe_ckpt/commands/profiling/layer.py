"""Seconds of one transformer layer with experts, forward and backward, when all of it trains and when it is frozen.

The layer has the shapes of the model, in plain torch: attention, router, routed and shared experts, each a matrix
product of the model's own size. What Megatron-Core adds (norms, fused kernels, dispatch over ranks) is not in it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from megatron.core.dist_checkpointing.moe.types import ModelShape, OperatorId, OperatorKind, expert

REPEATS = 4


@dataclass(frozen=True)
class LayerTimes:
    """Shortest seconds of forward and backward of `tokens` tokens, and their FLOPs where nothing is frozen."""

    tokens: int
    active_s: float
    frozen_s: float
    flops: float

    @property
    def frozen_saves(self) -> float:
        """Share of the time that is saved where the whole layer is frozen; 0 where noise has made it slower."""
        return max(0.0, 1 - self.frozen_s / self.active_s)


def layer_times(shape: ModelShape, tokens: int, seq_length: int) -> LayerTimes:
    """Measure the first layer of the model that has experts, or its first where none has.

    seq_length: of the sequences that the tokens are cut into, and that attention looks at.
    """
    layer = shape.moe_layers[0] if shape.moe_layers else 0
    sequences = max(1, tokens // seq_length)
    length = tokens // sequences
    module = Layer(shape, layer)
    seconds: dict[bool, list[float]] = {False: [], True: []}
    # Both in turns, so that a machine which slows down meanwhile does not make one of them look better.
    for frozen in (False, True) * (REPEATS + 1):
        module.freeze(frozen)
        seconds[frozen].append(_once_s(lambda: module.step(sequences, length)))
    flops = layer_flops(shape, layer, length) * sequences * length
    return LayerTimes(sequences * length, min(seconds[False][1:]), min(seconds[True][1:]), flops)


def matrix_flops(size: int, element_bytes: int) -> float:
    """Operations per second of one square matrix product: what this device can reach at most."""
    import torch

    kind = {2: torch.bfloat16, 4: torch.float32}[element_bytes]
    left, right = (torch.randn(size, size, device=device(), dtype=kind) for _ in range(2))
    return float(2.0 * size**3 / timed_s(lambda: torch.mm(left, right)))


def optimizer_bytes_per_s(parameters: int) -> float:
    """Bytes of gradients, parameters and moments that a step of Adam reads and writes in a second."""
    import torch

    weights = torch.nn.Parameter(torch.zeros(parameters, device=device()))
    weights.grad = torch.ones_like(weights)
    optimizer = torch.optim.Adam([weights], fused=True)
    return 28.0 * parameters / timed_s(optimizer.step)


def device() -> str:
    """Where torch computes here."""
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def element_bytes() -> int:
    """Of what a layer computes with here: bf16 on GPUs, fp32 on CPUs, which emulate anything narrower."""
    return 2 if device() == "cuda" else 4


def timed_s(work: Callable[[], object]) -> float:
    """Shortest seconds of REPEATS runs, after one that is not counted."""
    return min([_once_s(work) for _ in range(REPEATS + 1)][1:])


def _once_s(work: Callable[[], object]) -> float:
    """Seconds by the clock; without a GPU those that this thread computed, so that others on the machine do not count.

    OpenMP lets the calling thread work as long as any of its threads.
    """
    import torch

    on_gpu = device() == "cuda"
    clock = time.perf_counter if on_gpu else time.thread_time
    started = clock()
    work()
    if on_gpu:
        torch.cuda.synchronize()
    return clock() - started


def layer_flops(shape: ModelShape, layer: int, length: int) -> float:
    """FLOPs of one token in this layer, forward and backward."""
    from ...simulator.cost import operator_flops

    flops = operator_flops(shape, length)
    kinds = (OperatorId(layer, OperatorKind.NON_EXPERT), OperatorId(layer, OperatorKind.ROUTER))
    experts = tuple(expert(layer, index) for index in range(shape.num_experts))
    return sum(flops.get(operator, 0.0) for operator in (*kinds, *experts))


class Layer:
    """Weights of one layer, and a step of it."""

    def __init__(self, shape: ModelShape, layer: int) -> None:
        self.shape = shape
        self.is_moe = layer in shape.moe_layers
        hidden, heads = shape.hidden_size, shape.num_attention_heads
        self.head_dim = shape.kv_channels or hidden // heads
        width, groups = heads * self.head_dim, (shape.num_query_groups or heads) * self.head_dim
        self.qkv, self.out = self._weight(hidden, width + 2 * groups), self._weight(width, hidden)
        self.split = [width, groups, groups]
        dense = shape.moe_shared_expert_intermediate_size if self.is_moe else shape.ffn_hidden_size
        self.dense = self._ffn(dense) if dense else None
        count = shape.num_experts if self.is_moe else 0
        self.router = self._weight(hidden, count) if count else None
        self.experts = [self._ffn(shape.moe_ffn_hidden_size or shape.ffn_hidden_size) for _ in range(count)]

    def freeze(self, frozen: bool) -> None:
        """Whether there are no weight gradients from now on."""
        routers = [] if self.router is None else [self.router]
        blocks = [*self.experts, *([self.dense] if self.dense else [])]
        for weight in (self.qkv, self.out, *routers, *(matrix for block in blocks for matrix in block)):
            weight.requires_grad_(not frozen)

    def step(self, sequences: int, length: int) -> None:
        """Forward and backward; the input has a gradient too, as between layers."""
        import torch

        kind = self.qkv.dtype
        states = torch.randn(sequences, length, self.shape.hidden_size, device=device(), dtype=kind, requires_grad=True)
        states = states + self._attended(states)
        tokens = states.flatten(0, 1)
        result = tokens + self._routed(tokens) if self.is_moe else tokens
        if self.dense is not None:
            result = result + self._applied(self.dense, tokens)
        result.sum().backward()

    def _attended(self, states: Any) -> Any:
        from torch.nn.functional import scaled_dot_product_attention

        parts = (states @ self.qkv).split(self.split, -1)
        queries, keys, values = (part.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for part in parts)
        repeats = queries.shape[1] // keys.shape[1]
        keys, values = (part.repeat_interleave(repeats, 1) for part in (keys, values))
        attended = scaled_dot_product_attention(queries, keys, values, is_causal=True)
        return attended.transpose(1, 2).flatten(2) @ self.out

    def _routed(self, tokens: Any) -> Any:
        """Every expert receives as many tokens as any other: shapes are then the same in each run."""
        import torch

        assert self.router is not None
        gates = (tokens @ self.router).softmax(-1)
        count, ways = len(self.experts), self.shape.moe_router_topk
        choices = torch.arange(len(tokens) * ways, device=tokens.device) % count
        sources = torch.arange(len(tokens), device=tokens.device).repeat_interleave(ways)
        result = torch.zeros_like(tokens)
        for index, block in enumerate(self.experts):
            chosen = sources[choices == index]
            if len(chosen):
                gated = self._applied(block, tokens[chosen]) * gates[chosen, index, None]
                result = result.index_add(0, chosen, gated)
        return result

    def _applied(self, block: tuple[Any, Any], tokens: Any) -> Any:
        from torch.nn.functional import gelu, silu

        inner = tokens @ block[0]
        if self.shape.gated_linear_unit:
            gate, inner = inner.chunk(2, -1)
            return (silu(gate) * inner) @ block[1]
        return gelu(inner) @ block[1]

    def _ffn(self, size: int) -> tuple[Any, Any]:
        inner = size * (2 if self.shape.gated_linear_unit else 1)
        return self._weight(self.shape.hidden_size, inner), self._weight(size, self.shape.hidden_size)

    def _weight(self, rows: int, columns: int) -> Any:
        import torch

        kind = torch.bfloat16 if element_bytes() == 2 else torch.float32
        values = torch.randn(rows, columns, device=device(), dtype=kind) * rows**-0.5
        return values.requires_grad_()
