"""Where the numbers of each iteration go: log lines, JSON lines, TensorBoard."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron.core.dist_checkpointing.moe import ProtectionReport

log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class IterationReport:
    """What one training iteration did; the loss is known on the last pipeline stage only."""

    iteration: int
    consumed_train_samples: int
    lm_loss: float | None
    grad_norm: float | None
    learning_rate: float | None
    loss_scale: float | None
    skipped: bool
    iteration_time_s: float
    stall_s: float
    """Time in which training waited for checkpoints before this iteration's report: on a GPU, stood still for them."""
    passes_s: float | None = None
    """What the passes took, as far as the device has come."""
    slowed_s: float | None = None
    """By how much copies beside them made the newest such passes longer; None where no others are known."""
    snapshot_bytes: int = 0
    replicated_bytes: int = 0
    """Bytes that this rank began to copy to memory, and sent to peers, since the report before."""
    protection: str | None = None
    protection_since: int | None = None
    """How safe the newest snapshot in memory is, and since which iteration it is so; None without snapshots."""
    persistence: str | None = None
    """The same of persistent storage."""
    expert_tokens: dict[int, Any] | None = None
    """By iteration, tokens routed to each expert of each MoE layer: what became known since the report before."""
    checkpoint_memory: dict[str, int] | None = None
    """Bytes that checkpoints take in the memory of this rank, as MoEvement Table 6 counts them, and their window."""
    replayed: bool = False
    """Whether a recovery ran the iteration again to make a sparse checkpoint dense."""
    lost_tokens: dict[str, Any] | None = None
    """What all faults so far have cost under a lossy strategy: tokens by MoE layer, PLT by both definitions, MLT; and
    what the next one would cost."""


class Metrics:
    """Writes reports on the last rank, which knows the loss; elsewhere it does nothing."""

    def __init__(self, *, is_last_rank: bool, train_iters: int, jsonl: str | None, tensorboard_dir: str | None) -> None:
        self._train_iters = train_iters
        self._jsonl: int | None = None
        self._warned = False
        self._board: Any = None
        self._is_last_rank = is_last_rank
        if is_last_rank and jsonl is not None:
            Path(jsonl).parent.mkdir(parents=True, exist_ok=True)
            self._jsonl = os.open(jsonl, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        if is_last_rank and tensorboard_dir is not None:
            from torch.utils.tensorboard import SummaryWriter

            self._board = SummaryWriter(tensorboard_dir)

    @property
    def board(self) -> Any:
        """The TensorBoard writer, or None."""
        return self._board

    def record(self, report: IterationReport) -> None:
        """Write the report of an iteration to the JSON lines file and to TensorBoard."""
        self._append(dataclasses.asdict(report))
        if self._board is not None:
            for name, value in _scalars(report).items():
                self._board.add_scalar(name, value, report.iteration)

    def recovered(self, timeline: Mapping[str, Any]) -> None:
        """Write the timeline of a recovery as a line of its own: `{"recovery": {...}}`, without an iteration."""
        self._append({"recovery": dict(timeline)})

    def _append(self, data: dict[str, Any]) -> None:
        if self._jsonl is None:
            return
        try:
            # One write per line: a killed process leaves whole lines.
            os.write(self._jsonl, (json.dumps(data) + "\n").encode())
        except OSError as error:
            if not self._warned:
                log.critical("--metrics-jsonl cannot be written: %s; training goes on without its lines", error)
            self._warned = True

    def show(self, report: IterationReport, losses: dict[str, float]) -> None:
        """Log one line in Megatron's style; `losses` are further losses, such as auxiliary ones."""
        if self._is_last_rank:
            shown = {name: value for name, value in _scalars(report).items() if name != "samples"}
            parts = [f"{name}: {value:.6E}" for name, value in (shown | losses).items()]
            log.info(
                "iteration %8d/%8d | consumed samples: %12d | %s",
                report.iteration,
                self._train_iters,
                report.consumed_train_samples,
                " | ".join(parts),
            )

    def show_evaluation(self, split: str, iteration: int, loss: float | None) -> None:
        """Log the mean loss of an evaluation and record it in TensorBoard."""
        if loss is None or not self._is_last_rank:
            return
        log.info("%s split at iteration %d | lm loss: %.6E", split, iteration, loss)
        if self._board is not None:
            self._board.add_scalar(f"lm loss {split}", loss, iteration)

    def close(self) -> None:
        """Flush and close what is open."""
        if self._jsonl is not None:
            os.close(self._jsonl)
        if self._board is not None:
            self._board.close()


def _lost(done: ProtectionReport) -> dict[str, Any] | None:
    """What all faults so far have cost: tokens by MoE layer, and their shares by the definitions of the papers."""
    losses = done.losses
    if losses is None:
        return None
    shares = {"plt": losses.plt, "plt_pec": losses.plt_pec, "mlt": losses.mlt}
    by_layer = dict(zip(losses.layers, losses.lost_tokens, strict=True))
    at_risk = dict(zip(losses.layers, losses.at_risk, strict=True))
    return {
        "by_layer": by_layer,
        "at_risk": at_risk,
        "owed": losses.owed,
        **{name: float(share) for name, share in shares.items()},
    }


def protection_fields(done: ProtectionReport | None, *, with_tokens: bool) -> dict[str, Any]:
    """What checkpointing did, as fields of an `IterationReport`."""
    if done is None:
        return {}
    return {
        "snapshot_bytes": done.snapshot_bytes,
        "replicated_bytes": done.replicated_bytes,
        "passes_s": done.passes_s,
        "slowed_s": done.slowed_s,
        "protection": done.protection.state.name.lower(),
        "protection_since": done.protection.since_iteration,
        "persistence": done.persistent.state.name.lower() if done.persistent else None,
        "checkpoint_memory": dataclasses.asdict(done.memory) if done.memory else None,
        "expert_tokens": dict(done.tokens) if with_tokens else None,
        "lost_tokens": _lost(done),
    }


def _scalars(report: IterationReport) -> dict[str, float]:
    values = {
        "lm loss": report.lm_loss,
        "grad norm": report.grad_norm,
        "learning rate": report.learning_rate,
        "loss scale": report.loss_scale,
        "iteration time (s)": report.iteration_time_s,
        "stall (s)": report.stall_s,
        "samples": float(report.consumed_train_samples),
    }
    return {name: value for name, value in values.items() if value is not None}
