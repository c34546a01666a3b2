"""Strategies by name: one file each, one line here."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from .full import Full
from .pec import Pec, PecReport
from .sparse import Sparse
from .strategy import GATE_UNIT, Costs, Job, Pace, Piece, Room, Strategy

STRATEGIES: Mapping[str, Callable[[Job], Strategy]] = {"full": Full, "pec": Pec, "sparse": Sparse}

__all__ = [
    "GATE_UNIT",
    "STRATEGIES",
    "Costs",
    "Full",
    "Job",
    "Pace",
    "Pec",
    "PecReport",
    "Piece",
    "Room",
    "Sparse",
    "Strategy",
]
