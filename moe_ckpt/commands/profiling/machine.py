"""All measurements of one machine, and the profile that they make."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.core.dist_checkpointing.moe.types import ModelShape

from ...simulator.cost import Utilisation
from ...simulator.inputs import Cluster
from ...simulator.profiles import Profile
from . import layer, links

_MATRIX = {"cpu": 1024, "cuda": 8192}
_SHARES_OF_LARGEST = (64, 16, 4, 1)
"""Collectives are measured with this fraction of the size and up."""


@dataclass(frozen=True)
class ProfileSettings:
    """What to measure with.

    tokens: of a microbatch on one rank, in sequences of seq_length. ranks: processes of a collective. size: bytes of
    copies, writes and the largest collective. storage: folder to write to. timeout_s: for each measurement that waits
    for other processes. inter_node_bytes_per_s: of one GPU to other nodes; None: as within the node.
    """

    tokens: int
    seq_length: int
    ranks: int
    size: int
    storage: Path
    timeout_s: float
    inter_node_bytes_per_s: float | None


def measured_profile(shape: ModelShape, settings: ProfileSettings) -> Profile:
    """Measure everything, links first: they need a machine that is not busy.

    Raises UsageError for a folder that cannot be written, MoECheckpointError for what fails or takes too long.
    """
    storage = links.storage_bytes_per_s(settings.storage, settings.size, settings.timeout_s)
    sizes = [max(settings.ranks, settings.size // share) for share in _SHARES_OF_LARGEST]
    collectives = links.collective_seconds(settings.ranks, sizes, settings.timeout_s)
    law = links.affine_law(collectives, settings.ranks)
    copies = links.host_copy_bytes_per_s(settings.size)
    width = layer.element_bytes()
    peak = layer.matrix_flops(_MATRIX[layer.device()], width)
    times = layer.layer_times(shape, settings.tokens, settings.seq_length)
    others = settings.inter_node_bytes_per_s
    inter_node = "given" if others is not None else "as within the node, because one machine cannot tell"
    cluster = Cluster(
        name=f"measured-{layer.device()}",
        gpus_per_node=_ranks_per_node(),
        peak_flops={width: peak},
        host_link_bytes_per_s=copies,
        intra_node_bytes_per_s=law.bytes_per_s,
        inter_node_bytes_per_s=law.bytes_per_s if others is None else others,
        storage_bytes_per_s=storage,
        host_memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        source=f"moe-ckpt profile on {_device_name()}; inter_node: {inter_node}",
    )
    utilisation = Utilisation(
        gemm_share=min(1.0, times.flops / times.active_s / peak),
        nic_share=1.0,
        nvlink_share=1.0,
        latency_s=law.latency_s,
        optimizer_bytes_per_s=layer.optimizer_bytes_per_s(max(1, settings.size // 16)),
        imbalance=1.0,
        source="moe-ckpt profile: rates of links are those that collectives reached, so their shares are 1",
    )
    return Profile(cluster, utilisation, times.frozen_saves, _measured(shape, times, collectives))


def _measured(shape: ModelShape, times: layer.LayerTimes, collectives: Mapping[int, float]) -> dict[str, Any]:
    import torch

    return {
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "model": shape.name,
        "layer": "plain torch of the model's shapes, without norms and Megatron-Core's own kernels",
        "layer_tokens": times.tokens,
        "layer_active_s": times.active_s,
        "layer_frozen_s": times.frozen_s,
        "layer_flops": times.flops,
        "all_gather_s": {str(size): seconds for size, seconds in collectives.items()},
    }


def _ranks_per_node() -> int:
    import torch

    return torch.cuda.device_count() or os.cpu_count() or 1


def _device_name() -> str:
    import torch

    return str(torch.cuda.get_device_name()) if torch.cuda.is_available() else f"{os.cpu_count()} CPU cores"
