"""All sinks; a further one is a file beside this one and its line here."""

from __future__ import annotations

from megatron.pretrain.metrics.json_lines import JsonLines
from megatron.pretrain.metrics.prometheus import Prometheus
from megatron.pretrain.metrics.sink import MetricsSink
from megatron.pretrain.metrics.tensorboard import TensorBoard
from megatron.pretrain.metrics.weights_and_biases import WeightsAndBiases

SINKS: tuple[type[MetricsSink], ...] = (JsonLines, TensorBoard, Prometheus, WeightsAndBiases)

__all__ = ["SINKS", "MetricsSink"]
