"""What a snapshot of `selective` may take of the links: measured, or given by flags (MOETION 4.2)."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

from ...errors import UsageError
from ...strategies.base import Throughput
from ...strategies.memory_report import parse_bytes

LOCAL_FLAG, REMOTE_FLAG = "--moe-ckpt-budget-local", "--moe-ckpt-budget-remote"
AUTO = "auto"
UNBOUNDED = 2**62
"""Bytes of a budget that is neither given nor known yet."""


def parse_budget(flag: str, text: str) -> int | None:
    """Bytes of one snapshot on one rank; None for `auto`.

    Args:
        flag: The flag, for the error.
        text: Its value.

    Raises:
        UsageError: The value is neither `auto` nor a number of bytes above 0.
    """
    if text == AUTO:
        return None
    nbytes = parse_bytes(text)
    if not nbytes:
        raise UsageError(f"invalid {flag} {text} (expected {AUTO} or a size, such as 500MB or 2GiB)")
    return nbytes


@dataclass(frozen=True)
class LinkBudgets:
    """B_local and B_remote of MOETION 4.2 for one rank: bandwidth x time of an iteration's passes, agreed on.

    The paper takes the whole iteration for both; a copy has to end before the optimizer's step.

    given_local_bytes, given_remote_bytes: of the flags; None: as measured. replicas: peers that each rank sends to, who
    share its link. measured: of the newest iteration; None before the first one.
    """

    given_local_bytes: int | None
    given_remote_bytes: int | None
    replicas: int
    measured: Throughput | None = None

    def after(self, throughput: Throughput) -> LinkBudgets:
        """With the newest iteration; one of which nothing is known changes nothing."""
        return replace(self, measured=throughput) if throughput.iteration_s > 0 else self

    @property
    def local_link_bytes(self) -> int:
        """What the bus carries in an iteration."""
        measured = self.measured
        return UNBOUNDED if measured is None else _carried(measured.bandwidth_bytes_per_s, measured.iteration_s)

    @property
    def remote_link_bytes(self) -> int:
        """What the network carries in an iteration to each peer."""
        measured = self.measured
        if measured is None or not self.replicas:
            return UNBOUNDED
        return _carried(measured.peer_bytes_per_s / self.replicas, measured.iteration_s)

    @property
    def local_bytes(self) -> int:
        """B_local: as given, else what the bus carries."""
        return self.given_local_bytes or self.local_link_bytes

    @property
    def remote_bytes(self) -> int:
        """B_remote: as given, else what the network carries."""
        return self.given_remote_bytes or self.remote_link_bytes

    @property
    def beyond_links(self) -> dict[str, tuple[int, int]]:
        """Flags that give more than was measured: what they give, and what the link carries."""
        given = {
            LOCAL_FLAG: (self.given_local_bytes, self.local_link_bytes),
            REMOTE_FLAG: (self.given_remote_bytes, self.remote_link_bytes),
        }
        return {flag: (nbytes, link) for flag, (nbytes, link) in given.items() if nbytes is not None and nbytes > link}

    def to_data(self) -> list[float] | None:
        """What was measured, as JSON values; -1 stands for a bandwidth that is not known."""
        measured = self.measured
        if measured is None:
            return None
        peers = -1.0 if math.isinf(measured.peer_bytes_per_s) else measured.peer_bytes_per_s
        return [measured.iteration_s, measured.bandwidth_bytes_per_s, peers]

    def from_data(self, data: Any) -> LinkBudgets:
        """With what was measured when `to_data` was called."""
        if data is None:
            return self
        iteration_s, bandwidth, peers = data
        return replace(self, measured=Throughput(iteration_s, bandwidth, math.inf if peers < 0 else peers))


def _carried(bytes_per_s: float, iteration_s: float) -> int:
    return UNBOUNDED if math.isinf(bytes_per_s) else min(UNBOUNDED, int(bytes_per_s * iteration_s))
