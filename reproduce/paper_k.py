"""Dynamic-K as published, and what any routing can cost under a constant K."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

from megatron.core.dist_checkpointing.moe.errors import UsageError
from megatron.core.dist_checkpointing.moe.extensions.lossy.dynamic_k import check_floor


def paper_next_k(k: int, num_experts: int, plt: Fraction, limit: Fraction) -> int:
    """K after a recovery as published (MoC 5.3, PEC 3.1): doubled when the PLT under this K has passed its limit.

    The papers do not say what the limit of a K is. The rule reacts: the fault that makes it act may already have
    broken the threshold, which is why `choose_k` looks at what the next fault would cost.
    Raises UsageError for k outside of 1..num_experts.
    """
    check_floor(k, num_experts)
    return min(2 * k, num_experts) if plt > limit else k


@dataclass(frozen=True)
class Cadence:
    """How training checkpoints: every `interval` iterations of `tokens_per_iteration` input tokens.

    Raises UsageError for numbers below 1 or a topk above the number of experts.
    """

    num_experts: int
    topk: int
    interval: int
    tokens_per_iteration: int

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value < 1:
                raise UsageError(f"{name} is {value}, but must be at least 1")
        if self.topk > self.num_experts:
            raise UsageError(f"topk is {self.topk}, but must be from 1 to num_experts = {self.num_experts}")


def worst_case_lost_tokens(cadence: Cadence, k: int) -> int:
    """Tokens that one fault can lose in one MoE layer with sequential selection of a constant K, whatever the routing.

    An expert's copy is at most ceil(N / K) - 1 checkpoints older than the newest checkpoint, and N - (j + 1) x K
    experts have copies that are older than the j-th checkpoint before the newest. Each token that was trained between
    the (j + 1)-th and the j-th is therefore lost at most min(TopK, N - (j + 1) x K) times:
    I x T x the sum of this over j = 0 .. ceil(N / K) - 2. That is 0 for K = N. The bound is reached when the router
    only feeds the experts that come last. It holds from the first K after a recovery or a full checkpoint on; after K
    was raised in between, the bound of the K before holds until all experts were saved once.
    Raises UsageError for k outside of 1..N.
    """
    check_floor(k, cadence.num_experts)
    left_out = range(cadence.num_experts - k, 0, -k)
    return cadence.interval * cadence.tokens_per_iteration * sum(min(cadence.topk, experts) for experts in left_out)
