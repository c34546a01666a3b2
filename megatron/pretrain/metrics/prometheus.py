"""`--metrics-textfile` and `--metrics-port`: the newest numbers for Prometheus and all that reads OpenMetrics.

Protection comes first: the alarm to have is that a job was not `protected` for a while.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron.pretrain.metrics.iteration import LEVELS, IterationReport, RunFacts
from megatron.pretrain.metrics.settings import MetricsSettings
from megatron.pretrain.metrics.sink import MetricsSink, missing_package

log = logging.getLogger(__name__)

ADDRESS = "127.0.0.1"

_HELP = {
    "moe_ckpt_protection_state": "0 unprotected, 1 degraded, 2 protected; in memory, and in storage where there is one",
    "moe_ckpt_newest_iteration": "newest iteration that is protected in this tier",
    "moe_ckpt_newest_timestamp_seconds": "when that became known",
    "moe_ckpt_memory_bytes": "what checkpoints take in the memory of the reporting rank, by what for",
    "moe_ckpt_window_iterations": "iterations of a checkpoint",
    "moe_ckpt_order_changes": "changes of the order of operators in this attempt",
    "moe_ckpt_stall_seconds": "for how long training waited for checkpoints in the newest iteration",
    "moe_ckpt_slowed_seconds": "by how much copies made the newest passes longer",
    "moe_ckpt_recovery_timestamp_seconds": "when the recovery began that this attempt started with",
    "moe_ckpt_recovery_seconds": "how long it took, by its parts",
    "moe_ckpt_recovery_replayed_iterations": "iterations that were run again in it",
    "moe_ckpt_recovery_lost_tokens": "routed tokens whose updates it lost",
    "training_start_timestamp_seconds": "when this attempt of the job began to train",
    "training_timestamp_seconds": "when the newest iteration ended",
    "training_iteration": "newest iteration",
    "training_consumed_samples": "samples that were trained on",
    "training_loss": "loss of the newest iteration",
    "training_gradient_norm": "gradient norm of the newest iteration",
    "training_learning_rate": "learning rate of the newest iteration",
    "training_loss_scale": "loss scale of the newest iteration",
    "training_step_skipped": "whether the optimizer skipped the newest step",
    "training_replayed": "whether the newest iteration was run again by a recovery",
    "training_iteration_seconds": "seconds of the newest iteration",
    "training_passes_seconds": "seconds of its passes",
    "training_tokens_per_second": "input tokens of the whole job",
    "training_model_flops_per_second": "floating point operations that the model needs, of the whole job",
}
_COUNTERS = {
    "moe_ckpt_copied_bytes": "bytes that the reporting rank copied to memory in this attempt",
    "moe_ckpt_sent_bytes": "bytes that it sent to peers",
    "moe_ckpt_written_bytes": "bytes that it wrote to storage",
    "moe_ckpt_recoveries": "recoveries in this process",
}
_BY = {
    "moe_ckpt_protection_state": "tier",
    "moe_ckpt_newest_iteration": "tier",
    "moe_ckpt_newest_timestamp_seconds": "tier",
    "moe_ckpt_memory_bytes": "use",
    "moe_ckpt_recovery_seconds": "part",
}
"""The label that a metric has beside `run`."""


class Prometheus(MetricsSink):
    """textfile: written again with each iteration, by a rename, and removed where training ends well: what
    stays tells of a job that stands. port: served by a thread of its own."""

    flag = "--metrics-textfile"

    def __init__(self, textfile: str | None, port: int | None) -> None:
        import prometheus_client

        self._client, self._textfile, self._run = prometheus_client, textfile, ""
        self._registry = prometheus_client.CollectorRegistry()
        self._metrics = {
            name: kind(name, text, ["run", *([_BY[name]] if name in _BY else [])], registry=self._registry)
            for kind, group in ((prometheus_client.Gauge, _HELP), (prometheus_client.Counter, _COUNTERS))
            for name, text in group.items()
        }
        self._newest: dict[str, int] = {}
        self._server: Any = None
        if textfile is not None:
            self._write()
        if port is not None:
            self._serve(port)

    @classmethod
    def opened(cls, settings: MetricsSettings) -> Prometheus | None:
        """See `MetricsSink`. A port that cannot be had is said in one line; an earlier attempt may still have it."""
        if settings.textfile is None and settings.port is None:
            return None
        try:
            return cls(settings.textfile, settings.port)
        except ImportError as error:
            flag = cls.flag if settings.textfile is not None else "--metrics-port"
            raise missing_package(flag, "prometheus_client", "metrics", error) from error

    def began(self, facts: RunFacts) -> None:
        """See `MetricsSink`."""
        self._run = facts.job
        self._set("training_start_timestamp_seconds", facts.at_s)
        self._write()

    def iteration(self, report: IterationReport) -> None:
        """See `MetricsSink`."""
        now_s = report.at_s or 0.0
        tiers = {
            "memory": (report.protection, report.protected_iteration),
            "storage": (report.persistence, report.persisted_iteration),
        }
        for tier, (state, iteration) in tiers.items():
            if state is not None:
                self._set("moe_ckpt_protection_state", LEVELS[state], tier)
            if iteration is not None:
                self._set("moe_ckpt_newest_iteration", iteration, tier)
                if self._newest.get(tier) != iteration:
                    self._newest[tier] = iteration
                    self._set("moe_ckpt_newest_timestamp_seconds", now_s, tier)
        for name, value in _gauges(report).items():
            self._set(name, value)
        for name, value in (report.checkpoint_memory or {}).items():
            if name != "window":
                self._set("moe_ckpt_memory_bytes", value, name.removesuffix("_bytes"))
        counted = {"copied": report.snapshot_bytes, "sent": report.replicated_bytes, "written": report.persisted_bytes}
        for name, nbytes in counted.items():
            self._metrics[f"moe_ckpt_{name}_bytes"].labels(self._run).inc(nbytes)
        self._write()

    def recovered(self, timeline: Mapping[str, Any], iteration: int) -> None:
        """See `MetricsSink`."""
        self._metrics["moe_ckpt_recoveries"].labels(self._run).inc()
        self._set("moe_ckpt_recovery_timestamp_seconds", timeline["begun_s"])
        self._set("moe_ckpt_recovery_replayed_iterations", timeline["replayed"])
        lost = sum(sum(layer.values()) for layer in timeline["lost_tokens"].values())
        self._set("moe_ckpt_recovery_lost_tokens", lost)
        for part, length_s in timeline["parts"].items():
            self._set("moe_ckpt_recovery_seconds", length_s, part)
        self._write()

    def close(self) -> None:
        """See `MetricsSink`."""
        if self._textfile is not None:
            Path(self._textfile).unlink(missing_ok=True)
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()

    def _set(self, name: str, value: float | None, *labels: str) -> None:
        if value is not None:
            self._metrics[name].labels(self._run, *labels).set(value)

    def _write(self) -> None:
        if self._textfile is not None:
            self._client.write_to_textfile(self._textfile, self._registry)

    def _serve(self, port: int) -> None:
        try:
            self._server, _ = self._client.start_http_server(port, ADDRESS, self._registry)
        except (OSError, OverflowError) as error:
            why = getattr(error, "strerror", None) or error
            log.critical("metrics: cannot serve --metrics-port %d: %s; disabled", port, why)


def _gauges(report: IterationReport) -> dict[str, float | None]:
    return {
        "moe_ckpt_window_iterations": (report.checkpoint_memory or {}).get("window"),
        "moe_ckpt_order_changes": report.order_changes,
        "moe_ckpt_stall_seconds": report.stall_s,
        "moe_ckpt_slowed_seconds": report.slowed_s,
        "training_timestamp_seconds": report.at_s,
        "training_iteration": report.iteration,
        "training_consumed_samples": report.consumed_train_samples,
        "training_loss": report.lm_loss,
        "training_gradient_norm": report.grad_norm,
        "training_learning_rate": report.learning_rate,
        "training_loss_scale": report.loss_scale,
        "training_step_skipped": report.skipped,
        "training_replayed": report.replayed,
        "training_iteration_seconds": report.iteration_time_s,
        "training_passes_seconds": report.passes_s,
        "training_tokens_per_second": report.tokens_per_s,
        "training_model_flops_per_second": report.model_flops_per_s,
    }
