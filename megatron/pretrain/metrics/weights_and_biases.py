"""`--wandb-project`: curves of all numbers in Weights & Biases; `WANDB_MODE=offline` needs no account."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping
from typing import Any

from megatron.pretrain.metrics.iteration import (
    IterationReport,
    RunFacts,
    checkpoint_scalars,
    loop_scalars,
    recovery_scalars,
)
from megatron.pretrain.metrics.settings import MetricsSettings
from megatron.pretrain.metrics.sink import MetricsSink, missing_package

log = logging.getLogger(__name__)

INIT_TIMEOUT_S = 30
_STEP = "iteration"


class WeightsAndBiases(MetricsSink):
    """run: of wandb. owns: else it is the loop's, which has its own curves of what the loop does."""

    flag = "--wandb-project"

    def __init__(self, run: Any, *, owns: bool) -> None:
        self._run, self._owns = run, owns

    @classmethod
    def opened(cls, settings: MetricsSettings) -> WeightsAndBiases | None:
        """See `MetricsSink`. None also where wandb does not start, as without a key: that is said in one line."""
        if settings.wandb is not None:
            return cls(settings.wandb, owns=False)
        if settings.wandb_project is None:
            return None
        try:
            import wandb
        except ImportError as error:
            raise missing_package(cls.flag, "wandb", "wandb", error) from error
        try:
            run = wandb.init(
                project=settings.wandb_project,
                name=settings.wandb_exp_name,
                dir=settings.wandb_save_dir,
                settings=wandb.Settings(init_timeout=INIT_TIMEOUT_S, silent=True, console="off"),
            )
            # Iterations come again after a fault, which wandb's own count of steps does not allow.
            run.define_metric("*", step_metric=_STEP)
        except Exception as error:  # no key, no network, a server that refuses
            log.critical(
                "%s: Weights & Biases does not start: %s; training goes on without it. WANDB_MODE=offline needs no key",
                cls.flag,
                " ".join(str(error).split()) or type(error).__name__,
            )
            return None
        return cls(run, owns=True)

    def began(self, facts: RunFacts) -> None:
        """See `MetricsSink`."""
        if self._owns:
            self._run.config.update(dataclasses.asdict(facts), allow_val_change=True)

    def iteration(self, report: IterationReport) -> None:
        """See `MetricsSink`."""
        self._log(checkpoint_scalars(report) | (loop_scalars(report) if self._owns else {}), report.iteration)

    def recovered(self, timeline: Mapping[str, Any], iteration: int) -> None:
        """See `MetricsSink`."""
        self._log(recovery_scalars(timeline), iteration)

    def evaluated(self, split: str, iteration: int, loss: float) -> None:
        """See `MetricsSink`."""
        self._log({f"lm loss {split}": loss}, iteration)

    def close(self) -> None:
        """See `MetricsSink`."""
        if self._owns:
            self._run.finish()

    def _log(self, values: Mapping[str, float], iteration: int) -> None:
        if self._owns:
            self._run.log({**values, _STEP: iteration})
        else:
            self._run.log(dict(values), iteration)
