"""The numbers of a training job: what is known of each iteration, and the sinks that they go to."""

from .iteration import IterationReport, RunFacts, protection_fields
from .metrics import Metrics
from .settings import MetricsSettings

__all__ = ["IterationReport", "Metrics", "MetricsSettings", "RunFacts", "protection_fields"]
