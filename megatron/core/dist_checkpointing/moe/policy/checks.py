"""Checks of the numbers that decisions start from, and budgets made of them."""

from __future__ import annotations

import math
from fractions import Fraction

from ..errors import UsageError


def positive(name: str, value: float) -> Fraction:
    """The decimal number that `value` prints as, exactly: 0.03 is 3/100, so that limits lie where people expect them.

    Args:
        name: What the error calls the value.
        value: The number to check.

    Raises:
        UsageError: The value is not finite, or not greater than 0.
    """
    if not (math.isfinite(value) and value > 0):
        raise UsageError(f"{name} is {value}, but must be a finite number greater than 0")
    return Fraction(str(value))


def not_negative(name: str, value: float) -> Fraction:
    """As `positive`, but 0 is allowed. Raises UsageError unless it is finite and at least 0."""
    if not (math.isfinite(value) and value >= 0):
        raise UsageError(f"{name} is {value}, but must be a finite number of at least 0")
    return Fraction(str(value))


def whole(name: str, value: int, minimum: int) -> int:
    """`value` itself.

    Args:
        name: What the error calls the value.
        value: The number to check.
        minimum: The smallest value that is accepted.

    Raises:
        UsageError: It is no integer of at least `minimum`.
    """
    if not isinstance(value, int) or value < minimum:
        raise UsageError(f"{name} is {value}, but must be a whole number of at least {minimum}")
    return value


def budget_bytes(bandwidth_bytes_per_s: float, iteration_time_s: float) -> int:
    """Whole bytes that a link carries during one iteration: B_PCIe T_Iter of MoEvement Alg. 1, B of MOETION 4.2.

    Ranks that measured different values get different budgets: agree on the smallest before planning.

    Args:
        bandwidth_bytes_per_s: What the link carries, in bytes per second.
        iteration_time_s: Seconds of one iteration.

    Raises:
        UsageError: A value not above 0 or not finite, and a budget below one byte.
    """
    bandwidth = positive("bandwidth_bytes_per_s", bandwidth_bytes_per_s)
    return whole("budget_bytes", math.floor(bandwidth * positive("iteration_time_s", iteration_time_s)), 1)
