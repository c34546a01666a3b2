"""Strategies by name: a folder each, one line here."""

from __future__ import annotations

from ..types import Piece
from .base import GATE_UNIT, BufferSpec, Job, Strategy, Throughput
from .full import Full
from .interval_policy import Costs
from .pec import Pec, PecReport
from .sparse import Sparse

STRATEGIES: dict[str, type[Strategy]] = {
    "full": Full,
    "pec": Pec,
    "sparse": Sparse,
}

__all__ = [
    "GATE_UNIT",
    "STRATEGIES",
    "BufferSpec",
    "Costs",
    "Full",
    "Job",
    "Pec",
    "PecReport",
    "Piece",
    "Sparse",
    "Strategy",
    "Throughput",
]
