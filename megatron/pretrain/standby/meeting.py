"""What the agents of all nodes settle before each start of training: whose ranks are whose, and where workers meet."""

from __future__ import annotations

import json
import logging
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from torch.distributed import DistError, DistStoreError, Store, TCPStore
from torch.distributed.elastic.rendezvous import RendezvousHandler

from megatron.pretrain.bound_store import bound_store, is_address

WAITS = timedelta(seconds=60)


@dataclass(frozen=True)
class NodeRank:
    """Of a node among those of a job: its number, from 0, and how many there are."""

    number: int
    nodes: int


def settled(found: Sequence[NodeRank | None], nodes: int) -> list[int]:
    """The numbers of nodes, in the order in which they were found.

    Nodes keep the number that they had in a job of this size, so that their processes keep their ranks; the others take
    what is left, in their order. Where two had the same number the first one keeps it.

    Args:
        found: The place that each node had before, in the order in which nodes came; None: it had none.
        nodes: The number of nodes now.
    """
    numbers: list[int | None] = [None] * len(found)
    free = set(range(nodes))
    for index, place in enumerate(found):
        if place is not None and place.nodes == nodes and place.number in free:
            numbers[index] = place.number
            free.remove(place.number)
    left = iter(sorted(free))
    return [next(left) if number is None else number for number in numbers]


class NodeRankAgreement:
    """One node's part in settling it; all nodes make the same calls, each once.

    Args:
        store: Of this meeting alone, shared by the agents.
        index: Of this node in this meeting.
        nodes: How many there are.
    """

    def __init__(self, store: Store, index: int, nodes: int) -> None:
        self._store, self._index, self._nodes = store, index, nodes

    def number(self, had: NodeRank | None) -> int:
        """The number of this node. had: what it had before, if anything."""
        if self._nodes == 1:
            return 0
        self._store.set(f"slots/had/{self._index}", json.dumps(None if had is None else [had.number, had.nodes]))
        # If each node read the place of each, the one server of the store would get N^2 requests.
        if self._index == 0:
            found = [json.loads(place) for place in self._from_all("slots/had")]
            numbers = settled([None if place is None else NodeRank(*place) for place in found], self._nodes)
            keys = [f"slots/number/{index}" for index in range(self._nodes)]
            self._store.multi_set(keys, [str(number) for number in numbers])
            return numbers[0]
        return int(self._store.get(f"slots/number/{self._index}"))

    def workers(self, number: int, starts: int, address: str | None) -> WorkersStore:
        """Where the workers of this start of training meet, which the first node keeps.

        Args:
            number: Of this node.
            starts: How many starts of training there were before, as far as this node knows: one that has just come
                knows of none.
            address: Under which workers reach this node, if somebody has said so.
        """
        self._store.set(f"slots/starts/{number}", str(starts))
        if number:
            told: list[Any] = json.loads(self._store.get("slots/workers"))
            return WorkersStore(*told)
        host = address or socket.getfqdn()
        own = workers_store(host)
        start = max(map(int, self._from_all("slots/starts")))
        place = WorkersStore(host, own.port, start, own)
        self._store.set("slots/workers", json.dumps([place.address, place.port, place.start]))
        return place

    def _from_all(self, name: str) -> list[bytes]:
        """What each node has written. Raises DistStoreError naming those who did not."""
        keys, patience = [f"{name}/{node}" for node in range(self._nodes)], self._store.timeout
        try:
            self._store.wait(keys, patience)
        except DistStoreError:  # names all keys
            if missing := [key for key in keys if not self._store.check([key])]:
                raise DistStoreError(f"waited {patience.total_seconds():g} s for {', '.join(missing)}") from None
        found: list[bytes] = self._store.multi_get(keys)
        return found


def workers_store(host: str) -> TCPStore:
    """A store in this process at a free port, since agents may meet at the one that was named; reached at `host`.

    At that address alone, where it is one of this machine; a name may lead elsewhere here than on other nodes, so for a
    name on all interfaces, as torch's own, but on those of IPv4 alone where it stands for nothing else. Torch's server
    (2.13 to 2.15) asks for the name of whoever connects, on the one thread that serves all. Its own socket is open for
    both families: then no file of hosts knows an IPv4 address, a name server is asked each time, and one lost answer
    holds all ranks up for 5 s.
    """
    if is_address(host):
        with suppress(OSError):  # of a service in front of this node
            return bound_store(host, timeout=WAITS)
    if _is_ipv4(host):
        return bound_store("0.0.0.0", timeout=WAITS)
    return TCPStore("0.0.0.0", 0, is_master=True, wait_for_workers=False, timeout=WAITS)


def _is_ipv4(host: str) -> bool:
    try:
        return all(found[0] == socket.AF_INET for found in socket.getaddrinfo(host, None))
    except OSError:
        return False


@dataclass(frozen=True)
class WorkersStore:
    """The store of the workers of one start of training.

    start: how often workers were started before, on any node. kept: the store, on its node.
    """

    address: str
    port: int
    start: int
    kept: Store | None = None


# Word for nodes that wait for a place in a job: that its script takes slots.
#
# A spare node waits in the rendezvous, and so does one that has come for a lost node, whose end the others have not
# noticed yet. Meanwhile either can start standbys; but a script that takes no slots would train by itself if it were
# started without a rank. So agents whose ranks have taken slots leave word in the store of the rendezvous.

log = logging.getLogger(__name__)

KEY = "moe-ckpt/slots/{}"
"""In the store of the rendezvous, with the id of the job."""
LOOK_S = 0.5
"""How often a node that waits looks for it."""


class StandbyNotice:
    """Of one job."""

    def __init__(self, handler: RendezvousHandler) -> None:
        self._store = getattr(handler, "_store", None)  # none where a single node meets itself
        self._key, self._told = KEY.format(handler.get_run_id()), False

    def tell(self) -> None:
        """The ranks of this node take slots. Raises DistError."""
        if self._store is not None and not self._told:
            self._store.set(self._key, "taken")
            self._told = True

    def heard(self) -> bool:
        """Whether somebody has said that the script of the job takes slots. Raises DistError."""
        return self._store is not None and self._store.check([self._key])

    @contextmanager
    def heeded(self, refill: Callable[[], None]) -> Iterator[None]:
        """In this block another thread calls `refill` again and again once the script is known to take slots.

        Where that fails a line says so, and standbys are started once training continues.
        """
        is_over = threading.Event()

        def look() -> None:
            try:
                while not is_over.wait(LOOK_S):
                    if self.heard():
                        refill()
            except (DistError, OSError) as error:
                log.warning("no standby while this node waits: %s", error)

        thread = threading.Thread(target=look, name="moe-ckpt-standbys", daemon=True)
        thread.start()
        try:
            yield
        finally:
            is_over.set()
            thread.join()
