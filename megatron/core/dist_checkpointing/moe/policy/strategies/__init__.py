"""Strategies by name: one file each, one line here."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from .full import Full
from .pec import Pec, PecReport
from .strategy import Costs, Job, Piece, Room, Strategy

STRATEGIES: Mapping[str, Callable[[Job], Strategy]] = {"full": Full, "pec": Pec}

__all__ = ["STRATEGIES", "Costs", "Full", "Job", "Pec", "PecReport", "Piece", "Room", "Strategy"]
