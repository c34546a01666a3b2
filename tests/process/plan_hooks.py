"""What tests of the planner write down inside workers: each plan of the strategy, and the tokens it was given."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch


@contextlib.contextmanager
def recorded(folder: str, name: str) -> Iterator[None]:
    """Each rank appends JSON lines to a file of its own: bytes of operators by rank, then each plan and what was
    counted."""
    from megatron.core.dist_checkpointing.moe.strategies import STRATEGIES

    kind = STRATEGIES[name]
    build, plan, counted = kind.__init__, kind.plan, kind.on_token_counts

    def recorded_build(self: Any, job: Any) -> None:
        build(self, job)
        _note(folder, {"sizes": {rank: _sizes(own) for rank, own in job.sizes.items()}})

    def recorded_plan(self: Any, iteration: int) -> Any:
        made = plan(self, iteration)
        if made is not None:
            _note(folder, {"planned": iteration, "digest": made.digest()})
        return made

    def recorded_counted(self: Any, iteration: int, counts: Sequence[Sequence[int]]) -> None:
        _note(folder, {"counted": iteration, "tokens": [list(row) for row in counts]})
        counted(self, iteration, counts)

    with (
        mock.patch.object(kind, "__init__", recorded_build),
        mock.patch.object(kind, "plan", recorded_plan),
        mock.patch.object(kind, "on_token_counts", recorded_counted),
    ):
        yield


def _sizes(own: Any) -> list[list[Any]]:
    return [
        [[one.layer, one.kind.value, one.expert], [size.full_bytes, size.weights_bytes]] for one, size in own.items()
    ]


def _note(folder: str, event: dict[str, Any]) -> None:
    with (Path(folder) / f"plans-{torch.distributed.get_rank()}.jsonl").open("a") as file:
        file.write(json.dumps(event) + "\n")
