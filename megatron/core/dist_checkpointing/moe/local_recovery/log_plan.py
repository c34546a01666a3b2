"""What the boundary logs of a rank hold, and how much memory they take."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from ..policy.boundary import log_keys, receives
from ..ports import Field, Layout
from ..types import Direction, Topology, received_key

_UNDER_WAY = 2
"""Logs beside those that are kept: one that is being recorded, one that is being sealed."""


@dataclass(frozen=True)
class LogPlan:
    """What the logs of a rank hold, and how many of them are kept.

    shape, dtype: of each tensor that goes over a stage boundary; see `policy.boundary.tensor_shape`. lookback: the
    newest iterations whose logs are kept at most. group: microbatches that a model chunk takes in turn, None for
    Megatron-Core's default.
    """

    topology: Topology
    rank: int
    shape: tuple[int, ...]
    dtype: str
    lookback: int
    group: int | None = None

    def layout(self, microbatches: int) -> Layout:
        """The records of an iteration with so many microbatches: of each direction in the order of sending; and of
        each direction the fingerprints of what is received."""
        if microbatches not in self._layouts:
            sent = (Field(key, self.dtype, self.shape) for key in self.sent(microbatches))
            counts = ((way, receives(self.topology, self._stage, microbatches, way, self.group)) for way in Direction)
            received = (Field(received_key(way), "int64", (count,)) for way, count in counts if count)
            self._layouts[microbatches] = Layout.of((*sent, *received))
        return self._layouts[microbatches]

    def sent(self, microbatches: int) -> tuple[str, ...]:
        """The keys of what is sent, those of each direction in the order of sending."""
        return log_keys(self.topology, self._stage, microbatches, self.group)

    @property
    def _stage(self) -> int:
        return self.topology.stage(self.rank)

    @property
    def segments(self) -> int:
        """How many logs there are at most, those under way among them."""
        return self.lookback + _UNDER_WAY

    def sizes(self, microbatches: int) -> list[int]:
        """Bytes of the segments that logs of at most so many microbatches need: their sum is the bound."""
        return [self.layout(microbatches).nbytes] * self.segments

    @cached_property
    def _layouts(self) -> dict[int, Layout]:
        return {}
