"""What a rank keeps beside its snapshots so that a recovery can stay local: names of what is stored, and records."""

from __future__ import annotations

from .recovery import Direction

LOG = "log"
"""Kind of a snapshot with the tensors that a rank sent over stage boundaries in one iteration (MoEvement 3.4)."""

PARKED = "parked"
"""Kind of a snapshot of the complete live state, put aside when a peer was lost."""

GRADIENTS = "gradients"
"""Kind of a snapshot of the reduced gradients of the iteration after the parked one."""

STANDBY = frozenset({LOG, PARKED, GRADIENTS})
"""Kinds of snapshots that lie in the standby store."""


def boundary_key(direction: Direction, chunk: int, microbatch: int) -> str:
    """The key of a tensor in a log: which way it was sent, by which model chunk of the sender, of which microbatch."""
    return f"{direction.value}/chunk{chunk}/microbatch{microbatch}"


def received_key(direction: Direction) -> str:
    """The key of the fingerprints of all that came this way, in a log: 64 bits each, in the order of arrival; 0 where
    none was taken."""
    return f"received/{direction.value}"
