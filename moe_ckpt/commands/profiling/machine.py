"""All measurements of one machine, and the profile that they make."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.core.dist_checkpointing.moe.types import ModelShape, OperatorId, OperatorKind, expert

from ...simulator.cost import Utilisation, operator_flops
from ...simulator.inputs import Cluster
from ...simulator.layer_times import LayerTimes
from ...simulator.profiles import Profile
from . import layer, layers, links

_MATRIX = {"cpu": 1024, "cuda": 8192}
_SHARES_OF_LARGEST = (64, 16, 4, 1)
"""Collectives are measured with this fraction of the size and up."""


@dataclass(frozen=True)
class ProfileSettings:
    """What to measure with.

    layers: the jobs whose layers are timed. ranks: of collectives. size: bytes of copies, writes and the largest
    collective. storage: folder to write to. timeout_s: for each measurement of links. inter_node_bytes_per_s:
    of one GPU to other nodes; None: as within the node.
    """

    layers: layers.LayerSettings
    ranks: int
    size: int
    storage: Path
    timeout_s: float
    inter_node_bytes_per_s: float | None


LINKS = 5
"""Measurements beside those of layers."""


def measured_profile(shape: ModelShape, settings: ProfileSettings, done: Callable[[], None] = lambda: None) -> Profile:
    """Measure everything, links first: they need a machine that is not busy. done: called after each of the `LINKS`,
    and of `layers.count_of`.

    Raises UsageError for a folder that cannot be written, MoECheckpointError for what fails or takes too long.
    """

    def did(figure: Any) -> Any:
        done()
        return figure

    ranks = settings.ranks
    storage = did(links.storage_bytes_per_s(settings.storage, settings.size, settings.timeout_s))
    sizes = [max(ranks, settings.size // share) for share in _SHARES_OF_LARGEST]
    collectives = did(links.collective_seconds(ranks, sizes, settings.timeout_s))
    law = links.affine_law(collectives, ranks)
    copies = did(links.host_copy_bytes_per_s(settings.size))
    width = layer.element_bytes()
    peak = did(layer.matrix_flops(_MATRIX[layer.device()], width))
    optimizer = did(layer.optimizer_bytes_per_s(max(1, settings.size // 16)))
    found = layers.timed(shape, settings.layers, done)
    times = layers.layer_times(shape, settings.layers, found, copies)
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
        gemm_share=gemm_share(shape, times, settings.layers.micro_batch_sizes[-1], peak),
        nic_share=1.0,
        nvlink_share=1.0,
        latency_s=law.latency_s,
        optimizer_bytes_per_s=optimizer,
        imbalance=1.0,
        source="moe-ckpt profile: rates of links are those that collectives reached, so their shares are 1",
    )
    return Profile(
        cluster, utilisation, layers.frozen_saves(found), _measured(shape, settings, found, collectives), times
    )


def gemm_share(shape: ModelShape, times: LayerTimes, samples: int, peak: float) -> float:
    """Of the peak, what the computation of a measured layer reaches; at least a thousandth, at most all of it."""
    number = shape.moe_layers[0] if shape.moe_layers else 0
    line = times.moe or times.dense
    assert line is not None
    flops = layer_flops(shape, number, times.seq_length) * samples * times.seq_length / times.tp
    seconds = line.seconds(samples)
    return min(1.0, max(0.001, flops / seconds / peak)) if seconds > 0 else 1.0


def layer_flops(shape: ModelShape, number: int, length: int) -> float:
    """FLOPs of one token in this layer, forward and backward."""
    flops = operator_flops(shape, length)
    kinds = (OperatorId(number, OperatorKind.NON_EXPERT), OperatorId(number, OperatorKind.ROUTER))
    experts = tuple(expert(number, index) for index in range(shape.num_experts))
    return sum(flops.get(operator, 0.0) for operator in (*kinds, *experts))


def _measured(
    shape: ModelShape, settings: ProfileSettings, found: Mapping[str, Any], collectives: Mapping[int, float]
) -> dict[str, Any]:
    import torch

    return {
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "model": shape.name,
        "layer": "Megatron-Core's own, as the driver builds them",
        "layers": found["rows"],
        "copies_beside_training": found["copies"],
        "restart_s": found["restart_s"],
        "all_gather_s": {str(size): seconds for size, seconds in collectives.items()},
    }


def _ranks_per_node() -> int:
    import torch

    return torch.cuda.device_count() or os.cpu_count() or 1


def _device_name() -> str:
    import torch

    return str(torch.cuda.get_device_name()) if torch.cuda.is_available() else f"{os.cpu_count()} CPU cores"
