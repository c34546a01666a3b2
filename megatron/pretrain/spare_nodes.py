"""torchrun's rendezvous of a job that has more nodes than may train at a time: those without a place wait for one.

Who gets one is decided by `allocation_units.py` from what nodes leave in the state of the rendezvous, which all of them
replace by compare-and-set: no two can see different states and both get the last place.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

import psutil
from torch.distributed import DistError
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousGracefulExitError,
    RendezvousInfo,
    RendezvousTimeoutError,
)
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import (
    _Action,
    _DistributedRendezvousOpExecutor,
    _RendezvousContext,
    _RendezvousJoinOp,
    _RendezvousState,
    _should_keep_alive,
)

from megatron.pretrain.allocation_units import UNIT, UNIT_NODES, Candidate, admitted, whole_units
from megatron.pretrain.processes import node_name
from megatron.pretrain.rendezvous import NodesHandler, missed_s

log = logging.getLogger(__name__)

UNITS_S = 30.0
"""How long nodes wait at the first start of a job for others to make their units whole."""
LOOK_S = 1.0
"""How often a node that trains nothing any more looks whether the job has ended."""
SPARES_LOOK_S = 3.0
"""Until when each spare has seen that: they look once a second."""


class SpareNotNeeded(Exception):
    """The job has ended while this node was a spare; with a text where it had failed before this node came."""


class _Executor(_DistributedRendezvousOpExecutor):
    """Torchrun's, but a node joins once a place is its own, and becomes redundant where the job is full without it.

    In the state of the rendezvous stand `line`, for each node its name and allocation unit, in the order in which they
    came, and `trained`, for each name the last round in which it had a place.

    was_redundant: whether this node has seen that the job has no place for it, or trains without its unit, since the
    handler began to meet. since_s: when that was. checked_again: called before it takes a place; whether it took so
    long that the state has to be looked at again.
    """

    was_redundant = was_open = False
    since_s = 0.0
    checked_again: Callable[[], bool] = staticmethod(lambda: False)
    _called: tuple[datetime, float] | None = None  # until when the state says that nodes join, and when it was seen

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._own = node_name(), os.environ.get(UNIT, "")
        self._unit_nodes = int(os.environ.get(UNIT_NODES, "1"))

    def run(
        self,
        state_handler: Callable[[_RendezvousContext, float], _Action],
        deadline: float,
        update_deadline: Callable[[timedelta], float] | None = None,
    ) -> None:
        """As torchrun's."""

        def next_action(context: _RendezvousContext, deadline: float) -> _Action:
            state = context.state
            self.was_open |= not state.closed
            is_full = state.complete and len(state.participants) >= context.settings.max_nodes
            if is_full and not state.closed and context.node in state.wait_list:
                return _Action.ADD_TO_REDUNDANCY_LIST
            # Not full, as an elastic job with fewer whole units: torch leaves this node in the list of waiting ones.
            if state.complete and context.node not in state.participants and not self._was_in_round(state):
                self.was_redundant = True
            action = state_handler(context, deadline)
            if isinstance(state_handler, _RendezvousJoinOp):
                action = self._at_last_call(context, action)
            if action is not _Action.ADD_TO_PARTICIPANTS:
                return action
            if self._may_join(state):
                return _Action.SYNC if self.checked_again() else action
            if self._node not in state.wait_list:
                return _Action.ADD_TO_WAIT_LIST
            return _Action.KEEP_ALIVE if _should_keep_alive(context) else _Action.SYNC

        super().run(next_action, deadline, update_deadline)

    def _at_last_call(self, context: _RendezvousContext, action: _Action) -> _Action:
        """Whether nodes meet without those that could still come, by this node's own clock: until when they could is a
        time of day of another node."""
        state, settings = context.state, context.settings
        until = state.deadline if not state.complete and context.node in state.participants else None
        if until is None or len(state.participants) < settings.min_nodes:
            self._called = None
            return action
        if self._called is None or self._called[0] != until:
            self._called = until, time.monotonic()
        if time.monotonic() - self._called[1] > settings.timeout.last_call.total_seconds():
            return _Action.MARK_RENDEZVOUS_COMPLETE if action in (_Action.SYNC, _Action.KEEP_ALIVE) else action
        if action is not _Action.MARK_RENDEZVOUS_COMPLETE:
            return action
        return _Action.KEEP_ALIVE if _should_keep_alive(context) else _Action.SYNC

    def waits_for_a_place(self, state: _RendezvousState) -> bool:
        """Whether nodes without a place would get one if all met again now."""
        if self._unit_nodes == 1:
            return bool(state.wait_list)
        chosen = whole_units(self._candidates(state), self._settings.max_nodes, self._unit_nodes)
        return any(not one.has_joined for one in chosen)

    def _was_in_round(self, state: _RendezvousState) -> bool:
        """Whether the round that is complete is one that this node has just left, for all to meet again."""
        return bool(_noted(state, "trained").get(self._own[0], -1) >= state.round)

    def lost_nodes(self, state: _RendezvousState) -> list[str]:
        """Names of nodes that had a place in this round, and lost it since no heartbeat came."""
        line, trained = _noted(state, "line"), _noted(state, "trained")
        gone = [name for node, (name, _) in line.items() if node not in state.last_heartbeats]
        return sorted(name for name in gone if trained.get(name) == state.round)

    def _may_join(self, state: _RendezvousState) -> bool:
        settings, is_late = self._settings, time.monotonic() > self.since_s + UNITS_S
        line = self._candidates(state)
        places = admitted(line, settings.max_nodes, settings.min_nodes, self._unit_nodes, is_late=is_late)
        if self._node in places and (alive := self._alive_in_unit(line)) < self._unit_nodes:
            log.warning("%s joins with %d of %d nodes: no whole unit waits", self._label, alive, self._unit_nodes)
        return self._node in places

    @property
    def _label(self) -> str:
        return f"{self._own[0]}: allocation unit {self._own[1]}"

    def _alive_in_unit(self, line: Sequence[Candidate]) -> int:
        return sum(one.unit == self._own[1] for one in line)

    def _candidates(self, state: _RendezvousState) -> list[Candidate]:
        line, trained = _noted(state, "line"), _noted(state, "trained")
        # This node may stand in no list yet.
        alive = {node: own for node, own in line.items() if node in state.last_heartbeats} | {self._node: self._own}
        return [
            Candidate(node, unit, trained.get(name, -1), node in state.participants)
            for node, (name, unit) in alive.items()
        ]

    def _keep_alive(self) -> None:
        super()._keep_alive()
        _noted(self._state, "line").setdefault(self._node, self._own)

    def _add_to_redundancy_list(self) -> None:
        self.was_redundant = True
        self._state.wait_list.discard(self._node)
        alive = self._alive_in_unit(self._candidates(self._state))
        if alive < self._unit_nodes and self._own[0] in _noted(self._state, "trained"):
            log.warning("%s has %d of %d nodes; waiting as a spare", self._label, alive, self._unit_nodes)
        super()._add_to_redundancy_list()

    def _remove_from_redundancy_list(self) -> None:
        super()._remove_from_redundancy_list()
        self._stay_in_line()

    def _remove_from_participants(self) -> None:
        super()._remove_from_participants()
        self._stay_in_line()

    def _stay_in_line(self) -> None:
        # Torchrun's forgets a node between two lists, and others would take its place in the meantime.
        self._state.last_heartbeats[self._node] = datetime.now(UTC)

    def _mark_rendezvous_complete(self) -> None:
        super()._mark_rendezvous_complete()
        state = self._state
        line, trained = _noted(state, "line"), _noted(state, "trained")
        for node in [node for node in line if node not in state.last_heartbeats]:
            del line[node]
        joined = sorted(state.participants)
        trained.update((line[node][0], state.round) for node in joined)
        # Nodes of a unit get consecutive numbers: ranks that talk most are within it.
        units = list(dict.fromkeys(line[node][1] for node in joined))
        for rank, node in enumerate(sorted(joined, key=lambda node: units.index(line[node][1]))):
            state.participants[node] = rank


def _noted(state: _RendezvousState, name: str) -> dict[Any, Any]:
    found: dict[Any, Any] = vars(state).setdefault(name, {})
    return found


class SpareHandler(NodesHandler):
    """Torchrun's handler (2.13) for jobs with more nodes than may train at a time.

    When all meet again after a failure, torchrun's leaves the node that comes too late in the list of those that want
    in, and not among the redundant ones: the others would restart for it again and again, it would give up after a
    while, and take the end of the job for a failure. See `_Executor`; until this node has looked, nobody restarts.

    due_check: gives what this node has to pass before it takes a place; None: nothing now.
    has_ended_well: set once ranks of this node have ended as they should: who comes later is not needed.
    """

    due_check: Callable[[], Callable[[], None] | None] = staticmethod(lambda: None)
    has_ended_well = False

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._executor = _Executor(self._this_node, self._state_holder, self._settings)
        self._op_executor = self._executor
        self._executor.checked_again = self._checked_again
        self._trained = False
        self._reported: list[str] = []

    def _checked_again(self) -> bool:
        """Check this node where that is due, as for a spare that waited for days; whether it was. Others keep its place
        meanwhile, and if it raises, none was taken."""
        check = self.due_check()
        if check is None:
            return False
        self._start_heartbeats()
        try:
            check()
        finally:
            self._stop_heartbeats()
        return True

    @property
    def _ended_well(self) -> str:
        """A key of the store."""
        return f"moe-ckpt/{self._settings.run_id}/ended well"

    @property
    def _is_full(self) -> bool:
        is_full: bool = len(self._state_holder.state.participants) >= self._settings.max_nodes
        return is_full

    @property
    def _trains_without_this_node(self) -> bool:
        state = self._state_holder.state
        return self._is_full or (state.complete and self._executor.was_redundant)

    def num_nodes_waiting(self) -> int:
        """As `DynamicRendezvousHandler.num_nodes_waiting`, but nobody waits for a place while there is none."""
        waiting: int = super().num_nodes_waiting()
        state = self._state_holder.state
        if self._is_full or not self._executor.waits_for_a_place(state):
            return 0
        lost = self._executor.lost_nodes(state)
        if lost and lost != self._reported:
            self._reported = lost
            # Its ranks may be well, and nothing else would say why all of them start again.
            log.warning(
                "no heartbeat from %s for %g s: replaced; all ranks restart", ", ".join(lost), missed_s(self._settings)
            )
        return waiting

    def keep_store(self, why: str) -> None:
        """This node leaves the job, and its ranks have ended; where it has the store of all nodes, it waits until the
        job has ended, or no other node was there for as long as nodes wait for each other. why: it leaves, in a line.
        """
        if self._settings.max_nodes == 1 or not self._has_store:
            return
        self._stop_heartbeats()
        log.warning(
            "%s; its ranks have ended, but it has the rendezvous store, so it exits when the job ends: for an exit at"
            " once give --rdzv-endpoint a host that is no node of the job", why,
        )  # fmt: skip
        wait_s, seen_s = self._settings.timeout.join.total_seconds(), time.monotonic()
        while not self.is_closed() and time.monotonic() < seen_s + wait_s:
            if self._state_holder.state.last_heartbeats.keys() - {self._this_node}:
                seen_s = time.monotonic()
            time.sleep(LOOK_S)
        self._let_spares_look()

    def shutdown(self) -> bool:
        """As `DynamicRendezvousHandler.shutdown`, and spares see it before a store that is here is gone."""
        if self.has_ended_well:
            with contextlib.suppress(DistError):
                self._store.set(self._ended_well, b"")
        is_closed: bool = super().shutdown()
        self._let_spares_look()
        return is_closed

    def _let_spares_look(self) -> None:
        state = self._state_holder.state
        if (state.redundancy_list | state.wait_list) - {self._this_node} and self._has_store:
            time.sleep(SPARES_LOOK_S)

    @property
    def _has_store(self) -> bool:
        """Whether the store is in this process, by who listens at its port: torch decides it by names of hosts, and by
        who came first."""
        port, own = getattr(self._store, "port", 0), os.getpid()
        listening = (one for one in psutil.net_connections("tcp") if one.status == psutil.CONN_LISTEN)
        return any(one.pid == own and one.laddr.port == port for one in listening)

    def next_rendezvous(self) -> RendezvousInfo:
        """As `NodesHandler.next_rendezvous`.

        Raises SpareNotNeeded where the job ends while this node has no place in it, for torchrun stumbles over torch's
        own error then. One that has just trained, and whose place nobody took, fails with the node that ended the job.
        """
        self._executor.was_redundant, self._executor.since_s = False, time.monotonic()
        while True:
            try:
                met = super().next_rendezvous()
                self._trained = True
                return met
            except RendezvousGracefulExitError as error:
                raise SpareNotNeeded from error
            except RendezvousClosedError as error:
                if self._trained and not (self._executor.was_redundant or self._is_full):
                    raise
                knows = self._executor.was_open or self._store.check([self._ended_well])
                failed = (
                    "" if knows else f"job {self._settings.run_id!r} has failed; to continue it, restart its store too"
                )
                raise SpareNotNeeded(failed) from error
            except RendezvousTimeoutError:
                if not self._trains_without_this_node:
                    raise
