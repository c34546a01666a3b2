"""What stages of a pipeline send each other, through the communicator that lets a single one replay from it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..errors import UsageError


def boundary(manager: Any, options: Mapping[str, Any]) -> dict[str, Any]:
    """Options of a schedule through which the stages of a pipeline send what a single one can replay from."""
    if manager.communicator is None:
        return {}
    if options.get("p2p_communicator") is not None:
        raise UsageError(
            "`pretrain` was given a p2p_communicator, but what stages send has to go through that of the checkpoint"
            " subsystem: use --moe-ckpt-recovery global, or do without it"
        )
    return {"p2p_communicator": manager.communicator, "pg_collection": manager.process_groups}
