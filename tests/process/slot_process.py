"""What the processes of `standby_job.py` left: who trained on which rank, after each start."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def sitting(slots: Path, start: int, ranks: int) -> list[dict[str, Any]]:
    """Of each rank that trained after a start: its pid, the addresses of its weights, and what it had of the system."""
    return [json.loads((slots / f"{start}-{rank}").read_text()) for rank in range(ranks)]


def check_survivors(slots: Path, ranks: int, struck: list[set[int]]) -> None:
    """That in each start only these ranks have other processes than in the one before that trained."""
    starts = sorted({int(path.name.split("-")[0]) for path in slots.glob("[0-9]*-[0-9]*")})
    assert len(starts) == len(struck) + 1, starts
    for before, after, lost in zip(starts, starts[1:], struck, strict=False):
        assert survivors(slots, ranks, before, after) == set(range(ranks)) - lost


def survivors(slots: Path, ranks: int, before: int, after: int) -> set[int]:
    """The ranks that have the same process after two starts, with their weights where they were."""
    was, now = sitting(slots, before, ranks), sitting(slots, after, ranks)
    return {rank for rank in range(ranks) if all(was[rank][name] == now[rank][name] for name in ("pid", "weights"))}
