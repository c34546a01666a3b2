"""torch's elastic agent, which keeps the store of its workers, and waits only briefly for others behind a verdict."""

from __future__ import annotations

import logging
from datetime import timedelta
from typing import Any, ClassVar

from torch.distributed import DistError, DistStoreError, Store
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.utils.store import barrier

from megatron.core.dist_checkpointing.moe.errors import ranks_named
from megatron.core.dist_checkpointing.moe.standby.slot import LAUNCHER, this_launcher
from megatron.core.dist_checkpointing.moe.standby.verdict import (
    forget_verdict,
    has_strict_verdict,
    has_verdict,
    leave_verdict,
)
from megatron.pretrain.errors import InvalidInput
from megatron.pretrain.spare_nodes import SpareHandler
from megatron.pretrain.standby.meeting import NodeRankAgreement, WorkersStore

log = logging.getLogger(__name__)

OTHERS_S = 10
"""How long the ranks of other nodes may take to come to the same verdict."""
ATTEMPTS = 10
"""How often nodes meet again because one was lost meanwhile."""


class NodeAgent(LocalElasticAgent):
    """Torch's, but for four things.

    Its workers meet in a store that the first node's agent keeps. Torch's (2.14) draws a free port, lets go of it,
    and its first worker listens there seconds later: any connection of the machine may have it by then.

    Where ranks left a verdict it ends after `OTHERS_S`, not after 300 s. The rank that leaves first may take along what
    others still meet at. They fail then and come back to the rendezvous, which is closed only when this agent ends:
    until then each would wait for the other.

    A rank that ends with exit code 2, as argparse does, leaves that as a verdict: it would end so at each restart. So
    does Python where it cannot open the script for a moment: behind another start it is a verdict the second time.

    It tells its rendezvous whether ranks ended as they should.
    """

    _workers: WorkersStore | None = None
    _starts = 0
    told_to_end: ClassVar[SignalException | None] = None
    """Raised already, but maybe where nothing passes."""
    _refuses = _refused = False
    """Whether ranks of this node ended with the code of a refusal in this start, and in the one before."""

    def _rendezvous(self, worker_group: WorkerGroup) -> None:
        forget_verdict()
        self._refused, self._refuses = self._refuses, False
        for attempts_left in reversed(range(ATTEMPTS)):
            try:
                super()._rendezvous(worker_group)
                self._settle(worker_group)
                return
            except DistStoreError as error:
                if not attempts_left:
                    raise
                log.warning("node lost during rendezvous (%s); retrying", error)

    def _number(self, group: WorkerGroup) -> int:
        """Of this node, in the order of ranks."""
        number: int = group.group_rank
        return number

    def _settle(self, group: WorkerGroup) -> None:
        """Settle that workers meet in a store that none of them keeps, and that knows nothing of an earlier start."""
        spec, number, self._workers = group.spec, self._number(group), None
        meeting = NodeRankAgreement(group.store, number, group.group_world_size)
        # The address that torch has of the node that came first.
        own = spec.local_addr or (None if group.group_rank else spec.master_addr)
        self._workers = meeting.workers(number, self._starts, own)
        self._starts = self._workers.start + 1
        group.group_rank, group.master_addr, group.master_port = number, self._workers.address, self._workers.port

    def _setup_local_watchdog(self, envs: dict[int, dict[str, Any]]) -> None:
        for environment in envs.values():  # that workers are about to get
            environment |= {"TORCHELASTIC_USE_AGENT_STORE": "True", LAUNCHER: this_launcher()}
        super()._setup_local_watchdog(envs=envs)

    def run(self, *arguments: Any, **options: Any) -> RunResult:
        """As torch's."""
        result: RunResult = super().run(*arguments, **options)
        if isinstance(handler := self._worker_group.spec.rdzv_handler, SpareHandler):
            handler.has_ended_well = not (result.is_failed() or has_verdict())
        return result

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        if self.told_to_end is not None:
            raise self.told_to_end
        result = self._seen(worker_group)
        if result.is_failed() and has_strict_verdict():
            return self._ended(worker_group)  # the others of this node failed with that rank
        refused = [rank for rank, one in (result.failures or {}).items() if one.exitcode == InvalidInput.exit_code]
        if not refused:
            return result
        named, self._refuses = (ranks_named(sorted(refused)), InvalidInput.exit_code), True
        if self._starts > 1 and self._remaining_restarts and not self._refused:
            log.warning("%s ended with exit code %d behind another start: not restarted if that comes again", *named)
            return result
        log.error("%s ended with exit code %d: not restarted", *named)
        if not leave_verdict(InvalidInput.exit_code):
            return result
        return self._ended(worker_group)

    def _ended(self, group: WorkerGroup) -> RunResult:
        """Behind a verdict: nothing is restarted."""
        self._stop_workers(group)
        return RunResult(WorkerState.SUCCEEDED, {worker.global_rank: None for worker in group.workers})

    def _seen(self, worker_group: WorkerGroup) -> RunResult:
        """How the ranks of this node stand."""
        return super()._monitor_workers(worker_group)

    def _exit_barrier(self) -> None:
        if has_verdict():
            wait_for_others(self._store, self._worker_group.group_world_size)
        else:
            super()._exit_barrier()


def wait_for_others(store: Store, nodes: int, timeout_s: float = OTHERS_S) -> None:
    """Wait until the agents of all nodes are here, or for some time.

    Args:
        store: The store of the rendezvous.
        nodes: The number of nodes.
        timeout_s: The longest time in seconds.
    """
    store.set_timeout(timedelta(seconds=timeout_s))
    try:
        barrier(store, nodes, "moe-ckpt/verdict", timeout_s)
    except DistError:
        log.warning("ranks exited with a permanent error; other nodes are still running after %g s", timeout_s)
