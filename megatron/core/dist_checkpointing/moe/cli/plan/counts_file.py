"""Router counts that a person gives in a file."""

from __future__ import annotations

import json
from pathlib import Path

from ...errors import UsageError
from ...types import ModelShape, OperatorId, expert

HELP = "JSON: tokens per MoE layer and expert, [[12, 0, ...], ...]. Without it all experts have the same."


def load_counts(path: Path | None, shape: ModelShape) -> dict[OperatorId, int]:
    """Tokens per expert: those of the file, else 1 each. Raises UsageError for a file that does not fit the model."""
    layers, experts = shape.moe_layers, shape.num_experts
    if path is None:
        return {expert(layer, index): 1 for layer in layers for index in range(experts)}
    try:
        rows = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError(f"--counts {path} cannot be read as JSON: {error}") from None
    if not isinstance(rows, list) or len(rows) != len(layers):
        raise UsageError(
            f"--counts {path} must be a list of {len(layers)} lists, one for each MoE layer of {shape.name}"
        )
    for layer, row in zip(layers, rows, strict=True):
        if not isinstance(row, list) or len(row) != experts:
            raise UsageError(f"--counts {path}: layer {layer} must be a list of {experts} numbers, one for each expert")
        for index, count in enumerate(row):
            if type(count) is not int or count < 0:
                raise UsageError(f"--counts {path}: expert {index} of layer {layer} must have an integer of at least 0")
    return {
        expert(layer, index): count for layer, row in zip(layers, rows, strict=True) for index, count in enumerate(row)
    }
