"""What is known of a run, and of each of its iterations; a line of `--metrics-jsonl` has these fields."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from megatron.core.dist_checkpointing.moe import ProtectionReport, WaitReport

VERSION = 1
"""Of the lines. A reader that does not know a field, or a kind of line, passes it by."""


@dataclasses.dataclass(frozen=True)
class RunFacts:
    """What one attempt of a job is, written when it is about to train: a line `{"run": {...}}`.

    iteration: after which it begins. tokens_per_iteration, flops_per_iteration: of the whole job, forward and backward,
    as the model needs them: what is computed twice for recomputation counts once. at_s: seconds since 1970. boot: which
    boot of its node this is. since_boot_s: seconds since then, which are told with each line: the clock of the day may
    be set at any time. model, layout, software: in words, for the head of a report.
    """

    job: str
    strategy: str
    world_size: int
    train_iters: int
    iteration: int
    tokens_per_iteration: int
    flops_per_iteration: float
    at_s: float
    boot: str = ""
    since_boot_s: float | None = None
    model: str = ""
    layout: str = ""
    software: str = ""
    version: int = VERSION


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
    at_s: float | None = None
    """When it was written, in seconds since 1970."""
    since_boot_s: float | None = None
    tokens_per_s: float | None = None
    model_flops_per_s: float | None = None
    """Of the whole job, in this iteration: `RunFacts` over `iteration_time_s`."""
    passes_s: float | None = None
    """What the passes took, as far as the device has come."""
    slowed_s: float | None = None
    """By how much copies beside them made the newest such passes longer; None where no others are known."""
    pipeline_waits: list[dict[str, Any]] | None = None
    """With `--moe-ckpt-copy-placement bubbles`, of each pipeline stage, the mean of its ranks, one iteration late: for
    how long it waited for others in the passes, what the schedule lets expect, the bytes that began to be copied and
    sent in these waits, and by how much the latest of them ended after its wait; see `WaitReport`."""
    snapshot_bytes: int = 0
    replicated_bytes: int = 0
    persisted_bytes: int = 0
    """Bytes that this rank began to copy to memory, sent to peers, and wrote to storage, since the report before."""
    spared_bytes: int = 0
    """Bytes of the replicas that peers got meanwhile which they made from what they hold, or from gradients."""
    protection: str | None = None
    protection_since: int | None = None
    """How safe the newest snapshot in memory is, and since which iteration it is so; None without snapshots."""
    protected_iteration: int | None = None
    """The newest that has all its replicas, as far as this attempt of the job knows."""
    persistence: str | None = None
    persistence_since: int | None = None
    persisted_iteration: int | None = None
    """The same of persistent storage."""
    reason: str | None = None
    """Why there is less protection than was asked for, as this rank knows it."""
    order_changes: int = 0
    """How often this attempt changed the order in which operators are snapshotted."""
    expert_tokens: dict[int, Any] | None = None
    """By iteration, tokens routed to each expert of each MoE layer: what became known since the report before."""
    lost_tokens: dict[str, Any] | None = None
    """What all faults so far have cost under a lossy strategy: tokens by MoE layer, PLT by both definitions, MLT; and
    what the next one would cost."""
    checkpoint_memory: dict[str, int] | None = None
    """Bytes that checkpoints take in the memory of this rank, as MoEvement Table 6 counts them, and their window."""
    replayed: bool = False
    """Whether a recovery ran the iteration again to make a sparse checkpoint dense."""

    def of_run(self, facts: RunFacts | None, at_s: float, since_boot_s: float) -> IterationReport:
        """With when it was written, and with the rates of its run.

        Args:
            facts: Tokens and operations of an iteration; None: unknown, then there are no rates.
            at_s: Seconds since 1970.
            since_boot_s: Seconds since the machine started.
        """
        written = dataclasses.replace(self, at_s=at_s, since_boot_s=since_boot_s)
        if facts is None or self.iteration_time_s <= 0:
            return written
        per_s = facts.tokens_per_iteration / self.iteration_time_s, facts.flops_per_iteration / self.iteration_time_s
        return dataclasses.replace(written, tokens_per_s=per_s[0], model_flops_per_s=per_s[1])


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


def _waits(stage: WaitReport) -> dict[str, float]:
    """Of one pipeline stage, next to what its schedule lets expect."""
    return {
        "waited_s": stage.waited_s,
        "estimated_s": stage.estimated_s,
        "passes_s": stage.passes_s,
        "copied_bytes": stage.copied_bytes,
        "sent_bytes": stage.sent_bytes,
        "overrun_s": stage.overrun_s,
    }


def protection_fields(done: ProtectionReport | None, *, with_tokens: bool) -> dict[str, Any]:
    """What checkpointing did, as fields of an `IterationReport`.

    Args:
        done: What checkpointing did; None: nothing is protected.
        with_tokens: Whether the tokens of each expert are among them.
    """
    if done is None:
        return {}
    return {
        "snapshot_bytes": done.snapshot_bytes,
        "replicated_bytes": done.replicated_bytes,
        "spared_bytes": done.spared_bytes,
        "persisted_bytes": done.persisted_bytes,
        "passes_s": done.passes_s,
        "slowed_s": done.slowed_s,
        "pipeline_waits": [_waits(stage) for stage in done.waits] or None,
        "protection": done.protection.state.name.lower(),
        "protection_since": done.protection.since_iteration,
        "protected_iteration": done.protected_iteration,
        "persistence": done.persistent.state.name.lower() if done.persistent else None,
        "persistence_since": done.persistent.since_iteration if done.persistent else None,
        "persisted_iteration": done.persisted_iteration,
        "reason": done.reason or None,
        "order_changes": done.order_changes,
        "checkpoint_memory": dataclasses.asdict(done.memory) if done.memory else None,
        "expert_tokens": dict(done.tokens) if with_tokens else None,
        "lost_tokens": _lost(done),
    }


LEVELS = {"unprotected": 0, "degraded": 1, "protected": 2}
"""What a state of protection is as a number."""


def checkpoint_scalars(report: IterationReport) -> dict[str, float]:
    """All other numbers of a report, for boards; tokens of experts are in the JSON lines only."""
    return _known(
        {
            "checkpoint/protection": LEVELS.get(report.protection or ""),
            "checkpoint/persistence": LEVELS.get(report.persistence or ""),
            "checkpoint/protected iteration": report.protected_iteration,
            "checkpoint/persisted iteration": report.persisted_iteration,
            "checkpoint/iterations not protected": _behind(report, report.protected_iteration),
            "checkpoint/iterations not persisted": _behind(report, report.persisted_iteration),
            "checkpoint/stall (s)": report.stall_s,
            "checkpoint/slowed (s)": report.slowed_s,
            "checkpoint/passes (s)": report.passes_s,
            **{
                f"pipeline/stage {stage} {name} (s)": row[f"{name}_s"]
                for stage, row in enumerate(report.pipeline_waits or ())
                for name in ("waited", "estimated")
            },
            "checkpoint/bytes copied": report.snapshot_bytes,
            "checkpoint/bytes sent": report.replicated_bytes,
            "checkpoint/bytes written": report.persisted_bytes,
            "checkpoint/order changes": report.order_changes,
            "checkpoint/replayed": report.replayed,
            "checkpoint/step skipped": report.skipped,
            "throughput/tokens per s": report.tokens_per_s,
            "throughput/model FLOP per s": report.model_flops_per_s,
            **{
                f"checkpoint/memory {name.replace('_', ' ')}": value
                for name, value in (report.checkpoint_memory or {}).items()
            },
        }
    )


def recovery_scalars(timeline: Mapping[str, Any]) -> dict[str, float]:
    """What a recovery took, for boards."""
    lost = sum(sum(layer.values()) for layer in timeline.get("lost_tokens", {}).values())
    parts = {f"recovery/{name} (s)": length_s for name, length_s in timeline["parts"].items()}
    return _known(
        {
            "recovery/total (s)": timeline["total_s"],
            "recovery/iterations replayed": timeline["replayed"],
            "recovery/ranks back": timeline["ranks_back"],
            "recovery/lost tokens": lost,
            "recovery/share of tokens lost": timeline.get("plt"),
            **parts,
        }
    )


def _behind(report: IterationReport, iteration: int | None) -> int | None:
    return None if iteration is None else report.iteration - iteration


def _known(values: Mapping[str, float | None]) -> dict[str, float]:
    return {name: float(value) for name, value in values.items() if value is not None}
