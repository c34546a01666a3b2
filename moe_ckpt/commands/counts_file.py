"""Router counts that a person gives in a file, or that a job has logged."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click

from megatron.core.dist_checkpointing.moe.errors import UsageError
from megatron.core.dist_checkpointing.moe.storage.small_files import read_small
from megatron.core.dist_checkpointing.moe.types import ModelShape

from ..runs.run_log import parsed

option = click.option(
    "--counts",
    type=click.Path(path_type=Path),
    default=None,
    metavar="FILE",
    help="Tokens per MoE layer and expert: JSON, [[12, 0, ...], ...] for every iteration or a list of these with one"
    " for each; or the --metrics-jsonl of a job with --moe-ckpt-log-expert-tokens. Without it all experts have the"
    " same.",
)
"""For commands whose plans depend on them."""

MOST_BYTES = 1 << 30
"""Of the metrics log of a job; a longer one has to be cut."""

Rows = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Counts:
    """Tokens of the iterations 1, 2, ...; those after the last one have the same as the last.

    by_iteration: for each iteration, rows by MoE layer and expert. layers: the MoE layers, ascending.
    """

    layers: tuple[int, ...]
    by_iteration: tuple[Rows, ...] = field(repr=False)

    def of(self, iteration: int) -> Rows:
        """Tokens of an iteration, by MoE layer and expert."""
        return self.by_iteration[min(iteration, len(self.by_iteration)) - 1]


def load_counts(path: Path | None, shape: ModelShape) -> Counts:
    """The tokens of the file, else 1 for each expert. Raises UsageError for a file that does not fit the model.

    Args:
        path: JSON file of tokens by layer and expert; None: 1 token for each expert.
        shape: The model, whose MoE layers and experts the file has to match.
    """
    layers = shape.moe_layers
    if path is None:
        return Counts(layers, (((1,) * shape.num_experts,) * len(layers),))
    found = _read(path)
    if not isinstance(found, dict):
        is_series = isinstance(found, list) and found and all(isinstance(rows, list) and rows for rows in found)
        is_series = is_series and all(isinstance(row, list) for rows in found for row in rows)
        found = dict(enumerate(found if is_series else [found], start=1))
    return Counts(layers, tuple(_checked(path, shape, found[iteration]) for iteration in sorted(found)))


def _read(path: Path) -> Any:
    """What a JSON file holds; of a metrics log the rows by iteration, the last ones of an iteration that ran twice."""
    try:
        content = read_small(path, MOST_BYTES, through_links=True)
        if not content.lstrip().startswith(b"{"):
            return json.loads(content)
        logged: dict[int, Any] = {}
        for line in content.splitlines():
            for iteration, rows in ((parsed(line) or {}).get("expert_tokens") or {}).items():
                logged[int(iteration)] = rows
    except (OSError, ValueError, AttributeError, RecursionError) as error:
        raise UsageError(f"--counts {path} cannot be read as JSON: {error}") from None
    if sorted(logged) != list(range(1, len(logged) + 1)) or not logged:
        raise UsageError(
            f"--counts {path} must have the expert_tokens of all iterations from 1 on: log them from the start of"
            " training with --moe-ckpt-log-expert-tokens"
        )
    return logged


def _checked(path: Path, shape: ModelShape, rows: Any) -> Rows:
    layers, experts = shape.moe_layers, shape.num_experts
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
    return tuple(map(tuple, rows))
