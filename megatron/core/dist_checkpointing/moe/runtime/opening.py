"""How a session begins: what all ranks have to agree on before anything is kept."""

from __future__ import annotations

import logging
import socket
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from datetime import timedelta
from functools import reduce
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch
from torch.distributed.distributed_c10d import _get_default_store

from ..config import ANY_JOB, MoECheckpointConfig
from ..errors import MoECheckpointError, UsageError
from ..megatron_state.megatron import read_topology
from ..ports import Json, Manifest, NoRoom, Transport
from ..recovery.exactness import DivergenceNotes
from ..replication.agreement import gathered_by_store, merged, raise_on_all_ranks
from ..replication.interface import Endpoint, check_endpoints, of_local_rank, own_endpoint
from ..replication.tcp import TcpTransport
from ..replication.transports import TRANSPORTS
from ..storage.lease import STALE_S, Holder, Lease, name_in
from ..storage.manifest import use_secret
from ..storage.memory import MemoryStore
from ..storage.small_files import read_secret, signed
from ..types import Topology
from ..types.layout import BUCKETS, is_same_layout
from ..types.operators import scaled
from .peer_links import PeerLinks
from .process_info import NODE_NAME, JobClaim, ProcessInfo, agree_on_job, memory_folder, open_memory

log = logging.getLogger(__name__)

RECOVERY_PATIENCE = 12
"""How many times `--moe-ckpt-timeout-s` a rank may take to read its state during a recovery."""

SHARED_S = 60.0
"""For how long other nodes may not see what rank 0 has written: caches of NFS keep what was not there for as long."""

_KEPT = {"slot": "snapshots", "standby": "boundary logs and parked state"}


class JobMembers(NamedTuple):
    """What all ranks know of each other before they connect: the address of this one, and the id of the job. Rank 0
    knows besides what starts each rank again, and the node and the allocation unit that each is on."""

    address: str
    job_id: str
    run: tuple[str, ...] = ()
    places: tuple[tuple[str, str], ...] = ()


def introduced(store: torch.distributed.Store, config: MoECheckpointConfig, place: ProcessInfo) -> JobMembers:
    """What all ranks tell rank 0 through the store, and what it tells them; a collective.

    Args:
        store: In which all ranks find each other.
        config: The settings.
        place: Where this process runs.

    Raises:
        UsageError: A rank has a problem, or ranks contradict each other; on all ranks alike.
        PeerLost: A rank did not come.
    """
    rank, world_size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    own: dict[str, Json]
    address, everyone = "", list[Any]()
    # A problem of this rank goes to rank 0, and is raised on all.
    try:
        endpoint = own_endpoint(config.interface and of_local_rank(config.interface, place.local_rank))
        address = endpoint.address
        own = {
            "secret": _take_secret(config),
            "endpoint": asdict(endpoint),
            "job": asdict(JobClaim.of(config, place)),
            "run": place.run,
            "node": place.node,
            "unit": place.unit,
        }
    except UsageError as error:
        own = {"problem": f"rank {rank}: {error}"}

    def job_of(found: list[Any]) -> dict[str, Json]:
        everyone.extend(found)
        try:
            return {"job_id": _common_job(found)}
        except UsageError as error:
            return {"problem": str(error)}

    name, wait_s = "moe-ckpt-ranks", config.timeout_s
    told: Any = gathered_by_store(store, name, rank, world_size, own, job_of, wait_s)
    if problem := told.get("problem"):
        raise UsageError(problem)
    run, places = (one["run"] for one in everyone), ((one["node"], one["unit"]) for one in everyone)
    return JobMembers(address, told["job_id"], tuple(run), tuple(places))


def _common_job(found: Sequence[Mapping[str, Any]]) -> str:
    """The id of the job, from what all ranks say of themselves. Raises UsageError where they contradict each other."""
    if problems := [one["problem"] for one in found if "problem" in one]:
        raise UsageError(problems[0])
    if different := [other for other, one in enumerate(found) if one["secret"] != found[0]["secret"]]:
        raise UsageError(
            f"rank {different[0]} and rank 0 have different secrets: put the same file for --moe-ckpt-secret-file on"
            " every node, or give it to none"
        )
    endpoints = [Endpoint(**one["endpoint"]) for one in found]
    check_endpoints(endpoints)
    first = dict[str, int]()
    for rank, one in enumerate(found):
        other = first.setdefault(one["node"], rank)
        if endpoints[other].machine != endpoints[rank].machine:  # copies of one would be kept by itself, called a peer
            raise _of_one_name(other, rank, one["node"])
    name = endpoints[0].interface or f'of hostname "{endpoints[0].host}"'
    log.info("network: rank 0 listens on %s (interface %s)", endpoints[0].address, name)
    return agree_on_job([JobClaim(**one["job"]) for one in found])


def _of_one_name(rank: int, other: int, node: str) -> UsageError:
    return UsageError(
        f"rank {rank} and rank {other} are on two machines that are both called {node}: give each a name of its own, or"
        f" set {NODE_NAME}"
    )


def _take_secret(config: MoECheckpointConfig) -> str:
    """Seal with the job's secret from here on; a fingerprint of it, empty without one. Raises UsageError."""
    secret = read_secret(config.secret_file)
    use_secret(secret)
    # Never the secret itself: the store is open to whoever reaches it.
    return "" if secret is None else signed(secret, b"moe-ckpt fingerprint of a job's secret")


def own_connection(store: torch.distributed.Store, timeout_s: float) -> torch.distributed.Store:
    """The same store, over another connection: on one that is shared, a call waits while others wait for a key.

    One for the whole session: torch's server (2.13 to 2.15) looks up the name of whoever connects, which can take
    seconds where a name server is slow.

    Args:
        store: In which all ranks find each other.
        timeout_s: Longest wait of a call.
    """
    own = store.clone()
    own.set_timeout(timedelta(seconds=timeout_s))
    return own


class Transports(NamedTuple):
    """One for small messages and one for replicas, so that neither waits behind the other; and one for a recovery, in
    which ranks wait for others that read from slow storage (a dead one is noticed at once all the same); and links that
    tell of the loss of a peer while nothing is under way.

    Each connects a rank with those that it has something to say to, when it has.
    """

    control: TcpTransport
    data: TcpTransport
    patient: TcpTransport
    links: PeerLinks

    @classmethod
    def connected(cls, store: torch.distributed.Store, config: MoECheckpointConfig, address: str) -> Transports:
        """Between all ranks.

        Args:
            store: That of this attempt, as others' addresses mislead, over a connection of its own (see
                `own_connection`).
            config: The settings.
            address: Of this rank.

        Raises:
            PeerLost: A rank did not come.
        """
        rank, world_size = torch.distributed.get_rank(), torch.distributed.get_world_size()
        timeout_s, bulk = config.timeout_s, TRANSPORTS[config.transport]
        # First, because it says which rank does not answer, and where. Each of these waits for all ranks, so all make
        # them in this order.
        links = PeerLinks(store, rank, world_size, address, timeout_s)
        control = TcpTransport(store, rank, world_size, "moe-ckpt-control", timeout_s, address=address)
        data = bulk(store, rank, world_size, "moe-ckpt-data", timeout_s, address=address)
        wait_s = RECOVERY_PATIENCE * timeout_s
        patient = bulk(store, rank, world_size, "moe-ckpt-recovery", wait_s, address=address)
        if rank == 0:
            log.info("replication and recovery transport: %s", data.medium)
        return cls(control, data, patient, links)


class JobPlaces(msgspec.Struct, array_like=True):
    """The nodes of a job, each with its allocation unit, and how many ranks after each other are on which of them."""

    places: list[tuple[str, str]] = []
    runs: list[tuple[int, int]] = []

    @classmethod
    def of(cls, ranks: Sequence[tuple[str, str]]) -> JobPlaces:
        """From the node and the unit of each rank."""
        numbers = {place: number for number, place in enumerate(dict.fromkeys(ranks))}
        return cls(list(numbers), [(numbers[place], len(list(some))) for place, some in groupby(ranks)])

    def nodes(self) -> tuple[str, ...]:
        """Their names."""
        return tuple(dict.fromkeys(node for node, _ in self.places))

    def topology(self) -> Topology:
        """The layout of the running job with these nodes. Raises UsageError where it cannot be protected."""
        # Nodes are numbered by their lowest ranks: alike on all ranks, whatever they are called. So are units.
        numbers = {name: number for number, name in enumerate(self.nodes())}
        units = [unit or numbers[node] for node, unit in self.places]
        labels = {label: number for number, label in enumerate(dict.fromkeys(units))}
        nodes = tuple(numbers[self.places[at][0]] for at, count in self.runs for _ in range(count))
        of_units = tuple(labels[units[at]] for at, count in self.runs for _ in range(count))
        return replace(read_topology(max(Counter(nodes).values())), nodes=nodes, units=of_units)


def give_back(memory: MemoryStore) -> None:
    """Close memory; where nothing is in it, no note of a diverged replay either, it goes back to the node.

    Args:
        memory: Of this rank, in one area.
    """
    memory.close() if memory.snapshots() or DivergenceNotes(memory.directory).read() else memory.remove()


def open_memories(
    config: MoECheckpointConfig,
    place: ProcessInfo,
    segment_bytes: Mapping[str, Sequence[int]],
    transport: Transport,
    cpus: frozenset[int] = frozenset(),
    layout: Mapping[str, Json] | None = None,
) -> dict[str, MemoryStore]:
    """Memory of this rank by area; a collective.

    Segments have equal sizes on all ranks: a restart may place any rank anywhere. Where one rank has not enough, all
    give back what holds nothing that is needed to come back.

    Args:
        config: The settings.
        place: Where this process runs, with the job's id.
        segment_bytes: Of each segment, by area.
        transport: To all ranks.
        cpus: Cores near which the memory shall lie; none: anywhere.
        layout: Of this job; what another one left keeps its memory.

    Raises:
        UsageError: A folder cannot be used; on all ranks alike.
        NoRoom: There is too little memory; on all ranks alike.
    """
    # Before anything that may fail on one rank alone: this is a collective, too.
    most = transport.least([-sum(sizes) for sizes in segment_bytes.values()])
    opened: dict[str, MemoryStore] = {}

    def is_foreign(manifest: Manifest) -> bool:
        return layout is not None and not is_same_layout(manifest.facts.topology, layout)

    def open_all() -> None:
        for area, sizes in segment_bytes.items():
            opened[area] = open_memory(config, place, sizes, area, cpus, is_foreign)

    try:
        raise_on_all_ranks(transport, open_all, (NoRoom, UsageError))
    except (NoRoom, UsageError):
        for memory in opened.values():
            give_back(memory)
        raise
    if transport.rank == 0:
        for (area, sizes), negative in zip(segment_bytes.items(), most, strict=True):
            facts = scaled(-negative), _KEPT[area], memory_folder(config), len(sizes)
            log.info("memory per rank: at most %s of %s in %s (%d segments)", *facts)
    return opened


def parallel_layout(topology: Topology, shard: str, buckets: str) -> dict[str, Any]:
    """The parallel layout that a snapshot is made in, and who stores what in it; nodes do not matter.

    Args:
        topology: Of the job.
        shard: As `--moe-ckpt-shard` has it.
        buckets: Digest of what each rank steps.
    """
    names = ("world_size", "tp", "pp", "vpp", "cp", "ep")
    layout = {name: getattr(topology, name) for name in names} | {"etp": topology.expert_tp, BUCKETS: buckets}
    # Only where it is not the default, as snapshots of before do not say it.
    layout |= {"instances": topology.instances} if topology.instances > 1 else {}
    return layout if shard == "none" else layout | {"shard": shard}


# The places that a job writes to, of which it has a lease each; held by rank 0.


class Leases:
    """Of one process: none on ranks other than 0.

    Args:
        config: The settings.
        save: Folder that the loop saves checkpoints to.
        place: Where this process runs, with the job's id.
        run: The launchers of all ranks.
    """

    def __init__(self, config: MoECheckpointConfig, save: str | None, place: ProcessInfo, run: Sequence[str]) -> None:
        self._leases, self._durable = list[Lease](), config.persist_dir
        if torch.distributed.get_rank() == 0:
            agents = tuple(sorted(set(filter(None, run))))
            forced = "" if config.take_over == ANY_JOB else config.take_over or ""
            wanted = {one_spelling(where): where for where in (config.persist_dir, save) if where}
            self._leases = [
                Lease(where, Holder.here(place.job_here, place.agent, agents), forced) for where in wanted.values()
            ]

    def acquire(self) -> str:
        """Take all of them, or none. Raises UsageError where another job has one.

        Returns:
            The name of the one on the folder of snapshots; empty where this process has none on it.
        """
        try:
            for lease in self._leases:
                lease.acquire()
        except MoECheckpointError:
            self.give_back()
            raise
        return self._leases[0].name if self._leases and self._durable else ""

    def find(self, name: str) -> None:
        """Whether this node has the folder of snapshots on which rank 0 has a lease of that name, if it has one.

        Raises:
            UsageError: It has another folder.
            StoreFailure: It cannot be read now.
        """
        where, until_s, pause_s = self._durable or "", time.monotonic() + SHARED_S, 0.1
        while name and name_in(where) != name:
            if time.monotonic() > until_s:
                raise UsageError(
                    f"--moe-ckpt-persist-dir {where} on {socket.gethostname()} is not the folder that rank 0 writes to:"
                    " give one that all nodes share, as it has to outlive each of them"
                )
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, 2.0)  # the nodes of a large job ask one file server

    def check(self) -> None:
        """Raises UsageError where another job has taken a place over."""
        for lease in self._leases:
            lease.check()

    def give_back(self) -> None:
        """Training never began: others may write there, unless an earlier attempt has left it to the next one."""
        for lease in self._leases:
            lease.give_back()

    def release(self) -> None:
        """Training has ended well: others may write there."""
        for lease in self._leases:
            lease.release()

    def leave(self) -> None:
        """Leave them to the next attempt of this job."""
        for lease in self._leases:
            lease.leave()


def one_spelling(where: str) -> str:
    """Of a folder or URL: one place is known as one, however it is spelled."""
    return where.rstrip("/") if "://" in where else str(Path(where).resolve())


def leases_without_session(config: MoECheckpointConfig, save: str | None, place: ProcessInfo) -> Leases:
    """Of a job without a strategy, where ranks have no connections but those of training. A collective.

    Args:
        config: The settings.
        save: Folder that the loop saves checkpoints to.
        place: Where this process runs.

    Raises:
        UsageError: Another job has one of the places; on all ranks alike.
    """
    # Rank 0 may watch a lease of another job for that long, before it takes it over.
    group = _ByStore(config.timeout_s + STALE_S)
    run = merged(group, [place.run], list[str], _distinct)
    leases = Leases(config, save, place, run)
    raise_on_all_ranks(group, leases.acquire)
    return leases


def _distinct(first: list[str], second: list[str]) -> list[str]:
    return list(dict.fromkeys((*first, *second)))


class _ByStore:
    """All ranks, as they found each other."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s, self._asked = timeout_s, 0
        self.rank = torch.distributed.get_rank()

    def merge(self, value: bytes, combine: Callable[[bytes, bytes], bytes]) -> bytes:
        """As `ports.Transport.merge`, on rank 0."""

        def of_all(values: list[Any]) -> str:
            return reduce(combine, map(bytes.fromhex, values)).hex()

        self._asked += 1  # a name in the store serves one call only
        name, ranks = f"moe-ckpt-leases-{self._asked}", (self.rank, torch.distributed.get_world_size())
        told = gathered_by_store(_get_default_store(), name, *ranks, value.hex(), of_all, self._timeout_s)
        return bytes.fromhex(str(told))
