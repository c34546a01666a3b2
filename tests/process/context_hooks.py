"""Context parallelism on the CPU: attention of core over keys and values that are gathered from all of its ranks.

Core leaves context parallelism to Transformer Engine, whose attention for it is compiled code alone.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch


class _Gathered(torch.autograd.Function):
    """A tensor along its first axis, in the order of the sequence, from the two stretches that each rank has."""

    @staticmethod
    def forward(ctx: Any, own: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.group = group
        parts = [torch.empty_like(own) for _ in range(group.size())]
        torch.distributed.all_gather(parts, own.contiguous(), group=group)
        halves = [part.chunk(2) for part in parts]
        return torch.cat([*(front for front, _ in halves), *(back for _, back in reversed(halves))])

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        total = gradient.contiguous().clone()
        torch.distributed.all_reduce(total, group=ctx.group)
        stretches = total.chunk(2 * ctx.group.size())
        return torch.cat((stretches[ctx.group.rank()], stretches[-1 - ctx.group.rank()])), None


@contextlib.contextmanager
def gathered_context() -> Iterator[None]:
    """Let core's own attention compute a rank's part of the queries."""
    from megatron.core import parallel_state
    from megatron.core.models import backends
    from megatron.core.transformer.dot_product_attention import DotProductAttention

    class Attention(DotProductAttention):
        def __init__(self, config: Any, *given: Any, **named: Any) -> None:
            alone = copy.copy(config)
            alone.context_parallel_size = 1
            super().__init__(alone, *given, **named)

        def forward(self, query: Any, key: Any, value: Any, mask: Any, **options: Any) -> torch.Tensor:
            group = parallel_state.get_context_parallel_group()
            keys, values = (_Gathered.apply(own, group) for own in (key, value))
            return super().forward(query, keys, values, mask, **options)

    with mock.patch.object(backends, "DotProductAttention", Attention):
        yield


@contextlib.contextmanager
def warmed_up_apart() -> Iterator[None]:
    """Warm fusions up without a draw of the generator that routers are drawn from.

    On a GPU that takes the device's generator, and routers the host's. On the CPU they are one, and the number of draws
    is the length of a rank's part of a sequence: with context parallelism routers would begin otherwise.
    """
    from megatron.training import initialize

    name = "_warmup_jit_function"
    original = vars(initialize)[name]

    def warm_up(*given: Any, **named: Any) -> None:
        with torch.random.fork_rng(devices=()):
            original(*given, **named)

    with mock.patch.object(initialize, name, warm_up):
        yield
