"""Expert popularity of a given skewness, as MoEvement's appendix D draws it."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence


def skewness(shares: Sequence[float]) -> float:
    """S of appendix D: 0 where all experts have the same share of the tokens, 1 where one has all."""
    experts, index = len(shares), sum(share * share for share in shares)
    return (index - 1 / experts) / (1 - 1 / experts)


def expected_skewness(alpha: float, experts: int) -> float:
    """E[S] of a symmetric Dirichlet distribution."""
    index = (alpha + 1) / (alpha * experts + 1)
    return (index - 1 / experts) / (1 - 1 / experts)


def alpha_of(skew: float, experts: int) -> float:
    """The alpha whose E[S] is `skew`, above 0 and below 1: `expected_skewness` solved for alpha."""
    index = skew * (1 - 1 / experts) + 1 / experts
    return (1 - index) / (index * experts - 1)


def dirichlet(alpha: float, experts: int, seed: int) -> tuple[float, ...]:
    """One draw of the experts' shares of the tokens, also for an alpha so small that gamma variates would underflow."""
    chance = random.Random(seed)
    # A gamma variate of alpha is one of alpha + 1 times u ** (1 / alpha); its logarithm always fits a float.
    logs = [
        math.log(chance.gammavariate(alpha + 1, 1.0)) + math.log(1 - chance.random()) / alpha for _ in range(experts)
    ]
    largest = max(logs)
    weights = [math.exp(log - largest) for log in logs]
    total = sum(weights)
    return tuple(weight / total for weight in weights)
