"""torchrun's rendezvous of the agents of several nodes, made to survive the loss of a node half way.

Once all nodes have joined, the first of them writes where its workers will listen. If that node is lost in between, or
was so busy that the others took it for lost, torchrun's handler fails after a while, and closes the rendezvous for
everybody. Here the others join again. So does a node that does not reach the store for a while; one that trains then
trains on.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any

from torch.distributed import DistStoreError, Store
from torch.distributed.elastic.rendezvous import (
    RendezvousConnectionError,
    RendezvousInfo,
    RendezvousParameters,
    dynamic_rendezvous,
    rendezvous_handler_registry,
)
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import create_backend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler, RendezvousTimeout
from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint

from megatron.pretrain.bound_store import bound_store, is_loopback

log = logging.getLogger(__name__)

BACKEND = "moe-ckpt-nodes"
HEARTBEAT_S, FEW_HEARTBEAT_S, FEW_NODES = 1.0, 0.25, 16
"""How often a node says that it is there; the second where at most so many train: it writes the state of all."""
MISSED_S = 5.0
"""After so long without one a node counts as lost; on a busy machine an agent is late by seconds."""
MISSED_MEETING_S = 1.5
"""The same where few nodes have trained and meet again: one that is only late then joins as a new one, and disturbs
nobody. For the first `MISSED_S` of a meeting: a node without a place meets for as long as others train."""
LOOKS_S = 2.0
"""How far apart looks at the state may lie whatever the settings; torchrun's handler looks once a second."""
ANSWER_S = 20
"""How long the others wait for the first node to write where to listen: it has nothing else to do."""
ATTEMPTS = 10
PAUSE_S = 2.0
"""How long a node waits before it meets again where the store does not answer."""
POLLS_PER_S = 50.0
"""How often all nodes together ask for the state of a rendezvous. Torchrun's handler (2.13) asks once a second whatever
their number, which makes up most of the time in which few nodes meet again."""


class NodesHandler(DynamicRendezvousHandler):
    """Torchrun's handler, but a rendezvous that fails is followed by another one, `ATTEMPTS` at most.

    kept: The store in which it takes place, if this process has it.
    """

    kept: Store | None = None
    _is_cut_off = False
    _trained_nodes: Collection[Any] = ()
    _meets_since_s = float("-inf")

    def __init__(self, node: Any, settings: Any, backend_name: str, store: Store, state_holder: Any) -> None:
        super().__init__(node, settings, backend_name, store, state_holder)
        state_holder._sanitize = Heartbeats(state_holder, node, self._hurried).sanitize

    def _hurried(self) -> Collection[Any]:
        """Nodes that have trained, where they are few and have just begun to meet again."""
        begins = time.monotonic() < self._meets_since_s + MISSED_S
        return self._trained_nodes if begins and self._settings.max_nodes <= FEW_NODES else ()

    def get_backend(self) -> str:
        """As `DynamicRendezvousHandler.get_backend`."""
        return BACKEND

    def next_rendezvous(self) -> RendezvousInfo:
        """As `DynamicRendezvousHandler.next_rendezvous`."""
        for _ in range(ATTEMPTS - 1):
            try:
                return self._met()
            except DistStoreError as error:
                log.warning("node lost during rendezvous (%s); retrying", error)
            except RendezvousConnectionError as error:
                log.warning("rendezvous store unreachable (%s); retrying", reason_of(error))
                time.sleep(PAUSE_S)
        return self._met()

    def num_nodes_waiting(self) -> int:
        """As `DynamicRendezvousHandler.num_nodes_waiting`; none where the store does not answer."""
        try:
            waiting: int = super().num_nodes_waiting()
        except RendezvousConnectionError as error:
            if not self._is_cut_off:
                log.warning(
                    "rendezvous store unreachable (%s); training continues, nodes reconnect when it is back",
                    reason_of(error),
                )  # fmt: skip
            self._is_cut_off = True
            return 0
        self._is_cut_off = False
        return waiting

    def _met(self) -> RendezvousInfo:
        pause_s, holder = min(1.0, self._settings.max_nodes / POLLS_PER_S), self._state_holder
        kept_s, holder._cache_duration = holder._cache_duration, pause_s
        # At the first start nobody has left: whoever is late there is starting.
        self._meets_since_s = time.monotonic() if self._trained_nodes else self._meets_since_s
        try:
            with pausing_at_most(pause_s):
                met = super().next_rendezvous()
            self._trained_nodes = frozenset(holder.state.participants)
            return met
        finally:
            holder._cache_duration, self._meets_since_s = kept_s, float("-inf")


def missed_s(settings: Any) -> float:
    """After how many seconds without a heartbeat a node counts as lost, by the settings of a rendezvous."""
    return float((settings.keep_alive_interval * settings.keep_alive_max_attempt).total_seconds())


class Heartbeats:
    """Which nodes are lost, by heartbeats that do not change: clocks of nodes differ, and step.

    Torch's holder of the state (2.13 to 2.15) compares the time that another node has written with its own clock: nodes
    would take each other for lost whose clocks are further apart than the heartbeats that may be missed.

    Args:
        holder: Torch's, of the state of a rendezvous.
        node: This node's key in it.
        hurried: Gives the nodes for which `MISSED_MEETING_S` counts; a spare may be late, as its standby starts.
    """

    def __init__(self, holder: Any, node: Any, hurried: Callable[[], Collection[Any]]) -> None:
        self._holder, self._node, self._torchs, self._hurried = holder, node, holder._sanitize, hurried
        self._seen: dict[Any, tuple[datetime, float]] = {}
        self._looked_s = float("-inf")

    def sanitize(self) -> None:
        """In place of the holder's: after each look at the state."""
        state, settings, now_s = self._holder.state, self._holder._settings, time.monotonic()
        beats = state.last_heartbeats
        may_miss_s = missed_s(settings)
        soon = {node: min(may_miss_s, MISSED_MEETING_S) for node in self._hurried() if node != self._node}
        # A look that took long says nothing of the others: the store stood still for them too, or this node did.
        looked_s, self._looked_s = self._looked_s, now_s
        blind_s = {node: soon[node] / 2 if node in soon else max(may_miss_s / 2, LOOKS_S) for node in beats}
        self._seen = {
            node: last
            if (last := self._seen.get(node)) and last[0] == beat and now_s - looked_s <= blind_s[node]
            else (beat, now_s)
            for node, beat in beats.items()
        }
        silent_s = {node: now_s - since_s for node, (_, since_s) in self._seen.items() if node != self._node}
        lost = {node for node, this_s in silent_s.items() if this_s > soon.get(node, may_miss_s)}
        state.last_heartbeats = {node: _LONG_AGO if node in lost else _FAR_AHEAD for node in beats}
        self._torchs()
        state.last_heartbeats = {node: beats[node] for node in state.last_heartbeats}
        # Of this node: its clock was set back, and torch would not say again that it is there until that time comes.
        if state.last_heartbeats.get(self._node, _LONG_AGO) > datetime.now(UTC):
            state.last_heartbeats[self._node] = _LONG_AGO


_LONG_AGO, _FAR_AHEAD = datetime.min.replace(tzinfo=UTC), datetime.max.replace(tzinfo=UTC)


def reason_of(error: BaseException) -> str:
    """The first line of what is behind an error of a rendezvous."""
    return str(error.__cause__ or error).partition("\n")[0]


_pauses = threading.local()
"""In each thread, how long it pauses at most."""
_torchruns_delay = dynamic_rendezvous._delay


def _delay(seconds: float | tuple[float, float]) -> None:
    """As torchrun's, but for a thread that looks more often."""
    most_s = getattr(_pauses, "most_s", None)
    _torchruns_delay(seconds if most_s is None or isinstance(seconds, tuple) else min(seconds, most_s))


dynamic_rendezvous._delay = _delay


def _method_name(depth: int = 2) -> str:
    """As torchrun's (2.13), for its events; that one reads the sources of all frames, and looks through all modules for
    those that have none, which was most of what an agent computed in a rendezvous."""
    return sys._getframe(depth).f_code.co_name


dynamic_rendezvous.get_method_name = _method_name


@contextmanager
def pausing_at_most(most_s: float) -> Iterator[None]:
    """A block in which torchrun's handler pauses for no longer between two looks, on this thread."""
    _pauses.most_s = most_s
    try:
        yield
    finally:
        _pauses.most_s = None


def register_backend(handler: type[NodesHandler] = NodesHandler) -> None:
    """Make `BACKEND` known to torchrun's launcher in this process. Parameters, as of `c10d`: join_timeout, is_host,
    last_call_timeout, keep_alive_interval and keep_alive_max_attempt."""
    # Ranks follow from the order of nodes: asking around for them would be one more wait for a node that may be lost.
    os.environ["TORCH_ELASTIC_WORKER_IDENTICAL"] = "1"
    rendezvous_handler_registry.register(BACKEND, _CREATORS.setdefault(handler, partial(_handler, handler)))


_CREATORS: dict[object, partial[NodesHandler]] = {}
"""By kind, the same one each time: torch refuses to have another one registered under a name."""


def _handler(kind: type[NodesHandler], params: RendezvousParameters) -> NodesHandler:
    params.config.setdefault("read_timeout", ANSWER_S)
    kept = _own_store(params)
    backend, store = create_backend(params)
    last_call = timedelta(seconds=float(params.get("last_call_timeout", 30)))
    join = timedelta(seconds=params.get_as_int("join_timeout", 600) or 600)
    timeout = RendezvousTimeout(join=join, last_call=last_call)
    default_s = FEW_HEARTBEAT_S if params.max_nodes <= FEW_NODES else HEARTBEAT_S
    beat_s = float(params.get("keep_alive_interval", default_s))
    handler: NodesHandler = kind.from_backend(
        params.run_id, store, backend, params.min_nodes, params.max_nodes, params.local_addr, timeout,
        keep_alive_interval=beat_s,
        keep_alive_max_attempt=params.get_as_int("keep_alive_max_attempt", max(1, round(MISSED_S / beat_s))),
    )  # fmt: skip
    handler.kept = kept
    return handler


def _own_store(params: RendezvousParameters) -> Store | None:
    """The store at which the only node of a job meets itself: torch would let other machines reach it."""
    host, port = parse_rendezvous_endpoint(params.endpoint, default_port=0)
    if params.max_nodes > 1 or params.get_as_bool("is_host") is False or not is_loopback(host):
        return None
    store = bound_store(host, port)
    params.config["is_host"], params.endpoint = False, f"[{host}]:{store.port}"  # for 0 it took a free port
    return store
