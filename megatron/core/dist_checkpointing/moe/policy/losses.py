"""The proportion of tokens that faults lost, as each paper defines it, and the ledger that counts them."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from math import lcm

from ..errors import UsageError
from ..types import Level
from .ledger import LossRecord, TokenLedger

__all__ = ["Level", "LossRecord", "TokenLedger", "mlt", "plt_moc", "plt_pec"]


def plt_moc(lost_tokens: Sequence[int], tokens: int | Sequence[int], topk: int | Sequence[int]) -> Fraction:
    """Proportion of lost tokens after MoC eq. 7: the mean over MoE layers of lost_i / (T_i x TopK_i).

    lost_tokens: per MoE layer, of one fault or of all. tokens: T_i, input tokens of the planned training; topk: experts
    per token; each one value or one per layer. Raises UsageError for negative losses, tokens or topk below 1.
    """
    return mlt(lost_tokens, tokens, topk) / len(lost_tokens)


def plt_pec(lost_tokens: Sequence[int], tokens: int | Sequence[int], topk: int | Sequence[int]) -> Fraction:
    """Portion of lost tokens after PEC eq. 4: all lost tokens / sum over MoE layers of T_j x TopK_j; see `plt_moc`."""
    return Fraction(sum(lost_tokens), sum(_processed(lost_tokens, tokens, topk)))


def mlt(lost_tokens: Sequence[int], tokens: int | Sequence[int], topk: int | Sequence[int]) -> Fraction:
    """Momentary lost tokens after MOETION eq. 6: the sum over MoE layers of lost_l / (N_tokens_l x TopK_l).

    Arguments and errors are those of `plt_moc`, which is this divided by the number of MoE layers.
    """
    processed = _processed(lost_tokens, tokens, topk)
    common = lcm(*processed)
    return Fraction(sum(lost * (common // all_) for lost, all_ in zip(lost_tokens, processed, strict=True)), common)


def _processed(lost_tokens: Sequence[int], tokens: int | Sequence[int], topk: int | Sequence[int]) -> list[int]:
    layers = len(lost_tokens)
    if not layers or min(lost_tokens) < 0:
        raise UsageError(f"lost_tokens is {list(lost_tokens)}, but must be one number per MoE layer, at least 0")
    values = []
    for name, value in (("tokens", tokens), ("topk", topk)):
        row = [value] * layers if isinstance(value, int) else list(value)
        if len(row) != layers or min(row) < 1:
            raise UsageError(f"{name} is {value}, but must be at least 1, one value or one for each of {layers} layers")
        values.append(row)
    return [count * experts for count, experts in zip(*values, strict=True)]
