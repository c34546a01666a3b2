"""Activations that core offloads, on the CPU: what lies on it is taken for a GPU's."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from unittest import mock

import torch


@contextlib.contextmanager
def offloading_from_the_cpu() -> Iterator[None]:
    """Copies are made, dropped and waited for as on a GPU."""
    from megatron.core.pipeline_parallel import utils
    from megatron.core.pipeline_parallel.fine_grained_activation_offload import ChunkOffloadHandler

    def can_manage(tensor: torch.Tensor) -> bool:
        return not isinstance(tensor, torch.nn.Parameter)

    with (
        mock.patch.dict(os.environ, {"NVTE_CPU_OFFLOAD_V1": "1"}),
        mock.patch.object(utils, "set_ideal_affinity_for_current_gpu"),
        mock.patch.object(ChunkOffloadHandler, "_can_manage_tensor_for_offload", staticmethod(can_manage)),
    ):
        yield
