"""Where a process of a job keeps snapshots: in the memory of its node, on its peers, in storage."""

from __future__ import annotations

import getpass
import os
import shutil
import socket
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ..config import MoECheckpointConfig
from ..errors import UsageError
from ..policy.memory_limit import MemoryLimit
from ..policy.placement import Placement, place_replicas
from ..ports import Store
from ..snapshot.memory_limit import NodeMemory
from ..storage.base import open_durable
from ..storage.memory import MemoryStore
from ..storage.ownership import slot_directory
from ..storage.system import node_memory_bytes
from ..types import Topology

NODE_NAME = "MOE_CKPT_NODE"
"""Environment variable that names the node where several are played on one machine; else the host's name counts."""


@dataclass(frozen=True)
class ProcessInfo:
    """Where this process runs: its local rank, and a name of its node that no other node of the job has.

    job_id: the same for all attempts of a job, and for no other job.
    """

    local_rank: int
    node: str
    job_id: str

    @classmethod
    def from_environment(cls) -> ProcessInfo:
        """As torchrun's or Slurm's variables say; without a launcher, one process on this host.

        `MOE_CKPT_NODE` names the node where several are played on one machine.
        """
        local_rank = os.environ.get("LOCAL_RANK") or os.environ.get("SLURM_LOCALID") or "0"
        return cls(int(local_rank), os.environ.get(NODE_NAME) or socket.gethostname(), _job_id())


def _job_id() -> str:
    """A name that all attempts of one job share and two jobs do not: of torchrun's run, Slurm's job, or its parent."""
    run_id = os.environ.get("TORCHELASTIC_RUN_ID", "none")
    if run_id != "none":
        return run_id
    return f"slurm-{os.environ['SLURM_JOB_ID']}" if "SLURM_JOB_ID" in os.environ else f"agent-{os.getppid()}"


def memory_folder(config: MoECheckpointConfig) -> Path:
    """The folder on a tmpfs that the nodes' folders are in."""
    return (
        Path(config.memory_dir) if config.memory_dir is not None else Path("/dev/shm") / f"moe-ckpt-{getpass.getuser()}"
    )


def open_memory(
    config: MoECheckpointConfig,
    place: ProcessInfo,
    segment_bytes: Sequence[int],
    area: str = "slot",
    cpus: frozenset[int] = frozenset(),
) -> MemoryStore:
    """This process's slot of its node's memory, or one beside it for another purpose; near these cores.

    Raises UsageError for a folder that cannot be used, StoreFailure.
    """
    base = memory_folder(config)
    if config.memory_dir is None:
        _made(base, base, mode=0o700)
    node = base / place.node
    if base.is_dir():
        _made(node, base)
    where = node if base.is_dir() else base
    return MemoryStore(where, place.job_id, place.local_rank, segment_bytes, area=area, cpus=cpus)


def node_memory(config: MoECheckpointConfig, place: ProcessInfo) -> NodeMemory:
    """What this process's node has for checkpoints."""
    folder = memory_folder(config)
    areas = [slot_directory(folder / place.node, place.job_id, place.local_rank, area) for area in ("slot", "standby")]

    def held() -> int:
        return sum(path.stat().st_size for area in areas for path in area.glob("segment-*.bin"))

    limit = None if config.memory_limit is None else MemoryLimit.parse(config.memory_limit)
    return NodeMemory(place.node, limit, node_memory_bytes(), folder, held, counts_free=not config.strict)


def drop_memory(config: MoECheckpointConfig, place: ProcessInfo, area: str) -> None:
    """Give back what an earlier attempt of this process's slot kept in an area that this one does not use."""
    node = memory_folder(config) / place.node
    folder = slot_directory(node, place.job_id, place.local_rank, area)
    if folder.is_dir():
        shutil.rmtree(folder, ignore_errors=True)
        with suppress(OSError):
            folder.parent.rmdir()


def open_persistent(config: MoECheckpointConfig, rank: int) -> Store | None:
    """The storage of `--moe-ckpt-persist-dir`; None without that flag."""
    return open_durable(config.persist_dir, rank) if config.persist_dir is not None else None


def replicas_placed(config: MoECheckpointConfig, topology: Topology) -> Placement:
    """Who keeps whose replicas. Raises UsageError for more replicas than there are other ranks."""
    replicas = config.replicas if config.replicas is not None else int(len(topology.ranks_by_node) > 1)
    if replicas >= topology.world_size:
        raise UsageError(
            f"--moe-ckpt-replicas {replicas} needs as many peers, but the job has {topology.world_size} ranks: at most"
            f" {topology.world_size - 1} are possible"
        )
    return place_replicas(topology, replicas)


def _made(folder: Path, base: Path, mode: int = 0o777) -> None:
    try:
        folder.mkdir(mode=mode, exist_ok=True)
    except OSError as error:
        raise UsageError(f"memory dir {base} cannot be used: {error.strerror}; check its permissions") from error
