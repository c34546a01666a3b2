"""Whether the memory of a node suffices for its checkpoints, asked before the model is built: that takes minutes."""

from __future__ import annotations

import logging
import os
from pathlib import Path

from megatron.core.dist_checkpointing.moe.config import MoECheckpointConfig
from megatron.core.dist_checkpointing.moe.errors import UsageError
from megatron.core.dist_checkpointing.moe.policy.placement import replica_count
from megatron.core.dist_checkpointing.moe.strategies import STRATEGIES
from megatron.core.dist_checkpointing.moe.strategies.memory_report import memory_report
from megatron.core.dist_checkpointing.moe.types import PRECISIONS, ModelShape, Topology
from moe_ckpt.simulator.driver import strategy_job

log = logging.getLogger(__name__)


def check_memory(
    config: MoECheckpointConfig, shape: ModelShape, topology: Topology, *, is_half: bool, node: str
) -> None:
    """Warn where the node has less memory than snapshots are planned to take.

    The plan is that of `moe-ckpt plan`: without random states, boundary logs and parked state, which come on top. Where
    nothing can be planned nothing is said. No collective, and nothing is refused: once memory is taken all ranks know
    what there is, and agree on what to give up.

    Args:
        is_half: Whether compute weights have 16 bits.
        node: Of this process.
    """
    planned = 0 if config.strategy == "none" else planned_bytes(config, shape, topology, is_half=is_half)
    folder = Path(config.memory_dir or "/dev/shm")
    if not planned or not folder.is_dir():
        return
    found = os.statvfs(folder)
    has = found.f_bavail * found.f_frsize + _held(folder, node)
    if not found.f_blocks or planned <= has:
        return
    said = (
        f"snapshots are planned to take {planned / 1e9:.3g} GB of the memory of {node}, but {folder} has"
        f" {has / 1e9:.3g} GB for them: enlarge the tmpfs (mount -o remount,size=...), or keep fewer replicas"
    )
    log.warning("%s; %s", said, "the job will end" if config.strict else "what does not fit will be given up")


def planned_bytes(config: MoECheckpointConfig, shape: ModelShape, topology: Topology, *, is_half: bool) -> int:
    """Of all segments of a node's ranks; 0 where the planner cannot tell."""
    try:
        job = strategy_job(shape, topology, PRECISIONS["fp16-fp32" if is_half else "fp32"].exact(), config)
        specs = STRATEGIES[config.strategy](job).buffer_specs()
        owners = replica_count(config.replicas, topology)
        reports = [memory_report(specs, sizes, owners) for sizes in job.sizes.values()]
    except UsageError:
        return 0
    return topology.ranks_per_node * max((one.own_bytes + one.replica_bytes for one in reports), default=0)


def _held(folder: Path, node: str) -> int:
    """What an earlier attempt of the job left there, which this one takes over."""
    inner = folder.glob(f"moe-ckpt-*/{node}/*/*/segment-*.bin"), folder.glob(f"{node}/*/*/segment-*.bin")
    return sum(path.lstat().st_blocks * 512 for found in inner for path in found)
