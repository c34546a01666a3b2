"""Lines as jobs write them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def iteration(number: int, at_s: float | None = None, **changes: Any) -> dict[str, Any]:
    """A protected iteration of 0.5 s, of which 0.1 s were waited."""
    usual = {
        "iteration": number, "lm_loss": 5.0 - number / 100, "iteration_time_s": 0.5, "stall_s": 0.1, "slowed_s": 0.0,
        "tokens_per_s": 1000.0, "model_flops_per_s": 1e9, "snapshot_bytes": 100, "replicated_bytes": 50,
        "persisted_bytes": 0, "protection": "protected", "protection_since": 1, "protected_iteration": number - 1,
        "persistence": "degraded", "persisted_iteration": None, "reason": None, "order_changes": 0, "replayed": False,
        "checkpoint_memory": {"window": 4, "checkpoint_bytes": 8, "own_bytes": 16, "replica_bytes": 0, "log_bytes": 2},
    }  # fmt: skip
    return usual | ({} if at_s is None else {"at_s": at_s}) | changes


def start(at_s: float, after: int = 0, **changes: Any) -> dict[str, Any]:
    """An attempt begins to train."""
    facts = {"version": 1, "job": "j", "strategy": "sparse", "world_size": 4, "train_iters": 100, "iteration": after}
    return {"run": facts | {"at_s": at_s} | changes}


def recovery(begun_s: float, target: int, **changes: Any) -> dict[str, Any]:
    """One of 8 s."""
    parts = {"detect": 1.0, "rendezvous": 5.0, "replay": 2.0}
    facts = {
        "begun_s": begun_s, "is_whole": True, "parts": parts, "scope": "local", "target": target, "replayed": 3,
        "ranks_back": 2, "ranks": 4, "exactness": "exactly", "table": ["recovered <all>"], "lost_tokens": {},
        "plt": None,
    }  # fmt: skip
    return {"recovery": facts | changes}


def written(path: Path, *lines: dict[str, Any], end: str = "") -> Path:
    """A file of them."""
    path.write_text("".join(json.dumps(line) + "\n" for line in lines) + end)
    return path


def long_run(path: Path, iterations: int) -> Path:
    """With a fault every 1,000 iterations."""
    lines, at_s = [start(0.0)], 0.0
    for number in range(1, iterations + 1):
        at_s += 0.6
        lines.append(iteration(number, at_s, lm_loss=9.0 / (1 + number / 500) + number % 7 / 50))
        if number % 1000 == 0:
            lines.append(recovery(at_s, number))
            at_s += 8.0
    return written(path, *lines)
