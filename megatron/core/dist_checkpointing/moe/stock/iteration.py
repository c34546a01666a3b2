"""How an iteration of the stock loop came out."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from megatron.core import parallel_state

from ..recovery.timeline import RecoveryTimeline
from ..snapshot.coordinator import ProtectionReport


@dataclass(frozen=True)
class StockIteration:
    """How one iteration of the loop came out on this rank.

    losses: as the loop reports them, on the last pipeline stage. duration_s: of passes and step. stall_s: how long
    training waited for checkpoints. protection: None where nothing is protected, and in a replay. recovery: with the
    first new iteration after one. learning_rate, loss_scale: of the next iteration, as the loop logs them.
    """

    iteration: int
    losses: Mapping[str, float]
    grad_norm: float | None
    skipped: bool
    replayed: bool
    duration_s: float
    stall_s: float = 0.0
    protection: ProtectionReport | None = None
    recovery: RecoveryTimeline | None = None
    learning_rate: float | None = None
    loss_scale: float | None = None


Report = Callable[[StockIteration], None]


def mean_loss(losses: Sequence[Mapping[str, torch.Tensor]]) -> float | None:
    """The loss as the loop reports it: over microbatches and data-parallel ranks; None off the last pipeline stage.

    losses: what the forward step returned for each microbatch; its first entry is the one that is trained for.
    """
    if not losses:
        return None
    name = "lm loss" if "lm loss" in losses[0] else next(iter(losses[0]))
    parts = [part[name].view(-1) for part in losses]
    if parts[0].numel() == 1:
        return float(torch.cat(parts).mean())
    total = torch.vstack(parts).sum(dim=0)
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    torch.distributed.all_reduce(total, group=group)
    return float(total[0] / total[1])
