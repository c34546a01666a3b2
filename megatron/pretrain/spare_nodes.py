"""torchrun's rendezvous of a job that has more nodes than may train at a time: those without a place wait for one."""

from __future__ import annotations

import logging
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousGracefulExitError,
    RendezvousInfo,
    RendezvousTimeoutError,
)
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import (
    _Action,
    _DistributedRendezvousOpExecutor,
    _RendezvousContext,
)

from megatron.pretrain.rendezvous import NodesHandler

log = logging.getLogger(__name__)


class SpareNotNeeded(Exception):
    """The job has ended while this node was a spare."""


class _Executor(_DistributedRendezvousOpExecutor):
    """Torchrun's, but a node that wants into a job that is full without it becomes a redundant one.

    was_redundant: whether this node has seen that the job has no place for it, since the handler began to meet.
    """

    was_redundant = False

    def run(
        self,
        state_handler: Callable[[_RendezvousContext, float], _Action],
        deadline: float,
        update_deadline: Callable[[timedelta], float] | None = None,
    ) -> None:
        """As torchrun's."""

        def next_action(context: _RendezvousContext, deadline: float) -> _Action:
            state = context.state
            is_full = state.complete and len(state.participants) >= context.settings.max_nodes
            if is_full and not state.closed and context.node in state.wait_list:
                return _Action.ADD_TO_REDUNDANCY_LIST
            return state_handler(context, deadline)

        super().run(next_action, deadline, update_deadline)

    def _add_to_redundancy_list(self) -> None:
        self.was_redundant = True
        self._state.wait_list.discard(self._node)
        super()._add_to_redundancy_list()


class SpareHandler(NodesHandler):
    """Torchrun's handler (2.13) for jobs with more nodes than may train at a time.

    When all meet again after a failure, torchrun's leaves the node that comes too late in the list of those that want
    in, and not among the redundant ones: the others would restart for it again and again, it would give up after a
    while, and take the end of the job for a failure. See `_Executor`; until this node has looked, nobody restarts.
    """

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._executor = _Executor(self._this_node, self._state_holder, self._settings)
        self._op_executor = self._executor
        self._trained = False

    @property
    def _is_full(self) -> bool:
        is_full: bool = len(self._state_holder.state.participants) >= self._settings.max_nodes
        return is_full

    def num_nodes_waiting(self) -> int:
        """As `DynamicRendezvousHandler.num_nodes_waiting`, but nobody waits for a place while there is none."""
        waiting: int = super().num_nodes_waiting()
        return 0 if self._is_full else waiting

    def next_rendezvous(self) -> RendezvousInfo:
        """As `NodesHandler.next_rendezvous`.

        Raises NotNeeded where the job ends while this node has no place in it, for torchrun stumbles over torch's own
        error then. One that has just trained, and whose place nobody took, fails with the node that ended the job.
        """
        self._executor.was_redundant = False
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
                raise SpareNotNeeded from error
            except RendezvousConnectionError as error:
                # The node with the store may leave before this one has seen that the job has ended.
                if not self._executor.was_redundant:
                    raise
                log.warning("rendezvous store gone: spare node exits")
                raise SpareNotNeeded from error
            except RendezvousTimeoutError:
                if not self._is_full:
                    raise
