"""Where a process of a job keeps snapshots: in the memory of its node, on its peers, in storage."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from ..boot_clock import ProcessKey, machine, started
from ..config import MoECheckpointConfig
from ..errors import UsageError
from ..policy.placement import Placement, place_replicas, replica_count
from ..ports import Json, Manifest, Store
from ..resharding.generation import LiveLayout
from ..resharding.store import ReshardingStore
from ..snapshot.memory_limit import NodeMemory
from ..storage.memory import MemoryStore, remove_area
from ..storage.objects import open_durable
from ..storage.ownership import (
    Claim,
    check_private,
    default_memory_folder,
    file_system,
    is_shared,
    job_of_launcher,
    launcher,
    make_private,
    refused_as_unusable,
    slot_directory,
)
from ..storage.slot_reader import take_over_memory, tell_of_memory
from ..storage.system import node_memory_bytes
from ..strategies.memory_report import MemoryLimit
from ..types import Topology

PATIENCE = "MOE_CKPT_PATIENCE_S"
"""Environment variable that says for how many seconds the launcher lets a process live that it told to end."""
TORCHRUN_PATIENCE_S = 30.0
"""Torchrun's own, unless it is given --shutdown-timeout; workers are not told."""
LEAVING_MARGIN_S = 5.0
"""How much of it is left for hanging up before, and for the end of the process after parking."""
PATIENCE_ADVICE = f"raise torchrun's --shutdown-timeout, and set {PATIENCE} to the same seconds"

NODE_NAME = "MOE_CKPT_NODE"
"""Environment variable that names the node where several are played on one machine; else the host's name counts."""
UNIT = "MOE_CKPT_UNIT"
"""Environment variable with the label of the node's allocation unit; replicas are placed in other ones."""


@dataclass(frozen=True)
class ProcessInfo:
    """Where this process runs: its local rank, and a name of its node that no other node of the job has.

    Attributes:
        local_rank: Among the processes of its node.
        node: The name.
        job_id: The same for all attempts of a job, and for no other job; empty where the environment names none, until
            all ranks have agreed on one (`agree_on_job`).
        launcher: What starts this process again.
        patience_s: How long that lets the process live after it told it to end.
        agent: The launcher, where it is one that starts ranks again only when those before have ended.
        is_named: Whether the environment names the node, and not the host.
        unit: Label of the node's allocation unit, such as its rack; empty: none.
    """

    local_rank: int
    node: str
    job_id: str = ""
    launcher: str = ""
    patience_s: float = TORCHRUN_PATIENCE_S
    agent: ProcessKey | None = None
    is_named: bool = False
    unit: str = ""

    @classmethod
    def from_environment(cls) -> ProcessInfo:
        """As torchrun's or Slurm's variables say; without a launcher, one process on this host.

        `MOE_CKPT_NODE` names the node where several are played on one machine.
        """
        local_rank = os.environ.get("LOCAL_RANK") or os.environ.get("SLURM_LOCALID") or "0"
        node = os.environ.get(NODE_NAME) or socket.gethostname()
        own = launcher()
        # Of torchrun it is known that a rank is started again only when the one before has ended.
        agent = int(own.partition("-")[0]) if "TORCHELASTIC_RUN_ID" in os.environ else 0
        # With its start: the number alone may be that of another process some time later.
        key = (agent, started(agent)) if agent else None
        named, unit = bool(os.environ.get(NODE_NAME)), os.environ.get(UNIT, "")
        return cls(int(local_rank), node, _named_job(), own, _patience_s(), key, named, unit)

    @property
    def run(self) -> str:
        """The agent and its machine, which no other run of any job has; empty without an agent."""
        return f"{machine()}/{self.agent[0]}-{self.agent[1]}" if self.agent is not None else ""

    @property
    def park_timeout_s(self) -> float:
        """How long parking may take of that."""
        return max(1.0, self.patience_s - LEAVING_MARGIN_S)

    @property
    def job_here(self) -> str:
        """The job as far as this process alone knows it: the same when its launcher starts it again."""
        return self.job_id or f"agent-{_NO_NAME.sub('-', self.node)[:64]}-{self.launcher}"


def ranks_of_node() -> int:
    """Ranks on each node, as torchrun or Slurm says; 1 where neither does."""
    text = os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("SLURM_NTASKS_PER_NODE") or ""
    return int(text) if text.isdecimal() and int(text) else 1


def _patience_s() -> float:
    """Raises UsageError for what is no number of seconds."""
    text = os.environ.get(PATIENCE, str(TORCHRUN_PATIENCE_S))
    try:
        patience_s = float(text)
    except ValueError:
        patience_s = 0.0
    if not 0 < patience_s < float("inf"):
        raise UsageError(f"{PATIENCE} {text} must be a positive number of seconds")
    return patience_s


_NO_NAME = re.compile(r"[^A-Za-z0-9_-]")


def _named_job() -> str:
    """The name of torchrun's run (`--rdzv-id`), or of Slurm's job; else empty: torchrun calls all others "none"."""
    run_id = os.environ.get("TORCHELASTIC_RUN_ID", "none")
    if run_id != "none":
        return run_id
    return f"slurm-{os.environ['SLURM_JOB_ID']}" if "SLURM_JOB_ID" in os.environ else ""


@dataclass(frozen=True)
class JobClaim:
    """What one rank knows of the job's id.

    Attributes:
        named: By its environment.
        kept: Under which its launcher has kept memory on this node.
        own: What it would choose.
    """

    named: str
    kept: str
    own: str

    @classmethod
    def of(cls, config: MoECheckpointConfig, place: ProcessInfo) -> JobClaim:
        """What this rank knows.

        Args:
            config: The settings.
            place: Where this process runs.

        Raises:
            UsageError: Others could have filled the memory folders of this node.
        """
        # Before anything in there is believed: `job_of_launcher` reads it.
        check_memory(config, place)
        kept = "" if place.job_id else job_of_launcher(memory_folder(config) / place.node)
        return cls(place.job_id, kept, place.job_here)

    def to_data(self) -> dict[str, str]:
        """As JSON."""
        return asdict(self)


def agree_on_job(claims: Sequence[JobClaim]) -> str:
    """The id of the job, from what all ranks know, in their order.

    A name that any rank was given; else the id under which memory of an earlier attempt is there, which a launcher that
    is still the same has kept, on whichever node; else the choice of rank 0.

    Raises UsageError where ranks were given different names.
    """
    # From the last rank to the first, so that the lowest rank of each name is left for the message.
    named = {claim.named: rank for rank, claim in reversed(list(enumerate(claims))) if claim.named}
    if len(named) > 1:
        different = ", ".join(f"rank {rank} belongs to job {name!r}" for name, rank in sorted(named.items()))
        raise UsageError(
            f"the ranks were started as parts of different jobs: {different}; give all of them one id (torchrun"
            " --rdzv-id, the same on every node)"
        )
    kept = (claim.kept for claim in claims if claim.kept)
    return next(iter(named), "") or next(kept, "") or claims[0].own


def memory_folder(config: MoECheckpointConfig) -> Path:
    """The folder on a tmpfs that the nodes' folders are in."""
    return Path(config.memory_dir) if config.memory_dir is not None else default_memory_folder()


def check_memory(config: MoECheckpointConfig, place: ProcessInfo) -> None:
    """Refuse memory folders of this node that are there already and that others could have filled.

    Args:
        config: The settings.
        place: Where this process runs.

    Raises:
        UsageError: Names the folder.
    """
    base = memory_folder(config)
    # Twice: the second call looks at files of the innermost folder only, and ends early where that is not there yet.
    first, *inner = _chain(base, place)
    with refused_as_unusable(base), suppress(FileNotFoundError):
        check_private(first)
        check_private(first, *inner)


def take_over_renamed(config: MoECheckpointConfig, place: ProcessInfo, nodes: Sequence[str]) -> None:
    """Take what this job left in the memory of this machine when that had another name, or say so if a name was given.

    Args:
        config: The settings.
        place: Where this process runs, with the job's id.
        nodes: Names of all nodes of the running job.

    Raises:
        UsageError: Several names have what this job left, or a folder cannot be used.
    """
    # Said by one rank of the node; taken by the rank that comes first, under a lock.
    if not place.is_named or place.local_rank == 0:
        found = tell_of_memory if place.is_named else take_over_memory
        found(memory_folder(config), place.node, place.job_id, nodes, NODE_NAME)


def open_memory(
    config: MoECheckpointConfig,
    place: ProcessInfo,
    segment_bytes: Sequence[int],
    area: str = "slot",
    cpus: frozenset[int] = frozenset(),
    is_foreign: Callable[[Manifest], bool] = lambda manifest: False,
) -> MemoryStore:
    """This process's slot of its node's memory, or another area of it.

    Args:
        config: The settings.
        place: Where this process runs, with the job's id.
        segment_bytes: Of each segment.
        area: "slot" for snapshots, "standby" for boundary logs and parked state.
        cpus: Cores near which the memory shall lie; none: anywhere.
        is_foreign: Whether a snapshot that lies there already belongs to another layout.

    Raises:
        UsageError: A folder cannot be used.
        StoreFailure: The system refuses.
    """
    base = memory_folder(config)
    if config.memory_dir is None or base.is_dir():
        with refused_as_unusable(base):
            make_private(*_chain(base, place))
    where = base / place.node if base.is_dir() else base
    slot = place.job_id, place.local_rank
    return MemoryStore(where, *slot, segment_bytes, area=area, cpus=cpus, is_foreign=is_foreign)


def slot_of(config: MoECheckpointConfig, place: ProcessInfo) -> Path:
    """This process's folder for snapshots in its node's memory, there or not.

    Args:
        config: The settings.
        place: Where this process runs, with the job's id.
    """
    return slot_directory(memory_folder(config) / place.node, place.job_id, place.local_rank)


def node_memory(
    config: MoECheckpointConfig, place: ProcessInfo, ranks: Sequence[int], areas: Collection[str]
) -> NodeMemory:
    """What this process's node has for checkpoints.

    Args:
        config: The settings.
        place: Where this process runs, with the job's id.
        ranks: Of its node.
        areas: As of `open_memory`; of others nothing is used again.
    """
    folder = memory_folder(config)
    held_in = [slot_directory(folder / place.node, place.job_id, place.local_rank, area) for area in areas]

    # Read from the files, which an earlier attempt may have left: their room is used again.
    def held() -> int:
        return sum(path.stat().st_size for area in held_in for path in area.glob("segment-*.bin"))

    limit = None if config.memory_limit is None else MemoryLimit.parse(config.memory_limit)
    # Pages of other file systems, as of huge pages or of a disk, are charged to no control group.
    counts_total = not config.strict and file_system(folder) in ("tmpfs", "ramfs")
    free = {"counts_free": not config.strict, "counts_total": counts_total}
    return NodeMemory(ranks, limit, node_memory_bytes(), folder, held, **free)


def drop_memory(config: MoECheckpointConfig, place: ProcessInfo, area: str) -> bool:
    """Give back what an earlier attempt of this process's slot kept in an area that this one does not use.

    Args:
        config: The settings.
        place: Where this process runs, with the job's id.
        area: As of `open_memory`.

    Returns:
        Whether there was anything.

    Raises:
        UsageError: It belongs to a process that still runs.
    """
    slot = memory_folder(config) / place.node, place.job_id, place.local_rank, area
    folder = slot_directory(*slot)
    if not folder.is_dir():
        return False
    claim = Claim(*slot)
    remove_area(folder)
    claim.release()
    with suppress(OSError):  # other ranks or areas are in it
        folder.parent.rmdir()
    return not folder.exists()


def open_persistent(
    config: MoECheckpointConfig,
    rank: int,
    layout: Mapping[str, Json],
    live: Callable[[Mapping[str, Json]], LiveLayout],
) -> ReshardingStore | None:
    """The storage of `--moe-ckpt-persist-dir`, which shows what another layout stored as if this one had.

    Args:
        config: The settings.
        rank: This rank.
        layout: Of this job, as manifests have it.
        live: Gives what snapshots of this rank hold in that layout.

    Returns:
        The storage; None without that flag.
    """
    if config.persist_dir is None:
        return None
    store = open_durable(config.persist_dir, rank)
    return resharding(config, store, lambda: live(layout), layout, rank)


def resharding(
    config: MoECheckpointConfig,
    store: Store,
    live: Callable[[], LiveLayout],
    layout: Mapping[str, Json],
    rank: int,
) -> ReshardingStore:
    """A store that shows what another layout left in it as far as the settings allow.

    Args:
        config: The settings.
        store: Where snapshots are.
        live: Gives what snapshots of this rank hold.
        layout: Of this job, as manifests have it.
        rank: This rank.
    """
    inexact, replays = config.reshard == "inexact", config.replay_tolerance > 0
    return ReshardingStore(store, live, layout, rank, inexact=inexact, replays=replays)


def replicas_placed(config: MoECheckpointConfig, topology: Topology) -> Placement:
    """Who keeps whose replicas.

    Args:
        config: The settings.
        topology: Of the job.

    Raises:
        UsageError: More replicas are asked for than there are other ranks.
    """
    replicas = replica_count(config.replicas, topology)
    if config.elastic is not None:  # what fewer ranks can keep
        replicas = min(replicas, topology.world_size - 1)
    if replicas >= topology.world_size:
        raise UsageError(
            f"--moe-ckpt-replicas {replicas} needs as many peers, but the job has {topology.world_size} ranks: at most"
            f" {topology.world_size - 1} are possible"
        )
    return place_replicas(topology, replicas)


def _chain(base: Path, place: ProcessInfo) -> tuple[Path, *tuple[str, ...]]:
    """The outermost folder that has to be this user's own, and those in it: `base` may be `/dev/shm` itself."""
    return (base / place.node,) if is_shared(base) else (base, place.node)
