"""How a session begins: what all ranks have to agree on before anything is kept."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from ..config import MoECheckpointConfig
from ..errors import MoECheckpointError, UsageError
from ..ports import Transport
from ..store.memory import MemoryStore
from ..types import Topology
from .megatron import read_topology
from .places import Place, memory_folder, open_memory

log = logging.getLogger(__name__)

Value = TypeVar("Value")


def together(transport: Transport, action: Callable[[], Value]) -> Value:
    """What `action` gives on this rank; an error for people on any rank becomes one on all. A collective."""
    problem, value = "", None
    try:
        value = action()
    except MoECheckpointError as error:
        problem = str(error)
    for rank, told in enumerate(transport.gather(problem)):
        if told:
            raise UsageError(f"rank {rank}: {told}")
    return value  # type: ignore[return-value]


def placed_topology(transport: Transport, place: Place) -> Topology:
    """The layout of the running job, with the nodes that its ranks are on. A collective. Raises UsageError."""
    nodes = [str(node) for node in transport.gather(place.node)]
    names = list(dict.fromkeys(nodes))
    return replace(read_topology(max(map(nodes.count, names))), nodes=tuple(map(names.index, nodes)))


def opened_memory(
    config: MoECheckpointConfig,
    place: Place,
    segment_bytes: Sequence[int],
    transport: Transport,
    *,
    area: str = "slot",
    beside: Sequence[MemoryStore] = (),
) -> MemoryStore:
    """Memory of this rank. Segments should have equal sizes on all ranks: a restart may place any rank anywhere.

    A collective. Where another rank has none, what is not needed to come back is given up again, also of the stores
    `beside`. Raises UsageError, on all ranks alike.
    """
    opened = list(beside)
    (most,) = transport.least([-sum(segment_bytes)])
    try:
        together(transport, lambda: opened.append(open_memory(config, place, segment_bytes, area)))
    except UsageError:
        for memory in opened:
            memory.close() if memory.snapshots().sealed else memory.remove()
        raise
    if transport.rank == 0:
        what = "snapshots" if area == "slot" else "boundary logs and parked state"
        log.info(
            "%s in memory: at most %.3f GB per rank in %s (%d segments)",
            what,
            -most / 1e9,
            memory_folder(config),
            len(segment_bytes),
        )
    return opened[-1]


def layout_told(topology: Topology, shard: str) -> dict[str, Any]:
    """The parallel layout that a snapshot is made in, and who stores what in it; nodes do not matter."""
    names = ("world_size", "tp", "pp", "vpp", "cp", "ep")
    layout = {name: getattr(topology, name) for name in names} | {"etp": topology.expert_tp}
    return layout if shard == "none" else layout | {"shard": shard}
