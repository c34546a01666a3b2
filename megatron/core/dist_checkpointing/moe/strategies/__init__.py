"""Strategies by name: a folder each, one line here."""

from __future__ import annotations

from ..types import Piece
from .base import GATE_UNIT, BufferSpec, Job, LossReport, Strategy, Throughput
from .full import Full
from .interval_policy import Costs
from .lossy import Lossy
from .pec import Pec
from .selective import Selective
from .sparse import Sparse

STRATEGIES: dict[str, type[Strategy]] = {
    "full": Full,
    "pec": Pec,
    "selective": Selective,
    "sparse": Sparse,
}

__all__ = [
    "GATE_UNIT",
    "STRATEGIES",
    "BufferSpec",
    "Costs",
    "Full",
    "Job",
    "LossReport",
    "Lossy",
    "Pec",
    "Piece",
    "Selective",
    "Sparse",
    "Strategy",
    "Throughput",
]
