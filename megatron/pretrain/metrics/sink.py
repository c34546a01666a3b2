"""What each place that numbers go to has to offer."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

from megatron.pretrain.errors import InvalidInput
from megatron.pretrain.metrics.iteration import IterationReport, RunFacts
from megatron.pretrain.metrics.settings import MetricsSettings


class MetricsSink(ABC):
    """One place. Any call but `opened` may raise anything: the sink is then left out, and training continues."""

    flag: ClassVar[str]
    """By which users know it."""

    @classmethod
    @abstractmethod
    def opened(cls, settings: MetricsSettings) -> MetricsSink | None:
        """Ready to write; None where it is not asked for. Raises OSError, and InvalidInput for a missing package."""

    def began(self, facts: RunFacts) -> None:
        """This attempt of the job begins to train."""
        return

    @abstractmethod
    def iteration(self, report: IterationReport) -> None:
        """An iteration ended."""

    def recovered(self, timeline: Mapping[str, Any], iteration: int) -> None:
        """A recovery has ended.

        Args:
            timeline: Of `RecoveryTimeline.to_data`.
            iteration: The iteration after which training stands.
        """
        return

    def close(self) -> None:
        """The end of training."""
        return


def missing_package(flag: str, package: str, extra: str, error: ImportError) -> InvalidInput:
    """The error of a sink whose package is not there.

    Args:
        flag: The flag that asks for the sink.
        package: The package that is missing.
        extra: The extra of this project that brings it.
        error: Why it cannot be imported.
    """
    return InvalidInput(f"{flag} needs {package} ({error}): pip install 'megatron-moe-ckpt[{extra}]'")
